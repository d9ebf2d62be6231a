"""What Ctrl-C, SIGTERM and SIGHUP do before a training handles them itself. For the command line only."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from rollstream.engine.errors import SignalExit

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CODES = tuple(128 + number for number in _SIGNALS)
"""Exit codes after these signals."""
_SOON_SECONDS = 20.0


def exit_on_signals() -> None:
    """Exit without an exception: during an import it would crash, or be taken for a missing module."""
    _handle(_exit, instead_of=(signal.SIG_DFL, signal.default_int_handler))  # others are ignored, by nohup


def raise_on_signals() -> None:
    """Raise an exception, so that what is open is closed.

    Callbacks of JAX swallow exceptions. Then the process ends a little later.
    """
    _handle(_raise, instead_of=(_exit,))


def _handle(handler: Callable[[int, object], None], instead_of: tuple[object, ...]) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) in instead_of:
            signal.signal(number, handler)


def _exit(number: int, _: object) -> None:
    with suppress(OSError):
        os.write(2, b"rollstream: stopped\n")
    os._exit(128 + number)


def _raise(number: int, _: object) -> None:
    timer = threading.Timer(_SOON_SECONDS, _exit, (number, None))
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt if number == signal.SIGINT else SignalExit(128 + number)
