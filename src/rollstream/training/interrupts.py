"""Ctrl-C and SIGTERM while training: the iteration is finished and saved, then the program ends as usual."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

_STOPPING: dict[int, str] = {
    signal.SIGINT: "stopping; Ctrl-C again ends at once",
    signal.SIGTERM: "SIGTERM: stopping",
}


_OFTEN = 0.25
"""Seconds from one sign of life to the next."""


class Beat:
    """Whether it is time for a sign of life: a few times a second, and after a signal."""

    def __init__(self, interrupts: Interrupts):
        self._interrupts = interrupts
        self._last = time.monotonic()

    def __call__(self) -> bool:
        """Whether it is."""
        now = time.monotonic()
        if now - self._last < _OFTEN and self._interrupts.received is None:
            return False
        self._last = now
        return True


class Interrupts:
    """While entered, the first signal is only noted; Ctrl-C once more takes effect at once.

    SIGTERM once more does not: whoever sends it to a group of processes may send it twice, as `timeout` does.

    A flow that is stopped in the middle of an item has no state to save, so whoever loops over it looks at
    `received` between two items. In a thread other than the main one there are no signals, and this does
    nothing.

    Args:
        say: shows a person at once that the signal was seen.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.received: int | None = None
        self._usual: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._usual[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.received is not None and self._usual and error is None:
            self.end()  # it came after the last look
        self._restore()

    def end(self) -> None:
        """Do what the signal would have done: KeyboardInterrupt, or the exit code of a program it ended."""
        assert self.received is not None
        number, usual = self.received, self._usual.get(self.received)
        self._restore()
        if callable(usual):
            signal.raise_signal(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            with suppress(RuntimeError):  # it came in the middle of a line that is being written
                self._say(_STOPPING[number])
        elif number == signal.SIGINT:
            self.end()

    def _restore(self) -> None:
        for number, usual in self._usual.items():
            signal.signal(number, usual)
        self._usual = {}
