"""Random graphs under every order of events: nothing lost, nothing twice, every bound kept."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollstream as rs
from rollstream import flow
from rollstream.flow.gather import Gather, GatherAsync
from rollstream.flow.node import ancestors
from rollstream.flow.prefetch import Prefetch
from rollstream.flow.provenance import Merger, Origin, Provenance, RowOrigin, Span, Tally, merged
from rollstream.flow.split import Split
from rollstream.flow.via import Via
from rollstream.testing import ScriptedSource, chaos_engine

# An item is [value, path]: values are unique and ascend within a shard, the path says which branches it took.
Item = list[Any]
SHARD = 1000
REMOTE = ["processes", "ray"]


@dataclass(frozen=True)
class Tag:
    """Marks the items of one branch."""

    mark: str

    def __call__(self, item: Item) -> Item:
        return [item[0], item[1] + self.mark]


@dataclass(frozen=True)
class NotMultipleOf:
    """Drops some items."""

    number: int

    def __call__(self, item: Item) -> bool:
        return item[0] % self.number != 0


class Regroup:
    """Keeps items until it has a few: a combine with state."""

    def __init__(self, size: int):
        self.size = size
        self.kept: list[Item] = []

    def __call__(self, item: Item) -> list[Item]:
        self.kept.append(item)
        if len(self.kept) < self.size:
            return []
        kept, self.kept = self.kept, []
        return kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": list(self.kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = list(state["kept"])


class Echo:
    """A stage on an actor."""

    def same(self, item: Item) -> Item:
        return item


# Graphs as data, so that hypothesis can draw and shrink them --------------------------------------------


def operators(asynchronous: bool) -> st.SearchStrategy[Any]:
    choices = [
        st.just(("for_each",)),
        st.tuples(st.just("filter"), st.integers(2, 4)),
        st.tuples(st.just("batch"), st.integers(1, 4)),
        st.tuples(st.just("via"), st.integers(1, 3) if asynchronous else st.just(1), st.integers(1, 2)),
    ]
    if asynchronous:
        choices.append(st.tuples(st.just("prefetch"), st.integers(1, 3)))
    return st.lists(st.one_of(choices), max_size=3)


def sources(asynchronous: bool) -> st.SearchStrategy[Any]:
    shards = st.lists(st.integers(0, 6), min_size=1, max_size=3)
    gathers = ["gather_sync", "gather_async"] if asynchronous else ["gather_sync"]
    local = st.tuples(st.just("items"), st.integers(0, 6))
    shard_operators = st.lists(
        st.one_of(st.just(("for_each",)), st.tuples(st.sampled_from(["filter", "batch"]), st.integers(2, 3))),
        max_size=2,
    )
    gathered = st.tuples(
        st.just("actors"), shards, shard_operators, st.sampled_from(gathers), st.sampled_from([1, 2, 4])
    )
    return st.one_of(local, gathered)


def streams(asynchronous: bool) -> st.SearchStrategy[Any]:
    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        extended = [
            st.tuples(st.just("chain"), inner, operators(asynchronous)),
            st.tuples(
                st.just("union"), st.lists(st.tuples(inner, st.integers(1, 3)), min_size=1, max_size=2)
            ),
        ]
        if asynchronous:
            branches = st.lists(operators(asynchronous), min_size=2, max_size=3)
            extended += [
                st.tuples(st.just("union_async"), st.lists(inner, min_size=1, max_size=2)),
                st.tuples(st.just("split"), inner, branches, st.integers(1, 4)),
            ]
        return st.one_of(extended)

    return st.recursive(sources(asynchronous), extend, max_leaves=4)


class Build:
    """Builds a graph on an engine, and says which items should come out of it."""

    def __init__(self, engine: rs.Engine):
        self.engine = engine
        self.shards = 0

    def stream(self, spec: Any) -> tuple[flow.Iter[Item], Counter[tuple[int, str]]]:
        kind, *rest = spec
        return getattr(self, kind)(*rest)

    def _script(self, length: int) -> list[Item]:
        self.shards += 1
        return [[self.shards * SHARD + index, ""] for index in range(length)]

    def items(self, length: int) -> Any:
        script = self._script(length)
        return flow.from_items(script), Counter((value, path) for value, path in script)

    def actors(self, lengths: list[int], shard_operators: list[Any], gather: str, num_async: int) -> Any:
        scripts = [self._script(length) for length in lengths]
        actors = self.engine.spawn(ScriptedSource, (scripts,), count=len(scripts))
        parallel = flow.from_actors(actors, "next")
        expected = Counter((value, path) for script in scripts for value, path in script)
        for kind, *numbers in shard_operators:
            if kind == "for_each":
                parallel, expected = parallel.for_each(Tag("s")), tagged(expected, "s")
            elif kind == "filter":
                parallel, expected = parallel.filter(NotMultipleOf(*numbers)), kept(expected, *numbers)
            else:
                parallel = parallel.batch(*numbers).flatten()
        if gather == "gather_sync":
            return parallel.gather_sync().flatten(), expected
        return parallel.gather_async(num_async), expected

    def chain(self, inner: Any, ops: list[Any]) -> Any:
        return self._operate(*self.stream(inner), ops)

    def union(self, inner: list[Any]) -> Any:
        parts = [self.stream(spec) for spec, _ in inner]
        weights = [weight for _, weight in inner]
        return flow.union([s for s, _ in parts], weights), sum((e for _, e in parts), Counter())

    def union_async(self, inner: list[Any]) -> Any:
        parts = [self.stream(spec) for spec in inner]
        return flow.union_async([s for s, _ in parts]), sum((e for _, e in parts), Counter())

    def split(self, inner: Any, branches: list[list[Any]], buffer: int) -> Any:
        stream, expected = self.stream(inner)
        parts = [
            self._operate(branch.for_each(Tag(str(index))), tagged(expected, str(index)), ops)
            for index, (branch, ops) in enumerate(
                zip(stream.split(len(branches), buffer), branches, strict=True)
            )
        ]
        return flow.union_async([s for s, _ in parts]), sum((e for _, e in parts), Counter())

    def _operate(self, stream: flow.Iter[Item], expected: Counter[tuple[int, str]], ops: list[Any]) -> Any:
        for kind, *numbers in ops:
            if kind == "for_each":
                stream, expected = stream.for_each(Tag("d")), tagged(expected, "d")
            elif kind == "filter":
                stream, expected = stream.filter(NotMultipleOf(*numbers)), kept(expected, *numbers)
            elif kind == "batch":
                stream = stream.batch(*numbers).flatten()
            elif kind == "via":
                in_flight, count = numbers
                stream = stream.via(self.engine.spawn(Echo, count=count), "same", in_flight=in_flight)
            else:
                stream = stream.prefetch(*numbers)
        return stream, expected


def tagged(expected: Counter[tuple[int, str]], mark: str) -> Counter[tuple[int, str]]:
    return Counter({(value, path + mark): count for (value, path), count in expected.items()})


def kept(expected: Counter[tuple[int, str]], number: int) -> Counter[tuple[int, str]]:
    return Counter({key: count for key, count in expected.items() if key[0] % number != 0})


# What has to hold -----------------------------------------------------------------------------------------


def check_bounds(plan: flow.Iter[Item]) -> None:
    for node in ancestors(plan._node):
        if isinstance(node, Gather):
            for index, client in enumerate(node.clients):
                ready = sum(i == index for i, *_ in node.ready) if isinstance(node, GatherAsync) else 0
                assert len(client.pending) + ready <= node.num_async
        elif isinstance(node, Split):
            assert all(branch.held() <= node.buffer for branch in node.branches)
        elif isinstance(node, Via):
            assert node.held() <= node.in_flight
        elif isinstance(node, Prefetch):
            assert node.held() <= node.count


def check_order(outputs: list[Item]) -> None:
    last: dict[tuple[int, str], int] = {}
    for value, path in outputs:
        key = (value // SHARD, path)
        assert value > last.get(key, -1), f"item {value} of {key} came after {last[key]}"
        last[key] = value


def watched(plan: flow.Iter[Item]) -> Iterator[Item]:
    for item in plan:
        check_bounds(plan)
        yield item


@given(spec=streams(asynchronous=True), seed=st.integers(0, 2**32))
@settings(max_examples=400)
def test_random_graphs_conserve_items_keep_order_and_respect_bounds(spec: Any, seed: int) -> None:
    with chaos_engine(seed) as engine:
        plan, expected = Build(engine).stream(spec)
        outputs = list(watched(plan))
        assert Counter((value, path) for value, path in outputs) == expected
        check_order(outputs)


@given(spec=streams(asynchronous=True), seed=st.integers(0, 2**32), stop=st.integers(0, 12))
@settings(max_examples=400)
def test_a_snapshot_anywhere_gives_the_same_remaining_items(spec: Any, seed: int, stop: int) -> None:
    with chaos_engine(seed) as engine:
        plan, expected = Build(engine).stream(spec)
        before = [item for _, item in zip(range(stop), plan, strict=False)]
        state = json.loads(json.dumps(plan.state_dict()))
        rest = list(plan)
        assert Counter((value, path) for value, path in before + rest) == expected, (
            "a snapshot disturbed the flow"
        )
    with chaos_engine(seed + 1) as engine:
        plan, _ = Build(engine).stream(spec)
        plan.load_state_dict(state)
        resumed = list(watched(plan))
        assert Counter((value, path) for value, path in before + resumed) == expected
        check_order(before + resumed)


@given(spec=streams(asynchronous=False), seed=st.integers(0, 2**32), stop=st.integers(0, 12))
@settings(max_examples=200)
def test_synchronous_plans_give_identical_outputs_on_every_engine(spec: Any, seed: int, stop: int) -> None:
    results: list[list[Item]] = []
    states: list[Any] = []
    for make in (rs.engine, lambda: rs.engine("threads"), lambda: chaos_engine(seed)):
        with make() as engine:
            plan, _ = Build(engine).stream(spec)
            outputs = [item for _, item in zip(range(stop), plan, strict=False)]
            states.append(json.loads(json.dumps(plan.state_dict())))
            results.append(outputs + list(plan))
    assert results[0] == results[1] == results[2]
    assert states[0] == states[1] == states[2]
    with rs.engine("inline") as engine:
        plan, _ = Build(engine).stream(spec)
        plan.load_state_dict(states[0])
        assert list(plan) == results[0][stop:]


@given(spec=streams(asynchronous=True))
@settings(max_examples=60)
def test_random_graphs_on_real_threads(spec: Any) -> None:
    with rs.engine("threads") as engine:
        plan, expected = Build(engine).stream(spec)
        outputs = list(plan)
        assert Counter((value, path) for value, path in outputs) == expected
        check_order(outputs)


@pytest.mark.parametrize("name", REMOTE)
@given(spec=streams(asynchronous=True))
@settings(max_examples=8)
@pytest.mark.slow
def test_random_graphs_in_other_processes(name: str, spec: Any) -> None:
    with rs.engine(name) as engine:
        plan, expected = Build(engine).stream(spec)
        outputs = list(plan)
        assert Counter((value, path) for value, path in outputs) == expected
        check_order(outputs)


@pytest.mark.parametrize("name", REMOTE)
@given(spec=streams(asynchronous=False), stop=st.integers(0, 12))
@settings(max_examples=8)
@pytest.mark.slow
def test_synchronous_plans_give_identical_outputs_in_other_processes(name: str, spec: Any, stop: int) -> None:
    results, states = [], []
    for where in ("inline", name):
        with rs.engine(where) as engine:
            plan, _ = Build(engine).stream(spec)
            outputs = [item for _, item in zip(range(stop), plan, strict=False)]
            states.append(json.loads(json.dumps(plan.state_dict())))
            results.append(outputs + list(plan))
    assert results[0] == results[1]
    assert states[0] == states[1]


# A few graphs that have been trouble elsewhere, under thousands of orders of events -----------------------


def twin(engine: rs.Engine) -> flow.Iter[Any]:
    actors = engine.spawn(
        ScriptedSource, ([[[i, ""] for i in range(24)], [[SHARD + i, ""] for i in range(8)]],), count=2
    )
    left, right = flow.from_actors(actors, "next").gather_async(2).split(2, buffer=4)
    slow = left.for_each(Tag("l")).combine(Regroup(16))
    return flow.union_async([slow, right.for_each(Tag("r"))])


def nested_unions(engine: rs.Engine) -> flow.Iter[Any]:
    def part(shards: int, num_async: int, first: int) -> flow.Iter[Any]:
        scripts = [[[(first + s) * SHARD + i, ""] for i in range(8)] for s in range(shards)]
        actors = engine.spawn(ScriptedSource, (scripts,), count=shards)
        return flow.from_actors(actors, "next").gather_async(num_async)

    inner = flow.union([part(2, 1, 0), part(1, 3, 2)], weights=[2, 1])
    left, right = inner.prefetch(2).split(2, buffer=1)
    ahead = left.for_each(Tag("l")).via(engine.spawn(Echo, count=2), "same", in_flight=3)
    return flow.union_async([ahead, right.for_each(Tag("r")), part(1, 2, 3)])


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("build", [twin, nested_unions])
def test_a_thousand_orders_of_events(build: Any, seeds: range) -> None:
    with rs.engine("inline") as engine:
        expected = Counter((value, path) for value, path in build(engine))
    for seed in seeds:
        with chaos_engine(seed) as engine:
            plan = build(engine)
            outputs = [item for _, item in zip(range(seed % 40), watched(plan), strict=False)]
            state = plan.state_dict()
            outputs += list(watched(plan))
            assert Counter((value, path) for value, path in outputs) == expected, f"seed {seed}"
            check_order(outputs)
        with chaos_engine(seed) as engine:
            plan = build(engine)
            plan.load_state_dict(state)
            outputs[seed % 40 :] = list(watched(plan))
            assert Counter((value, path) for value, path in outputs) == expected, f"seed {seed}, resumed"


# Fragments that are coupled -------------------------------------------------------------------------------


class Table:
    """A replay-like actor whose samples wait, deferred, until something is stored."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.samples = 0
        self.waiting: list[rs.Deferred[list[int]]] = []

    def insert(self, item: int) -> None:
        self.stored.append(item)
        while self.waiting:
            self.waiting.pop(0).resolve(self.draw())

    def sample(self) -> Any:
        if self.stored:
            return self.draw()
        self.waiting.append(rs.Deferred())
        return self.waiting[-1]

    def draw(self) -> list[int]:
        self.samples += 1
        return [self.samples, len(self.stored)]

    def counts(self) -> tuple[int, int]:
        return len(self.stored), self.samples

    def state_dict(self) -> dict[str, Any]:
        return {"stored": list(self.stored), "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored, self.samples = list(state["stored"]), state["samples"]


def replay(engine: rs.Engine, *, limited: bool) -> tuple[Any, flow.Iter[Any]]:
    sources = engine.spawn(ScriptedSource, ([list(range(20)), list(range(100, 120))],), count=2)
    [table] = engine.spawn(Table)
    inserts = flow.from_actors(sources, "next").gather_async(2)
    samples = flow.from_actors([table], "sample").gather_async(3)
    if limited:
        inserts, samples = flow.limit_ratio(inserts, samples, 2, min_size=5, error_buffer=3)
    store = inserts.for_each(lambda item: table.send("insert", item))
    return table, flow.union_async([store, samples.batch(2)], output=[1])


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 300), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("limited", [True, False])
def test_coupled_fragments_go_on_where_they_stood(limited: bool, seeds: range) -> None:
    for seed in seeds:
        stop = seed % 25
        with chaos_engine(seed) as engine:
            table, plan = replay(engine, limited=limited)
            outputs = [next(plan) for _ in range(stop)]
            state = json.loads(json.dumps(plan.state_dict()))
        with chaos_engine(seed + 1) as engine:
            table, plan = replay(engine, limited=limited)
            plan.load_state_dict(state)
            for _ in range(25 - stop):
                outputs.append(next(plan))
                inserts, samples = table.call("counts").result()
                if limited:
                    assert abs(samples - 2 * (inserts - 5)) <= 3 + 2, f"seed {seed}"
                    assert inserts >= 5
            drawn = [sample for batch in outputs for sample, _ in batch]
            assert drawn == list(range(1, len(drawn) + 1)), f"seed {seed}: a sample was lost or came twice"


# Provenance -----------------------------------------------------------------------------------------------


@given(
    items=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), max_size=60),
    pieces=st.integers(1, 7),
)
def test_merging_counts_every_source_item_once(items: list[tuple[str, int]], pieces: int) -> None:
    """In whatever order and however often they come, alone or merged before, and across a resume."""

    def origin(source: str, sequence: int) -> Origin:
        if sequence % 3:
            return (source, "s", sequence, {"steps": 2})
        return Provenance((Span(source, "s", sequence, sequence, 1),), {"steps": Tally(2, 2, 2)})

    merger = Merger()
    for start in range(0, len(items), pieces):
        part = [origin(*item) for item in items[start : start + pieces]]
        merger.add(merged(RowOrigin(tuple(part))) if start % 2 else part[0])
        for one in part[1:] if not start % 2 else ():
            merger.add(one)
        saved = json.loads(json.dumps(merger.state_dict()))
        merger = Merger()
        merger.load_state_dict(saved)
    provenance = merger.take()
    assert provenance.count == len(set(items))
    assert provenance.total("steps") == pytest.approx(2 * len(set(items)))
    covered = {(s.source, n) for s in provenance.spans for n in range(s.first, s.last + 1)}
    assert covered == set(items)
