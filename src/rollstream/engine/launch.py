"""Starting an actor's process afresh, hearing what it writes, and telling how it ended."""

from __future__ import annotations

import codecs
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from contextlib import suppress

_BOOT = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('ROLLSTREAM_PATH')); "
    "from rollstream.engine.worker import main; main()"
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
"""The same everywhere; they idle unless a function is compiled to use them (see `rollstream.rl`)."""
DRIVERS_SIGNALS = {signal.SIGINT, signal.SIGTERM}
"""What a person, or whoever runs the program, tells the driver: an actor's process is not to see it."""
_LINES = 20
_LINE = 1000


def thread_variables(threads: int | None) -> dict[str, str]:
    """The environment that makes numeric libraries use so many threads; by default what is set, or one.

    For XLA that is `XLA_THREADS`.
    """
    if threads is not None:
        return dict.fromkeys(_THREADS, str(threads))
    return {name: os.environ.get(name, XLA_THREADS if name == "NPROC" else "1") for name in _THREADS}


_PROCESSES: weakref.WeakSet[Process] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    """A forked copy of this process must not keep its actors alive, nor hide their ends."""
    for process in list(_PROCESSES):
        process.let_go()


os.register_at_fork(after_in_child=_let_go_after_fork)


class Process:
    """A fresh interpreter with a socket to it. It ends by itself when this process ends, however that is."""

    def __init__(self, name: str, life: int, pool: int, variables: dict[str, str]):
        self.lines: deque[str] = deque(maxlen=_LINES)
        """The last lines it wrote."""
        self._partial = {"stdout": "", "stderr": ""}
        self._decoders = {which: codecs.getincrementaldecoder("utf-8")("replace") for which in self._partial}
        (mine, theirs), (my_fds, their_fds) = socket.socketpair(), socket.socketpair()
        watched, self._lifeline = os.pipe()
        path = [os.path.abspath(entry) for entry in sys.path]
        environment = {**os.environ, **variables, "ROLLSTREAM_PATH": json.dumps(path)}
        arguments = [name, life, theirs.fileno(), their_fds.fileno(), watched, pool]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DRIVERS_SIGNALS)  # until it has its handlers
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
        _PROCESSES.add(self)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.outputs = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for stream in self.outputs.values():
            os.set_blocking(stream.fileno(), False)

    def pass_on(self, which: str) -> int:
        """Show what the process wrote where this one writes: how much, 0 at its end, -1 if nothing now."""
        try:
            data = os.read(self.outputs[which].fileno(), 1 << 16)
        except BlockingIOError:
            return -1
        text = self._decoders[which].decode(data, final=not data)
        *lines, rest = (self._partial[which] + text).split("\n")
        self.lines.extend(lines)
        self._partial[which] = rest.rpartition("\r")[2][-_LINE:]  # a progress bar writes one line for ever
        with suppress(OSError, ValueError):  # nobody listens any more
            getattr(sys, which).write(text)
            getattr(sys, which).flush()
        return len(data)

    def let_go(self) -> None:
        """Close what ties it to this process; it is another's."""
        if not self._over:
            self._over = True
            os.close(self._lifeline)
            self.socket.close()
            self.fds.close()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self) -> str:
        """Wait for its end, take in the rest of what it wrote, and say how it ended."""
        code = self._process.wait()
        for which, stream in self.outputs.items():
            while self.pass_on(which) > 0:
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

    def last_words(self) -> str:
        """The last lines it wrote, for an error."""
        if not any(line.strip() for line in self.lines):
            return ""
        return "; the last it wrote:\n" + "\n".join(f"    {line}" for line in self.lines)
