"""Keeps Ctrl-C out of critical sections: it is raised right afterwards."""

from __future__ import annotations

import signal
import threading
from typing import Any

_MAIN = threading.main_thread().ident


class _InterruptGuard:
    """A SIGINT handler in front of the usual one that waits for the end of a critical section.

    Python runs signal handlers in the main thread, between any two steps of it: one could cut a message in
    two. Signals belong to the whole process, and so does this; it is installed while an `IOLoop` is open.
    """

    def __init__(self) -> None:
        self._users = 0
        self._depth = 0
        self._caught: tuple[Any, ...] | None = None
        self._usual: Any = None

    def open(self) -> None:
        """Install the handler, unless SIGINT is ignored or handled elsewhere."""
        usual = signal.getsignal(signal.SIGINT)
        if _in_main_thread() and self._usual is None and callable(usual) and usual != self._handle:
            self._usual = usual
            signal.signal(signal.SIGINT, self._handle)
        self._users += 1

    def close(self) -> None:
        """Restore the usual handler after the last user."""
        self._users -= 1
        if not self._users and self._usual is not None and _in_main_thread():
            if signal.getsignal(signal.SIGINT) == self._handle:  # else somebody has put another in front
                signal.signal(signal.SIGINT, self._usual)
            self._usual = None

    def _handle(self, *caught: Any) -> None:
        if self._depth:
            self._caught = caught
        else:
            (self._usual or signal.default_int_handler)(*caught)

    def hold(self) -> None:
        """A critical section begins."""
        if threading.get_ident() == _MAIN:
            self._depth += 1

    def release(self) -> None:
        """A critical section ends."""
        if threading.get_ident() == _MAIN:
            self._depth -= 1
            if not self._depth and self._caught is not None:
                caught, self._caught = self._caught, None
                self._handle(*caught)


def _in_main_thread() -> bool:
    return threading.get_ident() == _MAIN


INTERRUPTS = _InterruptGuard()
