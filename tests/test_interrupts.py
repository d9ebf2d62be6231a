"""However a flow is interrupted, nothing is left behind; the leak fixture watches every test here."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from scripts import PATIENCE, eventually, run_code

import rollstream as rs
from rollstream import flow
from rollstream.flow import Iter
from rollstream.testing import Fail, ScriptedSource


class Trainer:
    def train(self, item: Any) -> Any:
        return item


class Gate:
    """Interrupts the driver, which waits for the second item, and blocks until the driver has noticed."""

    opened = threading.Event()
    in_time: bool | None = None

    def __init__(self) -> None:
        self.items = 0

    def sample(self) -> int:
        self.items += 1
        if self.items > 1:
            main = threading.main_thread().ident
            assert main is not None
            eventually(main_thread_sleeps, "the driver waiting")  # a signal just before would not wake it up
            signal.pthread_kill(main, signal.SIGINT)
            Gate.in_time = Gate.opened.wait(PATIENCE)
        return self.items


def main_thread_sleeps() -> bool:
    """Whether the main thread waits for something, and not only for the interpreter."""
    time.sleep(0.01)  # in which it gets the interpreter, if it waits for that
    return Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def plans(engine: rs.Engine, operator: Callable[[Any], Any]) -> dict[str, Callable[[], Iter[Any]]]:
    def items() -> Any:
        return flow.from_actors(engine.spawn(ScriptedSource, ([list(range(1000))] * 2,), count=2), "next")

    def split() -> Iter[Any]:
        left, right = items().gather_async().split(2, buffer=2)
        return flow.union_async([left.batch(5), right.for_each(operator)])

    return {
        "shard": lambda: items().for_each(operator).gather_async(2),
        "rows": lambda: items().for_each(operator).gather_sync(),
        "driver": lambda: items().gather_async(2).for_each(operator),
        "filter": lambda: items().gather_async(2).filter(operator),
        "combine": lambda: items().gather_async(2).combine(lambda x: [operator(x)]),
        "prefetch": lambda: items().gather_sync().prefetch(2).flatten().for_each(operator),
        "split": split,
        "via": lambda: (
            items().gather_async(2).via(engine.spawn(Trainer), "train", in_flight=3).for_each(operator)
        ),
    }


ENGINES = ["inline", "threads", "processes", "ray"]
INTERRUPTS = ["close", "break", "error", "ctrl-c"]
SHAPES = ["shard", "rows", "driver", "filter", "combine", "prefetch", "split", "via"]


def cases() -> Iterator[Any]:
    """Every combination; of processes, which share their driver with threads, a few are quick."""
    for name, shape, how in product(ENGINES, SHAPES, INTERRUPTS):
        slow = name == "processes" and shape not in ("shard", "split")
        yield pytest.param(name, shape, how, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("name", "shape", "interrupt"), list(cases()))
def test_interrupted_anywhere(
    name: str, shape: str, interrupt: str, capfd: pytest.CaptureFixture[str]
) -> None:
    seen, here = 0, (os.getpid(), threading.get_ident())

    def operator(item: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen >= 7 and interrupt == "error":  # two threads count, and may both pass 7 before they look
            raise ValueError("enough")
        if seen == 7 and interrupt == "ctrl-c" and here == (os.getpid(), threading.get_ident()):
            raise KeyboardInterrupt
        return item if item else 1

    def run() -> None:
        with rs.engine(name) as engine:
            plan = plans(engine, operator)[shape]()
            for count, _ in enumerate(plan):
                if count == 20:
                    if interrupt == "close":
                        plan.close()
                        assert list(plan) == []
                    break

    if interrupt == "error":
        with pytest.raises(rs.OperatorError, match="enough"):
            run()
    elif interrupt == "ctrl-c" and (name == "inline" or shape not in ("shard", "rows")):
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        run()
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_while_the_flow_waits(capfd: pytest.CaptureFixture[str]) -> None:
    Gate.opened.clear()
    with pytest.raises(KeyboardInterrupt), rs.engine("threads") as engine:  # noqa: PT012
        plan = flow.from_actors(engine.spawn(Gate), "sample").gather_async()
        assert next(plan) == 1
        try:
            next(plan)
        finally:
            Gate.opened.set()
    assert Gate.in_time
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_in_a_script_prints_its_own_traceback_only() -> None:
    script = """
        import os, signal
        import rollstream as rs
        from rollstream import flow

        class Worker:
            def __init__(self):
                self.items = 0
            def sample(self):
                self.items += 1
                if self.items == 50:
                    os.kill(os.getpid(), signal.SIGINT)
                return self.items

        with rs.engine("threads") as engine:
            plan = flow.from_actors(engine.spawn(Worker, count=3), "sample").gather_async(2)
            for _ in plan:
                pass
    """
    done = run_code(script, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == ""
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    "name", ["inline", "threads", "processes", pytest.param("ray", marks=pytest.mark.slow)]
)
def test_an_error_while_others_are_running_ends_all(name: str) -> None:
    with pytest.raises(rs.OperatorError, match="ScriptedSource"), rs.engine(name) as engine:  # noqa: PT012
        scripts = [list(range(100)), [0, 1, Fail(RuntimeError("broken")), 3], list(range(100))]
        plan = flow.from_actors(engine.spawn(ScriptedSource, (scripts,), count=3), "next").gather_async(4)
        list(plan)


def test_a_context_manager_closes_the_flow() -> None:
    with rs.engine("threads") as engine:
        sources = engine.spawn(ScriptedSource, ([list(range(10))],))
        with flow.from_actors(sources, "next").gather_async() as plan:
            assert next(plan) == 0
        assert list(plan) == []
        beside = sources[0].apply(lambda instance, context: dict(context.local)).result()
        assert beside == {}, "the shard was taken away"
        assert sources[0].sticky == {}, "and does not come back with a restart"
