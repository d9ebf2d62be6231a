"""The process an actor of the processes engine lives in.

One thread reads the socket and handles messages in order. A second one only waits for the parent's end.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from functools import partial

from rollstream.engine.channel import Channel, SocketPort
from rollstream.engine.errors import EngineError
from rollstream.engine.framed_host import FramedHost
from rollstream.engine.launch import DRIVER_SIGNALS, continue_when_orphaned

_GRACE = 1.0
"""Seconds that threads an actor has left behind may take to end."""
_GROUP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
CHUNK = 1 << 17
"""Bytes read at once."""


class ProcessHost(FramedHost):
    """An actor's host, over a socket to the driver."""

    def __init__(self, actor: str, incarnation: int, sock: socket.socket, port: SocketPort, pool: int):
        super().__init__("processes", actor, f"{actor}#{incarnation}", pool, Channel(port, {}))
        self._sock = sock
        self._port = port
        self._thread = threading.get_ident()
        self._chunk = memoryview(bytearray(CHUNK))  # reused: allocating costs more
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def run(self) -> None:
        while True:
            if self.has_message() and self._readable.poll(0):
                self.read()  # a stop overtakes messages that have not begun
            while not self.has_message() and not self.stopping:
                self.read()
            if self.stopping:
                break
            self.handle_next()
        self.say_goodbye()

    def read(self) -> None:
        length = self._sock.recv_into(self._chunk)
        if not length:
            os._exit(0)  # the driver is gone
        self.receive(self._chunk[:length])

    def write(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError:
            os._exit(0)  # the driver is gone

    def can_wait(self) -> bool:
        return threading.get_ident() == self._thread

    def leave_fork(self) -> None:
        """In a fork of this process: send nothing, and do not hide the actor's end."""
        self.closed = True
        self._sock.close()
        self._port.close()


def main() -> None:
    """Run the actor that the parent process describes in the arguments."""
    actor, incarnation, control, fds, lifeline, pool = sys.argv[1], *map(int, sys.argv[2:])
    del sys.argv[1:]
    continue_when_orphaned()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends its actors,
    for number in _GROUP_SIGNALS:  # and so are these, which go to a whole group, too
        if signal.getsignal(number) is signal.SIG_DFL:  # else it is ignored, by `nohup`
            signal.signal(number, _leave_to_driver)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DRIVER_SIGNALS)  # blocked until here
    faulthandler.enable()
    if "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = partial(_no_terminal, actor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=_end_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    port = SocketPort(socket.socket(fileno=fds))
    host = ProcessHost(actor, incarnation, socket.socket(fileno=control), port, pool)
    os.register_at_fork(after_in_child=host.leave_fork)
    os.register_at_fork(
        before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_end_by_signals
    )
    host.run()
    _leave_threads(actor)


def _leave_to_driver(_: int, __: object) -> None:
    """Not ignored, which programs that an actor starts would inherit: they could not be terminated."""


def _no_terminal(actor: str, *_: object, **__: object) -> None:
    """What `breakpoint()` does here: the debugger would read the end of its input, and quit."""
    raise EngineError(
        f"breakpoint() in {actor}: its process has no terminal. In the engine inline it stops in "
        f"yours: engine='inline'"
    )


def _end_by_signals() -> None:
    """A fork of an actor's process ends like any other process."""
    for number in _GROUP_SIGNALS:
        if signal.getsignal(number) is _leave_to_driver:
            signal.signal(number, signal.SIG_DFL)
    _unblock_signals()


def _block_signals() -> None:
    """Until a fork has its own handlers: the actor's would swallow a signal that comes at once."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)


def _leave_threads(name: str) -> None:
    """Do not wait long for threads that an actor has left behind, as the interpreter would."""
    end = time.monotonic() + _GRACE
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in others:
        thread.join(max(0.0, end - time.monotonic()))
    if left := [thread.name for thread in others if thread.is_alive()]:
        print(f"{name} has ended and left a thread running: {', '.join(left)}", file=sys.stderr, flush=True)
        atexit._run_exitfuncs()
        os._exit(0)


def _end_with_parent(lifeline: int) -> None:
    """Wait until the parent's end of a pipe is closed: by its death, if nothing else."""
    os.read(lifeline, 1)
    os._exit(0)
