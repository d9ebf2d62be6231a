"""The driver's side of one Ray actor, and how such an actor ended."""

from __future__ import annotations

import os
import re
import socket
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from rollstream.engine.actor import Message
from rollstream.engine.future import Deferred

DEATHS = (RayActorError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
"""What Ray raises when the actor itself, or its machine, is gone."""
_LINES = 20
_LOG_BYTES = 8192


class Sent(NamedTuple):
    """A message in flight, and the objects that will hold its record and its value."""

    message: Message
    record: Any
    value: Any


class RayConnection:
    """One incarnation of an actor: the Ray actor, what was sent to it, and what it has not answered.

    Messages are numbered; the Ray actor counts along, so the numbers need not travel.
    """

    def __init__(self, handle: Any):
        self.handle = handle
        self.sent = 0
        self.pending: dict[int, Sent] = {}
        self.unhandled: dict[int, Message] = {}
        """Messages that the actor's death has cut off."""
        self.is_building = True
        self.is_listening = True
        """Whether the actor may still say something besides its replies."""
        self.is_dying = False
        self.heard = 0
        """How much of what the actor said has been heard."""
        self.early_records: list[tuple[int, Any]] = []
        """Records that came before something the actor had said earlier."""
        self.deferred: dict[int, Deferred[Any]] = {}
        self.early_replies: dict[int, tuple[bool, Any]] = {}
        """Deferred replies that came before the record that says so."""
        self.since = 0.0
        """When the actor began its current message."""
        self.clock_offset = 0.0
        self.counting = threading.Lock()
        """For the actor's counters: Ray calls back in several threads."""
        self.cause: BaseException = RuntimeError()
        self.logs: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether everything that was sent to a dead actor is accounted for."""
        return self.is_dying and not self.pending and not self.is_building and not self.is_listening

    def note_process(self, host: str, logs: list[str]) -> None:
        """Where the actor runs, and the files that hold its output."""
        self.logs = logs if host == socket.gethostname() else []

    def reason(self) -> str:
        """How the actor ended, in words that follow its name."""
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

    def last_output(self) -> str:
        """The last lines the actor wrote, for an error; known if it ran on this machine."""
        lines: list[str] = []
        for path in self.logs:
            with suppress(OSError), open(path, "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
                written = log.read().decode(errors="replace").splitlines()
                lines += [line for line in written if not line.startswith(_MARKS)]
        if not any(line.strip() for line in lines):
            return ""
        return "; the last it wrote:\n" + "\n".join(f"    {line}" for line in lines[-_LINES:])


_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""How lines begin that Ray itself writes into a log."""


def first_line(error: BaseException) -> str:
    """The first line of an error of Ray's."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
