"""Starting an actor's process, showing its output, and saying how it ended."""

from __future__ import annotations

import codecs
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress

from rollstream.engine.errors import EngineError

_BOOT = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('ROLLSTREAM_PATH')); "
    "from rollstream.engine.process_main import main; main()"
)
_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NPROC",  # XLA's thread pool: its results depend on it for wide layers
)
XLA_THREADS = "2"
"""The same on every machine; they idle unless a function is compiled to use them (see `rollstream.rl`)."""
DRIVER_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals meant for the driver, which ends its actors: an actor's process does not react to them."""
_PARENT_DEATH_SIGNAL = 1
_LINES = 20
_LINE = 1000


def thread_variables(threads: int | None) -> dict[str, str]:
    """Environment variables that fix the number of threads of numeric libraries.

    By default what is set already, or one; for XLA, `XLA_THREADS`.
    """
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise EngineError(f"threads={threads!r}: an actor needs a whole number, at least one")
    if threads is not None:
        return dict.fromkeys(_THREADS, str(threads))
    return {name: os.environ.get(name, XLA_THREADS if name == "NPROC" else "1") for name in _THREADS}


def continue_when_orphaned() -> None:
    """Let this process continue if it is stopped (SIGSTOP) when its parent dies, so that it can end itself.

    Linux tells of the end of the thread that started this process, which may come before its process ends:
    so the signal is a harmless one.
    """
    with suppress(AttributeError):  # other systems have no prctl
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGCONT)


class Process:
    """A fresh interpreter with a socket to it. It ends by itself when this process ends, however."""

    def __init__(self, name: str, incarnation: int, pool: int, variables: dict[str, str]):
        self.lines: deque[str] = deque(maxlen=_LINES)
        """The last lines it wrote."""
        self._partial = {"stdout": "", "stderr": ""}
        self._decoders = {which: codecs.getincrementaldecoder("utf-8")("replace") for which in self._partial}
        (mine, theirs), (my_fds, their_fds) = socket.socketpair(), socket.socketpair()
        watched, self._lifeline = os.pipe()
        path = [os.path.abspath(entry) for entry in sys.path]
        environment = {**os.environ, **variables, "ROLLSTREAM_PATH": json.dumps(path)}
        arguments = [name, incarnation, theirs.fileno(), their_fds.fileno(), watched, pool]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DRIVER_SIGNALS)  # until it has its handlers
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *map(str, arguments)],
                pass_fds=(theirs.fileno(), their_fds.fileno(), watched),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
        except BaseException:
            mine.close()
            my_fds.close()
            os.close(self._lifeline)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            their_fds.close()
            os.close(watched)
        self.socket, self.fds = mine, my_fds
        self._over = False
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.outputs = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for stream in self.outputs.values():
            os.set_blocking(stream.fileno(), False)

    def show_output(self, which: str) -> int:
        """Copy what the process wrote to this one's output: how many bytes, 0 at its end, -1 if none now."""
        try:
            data = os.read(self.outputs[which].fileno(), 1 << 16)
        except BlockingIOError:
            return -1
        text = self._decoders[which].decode(data, final=not data)
        *lines, rest = (self._partial[which] + text).split("\n")
        self.lines.extend(lines)
        self._partial[which] = rest.rpartition("\r")[2][-_LINE:]  # a progress bar rewrites one line
        with suppress(OSError, ValueError):  # the output is closed
            getattr(sys, which).write(text)
            getattr(sys, which).flush()
        return len(data)

    def let_go(self) -> None:
        """Close what ties it to this process, without ending it."""
        if not self._over:
            self._over = True
            os.close(self._lifeline)
        self.socket.close()
        self.fds.close()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self) -> str:
        """Wait for its end, show the rest of its output, and say how it ended."""
        code = self._process.wait()
        for which, stream in self.outputs.items():
            while self.show_output(which) > 0:
                pass
            if self._partial[which]:
                self.lines.append(self._partial[which])
            stream.close()
        self._over = True
        os.close(self._lifeline)
        if code < 0:
            known = {int(number): number.name for number in signal.Signals}
            return f"was killed by {known.get(-code, f'signal {-code}')}"
        return f"ended with exit code {code}"

    def last_output(self) -> str:
        """The last lines it wrote, for an error."""
        if not any(line.strip() for line in self.lines):
            return ""
        return "; the last it wrote:\n" + "\n".join(f"    {line}" for line in self.lines)
