"""Ctrl-C and SIGTERM while training: the iteration is finished and saved, then the program ends as usual."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

_STOPPING: dict[int, str] = {
    signal.SIGINT: "stopping after this iteration; Ctrl-C again ends at once",
    signal.SIGTERM: "SIGTERM: stopping after this iteration",
}


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
