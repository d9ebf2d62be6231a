"""Actors that die in tests, and a callback that tells when the engine has noticed."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import scripts

import rollstream as rs
from rollstream.engine import ActorContext
from rollstream.flow import Context


class Worker:
    """Numbers its items. Each has the shard and the incarnation that made it, and the version last set."""

    def __init__(self, items: int = 10**9, size: int = 10, *, context: ActorContext):
        self.index, self.incarnation = context.index, context.restarts
        self.left, self.size = items, size
        self.count = self.version = 0

    def sample(self, context: Context) -> dict[str, Any]:
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        self.count += 1
        context.note(steps=1)
        return {
            "shard": self.index,
            "incarnation": self.incarnation,
            "count": self.count,
            "version": self.version,
            "pid": os.getpid(),
            "data": np.full(self.size, self.count),
        }

    def set_version(self, version: int) -> None:
        self.version = version

    def pid(self) -> int:
        return os.getpid()

    def train(self, item: Any) -> Any:
        return self.index, item

    def read(self, fifo: str) -> None:
        Path(fifo).read_text()

    def die(self) -> None:
        print("these are my last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def exit(self, code: int) -> None:
        os._exit(code)

    def hang(self) -> None:
        threading.Event().wait()


class Deaths(list[rs.ActorEvent]):
    """Every event so far: the `on_event` of an engine."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def __call__(self, event: rs.ActorEvent) -> None:
        with self._changed:
            self.append(event)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> None:
        """Block until the engine has noticed this many."""
        with self._changed:
            noticed = self._changed.wait_for(lambda: len(self) >= count, scripts.PATIENCE)
        assert noticed, f"{count} deaths were due, but there were {list(self)}"


def kill(actor: rs.Actor[Any]) -> None:
    """Kill the process of an actor."""
    os.kill(actor.call("pid").result(), signal.SIGKILL)


def check_order(items: list[dict[str, Any]]) -> None:
    """Items of every shard and incarnation come in order, each once, with the data that belongs to them."""
    last: dict[int, tuple[int, int]] = {}
    for item in items:
        assert last.get(item["shard"], (0, 0)) < (item["incarnation"], item["count"])
        last[item["shard"]] = (item["incarnation"], item["count"])
        assert (item["data"] == item["count"]).all()
