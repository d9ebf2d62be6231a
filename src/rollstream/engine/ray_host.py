"""The host of an actor on Ray."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from rollstream.engine.actor_host import DEFERRED, ERROR, VALUE, ActorHost
from rollstream.engine.errors import EngineError
from rollstream.engine.future import Deferred
from rollstream.engine.ray_objects import Buffers, body_of, is_large, item_of, items_of, payload_from, store
from rollstream.engine.serialization import Codec, Payload

STORED, REFUSED = 3, 4
"""What a record says of a message, besides `VALUE`, `ERROR` and `DEFERRED`: its value is a separate object;
it was not handled."""
LATE, POST = "late", "post"
"""What an actor says besides its replies: a deferred reply, a message to another actor."""


class RayHost(ActorHost):
    """Replies with records, and queues what else the actor says until the driver takes it.

    A record says how much had been said before it, so that the driver can keep the order.
    """

    def __init__(self, actor: str):
        super().__init__("ray", actor)
        self.codec = Codec(self, Buffers, f"{actor}, process {os.getpid()}", store)
        self._handled = 0
        self._said = 0
        self._saying = threading.Lock()
        self._outbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    def build_instance(self, context: tuple[str, int, int, int], body: Any, items: Sequence[Any]) -> Any:
        """Build the instance: an error or none, and facts about this process."""
        error = self.build(payload_from(body, items), context)
        item = None if error is None else self._error_item(error)
        logs: list[str] = []
        for descriptor in (1, 2):
            with suppress(OSError):  # only Linux shows the files that Ray writes the output to
                logs.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return item, socket.gethostname(), logs, time.time() - time.perf_counter()

    def handle_message(self, body: Any, items: Sequence[Any]) -> tuple[Any, Any]:
        """Handle one message: its record and its value."""
        number = self._handled
        self._handled += 1
        if self.closed or self.slot is None:
            return self._record(REFUSED, None), b""
        value, error, start, end = self.handle(payload_from(body, items))
        if isinstance(value, Deferred):
            try:
                value.then(partial(self._say_late, number))
                return self._record(DEFERRED, number, start, end), b""
            except EngineError as twice:
                error = twice
        status, payload = self.result(value, error)
        if status == ERROR:
            return self._record(ERROR, item_of(payload), start, end), b""
        if is_large(payload):
            return self._record(STORED, items_of(payload), start, end), body_of(payload)
        return self._record(VALUE, item_of(store(payload)), start, end), b""

    def end_instance(self) -> list[Any]:
        """End the instance; its errors."""
        return [self._error_item(error) for error in self.end()]

    def _record(self, status: int, item: Any, start: float = 0.0, end: float = 0.0) -> Any:
        """Bytes, which Ray passes on as they are, unless there are references or buffers in the record."""
        record = (status, self._said, start, end, item)
        return pickle.dumps(record, 5) if item is None or type(item) in (bytes, int) else record

    def _error_item(self, error: BaseException) -> Any:
        return item_of(self.codec.pack_error(error))

    # What the actor says besides ---------------------------------------------------------------

    def take(self) -> list[Any]:
        """Wait until there is something, and take all of it."""
        frames = [self._outbox.get()]
        while not self._outbox.empty():
            frames.append(self._outbox.get())
        return frames

    def post_to_driver(
        self, target: str, payload: Payload, label: str, sticky: str | None, seconds: float | None
    ) -> None:
        self._say(POST, target, item_of(payload), label, sticky, seconds)

    def _say_late(self, number: int, value: Any, error: BaseException | None) -> None:
        status, payload = self.result(value, error)
        self._say(LATE, number, status == ERROR, item_of(store(payload)))

    def _say(self, *frame: Any) -> None:
        with self._saying:
            self._said += 1
            self._outbox.put(frame)
