"""However a flow is interrupted, nothing is left behind; the leak fixture watches every test here."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

import rollstream as rs
from rollstream import flow
from rollstream.flow import Iter
from rollstream.testing import Fail, ScriptedSource


class Trainer:
    def train(self, item: Any) -> Any:
        return item


class Gate:
    """Blocks its second item until the test lets it go."""

    opened = threading.Event()

    def __init__(self) -> None:
        self.items = 0

    def sample(self) -> int:
        self.items += 1
        if self.items > 1:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)  # Ctrl-C while the driver waits for this item
            Gate.opened.wait(5)
        return self.items


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


SHAPES = ["shard", "rows", "driver", "filter", "combine", "prefetch", "split", "via"]


@pytest.mark.parametrize("name", ["inline", "threads", "processes", "ray"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interrupt", ["close", "break", "error", "ctrl-c"])
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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGINT
    assert done.stdout == ""
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("name", ["inline", "threads", "processes", "ray"])
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
