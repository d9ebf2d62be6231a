"""Ctrl-C and SIGTERM while training: the iteration is finished and saved, then the program ends as usual."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, the first signal is only noted; a second one takes effect at once.

    A flow that is stopped in the middle of an item has no state to save, so whoever loops over it looks at
    `received` between two items. In a thread other than the main one there are no signals, and this does
    nothing.
    """

    def __init__(self) -> None:
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
        if self.received is not None:
            self.end()
        self.received = number

    def _restore(self) -> None:
        for number, usual in self._usual.items():
            signal.signal(number, usual)
        self._usual = {}
