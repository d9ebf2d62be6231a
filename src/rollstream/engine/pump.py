"""Serving sockets without a thread in between: whoever waits serves, and a standby does when nobody waits.

A thread that only serves costs every reply two wake-ups, its own and that of the thread the reply is for:
some 40 of 100 microseconds of a call. So a thread that waits for replies reads the sockets itself. But actors
also talk to each other, die and print while the driver is busy with something else. A standby sees to that:
it takes over when nobody has served for some milliseconds. It sleeps on a timer that whoever serves puts off
now and then, which wakes nobody. (Any earlier, it would be in the way of a driver that sends to many.)
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollstream.engine.errors import EngineError
from rollstream.engine.future import Future
from rollstream.engine.threads import QueueSink

_PATIENCE = 5_000_000
"""Nanoseconds without anybody serving after which the standby does."""


class Pump:
    """A selector that one thread at a time serves.

    Args:
        time_left: seconds after which `tick` is due, or `None`.
        tick: called after every turn.
        broken: told of an error in what the standby was doing.
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
        self._todo: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()
        self._claim = threading.Lock()
        self._owner: int | None = None
        self._wanted = False
        self._standing_in = False
        self._closing = False
        self._rung = False
        self._awake, self._alarm = socket.socketpair()
        self.selector.register(self._awake, selectors.EVENT_READ, self._hear)
        self._timer = _Timer.make()
        _INTERRUPTS.open()
        self._standby = threading.Thread(target=self._stand_by, name="rollstream pump", daemon=True)
        self._standby.start()
        if self._timer is not None:
            self._timer.set()

    def mine(self) -> bool:
        """Whether the calling thread serves at the moment."""
        return self._owner == threading.get_ident()

    def later(self, function: Callable[[], None]) -> None:
        """Have whoever serves do something."""
        self._todo.append(function)
        self.ring()

    def ring(self) -> None:
        """Make whoever serves look up."""
        if self._owner not in (None, threading.get_ident()) and not self._rung:
            self._rung = True
            with suppress(OSError):
                self._alarm.send(b"!")

    def _hear(self, _: int) -> None:
        self._awake.recv(4096)
        self._rung = False  # only now: whoever rings before has its errand done in this turn

    # Turns -------------------------------------------------------------------------------------

    def serve(self, until: Callable[[], bool], timeout: float | None) -> None:
        """Serve until something is true; returns at once if another waiting thread serves."""
        if self._timer is None:
            return
        end = None if timeout is None else time.monotonic() + timeout
        mine = False
        _INTERRUPTS.hold_back()
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
            _INTERRUPTS.let_through()

    def _take_turn(self) -> bool:
        assert self._timer is not None
        if not self._turn.acquire(blocking=False):
            if not self._standing_in or not self._claim.acquire(blocking=False):
                return False
            try:
                self._wanted = True
                self.ring()
                if not self._turn.acquire(timeout=_PATIENCE / 1e9):
                    self._timer.set(at_once=True)
                    return False  # a third thread was quicker, and serves
            finally:
                self._wanted = False
                self._claim.release()
        self._owner = threading.get_ident()
        return True

    def _once(self, timeout: float | None = None) -> None:
        """Wait for sockets, and do what is to be done."""
        self._do_errands()
        left = self._time_left()
        if left is not None:
            timeout = left if timeout is None else min(left, timeout)
        try:
            _INTERRUPTS.let_through()  # here it does no harm: what is in the sockets stays there
            events = self.selector.select(timeout)
        finally:
            _INTERRUPTS.hold_back()
        for key, mask in events:
            key.data(mask)
        self._do_errands()
        self._tick()

    def _do_errands(self) -> None:
        while self._todo:
            self._todo.popleft()()

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
                        self._timer.set(at_once=True)  # something broke: go on with the rest

    def close(self) -> None:
        """End the standby; nobody serves any more."""
        self._closing = True
        self.ring()
        if self._timer is not None:
            self._timer.set(at_once=True)
        self._standby.join()
        _INTERRUPTS.close()
        self.selector.close()
        self._awake.close()
        self._alarm.close()
        if self._timer is not None:
            self._timer.close()


class PumpSink(QueueSink):
    """A sink whose owner serves the sockets while it waits."""

    __slots__ = ("_pump",)

    def __init__(self, pump: Pump):
        super().__init__()
        self._pump = pump

    def wait(self, timeout: float | None = None) -> Future[Any] | None:
        """Serve until there is a future; if another thread serves, it brings it."""
        if self._queue.empty():
            if self._pump.mine():
                raise EngineError("on_event cannot wait for replies: the thread it runs in has to bring them")
            start = time.monotonic()
            self._pump.serve(self._filled, timeout)
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
        self._due = (ctypes.c_long * 4)(0, 0, 0, _PATIENCE)
        self._now = (ctypes.c_long * 4)(0, 0, 0, 1)
        self._set = 0.0

    @classmethod
    def make(cls) -> _Timer | None:
        """One, if the system has such a thing; if not, the standby serves always."""
        with suppress(AttributeError, OSError):
            system = ctypes.PyDLL(None)
            return cls(system.timerfd_create, system.timerfd_settime)
        return None

    def set(self, *, at_once: bool = False) -> None:
        """Let it be due after half the patience at least; set often, it is never due."""
        now = time.monotonic()
        if at_once or now - self._set > _PATIENCE / 2e9:
            self._set = 0.0 if at_once else now
            self._settime(self._fd, 0, self._now if at_once else self._due, None)

    def wait(self) -> None:
        """Sleep until it is due."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Give it back."""
        os.close(self._fd)


class _Interrupts:
    """Keeps Ctrl-C out of what has to be done as a whole: it comes right afterwards.

    Python runs signal handlers in the main thread, between any two steps of it. So while a pump is open, a
    handler in front of the usual one waits for the end of such a whole. Signals are the whole process's, and
    so is this.
    """

    def __init__(self) -> None:
        self._pumps = 0
        self._depth = 0
        self._caught: tuple[Any, ...] | None = None
        self._usual: Any = None

    def open(self) -> None:
        """A pump begins."""
        usual = signal.getsignal(signal.SIGINT)
        if _in_main_thread() and self._usual is None and callable(usual) and usual != self._handle:
            self._usual = usual
            signal.signal(signal.SIGINT, self._handle)
        self._pumps += 1

    def close(self) -> None:
        """A pump ends; after the last one the usual handler is back."""
        self._pumps -= 1
        if not self._pumps and self._usual is not None and _in_main_thread():
            if signal.getsignal(signal.SIGINT) == self._handle:  # else somebody has put another in front
                signal.signal(signal.SIGINT, self._usual)
            self._usual = None

    def _handle(self, *caught: Any) -> None:
        if self._depth:
            self._caught = caught
        else:
            (self._usual or signal.default_int_handler)(*caught)

    def hold_back(self) -> None:
        """Something begins that has to be done as a whole."""
        if threading.get_ident() == _MAIN:  # in line: this is done for every message
            self._depth += 1

    def let_through(self) -> None:
        """It is done."""
        if threading.get_ident() == _MAIN:
            self._depth -= 1
            if not self._depth and self._caught is not None:
                caught, self._caught = self._caught, None
                self._handle(*caught)


def _in_main_thread() -> bool:
    return threading.get_ident() == _MAIN


_MAIN = threading.main_thread().ident
_INTERRUPTS = _Interrupts()
hold_back, let_through = _INTERRUPTS.hold_back, _INTERRUPTS.let_through
