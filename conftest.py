"""What every test shares: nothing leaks or hangs, documents are run, and random examples repeat."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker
from typing import Any

import pytest
import reaper
from hypothesis import settings
from leaks import Leaks
from sybil import Sybil
from sybil.integration.pytest import SybilItem
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest.register_assert_rewrite("rollstream.testing")

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
    fixtures=["no_leaks"],
).pytest()

RUN = ".".join([*filter(None, [os.environ.get(reaper.VARIABLE)]), uuid.uuid4().hex])
"""The mark of every process that this run starts; within a test, a part of that test's."""

LIMIT, SLOW_LIMIT = 300.0, 900.0
"""Seconds that a test may take, on a busy machine, too; and one that is marked `slow`."""

FAILED = pytest.StashKey[bool]()

_numbers = itertools.count()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Prepare what lives as long as the run, and so is no test's leak."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background, or by `nohup`
        signal.signal(signal.SIGINT, signal.default_int_handler)  # children would ignore Ctrl-C, too
    _start_reaper(session.config)
    gc.set_threshold(1000, 20, 100)  # what JAX keeps of all that tests compile is much to look through
    if sys.platform == "linux":
        resource_tracker.ensure_running()
    _keep_what_jax_compiles(session.config)
    state = tempfile.TemporaryDirectory(prefix="rollstream-state-")  # which runs were trained here
    session.config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name


def _start_reaper(config: pytest.Config) -> None:
    """Whatever tests have started dies with this process, even if it is killed."""
    watching = subprocess.Popen(
        [sys.executable, "-S", reaper.__file__, RUN], stdin=subprocess.PIPE, start_new_session=True
    )
    config.add_cleanup(lambda: watching.__exit__(None, None, None))
    os.environ[reaper.VARIABLE] = RUN


def _keep_what_jax_compiles(config: pytest.Config) -> None:
    """Tests build the same learners again and again, in processes of their own, too."""
    cache = tempfile.TemporaryDirectory(prefix="rollstream-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache.name)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    own = "ignore:Error reading persistent compilation cache entry:UserWarning"  # see pyproject.toml
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), own]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on Ray are slow unless they are marked quick.

    If tests run in several processes, those on Ray share one, and its cluster; so do the examples of a
    document, each of which uses those above it.
    """
    for item in items:
        if _uses_ray(item):
            item.add_marker(pytest.mark.xdist_group("ray"))
            if not item.get_closest_marker("quick"):
                item.add_marker("slow")
        if isinstance(item, SybilItem):
            item.add_marker(pytest.mark.xdist_group(item.location[0]))
            item.add_marker(pytest.mark.random_order(disabled=True))
            # Its own filter looks into the document's frames, and fails if there are none.
            setattr(item, "_traceback_filter", lambda error: error.traceback)  # noqa: B010


def _uses_ray(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    on_ray = any(isinstance(value, str) and value == "ray" for value in parameters.values())
    return on_ray or "ray_cluster" in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def _limited(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that hangs, with the stacks of all threads, and go on with the next one."""
    limit = SLOW_LIMIT if item.get_closest_marker("slow") else LIMIT

    def expire(*_: object) -> None:
        pytest.fail(f"the test hangs: it took longer than {limit:.0f} s\n{_stacks_of_others()}")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, limit, limit / 4)  # again, if it hangs while it is cleaned up
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _limited


def _stacks_of_others() -> str:
    """The stacks of all threads but this one, whose traceback pytest shows."""
    frames = sys._current_frames()
    stacks = [
        f"thread {other.name!r}:\n{''.join(traceback.format_stack(frames[other.ident]))}"
        for other in threading.enumerate()
        if other is not threading.current_thread() and other.ident in frames
    ]
    return "\n".join(stacks)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember what has failed."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray for all tests, where it is installed: engines join it, and leave it running."""
    if importlib.util.find_spec("ray") is None:
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of a change to come
    ray = importlib.import_module("ray")
    on_terminate = signal.getsignal(signal.SIGTERM)
    with reaper.marking(RUN), importlib.import_module("rollstream.engine.ray_cluster").forks_of_ray():
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
    """Fail a test that leaves a thread, a process, a file descriptor or shared memory behind.

    Processes that it leaves, or that are left because it failed, are killed.
    """
    if _uses_ray(request.node):
        request.getfixturevalue("ray_cluster")  # is there before and after, and so no leak
    mark = f"{RUN}.{next(_numbers)}"
    leaks = Leaks()
    with reaper.marking(mark):
        yield
    if request.node.stash.get(FAILED, False):
        reaper.kill(mark)
    if found := leaks.found():
        reaper.kill(mark)
        pytest.fail(f"the test leaked {', '.join(found)}", pytrace=False)
