"""Entry point of `rollstream` and `python -m rollstream`."""

import os
import sys
from contextlib import suppress

from rollstream import cli, exit_signals


def entry_point() -> None:
    """Run the command line in a process of its own, which signals end without finalizing the interpreter.

    XLA may still compile what Ctrl-C interrupted, and would crash when JAX frees its memory.
    """
    exit_signals.exit_on_signals()
    try:
        cli.main()
    except SystemExit as exiting:
        if not isinstance(exiting.code, int) or exiting.code not in exit_signals.CODES:
            raise
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(exiting.code)


if __name__ == "__main__":
    entry_point()
