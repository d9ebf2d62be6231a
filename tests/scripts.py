"""Run scripts from tests, and wait for states that no event announces."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 100.0
"""Seconds to wait for something that takes a moment: far more than a busy machine needs."""


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run Python with these arguments, and kill it on leaving if it still runs."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *arguments], **{**pipes, **options}) as process:
        try:
            yield process
        finally:
            process.kill()


def run(
    *arguments: str, check: bool = True, given: str = "", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end, with text to read; with `check`, it has to succeed."""
    with started(*arguments, stdin=subprocess.PIPE, **options) as process:
        output, errors = process.communicate(given)
    assert not check or process.returncode == 0, f"exit code {process.returncode}\n{output}\n{errors}"
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run_code(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program given as text."""
    return run("-c", textwrap.dedent(code), *arguments, **options)


def eventually(condition: Callable[[], object], what: str = "the state waited for") -> None:
    """Wait until a condition holds that no event announces."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {PATIENCE:.0f} s"
        time.sleep(0.02)


def ended(pids: list[int]) -> bool:
    """Whether none of these processes runs any more; one that its parent has not yet waited for has ended."""
    return not any(state(pid) not in ("", "Z", "X") for pid in pids)


def state(pid: int) -> str:
    """The state of a process, as Linux shows it: T if it is stopped, nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
