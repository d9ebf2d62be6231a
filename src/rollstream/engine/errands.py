"""One thread that does things in the order they were asked for, and looks at the clock in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

Errand = Callable[[], None]


class Errands:
    """A thread for what must not keep others waiting, or has to be in order. It sleeps when it has none.

    Args:
        name: the thread's name.
        due: when `tick` is due, as `time.monotonic` counts, or `None`.
        tick: called after every errand, and when it is due.
        broken: told of an error in an errand.
    """

    def __init__(
        self,
        name: str,
        due: Callable[[], float | None],
        tick: Errand,
        broken: Callable[[BaseException], None],
    ):
        self._due = due
        self._tick = tick
        self._broken = broken
        self._todo: SimpleQueue[Errand | None] = SimpleQueue()
        self.later = self._todo.put
        """Have something done, soon."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def look(self) -> None:
        """Have the clock looked at: something is due earlier than it was."""
        self.later(_nothing)

    def close(self) -> None:
        """Do what was asked for so far, and end."""
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            due = self._due()
            try:
                errand = self._todo.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except Empty:
                errand = _nothing
            if errand is None:
                return
            try:
                errand()
                self._tick()
            except BaseException as error:
                self._broken(error)


def _nothing() -> None:
    """An errand after which the clock is looked at."""
