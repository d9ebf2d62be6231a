"""Every operator through the same check: right, lazy, the same on every engine, and resumable anywhere."""

from collections.abc import Callable
from typing import Any

import pytest

import rollstream as rs
from rollstream import flow
from rollstream.flow import Iter
from rollstream.flow.node import END, Node, Pulled
from rollstream.testing import ScriptedSource, check_operator


class RunningSum:
    """A stateful callable that can be saved."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, item: int) -> int:
        self.total += item
        return self.total

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class Windows:
    """Overlapping pairs: it has something to keep after each output."""

    def __init__(self) -> None:
        self.last: list[int] = []

    def __call__(self, item: int) -> list[list[int]]:
        pair, self.last = [*self.last, item], [item]
        return [pair] if len(pair) == 2 else []

    def state_dict(self) -> dict[str, Any]:
        return {"last": list(self.last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = list(state["last"])


class EveryOther(Node):
    """A new kind of node, all of it: graphs, statistics and snapshots know it by what it says of itself."""

    kind = "every_other"
    saved = (*Node.saved, "skip")

    def __init__(self, stream: Iter[Any]):
        super().__init__("every_other", "here", [stream._use("every_other")])
        self.skip = False

    def pull(self) -> Pulled:
        while (packet := self.upstreams[0].pull()) is not None and packet is not END:
            self.skip = not self.skip
            if self.skip:
                self.items += 1
                return packet
        return packet


def test_a_new_kind_of_node_is_one_class() -> None:
    def operator(stream: Iter[int]) -> Iter[int]:
        return stream._into(EveryOther(stream))

    check_operator(operator, [1, 2, 3, 4, 5], [1, 3, 5])
    plan = operator(flow.from_items([1, 2, 3]))
    assert [(node.name, node.kind, node.place) for node in flow.graph(plan).nodes][1:] == [
        ("every_other", "every_other", "driver")
    ]
    assert list(plan) == [1, 3]
    assert plan.statistics()["every_other"].items == 2


class Chunks:
    """Keeps items until their sum is large enough: what ConcatBatches does."""

    def __init__(self, enough: int):
        self.enough = enough
        self.kept: list[int] = []

    def __call__(self, item: int) -> list[list[int]]:
        self.kept.append(item)
        if sum(self.kept) < self.enough:
            return []
        chunk, self.kept = self.kept, []
        return [chunk]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": list(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = list(state["kept"])


def _two_ways(stream: Iter[int]) -> Iter[Any]:
    left, right = stream.split(2, buffer=2)
    return flow.union_async([left.batch(3), right.filter(lambda x: False)])


ITEMS = list(range(7))
CASES: dict[str, tuple[Callable[[Iter[Any]], Iter[Any]], list[Any], list[Any]]] = {
    "for_each": (lambda s: s.for_each(lambda x: x * 10), ITEMS, [x * 10 for x in ITEMS]),
    "for_each, stateful": (lambda s: s.for_each(RunningSum()), ITEMS, [0, 1, 3, 6, 10, 15, 21]),
    "filter": (lambda s: s.filter(lambda x: x % 2), ITEMS, [1, 3, 5]),
    "filter, nothing left": (lambda s: s.filter(lambda x: x > 99), ITEMS, []),
    "batch": (lambda s: s.batch(3), ITEMS, [[0, 1, 2], [3, 4, 5], [6]]),
    "batch of batches": (lambda s: s.batch(2).batch(2), ITEMS, [[[0, 1], [2, 3]], [[4, 5], [6]]]),
    "flatten": (lambda s: s.flatten(), [[1, 2], [], [3]], [1, 2, 3]),
    "flatten twice": (lambda s: s.flatten().flatten(), [[[1], [2, 3]], [], [[4]]], [1, 2, 3, 4]),
    "combine": (lambda s: s.combine(Chunks(5)), ITEMS[:-1], [[0, 1, 2, 3], [4, 5]]),
    "combine, overlapping": (lambda s: s.combine(Windows()), [1, 2, 3, 4], [[1, 2], [2, 3], [3, 4]]),
    "combine, several at once": (lambda s: s.combine(lambda x: [x] * x), [2, 0, 1], [2, 2, 1]),
    "take": (lambda s: s.take(3), ITEMS, [0, 1, 2]),
    "take nothing": (lambda s: s.take(0), ITEMS, []),
    "take more than there is": (lambda s: s.take(99), ITEMS, ITEMS),
    "take inside a chain": (lambda s: s.flatten().take(3).batch(2), [[1, 2], [3, 4]], [[1, 2], [3]]),
    "zip_with_source": (
        lambda s: s.zip_with_source().for_each(lambda pair: [pair[0], pair[1].sequence]),
        ["a", "b"],
        [["a", 0], ["b", 1]],
    ),
    "prefetch": (lambda s: s.prefetch(2), ITEMS, ITEMS),
    "split and union_async": (_two_ways, ITEMS, [[0, 1, 2], [3, 4, 5], [6]]),
    "a long chain": (
        lambda s: s.for_each(lambda x: [x, x]).flatten().filter(lambda x: x % 3).batch(2).take(3).flatten(),
        ITEMS,
        [1, 1, 2, 2, 4, 4],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_operator(case: str) -> None:
    operator, items, expected = CASES[case]
    check_operator(operator, items, expected)


@pytest.mark.parametrize("name", ["processes", "ray"])
def test_operators_over_actors_in_other_processes(name: str) -> None:
    with rs.engine(name) as engine:
        scripts = [items for _, items, _ in CASES.values()]
        sources = engine.spawn(ScriptedSource, (scripts,), count=len(CASES))
        for source, (operator, _, expected) in zip(sources, CASES.values(), strict=True):
            assert list(operator(flow.from_actors(source, "next").gather_async(2))) == expected


def test_check_operator_catches_a_wrong_result() -> None:
    with pytest.raises(AssertionError, match="local source"):
        check_operator(lambda s: s.for_each(lambda x: x + 1), [1, 2], [1, 2])


def test_check_operator_catches_an_operator_that_runs_while_built() -> None:
    def eager(stream: Iter[int]) -> Iter[int]:
        return flow.from_items([next(stream), *stream])

    with pytest.raises(AssertionError, match="building"):
        check_operator(eager, [1, 2], [1, 2])


def test_check_operator_catches_lost_state() -> None:
    class Forgetful(Windows):
        def state_dict(self) -> dict[str, Any]:
            return {"last": []}

    with pytest.raises(AssertionError, match="resume"):
        check_operator(lambda s: s.combine(Forgetful()), [1, 2, 3], [[1, 2], [2, 3]])


def test_check_operator_catches_state_that_is_only_there_between_outputs() -> None:
    class Pairs:
        """Would have to offer `state_dict`, and does not."""

        def __init__(self) -> None:
            self.kept: list[int] = []

        def __call__(self, item: int) -> list[list[int]]:
            self.kept.append(item)
            if len(self.kept) < 2:
                return []
            pair, self.kept = self.kept, []
            return [pair]

    with pytest.raises(AssertionError, match="resume"):
        check_operator(lambda s: s.combine(Pairs()), [1, 2, 3, 4], [[1, 2], [3, 4]])
