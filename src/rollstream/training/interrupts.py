"""Ctrl-C, SIGTERM and SIGHUP during training: finish the iteration, save a checkpoint, then exit."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from rollstream.engine.errors import SignalExit

_MESSAGES: dict[int, str] = {
    signal.SIGINT: "stopping; press Ctrl-C again to stop at once",
    signal.SIGTERM: "SIGTERM: stopping",
    signal.SIGHUP: "SIGHUP: stopping",
}
_TWICE_SECONDS = 1.0
"""A second Ctrl-C within this time is the same one: `timeout -s INT` signals the process and its group."""
_HEARTBEAT_SECONDS = 0.25


class Interrupts:
    """While entered, the first signal is only recorded; another Ctrl-C, a second later, takes effect at once.

    A second SIGTERM does not: tools that signal a whole process group, such as `timeout`, may send two. After
    SIGHUP the terminal may be gone: what is written to it from then on is dropped. A
    flow that is stopped in the middle of an item has no state to save, so the training loop checks `received`
    between two items. A process that was started with a signal ignored (`nohup`, `command &` in a script)
    keeps ignoring it. Outside the main thread Python delivers no signals, and this class does nothing.

    Args:
        notify: shows the user at once that a signal has arrived.
        clock: seconds.
    """

    def __init__(self, notify: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._notify = notify
        self._clock = clock
        self._received_at = 0.0
        self.received: int | None = None
        self._forced = False
        self._previous: dict[int, Any] = {}
        self._arrivals: tuple[socket.socket, socket.socket] | None = None
        """Python writes each signal's number to one end when it arrives, before it calls `_record`."""
        self._lock = threading.RLock()  # of `_arrivals`

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._open_arrivals()
            for number in _MESSAGES:
                if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.received is not None and self._previous and error is None:
            self.exit()  # it arrived after the last check
        self._restore()

    def exit(self) -> None:
        """Do what the signal would have done: raise KeyboardInterrupt, or exit with code 128 + number."""
        assert self.received is not None
        number, previous = self.received, self._previous.get(self.received)
        self._restore()
        if callable(previous):
            try:
                signal.raise_signal(number)
            except SystemExit as exiting:
                if exiting.code != number:  # as Ray's handler does, which exits with the number alone
                    raise
        raise KeyboardInterrupt if number == signal.SIGINT else SignalExit(128 + number)

    def wake(self) -> None:
        """Wake the main thread if a signal has arrived that it sleeps through. For other threads.

        A signal that arrives just before the main thread begins to wait, or in another thread, interrupts
        nothing: Python would call its handler when the wait is over.
        """
        with self._lock, suppress(BlockingIOError):  # nothing has arrived
            if self.received is None and self._arrivals is not None:
                arrived = set(self._arrivals[0].recv(4096))  # bytes
                for number in arrived & _MESSAGES.keys():
                    _signal_main_thread(number)

    def force(self) -> None:
        """Do it now, in the middle of whatever the main thread waits for. For other threads."""
        assert self.received is not None
        self._forced = True
        _signal_main_thread(self.received)

    def _record(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if self._forced:
            self.exit()
        if self.received is None:
            self.received, self._received_at = number, self._clock()
            with suppress(RuntimeError):  # the signal interrupted a write to the same stream
                self._notify(_MESSAGES[number])
        elif number == signal.SIGINT and self._clock() - self._received_at >= _TWICE_SECONDS:
            self.exit()

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}
        self._close_arrivals(-1)

    def _open_arrivals(self) -> None:
        self._arrivals = socket.socketpair()
        for end in self._arrivals:
            end.setblocking(False)
        other = signal.set_wakeup_fd(self._arrivals[1].fileno(), warn_on_full_buffer=False)
        if other != -1:  # an event loop's
            self._close_arrivals(other)

    def _close_arrivals(self, other: int) -> None:
        with self._lock:
            if self._arrivals is not None:
                signal.set_wakeup_fd(other)
                for end in self._arrivals:
                    end.close()
                self._arrivals = None


def _signal_main_thread(number: int) -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


def _leave_terminal() -> None:
    """Let standard output and error go nowhere, if their terminal is gone: writing to it would fail."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


class HeartbeatTimer:
    """Whether a heartbeat is due: a few times per second, and after a signal."""

    def __init__(self, interrupts: Interrupts):
        self._interrupts = interrupts
        self._last = time.monotonic()

    def __call__(self) -> bool:
        """Return whether it is due, and restart the timer if so."""
        now = time.monotonic()
        if now - self._last < _HEARTBEAT_SECONDS and self._interrupts.received is None:
            return False
        self._last = now
        return True
