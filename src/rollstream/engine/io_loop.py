"""Serving sockets without a thread in between: whoever waits serves, and a standby thread otherwise.

A thread that only serves costs every reply two wake-ups, its own and that of the thread the reply is for:
some 40 of 100 microseconds of a call. So a thread that waits for replies reads the sockets itself. But actors
also send, die and print while the driver computes. A standby thread takes over when nobody has served for
some milliseconds. It sleeps on a timer that whoever serves puts off now and then, which wakes nobody. (Any
earlier, it would be in the way of a driver that sends to many.)
"""

from __future__ import annotations

import ctypes
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollstream.engine.errors import EngineError
from rollstream.engine.interrupts import INTERRUPTS
from rollstream.engine.sinks import QueueSink

_STANDBY_DELAY = 5_000_000
"""Nanoseconds without anybody serving after which the standby thread does."""


class IOLoop:
    """A selector that one thread at a time serves.

    Args:
        time_left: seconds after which `tick` is due, or `None`.
        tick: called after every turn.
        broken: called with an error in what the standby thread was doing.
    """

    def __init__(
        self,
        time_left: Callable[[], float | None],
        tick: Callable[[], None],
        broken: Callable[[BaseException], None],
    ):
        self.selector = selectors.DefaultSelector()
        self._time_left = time_left
        self._tick = tick
        self._broken = broken
        self._callbacks: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()
        self._claim = threading.Lock()
        self._owner: int | None = None
        self._wanted = False
        self._standing_in = False
        self._closing = False
        self._woken = False
        self._reader, self._writer = socket.socketpair()
        self.selector.register(self._reader, selectors.EVENT_READ, self._on_wake)
        self._timer = _Timer.make()
        INTERRUPTS.open()
        self._standby = threading.Thread(target=self._stand_by, name="rollstream io", daemon=True)
        self._standby.start()
        if self._timer is not None:
            self._timer.set()

    def is_mine(self) -> bool:
        """Whether the calling thread serves at the moment."""
        return self._owner == threading.get_ident()

    def later(self, callback: Callable[[], None]) -> None:
        """Have whoever serves call a function."""
        self._callbacks.append(callback)
        self.wake()

    def wake(self) -> None:
        """Interrupt the wait of whoever serves."""
        if self._owner not in (None, threading.get_ident()) and not self._woken:
            self._woken = True
            with suppress(OSError):
                self._writer.send(b"!")

    def _on_wake(self, _: int) -> None:
        self._reader.recv(4096)
        self._woken = False  # only now: a callback added before is called in this turn

    # Turns -------------------------------------------------------------------------------------

    def serve(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Serve until something is true; returns at once if another waiting thread serves."""
        if self._timer is None:
            return
        end = None if timeout is None else time.monotonic() + timeout
        mine = False
        INTERRUPTS.hold()
        try:
            mine = self._take_turn()
            while mine and not until():
                left = None if end is None else max(0.0, end - time.monotonic())
                self._once(left)
                if left == 0:
                    break
        finally:
            if mine:
                self._owner = None
                self._turn.release()
                self._timer.set()
            INTERRUPTS.release()

    def _take_turn(self) -> bool:
        assert self._timer is not None
        if not self._turn.acquire(blocking=False):
            if not self._standing_in or not self._claim.acquire(blocking=False):
                return False
            try:
                self._wanted = True
                self.wake()
                taken = self._turn.acquire(timeout=_STANDBY_DELAY / 1e9)
            finally:
                self._wanted = False
                self._claim.release()
            if not taken:  # a third thread was quicker, or the standby thread has not run yet
                self._timer.set(at_once=True)  # only now: it gives way as long as a turn is wanted
                return False
        self._owner = threading.get_ident()
        return True

    def _once(self, timeout: float | None = None) -> None:
        """Wait for sockets, then call what is due."""
        self._run_callbacks()
        left = self._time_left()
        if left is not None:
            timeout = left if timeout is None else min(left, timeout)
        try:
            INTERRUPTS.release()  # here it does no harm: what is in the sockets stays there
            events = self.selector.select(timeout)
        finally:
            INTERRUPTS.hold()
        for key, mask in events:
            key.data(mask)
        self._run_callbacks()
        self._tick()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            self._callbacks.popleft()()

    def _stand_by(self) -> None:
        while not self._closing:
            if self._timer is not None:
                self._timer.wait()
            if self._turn.acquire(blocking=False):
                self._owner = threading.get_ident()
                self._standing_in = True
                try:
                    while not self._wanted and not self._closing:
                        self._once()
                except BaseException as error:
                    self._broken(error)
                finally:
                    self._standing_in = False
                    self._owner = None
                    self._turn.release()
                    if self._timer is not None and not self._wanted:
                        self._timer.set(at_once=True)  # something broke: serve the rest

    def close(self) -> None:
        """End the standby thread; nobody serves any more."""
        self._closing = True
        self.wake()
        if self._timer is not None:
            self._timer.set(at_once=True)
        self._standby.join()
        INTERRUPTS.close()
        self.selector.close()
        self._reader.close()
        self._writer.close()
        if self._timer is not None:
            self._timer.close()


class IOLoopSink(QueueSink):
    """A sink whose owner serves the sockets while it waits."""

    __slots__ = ("_loop",)

    def __init__(self, loop: IOLoop):
        super().__init__()
        self._loop = loop

    def wait(self, timeout: float | None = None) -> Any | None:
        """Serve until there is a future; if another thread serves, it brings it."""
        if self._queue.empty():
            if self._loop.is_mine():
                raise EngineError("on_event cannot wait for replies: its own thread has to bring them")
            start = time.monotonic()
            self._loop.serve(self._filled, timeout)
            if timeout is not None:
                timeout = max(0.0, timeout - (time.monotonic() - start))
        return super().wait(timeout)

    def _filled(self) -> bool:
        return not self._queue.empty()


class _Timer:
    """A timer of the system that one thread sleeps on while others put it off."""

    def __init__(self, create: Any, settime: Any):
        self._settime = settime
        self._fd: int = create(1, os.O_CLOEXEC)  # 1 is CLOCK_MONOTONIC
        if self._fd < 0:
            raise OSError("timerfd_create failed")
        self._delay = (ctypes.c_long * 4)(0, 0, 0, _STANDBY_DELAY)
        self._now = (ctypes.c_long * 4)(0, 0, 0, 1)
        self._set = 0.0

    @classmethod
    def make(cls) -> _Timer | None:
        """A timer, if the system has one; if not, the standby thread always serves."""
        with suppress(AttributeError, OSError):
            system = ctypes.PyDLL(None)
            return cls(system.timerfd_create, system.timerfd_settime)
        return None

    def set(self, *, at_once: bool = False) -> None:
        """Let it be due after half the delay at least; set often, it is never due."""
        now = time.monotonic()
        if at_once or now - self._set > _STANDBY_DELAY / 2e9:
            self._set = 0.0 if at_once else now
            self._settime(self._fd, 0, self._now if at_once else self._delay, None)

    def wait(self) -> None:
        """Sleep until it is due."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Close the timer."""
        os.close(self._fd)
