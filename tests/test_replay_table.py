"""Tables against a list model; batches, state, rate limiters, and invalid arguments."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import scripts
from hypothesis import given, settings
from hypothesis import strategies as st
from states import same_state

from rollstream.engine.errors import RollstreamError
from rollstream.replay import (
    ArraySpec,
    Field,
    Fifo,
    InsertRefused,
    Lifo,
    MaxHeap,
    MinHeap,
    MinSize,
    OrderedSelector,
    Prioritized,
    Queue,
    RateLimiter,
    ReplayError,
    Sample,
    SampleRefused,
    SampleToInsertRatio,
    Sequences,
    SignatureError,
    Stack,
    Table,
    Transitions,
    Uniform,
    Writer,
    importance_weights,
)

SELECTORS: dict[str, Any] = {
    "uniform": Uniform,
    "prioritized": lambda: Prioritized(0.5),
    "fifo": Fifo,
    "lifo": Lifo,
    "min heap": MinHeap,
    "max heap": MaxHeap,
}
SIGNATURE = {"observation": ArraySpec((), np.int64), "reward": ArraySpec((), np.float64)}
FIELDS = {"observation": Field("observation"), "next_observation": Field("observation", "next")}


def make_table(max_size: int = 5, **options: Any) -> Table:
    chosen: dict[str, Any] = {"sampler": Uniform(), "remover": Fifo(), "rate_limiter": MinSize(1), **options}
    return Table(SIGNATURE, FIELDS, max_size=max_size, **chosen)


def chain(table: Table, count: int) -> Any:
    """Rows of one long episode, with a reference that keeps them."""
    rows = table.storage.allocate(count)
    table.storage.previous[rows] = np.concatenate([rows[:1], rows[:-1]])
    table.storage.step_ids[rows] = np.arange(count)
    table.storage.columns["observation"][rows] = np.arange(count)
    return rows


# The model ----------------------------------------------------------------------------------------


class ListModel:
    """A model of a table: a dict of items, handled one at a time."""

    def __init__(self, table: Table):
        self.table = table
        self.items: dict[int, dict[str, Any]] = {}
        self.inserts = self.samples = self.deletes = self.clock = self.unique = 0

    def can_insert(self, n: int) -> bool:
        own = self.table.rate_limiter
        few = self.inserts + n - self.deletes <= own.min_size
        return few or (self.inserts + n) * own.samples_per_insert - self.samples <= own.max_diff

    def can_sample(self, n: int) -> bool:
        own = self.table.rate_limiter
        if self.inserts - self.deletes < own.min_size:
            return False
        return self.inserts * own.samples_per_insert - self.samples - n >= own.min_diff

    def first(self, selector: Any) -> int:
        """The key that an ordered selector selects."""
        orders: Any = {
            Fifo: lambda item: item["inserted"],
            Lifo: lambda item: -item["inserted"],
            MinHeap: lambda item: (item["priority"], item["touched"]),
            MaxHeap: lambda item: (-item["priority"], item["touched"]),
        }
        return min(self.items, key=lambda key: orders[type(selector)](self.items[key]))

    def probability(self, selector: Any, key: int) -> float:
        if isinstance(selector, OrderedSelector):
            return float(key == self.first(selector))
        if isinstance(selector, Uniform) or not any(item["priority"] for item in self.items.values()):
            return 1 / len(self.items)
        weights = {k: math.pow(item["priority"], 0.5) for k, item in self.items.items()}
        return weights[key] / sum(weights.values())

    def insert(self, key: int, row: int, priority: float, present: set[int]) -> None:
        """Insert, then remove. `present`, the keys left in the table, tells what a random remover removed."""
        self.items[key] = {
            "row": row,
            "priority": priority,
            "inserted": self.clock,
            "touched": self.clock,
            "times": 0,
        }
        self.clock += 1
        self.inserts += 1
        if len(self.items) > self.table.max_size:
            remover = self.table.remover
            if isinstance(remover, OrderedSelector):
                del self.items[self.first(remover)]
            else:
                gone = next(k for k in self.items if k not in present)
                assert self.probability(remover, gone) > 0 or len(present) < len(self.items)
                del self.items[gone]
            self.deletes += 1

    def update(self, key: int, priority: float) -> None:
        if key in self.items:
            self.items[key].update(priority=priority, touched=self.clock)
            self.clock += 1

    def delete(self, key: int) -> None:
        if self.items.pop(key, None) is not None:
            self.deletes += 1

    def check_sample(self, sample: Sample) -> None:
        """Each draw is possible, with its probability, size and counts."""
        limit, sampler = self.table.max_times_sampled, self.table.sampler
        for i, key in enumerate(sample.keys.tolist()):
            item = self.items[key]
            chance = self.probability(sampler, key)
            assert chance > 0
            assert sample.probabilities[i] == pytest.approx(chance)
            assert sample.table_sizes[i] == len(self.items)
            assert sample.priorities[i] == item["priority"]
            self.unique += item["times"] == 0
            item["times"] += 1
            assert sample.times_sampled[i] == item["times"]
            assert sample.columns["observation"][i] == item["row"]
            assert sample.columns["next_observation"][i] == item["row"] + 1
            self.samples += 1
            if item["times"] == limit:
                self.delete(key)

    def may_run_out(self, n: int) -> bool:
        """Whether n samples in a row may leave too few items on the way."""
        limit = self.table.max_times_sampled
        if not limit:
            return False
        times = sorted(limit - item["times"] for item in self.items.values())
        gone = np.searchsorted(np.cumsum(times), n - 1, side="right")
        return bool(len(self.items) - gone < self.table.rate_limiter.min_size)


priorities = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.01, 100))


@pytest.mark.parametrize("remover", SELECTORS)
@pytest.mark.parametrize("sampler", SELECTORS)
@given(data=st.data())
@settings(max_examples=12)
def test_table_matches_a_list_model(sampler: str, remover: str, data: st.DataObject) -> None:
    """After any inserts, samples, updates, deletes and restores, allowed or refused."""
    limiter = data.draw(st.sampled_from([MinSize(1), MinSize(3), SampleToInsertRatio(2, 2, 6), Queue(4)]))

    def made() -> Table:
        own = RateLimiter(limiter.samples_per_insert, limiter.min_size, limiter.min_diff, limiter.max_diff)
        return make_table(
            sampler=SELECTORS[sampler](),
            remover=SELECTORS[remover](),
            rate_limiter=own,
            max_times_sampled=limit,
        )

    limit = data.draw(st.sampled_from([0, 1, 2]))
    table = made()
    rows = chain(table, 100)
    model = ListModel(table)
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    keys: list[int] = []
    for _ in range(data.draw(st.integers(5, 25))):
        kind = data.draw(
            st.sampled_from(["insert", "insert", "insert", "sample", "sample", "update", "delete", "save"])
        )
        if kind == "insert":
            count = data.draw(st.integers(1, 7))
            given = data.draw(st.lists(priorities, min_size=count, max_size=count))
            firsts = data.draw(st.lists(st.integers(0, 98), min_size=count, max_size=count))
            if not model.can_insert(count):
                assert not table.can_insert(count)
                with pytest.raises(InsertRefused):
                    table.insert(rows[firsts], rows[firsts] + 1, np.array(given))
                continue
            new = table.insert(rows[firsts], rows[firsts] + 1, np.array(given)).tolist()
            assert new == sorted(new)
            assert not keys or new[0] > keys[-1]
            keys += new
            present = set(table.state_dict()["items"]["keys"].tolist())
            for key, row, priority in zip(new, firsts, given, strict=True):
                model.insert(key, row, priority, present)
        elif kind == "sample":
            count = data.draw(st.integers(1, 6))
            before = [table.state_dict(), generator.bit_generator.state]
            try:
                sample = table.sample(count, generator)
            except SampleRefused:
                assert not model.can_sample(count) or model.may_run_out(count)
                assert same_state([table.state_dict(), generator.bit_generator.state], before)
            else:
                assert model.can_sample(count)
                model.check_sample(sample)
        elif kind == "update" and keys:
            chosen = data.draw(st.lists(st.sampled_from(keys), max_size=6))
            given = data.draw(st.lists(priorities, min_size=len(chosen), max_size=len(chosen)))
            stale = table.stale_updates
            there = [key for key in chosen if key in model.items]
            assert table.update_priorities(np.array(chosen, np.int64), np.array(given)) == len(there)
            assert table.stale_updates == stale + len(chosen) - len(there)
            for key, priority in zip(chosen, given, strict=True):
                model.update(key, priority)
        elif kind == "delete" and keys:
            chosen = data.draw(st.lists(st.sampled_from(keys), max_size=3))
            assert table.delete(np.array(chosen, np.int64)) == len(set(chosen) & model.items.keys())
            for key in chosen:
                model.delete(key)
        elif kind == "save":
            state = table.state_dict()
            table = model.table = made()
            table.load_state_dict(state)
            assert same_state(table.state_dict(), state)
        assert_matches(table, model)
        references = np.ones(100, int)
        for item in model.items.values():
            references[[item["row"], item["row"] + 1]] += 1
        assert table.storage.refcounts[rows].tolist() == references.tolist()


def assert_matches(table: Table, model: ListModel) -> None:
    state, info = table.state_dict(), table.info()
    items = dict(
        zip(
            state["items"]["keys"].tolist(),
            zip(state["items"]["priorities"], state["items"]["times_sampled"], strict=True),
            strict=True,
        )
    )
    assert items == {key: (item["priority"], item["times"]) for key, item in model.items.items()}
    assert info.size == len(model.items) == table.sampler.size == table.remover.size
    assert (info.inserts, info.samples, info.deletes) == (model.inserts, model.samples, model.deletes)
    assert info.unique_samples == model.unique
    for count in (1, 2, 5):
        assert table.can_insert(count) == model.can_insert(count)
        assert table.can_sample(count) == model.can_sample(count)


# Batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("sampler", SELECTORS)
def test_a_batch_equals_single_samples_in_a_row(sampler: str, limit: int) -> None:
    """With the same random numbers, also where items are removed on the way."""

    def filled() -> Table:
        table = make_table(40, sampler=SELECTORS[sampler](), max_times_sampled=limit)
        rows = chain(table, 50)
        table.insert(rows[:40], rows[1:41], np.arange(40) % 7 + 0.5)
        return table

    for count in (1, 2, 30):
        at_once, one_by_one = filled(), filled()
        generators = np.random.default_rng(count), np.random.default_rng(count)
        batch = at_once.sample(count, generators[0])
        singles = [one_by_one.sample(1, generators[1]) for _ in range(count)]
        for name in ("keys", "probabilities", "priorities", "times_sampled", "table_sizes", "lengths"):
            np.testing.assert_array_equal(
                getattr(batch, name), np.concatenate([getattr(s, name) for s in singles])
            )
        for name, column in batch.columns.items():
            np.testing.assert_array_equal(column, np.concatenate([s.columns[name] for s in singles]))
        assert at_once.info() == one_by_one.info()


def test_a_restored_table_behaves_identically() -> None:
    """With every pair of selectors."""
    for sampler in SELECTORS.values():
        for remover in SELECTORS.values():
            tables = [make_table(30, sampler=sampler(), remover=remover(), seed=4) for _ in range(2)]
            tables[1].load_state_dict(_busy(tables[0], np.random.default_rng(0)).state_dict())
            after = [_busy(table, np.random.default_rng(1), chained=True) for table in tables]
            assert same_state(after[0].state_dict(), after[1].state_dict())
            samples = [table.sample(20, np.random.default_rng(2)) for table in after]
            np.testing.assert_array_equal(samples[0].keys, samples[1].keys)
            np.testing.assert_array_equal(
                samples[0].columns["observation"], samples[1].columns["observation"]
            )


def _busy(table: Table, generator: np.random.Generator, *, chained: bool = False) -> Table:
    rows = np.arange(100) if chained else chain(table, 100)
    keys = np.empty(0, np.int64)
    for _ in range(10):
        first = generator.integers(0, 98, 7)
        keys = np.append(keys, table.insert(rows[first], rows[first] + 1, generator.random(7)))
        sample = table.sample(5, generator)
        table.update_priorities(sample.keys, generator.random(5))
        table.delete(generator.choice(keys, 2))
    return table


# Shards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_two_tables_have_the_importance_weights_of_one_large_table(sampler: str) -> None:
    """If each is sampled in proportion to its total weight, even if these are very different."""
    given = np.concatenate([np.linspace(0.1, 1, 10), np.linspace(5, 50, 6)])
    whole = make_table(16, sampler=SELECTORS[sampler]())
    halves = [make_table(10, sampler=SELECTORS[sampler]()) for _ in range(2)]
    for table, part in zip([whole, *halves], [slice(0, 16), slice(0, 10), slice(10, 16)], strict=True):
        rows = chain(table, 20)
        table.insert(rows[:16][part], rows[1:17][part], given[part])
    total = sum(table.total_weight for table in halves)
    assert total == pytest.approx(whole.total_weight)
    generator = np.random.default_rng(0)
    large = whole.sample(4000, generator)
    share = generator.multinomial(4000, [table.total_weight / total for table in halves])
    samples = [table.sample(int(count), generator) for table, count in zip(halves, share, strict=True)]
    probabilities = np.concatenate(
        [s.probabilities * (table.total_weight / total) for s, table in zip(samples, halves, strict=True)]
    )
    priorities = np.concatenate([s.priorities for s in samples])
    expected = dict(zip(large.priorities.tolist(), large.probabilities.tolist(), strict=True))
    np.testing.assert_allclose(probabilities, [expected[p] for p in priorities.tolist()], rtol=1e-12)
    weights = importance_weights(probabilities, 0.6)
    of_large = importance_weights(large.probabilities, 0.6)
    known = dict(zip(large.priorities.tolist(), of_large.tolist(), strict=True))
    np.testing.assert_allclose(weights, [known[p] for p in priorities.tolist()], rtol=1e-12)
    counts = [
        np.array([np.count_nonzero(drawn == p) for p in given]) for drawn in (priorities, large.priorities)
    ]
    chances = np.array([expected[p] for p in given.tolist()]) * 4000
    assert all(((count - chances) ** 2 / chances).sum() < 45 for count in counts)  # 15 degrees of freedom


# Limiters -----------------------------------------------------------------------------------------


def test_queue_samples_every_item_once_in_order() -> None:
    table = make_table(10, sampler=Fifo(), remover=Fifo(), rate_limiter=Queue(3), max_times_sampled=1)
    rows = chain(table, 20)
    table.insert(rows[:3], rows[1:4])
    assert not table.can_insert()
    assert not table.can_sample(4)
    assert table.sample(2, np.random.default_rng(0)).columns["observation"].tolist() == [0, 1]
    table.insert(rows[3:5], rows[4:6])
    assert table.sample(3, np.random.default_rng(0)).columns["observation"].tolist() == [2, 3, 4]
    with pytest.raises(
        SampleRefused, match="does not allow 1 samples after 5 inserts, 5 samples and 5 deletes"
    ):
        table.sample(1, np.random.default_rng(0))


def test_stack_samples_the_newest_first() -> None:
    table = make_table(10, sampler=Lifo(), remover=Lifo(), rate_limiter=Stack(3), max_times_sampled=1)
    rows = chain(table, 20)
    table.insert(rows[:3], rows[1:4])
    assert table.sample(2, np.random.default_rng(0)).columns["observation"].tolist() == [2, 1]
    table.insert(rows[3:5], rows[4:6])
    assert table.sample(3, np.random.default_rng(0)).columns["observation"].tolist() == [4, 3, 0]


def test_rate_limiters_match_reverb() -> None:
    def numbers(limiter: RateLimiter) -> tuple[float, ...]:
        return limiter.samples_per_insert, limiter.min_size, limiter.min_diff, limiter.max_diff

    assert numbers(MinSize(7)) == (1, 7, -math.inf, math.inf)
    assert numbers(SampleToInsertRatio(4, 100, 50)) == (4, 100, 350, 450)
    assert numbers(SampleToInsertRatio(4, 100, (10, 500))) == (4, 100, 10, 500)
    assert numbers(Queue(5)) == numbers(Stack(5)) == (1, 1, 0, 5)


def test_rate_limiters_that_deadlock_are_rejected() -> None:
    with pytest.raises(ReplayError, match="range 396 to 403 is too narrow for 4 samples per insert"):
        SampleToInsertRatio(4, 100, (396, 403))
    SampleToInsertRatio(4, 100, 4)
    with pytest.raises(
        ReplayError, match=r"the lower bound 401 blocks sampling .* 100 items; set it to at most .* = 400"
    ):
        SampleToInsertRatio(4, 100, (401, 500))
    with pytest.warns(UserWarning, match="inserts and samples may block each other"):
        SampleToInsertRatio(4, 100, (100, 399))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SampleToInsertRatio(4, 100, (100, 400))
    with pytest.raises(RollstreamError, match="samples_per_insert is 0 and must be positive"):
        SampleToInsertRatio(0, 100, 4)
    with pytest.raises(RollstreamError, match="min_size is 0 and must be at least 1"):
        MinSize(0)


@given(ratio=st.sampled_from([0.25, 1.0, 3.5]), min_size=st.integers(1, 5), data=st.data())
def test_sample_to_insert_ratio_holds_in_any_order(ratio: float, min_size: int, data: st.DataObject) -> None:
    """Any allowed order stays within the error buffer, and an insert or a sample is always allowed."""
    buffer = max(1.0, ratio) * data.draw(st.sampled_from([1, 2, 5]))
    limiter = SampleToInsertRatio(ratio, min_size, buffer)
    for insert in data.draw(st.lists(st.booleans(), max_size=60)):
        assert limiter.can_insert() or limiter.can_sample()
        if insert and limiter.can_insert():
            limiter.inserts += 1
        elif not insert and limiter.can_sample():
            limiter.samples += 1
        if limiter.inserts >= min_size:
            assert abs((limiter.inserts - min_size) * ratio - limiter.samples) <= buffer


# Invalid arguments --------------------------------------------------------------------------------


def test_invalid_arguments_are_rejected() -> None:
    table = make_table()
    rows = chain(table, 10)
    with pytest.raises(ReplayError, match=r"1 to 1 consecutive steps .* got lengths 2$"):
        table.insert(rows[:1], rows[2:3])
    with pytest.raises(ReplayError, match=r"got lengths 0$"):
        table.insert(rows[:1], rows[:1])
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ReplayError, match=f"finite and at least 0; got {wrong:g}$"):
            table.insert(rows[:2], rows[1:3], np.array([1.0, wrong]))
    keys = table.insert(rows[:2], rows[1:3])
    with pytest.raises(ReplayError, match="finite and at least 0"):
        table.update_priorities(keys, np.array([1.0, math.nan]))
    with pytest.raises(ReplayError, match="cannot sample 0 items"):
        table.sample(0, np.random.default_rng(0))
    with pytest.raises(ReplayError, match="max_size is 0 and max_length is 1; set both to 1 or more"):
        make_table(0)
    with pytest.raises(
        ReplayError, match=r"waits for 6 items, but max_size is 5.* set max_size to at least 6"
    ):
        make_table(5, rate_limiter=MinSize(6))
    one = Fifo()
    with pytest.raises(ReplayError, match="same object; create one selector for each"):
        make_table(sampler=one, remover=one)
    only: Any = {"max_size": 1, "sampler": Uniform(), "remover": Fifo(), "rate_limiter": MinSize(1)}
    with pytest.raises(
        SignatureError, match="field 'a' needs column 'b'; the columns are observation, reward"
    ):
        Table(SIGNATURE, {"a": Field("b")}, **only)
    with pytest.raises(SignatureError, match="field 'a' has stack=0; set it to 1 or more"):
        Table(SIGNATURE, {"a": Field("reward", stack=0)}, **only)


def test_unknown_keys_are_ignored() -> None:
    table = make_table()
    rows = chain(table, 10)
    keys = table.insert(rows[:2], rows[1:3])
    strange = np.array([-1, 7, 10**15, keys[0] + (1 << 40), *keys])
    assert table.update_priorities(strange, np.full(6, 3.0)) == 2
    assert table.delete(strange) == 2
    assert table.delete(strange) == 0


def test_frame_stacks_within_sequences() -> None:
    """Every step is stacked with the frames before it; the padding is zero."""
    fields = {"seen": Field("observation", "steps", stack=2), "reward": Field("reward", "steps")}
    chosen: Any = {"sampler": Fifo(), "remover": Fifo(), "rate_limiter": MinSize(1), "max_times_sampled": 1}
    table = Table(SIGNATURE, fields, max_size=9, max_length=3, **chosen)
    columns = {
        "observation": np.arange(1, 6)[:, None],
        "reward": np.ones((5, 1)),
        "terminated": np.array([[False]] * 4 + [[True]]),
        "truncated": np.zeros((5, 1), bool),
    }
    Writer(table, Sequences(3)).write(columns, np.array([9]))
    sample = table.sample(2, np.random.default_rng(0))
    assert sample.columns["seen"].tolist() == [[[1, 1], [1, 2], [2, 3]], [[3, 4], [4, 5], [0, 0]]]
    assert sample.columns["reward"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_samples_are_copies() -> None:
    table = make_table()
    rows = chain(table, 10)
    table.insert(rows[:2], rows[1:3])
    sample = table.sample(3, np.random.default_rng(0))
    for column in sample.columns.values():
        column[:] = -1
    assert (table.sample(3, np.random.default_rng(0)).columns["observation"] >= 0).all()


def test_info_reports_the_memory_of_used_rows() -> None:
    signature = {"observation": ArraySpec((84, 84), np.uint8), "reward": ArraySpec((), np.float32)}
    fields = {"observation": Field("observation", stack=4), "next": Field("observation", "next", stack=4)}
    only: Any = {"sampler": Uniform(), "remover": Fifo(), "rate_limiter": MinSize(1)}
    table = Table(signature, fields, max_size=200, **only)
    writer = Writer(table, Transitions(1))
    columns = {
        "observation": np.zeros((150, 2, 84, 84), np.uint8),
        "reward": np.zeros((150, 2), np.float32),
        "terminated": np.zeros((150, 2), bool),
        "truncated": np.zeros((150, 2), bool),
    }
    for _ in range(3):
        writer.write(columns, np.zeros((2, 84, 84), np.uint8))
    info = table.info()
    assert info.size == 200
    assert info.rows == 200 + 2 + 2 * 3, "frames of the items, after them, and stacked before them"
    assert info.row_bytes == info.rows * (84 * 84 + 4)
    assert info.row_bytes / (200 * 84 * 84) < 1.1


def test_replay_imports_neither_jax_nor_gymnasium() -> None:
    code = "import sys, rollstream.replay; sys.exit(any(m in sys.modules for m in ('jax', 'gymnasium')))"
    scripts.run_code(code)
