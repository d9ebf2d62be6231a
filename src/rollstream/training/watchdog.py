"""Tells of workers that are silent, and ends a training that they keep from ending after a signal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rollstream.engine import Engine
from rollstream.training.checkpointing import is_worker
from rollstream.training.interrupts import Interrupts

SILENCE = 30.0
"""Seconds at one message after which an actor is called silent."""
GRACE = 5.0
"""Seconds at one message after which an actor is no longer waited for, once a signal has come."""
_INTERVAL = 0.5


class Watchdog:
    """While entered, a thread looks twice a second for how long each actor has been at its message.

    How long is too long depends on the actor: twice its longest message so far, and at least `SILENCE`, or
    `GRACE` after a signal. An actor that is built again, or that writes its state to a file, may take
    `SILENCE` then, too.

    Args:
        engine: whose actors to watch.
        interrupts: forced to take effect if an actor keeps the training from ending.
        notify: shows the user a message, from this thread.
    """

    def __init__(self, engine: Engine, interrupts: Interrupts, notify: Callable[[str], None]):
        self._engine = engine
        self._interrupts = interrupts
        self._notify = notify
        self._noted: dict[str, float] = {}
        """Silences that the user knows of: seconds at the last note, by actor."""
        self._signalled: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rollstream watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_INTERVAL):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Say who is silent; if a signal has come, do not wait for them."""
        silences = self._engine.silences()
        self._noted = {name: self._noted[name] for name in self._noted.keys() & silences.keys()}
        for name, seconds in silences.items():
            if seconds >= max(self._patience(name, SILENCE), 2 * self._noted.get(name, 0.0)):
                self._noted[name] = seconds
                self._notify(f"{name} has been silent for {seconds:.0f} s{self._hint(name)}")
        self._interrupts.wake()
        if self._interrupts.received is None:
            return
        self._signalled = self._signalled or now
        silent = [name for name, seconds in silences.items() if seconds >= self._patience(name, GRACE)]
        if silent and now - self._signalled >= GRACE:
            self._signalled = now
            self._notify(f"no answer from {', '.join(silent)}: stopping without a last checkpoint")
            self._interrupts.force()

    def _hint(self, name: str) -> str:
        """Only workers get the deadline of a training: others may compile for as long as they need."""
        can_have_deadline = self._engine.remote and is_worker(name)
        without = self._engine.actors[name].options.deadline is None
        return "; with a deadline it would be restarted" if can_have_deadline and without else ""

    def _patience(self, name: str, least: float) -> float:
        actor = self._engine.actors[name]
        slow = actor.rebuilding is not None or hasattr(actor.cls, "save_to")
        return max(SILENCE if slow else least, 2 * actor.longest)
