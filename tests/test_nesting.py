"""Flows nest: actors that consume flows of their own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rollstream as rs
from rollstream import flow
from rollstream.testing import ScriptedSource, chaos_engine


def tree(first: int, name: str) -> Callable[[], Iterator[int]]:
    """A factory for an inner flow with an engine of its own, which ends with it."""

    def inner() -> Iterator[int]:
        with rs.engine(name) as engine:
            sources = engine.spawn(ScriptedSource, ([[first, first + 1], [first + 10, first + 11]],), count=2)
            yield from flow.from_actors(sources, "next").gather_sync().for_each(sum)

    return inner


def nested(
    engine: rs.Engine, factories: list[Callable[[], Any]], name: str | None = None
) -> flow.ParIter[Any]:
    """A flow over actors that iterate flows of their own."""
    return flow.from_actors(
        engine.spawn(flow.StreamActor, (factories,), count=len(factories)), "next", name=name
    )


@pytest.mark.parametrize("outer", ["inline", "threads", "processes", "ray"])
@pytest.mark.parametrize("inner", ["inline", "threads", "processes"])
def test_trees_of_flows(outer: str, inner: str) -> None:
    with rs.engine(outer) as engine:
        plan = nested(engine, [tree(0, inner), tree(100, inner), tree(200, inner)]).gather_sync()
        assert list(plan) == [[10, 210, 410], [12, 212, 412]]


@pytest.mark.parametrize("name", ["threads", "processes", "ray"])
def test_three_levels(name: str) -> None:
    def middle() -> Iterator[int]:
        with rs.engine(name) as engine:
            yield from (nested(engine, [tree(0, "inline"), tree(100, name)]).gather_sync().for_each(sum))

    with rs.engine(name) as engine:
        plan = nested(engine, [middle, middle]).for_each(lambda x: x + 1).gather_sync()
        assert list(plan) == [[221, 221], [225, 225]]


@pytest.mark.parametrize("name", ["threads", "processes", "ray"])
def test_an_inner_flow_left_early_ends_with_its_parent(name: str) -> None:
    with rs.engine(name) as engine:
        plan = nested(engine, [tree(0, name)]).gather_async()
        assert next(plan) == 10
    # the fixture that looks for leaked threads and processes does the rest


@pytest.mark.parametrize("name", ["threads", "processes", "ray"])
def test_an_inner_error_names_both_operators(name: str) -> None:
    def inner() -> Iterator[int]:
        yield from flow.from_items([1, 0]).for_each(lambda x: 1 // x, name="divide")

    with rs.engine(name) as engine:
        plan = nested(engine, [inner], name="trial").gather_async()
        assert next(plan) == 1
        with pytest.raises(rs.OperatorError, match=r"(?s)trial .*divide .*ZeroDivisionError"):
            next(plan)


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4])
def test_nested_flows_have_state(position: int) -> None:
    def counting() -> Any:
        return flow.from_items(range(5)).for_each(lambda x: x * 10)

    def plan(engine: rs.Engine) -> flow.Iter[Any]:
        return nested(engine, [counting, lambda: iter(range(100, 105))]).gather_sync()

    with rs.engine("inline") as engine:
        everything = list(plan(engine))
    with chaos_engine(1) as engine:
        first = plan(engine)
        before = [next(first) for _ in range(position)]
        state = first.state_dict()
    with chaos_engine(2) as engine:
        second = plan(engine)
        second.load_state_dict(state)
        assert before + list(second) == everything


def test_a_stateful_operator_has_one_copy_a_shard() -> None:
    class Count:
        def __init__(self) -> None:
            self.items = 0

        def __call__(self, item: Any) -> int:
            self.items += 1
            return self.items

    for name in ("inline", "threads", "processes"):
        with rs.engine(name) as engine:
            sources = engine.spawn(ScriptedSource, ([["x"] * 3] * 2,), count=2)
            count = Count()
            assert list(flow.from_actors(sources, "next").for_each(count).gather_sync()) == [
                [1, 1],
                [2, 2],
                [3, 3],
            ]
            assert count.items == 0, "the template itself is not used"
