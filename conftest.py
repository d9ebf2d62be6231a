"""What every test shares: nothing may leak, documents are run, and random examples are the same each time."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from hypothesis import settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest.register_assert_rewrite("rollstream.testing")

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
    fixtures=["no_leaks"],
).pytest()

PATIENCE = 5.0
"""Seconds that threads which are ending may take after a test."""

SEGMENTS = Path("/dev/shm")
"""Where Linux shows shared memory."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the one helper process of shared memory now: it lives on, and is no test's leak.

    And let JAX keep what it compiles for the whole session: tests build the same learners again and again, in
    processes of their own, too.
    """
    if sys.platform == "linux":
        resource_tracker.ensure_running()
    cache = tempfile.TemporaryDirectory(prefix="rollstream-tests-")
    session.config.add_cleanup(cache.cleanup)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache.name)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray for all tests, where it is installed: engines join it, and leave it running."""
    if importlib.util.find_spec("ray") is None:
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a change to come
    ray = importlib.import_module("ray")
    on_terminate = signal.getsignal(signal.SIGTERM)
    with importlib.import_module("rollstream.engine.ray_cluster").forks_of_ray():
        ray.init(
            "local",
            num_cpus=4,
            resources={"arm": 2},
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    signal.signal(signal.SIGTERM, on_terminate)  # Ray has set its own, which tests of signals would meet
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a process, a file descriptor or shared memory behind."""
    if "ray" in getattr(getattr(request.node, "callspec", None), "params", {}).values():
        request.getfixturevalue("ray_cluster")  # is there before and after, and so no leak
    threads, before = _threads(), _held()
    yield
    deadline = time.monotonic() + PATIENCE
    for thread in _threads() - threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if _leaks(before):
        gc.collect()  # something in a cycle is late, not lost
    if leaks := _leaks(before):
        pytest.fail(f"the test leaked {', '.join(leaks)}", pytrace=False)


def _threads() -> set[threading.Thread]:
    """Threads made in Python; a dummy stands for one that a library made, and cannot be joined."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def _leaks(before: dict[object, str]) -> list[str]:
    after = {key: what for key, what in _held().items() if key not in before}
    return sorted(what for key, what in after.items() if not (isinstance(key, Path) and _is_of_others(key)))


def _held() -> dict[object, str]:
    """What this process holds, by identity, in words; outside Linux its threads only."""
    held: dict[object, str] = {thread: f"thread {thread.name!r}" for thread in _threads()}
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in _read(children).split():
            command = _read(Path("/proc", pid, "cmdline")).replace("\0", " ").strip()
            held["process", pid] = f"process {pid} ({command or 'ended, but not waited for'})"
    for number, target in _open_files("self").items():
        if target.endswith(".ttf"):  # a font: matplotlib keeps those it has drawn with
            continue
        if not (target.startswith("socket:") and _is_of_ray(int(number))):
            held["file descriptor", number, target] = f"file descriptor {number} ({target})"
    for segment in SEGMENTS.glob("*"):
        held[segment] = f"shared memory {segment}"
    return held


def _is_of_ray(number: int) -> bool:
    """Whether a socket is a TCP connection, where Ray runs: it keeps them as it likes. Engines have none."""
    if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
        return False
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            return connection.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:  # closed meanwhile
        return True


def _is_of_others(segment: Path) -> bool:
    """Whether another process uses a segment, or has just ended it: the whole machine shares one folder."""
    for pid in (path.name for path in Path("/proc").glob("[0-9]*") if path.name != str(os.getpid())):
        if str(segment) in _open_files(pid).values() or str(segment) in _read(Path("/proc", pid, "maps")):
            return True
    return not segment.exists() or segment.stat().st_uid != os.getuid()


def _open_files(pid: str) -> dict[str, str]:
    """What each file descriptor of a process stands for, as far as we may look."""
    files: dict[str, str] = {}
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # the one that listed the folder is closed by now
                files[number] = os.readlink(f"/proc/{pid}/fd/{number}").removesuffix(" (deleted)")
    return files


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended, or is not ours to look at
        return ""
