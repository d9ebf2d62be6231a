"""The driver's side of one Ray actor, and how such an actor ended."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from rollstream.engine.actor import Actor, Message
from rollstream.engine.future import Deferred
from rollstream.engine.hub import Hub, Link, Started
from rollstream.engine.ray_cell import SLOTS
from rollstream.engine.wire import Parcel

if TYPE_CHECKING:
    from ray.actor import ActorHandle

DEATHS = (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
"""What Ray raises when it is the actor itself, or its machine, that is gone."""
BUILDING = -1
_LINES = 20
_LOG_BYTES = 8192


class Sent(NamedTuple):
    """A message on its way, and the objects that will hold its record and its value."""

    message: Message
    record: Any
    value: Any


class RayLink(Link):
    """The driver's side of one actor: its cell, what was sent to it, and what it has not answered.

    Numbers count the messages sent to one cell; the cell counts along, so they need not travel. Ray's own
    threads never take the lock, since Ray may wait while it is held.
    """

    def __init__(self, engine: Hub, actor: Actor[Any], recipe: Parcel, started: Started):
        super().__init__(engine, actor, recipe, started)
        self.counting = threading.Lock()
        """For the actor's counters."""
        self.cell: ActorHandle[Any]
        self.restarted(None)

    def restarted(self, cell: Any) -> None:
        """Begin with a new cell."""
        self.cell = cell
        self.sent = 0
        self.pending: dict[int, Sent] = {}
        self.unhandled: dict[int, Message] = {}
        """Messages that the cell's death has cut off."""
        self.dying = False
        self.take: Any = None
        """The object that will hold what the actor has to say next; none once it has fallen silent."""
        self.heard = 0
        """How much of what it had to say has been heard."""
        self.held: list[tuple[int, int, Any]] = []
        """Records that came before something the actor had said earlier."""
        self.deferred: dict[int, Deferred[Any]] = {}
        self.early: dict[int, tuple[bool, Any]] = {}
        """Deferred replies that came before the record that announces them."""
        self.known: dict[bytes, Any] = {}
        """Messages the cell knows by number, and the methods that stand for them."""
        self.slots: dict[bytes, int] = {}
        self.recent: deque[bytes] = deque(maxlen=8)
        self.verdict = None
        self.cause: BaseException | None = None
        """What Ray says of its death."""
        self.offset = 0.0
        """What to add to the actor's clock to have the driver's."""
        self.logs: list[str] = []

    def know(self, body: bytes) -> int:
        """Have a message known by number from now on, in place of the one known longest if need be."""
        slot = len(self.known)
        if slot == SLOTS:
            slot = self.slots[oldest := next(iter(self.known))]
            del self.known[oldest], self.slots[oldest]
        self.known[body] = getattr(self.cell, f"repeat_{slot}")
        self.slots[body] = slot
        return slot

    def first(self) -> Message | None:
        """The message it is at."""
        return next((sent.message for number, sent in list(self.pending.items()) if number != BUILDING), None)

    def kill(self) -> None:
        """End the cell at once."""
        with suppress(Exception):
            ray.kill(self.cell)

    @property
    def over(self) -> bool:
        """Whether everything that was sent to a dead cell has been accounted for."""
        return self.dying and not self.pending and self.take is None

    def reason(self) -> str:
        """How the actor ended, in words that follow its name."""
        if self.verdict is not None:
            return self.verdict
        text = str(self.cause)
        if "node has died" in text or isinstance(self.cause, NodeDiedError):
            return "died with its node"
        if isinstance(self.cause, OutOfMemoryError):
            return "was killed by Ray, since its machine ran out of memory"
        if (code := re.search(r"exit code (\d+)", text)) is not None:
            return f"ended with exit code {code[1]}"
        if isinstance(self.cause, ActorUnavailableError):
            return "died: it can no longer be reached"
        if "ray.kill" in text:
            return "was killed by ray.kill"
        if "worker process has died" in text or "connection error code" in text:
            return "died: its worker process was killed or crashed"
        return f"died: {text.strip().splitlines()[-1] if text.strip() else type(self.cause).__name__}"

    def last_words(self) -> str:
        """The last lines it wrote, for an error; known if it ran on this machine."""
        lines: list[str] = []
        for path in self.logs:
            with suppress(OSError), open(path, "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
                lines += [line for line in log.read().decode(errors="replace").splitlines() if _is_own(line)]
        if not any(line.strip() for line in lines):
            return ""
        return "; the last it wrote:\n" + "\n".join(f"    {line}" for line in lines[-_LINES:])

    def note_process(self, host: str, logs: list[str | None]) -> None:
        """Where the cell runs, and the files it writes to."""
        self.logs = [log for log in logs if log is not None] if host == socket.gethostname() else []


def _is_own(line: str) -> bool:
    """Whether a line of a log is the actor's, not one by which Ray marks what follows."""
    return not line.startswith((":job_id:", ":actor_name:", ":task_name:"))
