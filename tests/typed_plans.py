"""Types through a plan: checked by pyright in `make check`, and by tests/test_types.py."""

from collections.abc import Sequence
from typing import Any, assert_type

from rollstream import flow
from rollstream.engine import Actor, Engine, Future, Ref
from rollstream.flow import Context, Iter, ParIter, Provenance


class Batch:
    """An item."""


class Gradient:
    """What is made of it."""


class Worker:
    """A source."""

    def sample(self) -> Batch:
        return Batch()


def compute(batch: Batch) -> Gradient:
    return Gradient()


class ComputeGradients:
    """An operator that asks for its context."""

    def __call__(self, batch: Batch, context: Context) -> Gradient:
        return Gradient()


def pairs(batch: Batch) -> list[tuple[int, Batch]]:
    return [(1, batch)]


def plans(engine: Engine, actors: Sequence[Actor[Worker]]) -> None:
    assert_type(engine.spawn(Worker, count=2), list[Actor[Worker]])
    assert_type(engine.put(3), Ref[int])
    assert_type(actors[0].call("sample"), Future[Any])

    assert_type(flow.from_actors(actors, "sample").for_each(compute), ParIter[Gradient])
    assert_type(flow.from_actors(actors, "sample").for_each(compute).gather_async(), Iter[Gradient])
    assert_type(
        flow.from_actors(actors, "sample").for_each(ComputeGradients()).gather_async(2), Iter[Gradient]
    )
    assert_type(flow.from_actors(actors, "sample").for_each(compute).gather_sync(), Iter[list[Gradient]])
    assert_type(
        flow.from_actors(actors, "sample").for_each(compute).batch(2).gather_async(), Iter[list[Gradient]]
    )

    batches: ParIter[Batch] = flow.from_actors(actors, "sample")
    assert_type(batches.combine(pairs).gather_sync().flatten(), Iter[tuple[int, Batch]])
    numbers = flow.from_items([1, 2, 3])
    assert_type(numbers, Iter[int])
    assert_type(numbers.for_each(str).batch(2), Iter[list[str]])
    assert_type(flow.from_items([1]).filter(lambda number: number > 1).take(1).prefetch(2), Iter[int])
    assert_type(flow.from_items([1]).zip_with_source(), Iter[tuple[int, Provenance]])
    assert_type(flow.from_items([1]).split(2), tuple[Iter[int], ...])
    assert_type(flow.from_items([[1], [2]]).flatten(), Iter[int])
    assert_type(flow.union([flow.from_items([1]), flow.from_items([2])]), Iter[int])
    assert_type(flow.union_async([flow.from_items(["a"])]), Iter[str])
    assert_type(
        flow.limit_ratio(flow.from_items([1]), flow.from_items(["a"]), 2), tuple[Iter[int], Iter[str]]
    )
    assert_type(next(flow.from_items([1])), int)
