"""Replay on the device returns what replay on the host returns, trains the same way, and goes on exactly."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_runs import SMALL, fingerprint, trained, training
from small_envs import Samples, Scripted
from test_off_policy import CONTINUOUS, DISCRETE, SEEN, Catch, Home
from test_replayed_frames import Pages

import rollstream as rs
from rollstream import flow
from rollstream.algos import ALGORITHMS, dqn, sac, td3
from rollstream.replay.buffer import Chunk, ReplayBuffer, concatenate_frames, transition_buffer
from rollstream.replay.fields import gather_fields
from rollstream.replay.importance import importance_weights
from rollstream.replay.signature import flatten_columns, infer_signature, unflatten_columns
from rollstream.rl import device_storage
from rollstream.rl.algorithm import Task
from rollstream.rl.batch import Columns
from rollstream.rl.device_replay import DeviceReplay
from rollstream.rl.device_sampling import (
    Priorities,
    gather_transitions,
    sample_transitions,
    update_priorities,
)
from rollstream.rl.device_sum_tree import (
    WIDTH,
    create_levels,
    draw_leaves,
    num_levels,
    parents_of_range,
    set_leaves,
    with_sums,
)
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.off_policy import updates_per_call
from rollstream.rl.operators import ParallelRollouts
from rollstream.rl.replay_operators import StoreToBuffer
from rollstream.rl.update_metrics import UpdateMetrics
from rollstream.testing import kill

# The same transitions as on the host -------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Rollouts of some shape, and what is made of them."""

    workers: int = 1
    width: int = 2
    """Environments per worker."""
    length: int = 2
    reset_steps: bool = False
    n_step: int = 1
    frame_stack: int = 1
    priority_exponent: float = 0.0
    nested: bool = False
    image: bool = False
    max_size: int = 12

    @property
    def num_envs(self) -> int:
        return self.workers * self.width

    def observation(self, number: Any) -> Any:
        """An observation that tells its number."""
        number = np.asarray(number, np.float32)
        if self.nested:
            return {"a/b": number[..., None] + [0, 0.5], "c": (number.astype(np.int64),)}
        shape = (2, 3, 3) if self.image else (2,)
        return np.broadcast_to(number[(..., *[None] * len(shape))], (*number.shape, *shape)).copy()


@dataclass
class Stream:
    """One environment, whose every observation has a number of its own."""

    number: int = 0
    resets_next: bool = False

    def next(self) -> int:
        self.number += 1
        return self.number


class Rollouts:
    """Rollouts of environments that end as a generator says; the action of a step is its number."""

    def __init__(self, case: Case, seed: int):
        self.case = case
        self._random = np.random.default_rng(seed)
        self._streams = [Stream(1000 * (i + 1)) for i in range(case.num_envs)]
        self._now = [stream.next() for stream in self._streams]
        self._ends = self._random.choice([0.05, 0.3])
        self._fails = self._random.choice([0, 0.2])
        self.steps = 0

    def round(self) -> list[Chunk]:
        """A rollout of each worker; one may be missing, and may have been restarted."""
        case, chunks = self.case, []
        absent = int(self._random.integers(case.workers)) if self._random.random() < self._fails else None
        for worker in range(case.workers):
            after_reset = bool(self.steps == 0 or self._random.random() < self._fails)
            if worker == absent and case.workers > 1:
                self._reset(worker)
                continue
            if after_reset and self.steps:
                self._reset(worker)
            chunks.append(self._chunk(worker, after_reset or absent is not None))
        self.steps += case.length
        return chunks

    def _reset(self, worker: int) -> None:
        for i in range(worker * self.case.width, (worker + 1) * self.case.width):
            self._streams[i].resets_next = False
            self._now[i] = self._streams[i].next()

    def _chunk(self, worker: int, after_reset: bool) -> Chunk:
        case = self.case
        shape = case.length, case.width
        first = worker * case.width
        if after_reset and self.steps:
            self._reset(worker)
        numbers = np.zeros(shape)
        terminated, truncated, mask = np.zeros(shape, bool), np.zeros(shape, bool), np.ones(shape, bool)
        finals = []
        for t in range(case.length):
            for i in range(case.width):
                stream = self._streams[first + i]
                numbers[t, i] = self._now[first + i]
                if stream.resets_next:
                    mask[t, i], stream.resets_next = False, False
                elif self._random.random() < self._ends:
                    how = self._random.integers(3)
                    terminated[t, i], truncated[t, i] = how != 1, how != 0
                    if case.reset_steps:
                        stream.resets_next = True
                    elif how == 1:
                        finals.append((t, i, case.observation(stream.next())))
                self._now[first + i] = stream.next()
        columns = {
            "observation": case.observation(numbers),
            "action": np.broadcast_to(self.steps + np.arange(case.length)[:, None], shape).astype(np.int32),
            "reward": self._random.standard_normal(shape).astype(np.float32),
            "terminated": terminated,
            "truncated": truncated,
        }
        last = case.observation(self._now[first : first + case.width])
        streams = first + np.arange(case.width)
        return Chunk(
            columns, last, finals, streams, mask if case.reset_steps else None, after_reset=after_reset
        )


def device_replay(case: Case, **options: Any) -> DeviceReplay:
    zeros = case.observation(np.zeros((1, 1)))
    signature = infer_signature(
        {
            "observation": zeros,
            "action": np.zeros((1, 1), np.int32),
            "reward": np.zeros((1, 1), np.float32),
            "terminated": np.zeros((1, 1), bool),
        }
    )
    usual = {
        "num_envs": case.num_envs,
        "rollout_length": case.length,
        "max_size": case.max_size,
        "min_size": 1,
        "batch_size": 8,
        "n_step": case.n_step,
        "priority_exponent": case.priority_exponent,
        "frame_stack": case.frame_stack,
        "frame_axis": -3 if case.image else -1,
    }
    return DeviceReplay(signature, **usual | options)


def priorities_of(replay: DeviceReplay) -> Priorities:
    assert replay.storage.priorities is not None
    return replay.storage.priorities


def host_transitions(case: Case, rounds: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
    """All transitions of these rollouts, from a replay buffer on the host that is never full."""
    signature = infer_signature(
        {name: column for name, column in rounds[0][0].columns.items() if name != "truncated"}
    )
    buffer = transition_buffer(
        signature,
        0,
        max_size=10_000,
        min_size=1,
        batch_size=1,
        n_step=case.n_step,
        frame_stack=case.frame_stack,
    )
    for chunks in rounds:
        seen = np.concatenate([chunk.streams for chunk in chunks])
        buffer.reset_streams(np.setdiff1d(np.arange(case.num_envs), seen))
        for chunk in chunks:
            buffer.insert(chunk)
    table = buffer.table
    start, end, *_ = table._items.read(table._items.slots())
    lengths = table.storage.lengths(start, end)
    fields = gather_fields(table.storage, table.fields, start, end, lengths, max_length=case.n_step)
    columns = unflatten_columns(fields) | {"length": lengths.astype(np.float32)}
    if case.frame_stack > 1 and len(lengths):
        for name in ("observation", "next_observation"):
            columns[name] = concatenate_frames(columns[name], -3 if case.image else -1)
    return columns


def assert_same_transitions(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    (found, order), (expected, other) = (
        (flat, np.lexsort([flat["action"], _first_number(flat)]))
        for flat in (flatten_columns(found), flatten_columns(expected))
    )
    continues = ~expected["terminated"].any(axis=1)[other]  # else nobody looks at what follows
    for name, column in expected.items():
        ours, theirs = found[name][order], column[other]
        if name.startswith("next_"):
            ours, theirs = ours[continues], theirs[continues]
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


def _first_number(columns: dict[str, Any]) -> Any:
    observation = next(column for name, column in columns.items() if name.startswith("observation"))
    return observation[(slice(None), *(-1 for _ in observation.shape[1:]))]


CASES = {
    "vectors": Case(),
    "one environment": Case(width=1, length=1, max_size=5),
    "long rollouts": Case(length=7, max_size=20),
    "two workers": Case(workers=2, priority_exponent=0.5),
    "n-step": Case(n_step=3, priority_exponent=0.5),
    "n-step of two workers": Case(workers=2, width=1, length=1, n_step=3),
    "n-step in a buffer smaller than a rollout": Case(width=1, length=4, n_step=3, max_size=2),
    "prioritized n-step in a buffer smaller than a rollout": Case(
        width=1, length=4, n_step=3, priority_exponent=0.5, max_size=2
    ),
    "reset steps": Case(reset_steps=True, priority_exponent=0.5),
    "n-step with reset steps": Case(workers=2, reset_steps=True, n_step=2, length=3),
    "parts": Case(nested=True, n_step=2),
    "stacks": Case(frame_stack=3, image=True),
    "stacks of two workers": Case(workers=2, width=1, length=1, frame_stack=4),
    "n-step stacks": Case(frame_stack=2, n_step=3, priority_exponent=1.0),
    "n-step stacks with reset steps": Case(frame_stack=3, n_step=2, reset_steps=True, image=True),
}


@cache
def replay_of(name: str) -> tuple[DeviceReplay, Any, Callable[..., Any]]:
    """A buffer that is compiled once for all examples, its empty state, and how to gather all its rows."""
    replay = device_replay(CASES[name])
    gather = jax.jit(partial(gather_transitions, replay.layout))
    rows = np.arange(replay.layout.num_rows)
    return replay, replay.state_dict(), lambda storage: gather(storage, rows)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 20), rounds=st.integers(1, 20))
@pytest.mark.slow
def test_transitions_are_those_of_the_host(name: str, seed: int, rounds: int) -> None:
    case = CASES[name]
    replay, empty, gather = replay_of(name)
    replay.load_state_dict(empty)
    rollouts = Rollouts(case, seed)
    written = [rollouts.round() for _ in range(rounds)]
    inserted = sum(replay.insert(chunks) for chunks in written)
    is_item = replay._ring._is_item.ravel()
    found = jax.tree.map(lambda column: np.asarray(column)[is_item], gather(replay.storage.arrays))
    expected = host_transitions(case, written)
    assert inserted == len(expected["reward"])
    kept = expected["action"] >= rollouts.steps - replay.layout.capacity
    if inserted:
        assert_same_transitions(found, jax.tree.map(lambda column: column[kept], expected))
    assert replay.size == kept.sum() == replay.rate_limiter.inserts - replay.rate_limiter.deletes
    if not (case.reset_steps or rollouts._fails) and replay._ring.is_full:
        assert replay.size >= case.max_size
    if case.priority_exponent:
        levels = priorities_of(replay).levels
        leaves = np.asarray(levels[0])
        np.testing.assert_array_equal(leaves, np.pad(is_item, (0, len(leaves) - len(is_item))))
        assert_consistent(levels)


def test_more_final_observations_than_expected_get_more_room() -> None:
    case = Case(width=4, length=4, max_size=400)
    replay = device_replay(case)
    assert replay._slots.count == 64
    rollouts = Rollouts(case, 3)
    rollouts._ends, rollouts._fails = 0.9, 0
    written = [rollouts.round() for _ in range(60)]
    for chunks in written:
        replay.insert(chunks)
    assert replay.storage.arrays is not None
    assert replay._slots.count == len(replay.storage.arrays.finals["observation"]) == 256
    expected = host_transitions(case, written)
    kept = expected["action"] >= rollouts.steps - replay.layout.capacity
    rows = np.flatnonzero(replay._ring._is_item)
    found = jax.tree.map(np.asarray, gather_transitions(replay.layout, replay.storage.arrays, rows))
    assert_same_transitions(found, jax.tree.map(lambda column: column[kept], expected))
    alive = {slot for slots in replay._slots._taken.values() for slot in slots}
    assert sorted([*alive, *replay._slots._free]) == list(range(256))
    finals = np.asarray(replay.storage.arrays.columns["final"])[rows]
    assert set(finals[finals >= 0].tolist()) == alive


def test_final_observations_are_released_with_their_rows() -> None:
    case = Case(width=2, length=2, max_size=8)
    replay, rollouts = device_replay(case), Rollouts(case, 5)
    rollouts._ends = 0.9
    for _ in range(400):
        replay.insert(rollouts.round())
    assert replay._slots.count == 64


# The sum tree ------------------------------------------------------------------------------------


def set_range(levels: Any, first: int, scaled: Any) -> Any:
    leaves = levels[0].at[first : first + len(scaled)].set(scaled)
    return with_sums(leaves, levels, parents_of_range(levels, jnp.int32(first), len(scaled)))


def assert_consistent(levels: Any) -> None:
    for below, above in pairwise(levels):
        sums = np.asarray(below).reshape(-1, WIDTH).sum(axis=1)
        np.testing.assert_allclose(np.asarray(above)[: len(sums)], sums, rtol=1e-5)
        assert not np.asarray(above)[len(sums) :].any()


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 32, 33, 1_000, 40_000])
def test_sums_are_those_of_the_leaves(count: int) -> None:
    random = np.random.default_rng(count)
    levels = create_levels(count)
    assert len(levels) == num_levels(count)
    expected = np.zeros(len(levels[0]), np.float32)
    for _ in range(5):
        size = int(random.integers(1, min(count, 70) + 1))
        first, scaled = int(random.integers(count - size + 1)), random.random(size, np.float32)
        levels = set_range(levels, first, scaled)
        expected[first : first + size] = scaled
        leaves, scaled = random.integers(count, size=size), random.random(size, np.float32)
        levels = set_leaves(levels, leaves, scaled)
        expected[leaves] = 0
        np.maximum.at(expected, leaves, scaled)
        np.testing.assert_array_equal(levels[0], expected)
        assert_consistent(levels)


def test_leaves_are_drawn_in_proportion_to_their_scaled_priorities() -> None:
    """Also where these differ by orders of magnitude, and never one of 0."""
    random = np.random.default_rng(0)
    count, draws = 5_000, 400_000
    scaled = np.where(random.random(count) < 0.3, 0, 10 ** random.uniform(-4, 0, count)).astype(np.float32)
    levels = set_range(create_levels(count), 0, scaled)
    leaves, found = jax.jit(draw_leaves)(levels, random.random((draws, len(levels)), np.float32))
    np.testing.assert_array_equal(found, scaled[leaves])
    assert np.asarray(found).min() > 0
    counts, expected = np.bincount(leaves, minlength=count), draws * scaled / scaled.sum(dtype=float)
    assert_chi_square(counts, expected)


def assert_chi_square(counts: Any, expected: Any) -> None:
    often = expected >= 5
    assert counts[~often].sum() == pytest.approx(
        expected[~often].sum(), abs=5 * expected[~often].sum() ** 0.5
    )
    freedom = often.sum() - 1
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("uniform", [0.0, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_the_ends_of_the_unit_interval_draw_leaves_above_zero(uniform: float) -> None:
    scaled = np.zeros(3_000, np.float32)
    scaled[[700, 701, 1999]] = 0.1, 1e-12, 0.3
    levels = set_range(create_levels(3_000), 0, scaled)
    leaves, _ = draw_leaves(levels, np.full((1, len(levels)), uniform, np.float32))
    assert int(leaves[0]) == (700 if uniform == 0 else 1999)


# Sampling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [Case(), Case(n_step=3), Case(reset_steps=True), Case(width=1, length=4, n_step=3, max_size=2)],
    ids=str,
)
def test_uniform_draws_are_of_all_transitions_alike(case: Case) -> None:
    replay, rollouts = device_replay(case, batch_size=40_000), Rollouts(case, 1)
    for rounds in (1, 3, 9):
        for _ in range(rounds):
            replay.insert(rollouts.round())
        if not replay.size:
            continue
        draw = replay.sample()
        assert draw is not None
        counts = np.bincount(draw.draws, minlength=replay.layout.num_rows)
        is_item = replay._ring._is_item.ravel()
        assert not counts[~is_item].any()
        assert_chi_square(counts[is_item], np.full(replay.size, 40_000 / replay.size))


def test_few_transitions_among_many_rows_are_drawn_alike() -> None:
    case = Case(n_step=8, length=10, max_size=20)
    replay, rollouts = device_replay(case, batch_size=9_000), Rollouts(case, 1)
    rollouts._ends = 0.0
    replay.insert(rollouts.round())
    draw = replay.sample()
    assert draw is not None
    assert replay.size == 6 == len(set(draw.draws.tolist()))
    assert_chi_square(np.unique(draw.draws, return_counts=True)[1], np.full(6, 1_500))


def test_priorities_and_importance_weights_are_those_of_the_host() -> None:
    """Frequencies by a chi-square test, weights to float32, through several updates of priorities."""
    case = Case(workers=2, length=4, priority_exponent=0.7, max_size=64)
    replay, rollouts = device_replay(case), Rollouts(case, 2)
    rollouts._fails = 0
    rounds = [rollouts.round() for _ in range(8)]
    signature = infer_signature(
        {name: column for name, column in rounds[0][0].columns.items() if name != "truncated"}
    )
    host = transition_buffer(signature, 0, max_size=64, min_size=1, batch_size=8, priority_exponent=0.7)
    random = np.random.default_rng(3)
    sample = jax.jit(partial(sample_transitions, replay.layout))
    update = jax.jit(partial(update_priorities, replay.layout))
    for chunks in rounds[:6]:
        replay.insert(chunks)
        for chunk in chunks:
            host.insert(chunk)
        storage = replay.storage
        uniforms = random.random((16, len(priorities_of(replay).levels)), np.float32)
        batch, rows = sample(storage.arrays, storage.priorities, uniforms)
        numbers = np.asarray(batch["observation"])[:, 0]
        items, start = host.table._items, host.table._items.start
        number_of = {
            host.table.storage.columns["observation"][start[slot]][0]: slot for slot in items.slots()
        }
        slots = np.array([number_of[number] for number in numbers])
        scaled = items.priorities[slots] ** 0.7
        relative = scaled / scaled.min()
        np.testing.assert_allclose(batch["relative_probability"], relative, rtol=1e-5)
        np.testing.assert_allclose(
            importance_weights(batch["relative_probability"], 0.4, 1.0),
            importance_weights(scaled / scaled.sum(), 0.4),
            rtol=1e-5,
        )
        errors = random.exponential(2.0, 16).astype(np.float32)
        errors = errors[np.unique(np.asarray(rows), return_inverse=True)[1]]  # the same for the same item
        storage.priorities = update(storage.priorities, rows, errors, np.float32(1))
        host.update_priorities(items.keys[slots], errors.astype(float) + 1e-6)
        assert float(priorities_of(replay).max_priority) == pytest.approx(host.table.max_priority)
    levels = priorities_of(replay).levels
    rows, _ = jax.jit(draw_leaves)(levels, random.random((200_000, len(levels)), np.float32))
    assert replay.storage.arrays is not None
    numbers = np.asarray(replay.storage.arrays.columns["observation"])[:, 0]
    counts = dict(zip(*np.unique(numbers[rows], return_counts=True), strict=True))
    expected = host.table._items.priorities[host.table._items.slots()] ** 0.7
    found = np.array([counts.get(number, 0) for number in item_numbers(host)])
    assert found.sum() == 200_000
    assert_chi_square(found, 200_000 * expected / expected.sum())


def item_numbers(buffer: ReplayBuffer) -> list[float]:
    """The number of each item's observation, by slot."""
    items, storage = buffer.table._items, buffer.table.storage
    return storage.columns["observation"][items.start[items.slots()], 0].tolist()


def test_priorities_of_an_update_that_is_not_finite_are_not_taken_up() -> None:
    case = Case(priority_exponent=0.5)
    replay = device_replay(case)
    replay.insert(Rollouts(case, 0).round())
    before = priorities_of(replay)
    after = update_priorities(replay.layout, before, np.array([0, 1]), np.array([np.nan, 3.0]), np.float32(0))
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_is_drawn_before_there_is_enough() -> None:
    case = Case(max_size=8)
    replay, rollouts = device_replay(case, min_size=6), Rollouts(case, 0)
    for size in (4, 8):
        replay.insert(rollouts.round())
        assert replay.size == size
        assert (replay.sample() is not None) == replay.can_sample(8) == (size >= 6)


def test_reset_steps_in_a_full_ring_do_not_keep_training_from_starting() -> None:
    case = Case(reset_steps=True, max_size=8)
    replay, rollouts = device_replay(case, min_size=8), Rollouts(case, 0)
    rollouts._ends = 0.5
    for _ in range(10):
        replay.insert(rollouts.round())
    assert replay.size < 8
    assert replay.sample() is not None


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_a_state_is_loaded_block_by_block(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, several blocks of which the last overlaps, and one block."""
    monkeypatch.setattr(device_storage, "_BLOCK_BYTES", block_bytes)
    case = Case(width=3, n_step=2, frame_stack=2, priority_exponent=0.5, max_size=40)
    replay, rollouts, loaded = device_replay(case), Rollouts(case, 4), device_replay(case)
    for rounds in (3, 9):
        for _ in range(rounds):
            replay.insert(rollouts.round())
        loaded.load_state_dict(pickle.loads(pickle.dumps(replay.state_dict())))
        for one, other in zip(
            *(jax.tree.leaves((own.storage.arrays, own.storage.priorities)) for own in (replay, loaded)),
            strict=True,
        ):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    assert loaded.insert(chunks := rollouts.round()) == replay.insert(chunks)


# Training ----------------------------------------------------------------------------------------

RAINBOW = {"n_step": 3, "priority_exponent": 0.6, "num_atoms": 5, "dueling": True, "buffer_size": 60}
PENDULUM = {"environment": "Pendulum-v1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dqn", RAINBOW),
        ("dqn", {"priority_exponent": 0.6, "utd_ratio": 0.25, "environment": Scripted}),
        ("sac", PENDULUM | {"utd_ratio": 2.0}),
        pytest.param("sac", {"buffer_size": 40}, marks=pytest.mark.slow),
        pytest.param("td3", PENDULUM, marks=pytest.mark.slow),
        pytest.param("ddpg", PENDULUM, marks=pytest.mark.slow),
    ],
)
def test_a_saved_plan_goes_on_exactly(name: str, options: dict[str, Any]) -> None:
    options = options | {"replay": "device"}
    with training(name, "inline", **options) as (plan, workers):
        straight = [next(plan) for _ in range(9)]
        expected = fingerprint(workers.learner)
    with training(name, "inline", **options) as (plan, workers):
        resumed = [next(plan) for _ in range(6)]
        state = pickle.dumps(plan.state_dict())
        resumed += [next(plan) for _ in range(3)]  # saving changes nothing
        assert fingerprint(workers.learner) == expected
    with training(name, "inline", **options) as (plan, workers):
        plan.load_state_dict(pickle.loads(state))
        resumed[6:] = [next(plan) for _ in range(3)]
        assert fingerprint(workers.learner) == expected
    for one, other in zip(straight, resumed, strict=True):
        np.testing.assert_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "environment", "options"),
    [("sac", "Pendulum-v1", {}), ("dqn", "CartPole-v1", {"priority_exponent": 0.6})],
)
def test_a_run_goes_on_exactly_from_its_checkpoint(
    name: str, environment: str, options: dict[str, Any], tmp_path: Path
) -> None:
    config = SMALL[name] | options | {"replay": "device", "buffer_size": 100}
    usual: Any = {"env": environment, "config": config, "steps": 192, "quiet": True}
    straight = rs.train(name, **usual)
    stop: Any = {"out": tmp_path / "run", "on_report": lambda report: report["time/total_timesteps"] >= 96}
    rs.train(name, **usual, **stop)
    resumed = rs.train(name, out=tmp_path / "run", resume=True, quiet=True)
    assert straight._weights.keys() == resumed._weights.keys()
    for key, own in straight._weights.items():
        np.testing.assert_array_equal(own, resumed._weights[key])


@pytest.mark.parametrize("name", ["dqn", pytest.param("sac", marks=pytest.mark.slow)])
def test_a_buffer_in_another_place_is_not_resumed_from(name: str, tmp_path: Path) -> None:
    environment = "Pendulum-v1" if name == "sac" else "CartPole-v1"
    usual: Any = {"env": environment, "quiet": True}
    for place, other in (("host", "device"), ("device", "host")):
        usual["out"] = tmp_path / place
        rs.train(name, steps=64, config=SMALL[name] | {"replay": place}, **usual)
        changed: Any = {"config": {"replay": other}, "steps": 128, "resume": True}
        with pytest.raises(rs.RollstreamError, match="replay"):
            rs.train(name, **usual, **changed)
        told = (
            f"the checkpoint has its replay buffer on the {place}, and replay is {other}: resume with replay"
        )
        with pytest.raises(rs.RollstreamError, match=told):
            rs.train(name, **usual, **changed, allow_changes=True)
        rs.train(name, **usual, **changed | {"config": {"replay": place}}, allow_changes=True)


MODULES: dict[str, Any] = {"dqn": dqn, "sac": sac, "td3": td3}


@contextmanager
def filled_buffer(name: str, environment: Any, *, batch_size: int, **options: Any) -> Iterator[Any]:
    """Workers, and a buffer with eight rollouts of each."""
    algorithm = ALGORITHMS[name]
    config: Any = algorithm.config(**SMALL[name] | options | {"replay": "device"})
    with rs.engine("inline") as engine:
        workers = algorithm.workers(engine, config, Task(EnvSpec(environment), 1_000, seed=3, workers=2))
        buffer = MODULES[name].make_buffer(workers, config, batch_size)
        stored = ParallelRollouts(workers).gather_sync().for_each(StoreToBuffer(buffer))
        reports = list(islice(stored, 8))
        stored.close()
        assert reports[-1]["replay/size"] == buffer.size
        yield workers, buffer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "environment", "options"),
    [
        ("sac", "Pendulum-v1", {}),
        pytest.param("td3", Home, {}, marks=pytest.mark.slow),
        ("dqn", Scripted, {"priority_exponent": 0.6, "n_step": 2}),
    ],
)
def test_several_updates_in_one_program_are_those_of_several_programs(
    name: str, environment: Any, options: dict[str, Any]
) -> None:
    """New priorities count from the next of them on."""
    results = []
    for updates in (4, 1):
        with filled_buffer(name, environment, batch_size=4 * 16, **options) as (workers, buffer):
            draw = buffer.sample()
            parts = [replace(draw, draws=own) for own in np.split(draw.draws, 4 // updates)]
            metrics = [workers.learner.train_on_draw(part, updates=updates) for part in parts]
            rows = np.concatenate([own.rows() for own in metrics])
            assert workers.learner.version == len(rows) == 4
            results.append((workers.learner.get_weights(), buffer.storage.priorities, rows))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    if name == "dqn":
        assert len(np.unique(results[0][1].levels[0])) > 20


def test_a_program_trains_as_the_host_does_on_the_same_transitions() -> None:
    with filled_buffer("sac", "Pendulum-v1", batch_size=16) as (workers, buffer):
        draw, learner = buffer.sample(), workers.learner
        state = learner.state_dict()
        gathered = sample_transitions(buffer.layout, buffer.storage.arrays, None, draw.draws)[0]
        metrics = dict(learner.train_on_draw(draw))
        weights = learner.get_weights()
        learner.load_state_dict(state)
        expected = learner.train(Columns(jax.tree.map(np.asarray, dict(gathered))), 0)
        for name, own in learner.get_weights().items():
            np.testing.assert_allclose(weights[name], own, rtol=1e-5, atol=1e-6)
        assert metrics == pytest.approx(dict(expected), rel=1e-4)


@pytest.mark.parametrize("priority_exponent", [0.0, 0.6])
def test_nothing_is_read_from_an_accelerator_between_reports(priority_exponent: float) -> None:
    options = {"priority_exponent": priority_exponent}
    with filled_buffer("dqn", "CartPole-v1", batch_size=32, **options) as (workers, buffer):
        workers.learner._accelerated = True
        metrics = workers.learner.train_on_draw(buffer.sample(), updates=2)
        assert isinstance(metrics, UpdateMetrics)
        assert metrics._rows is None
        assert not metrics.packed.arrays
        assert np.isfinite(metrics.rows()).all()


@pytest.mark.parametrize("kind", ["dqn", pytest.param("sac", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seen", ["parts", pytest.param("several", marks=pytest.mark.slow)])
def test_observations_of_every_kind_are_learned_from(kind: str, seen: str) -> None:
    actions = spaces.Discrete(3, start=1) if kind == "dqn" else spaces.Box(-1, 2, (2, 1))
    options = {"batch_size": 4, "learning_starts": 8, "report_every": 4, "replay": "device"}
    with training(kind, "inline", lambda: Samples(SEEN[seen], actions), **options) as (plan, workers):
        report = list(islice(plan, 6))[-1]
        assert workers.learner.version > 4
    assert np.isfinite([value for key, value in report.items() if "loss" in key]).all()


def test_updates_of_a_rollout_are_one_program_however_large_their_rows() -> None:
    environment = EnvSpec(Catch, frame_stack=2)
    shape: Any = {"num_envs": 64, "rollout_length": 2, "utd_ratio": 1, "batch_size": 1_024}
    for place in ("host", "device"):
        config = dqn.Config(**shape | {"replay": place})
        with rs.engine("inline") as engine:
            workers = dqn.DQN.workers(engine, config, Task(environment, 10_000))
            calls = config.updates_per_rollout() // updates_per_call(workers, config)
            assert calls == 1 if place == "device" else calls >= 8


@pytest.mark.parametrize("options", [{}, {"n_step": 3, "priority_exponent": 0.5}], ids=str)
def test_stacks_of_frames_are_those_of_the_environment(options: dict[str, Any]) -> None:
    """Every pixel of a frame is its number; stacks repeat the first frame of an episode."""
    environment = EnvSpec(Pages, {"shape": (40, 40, 1)}, frame_stack=3)
    shape: Any = {"num_envs": 2, "rollout_length": 4, "hidden": (4,), "buffer_size": 20, "learning_starts": 1}
    config = dqn.Config(**shape, **options, replay="device")
    with rs.engine("inline") as engine:
        workers = dqn.DQN.workers(engine, config, Task(environment, 10_000))
        buffer = dqn.make_buffer(workers, config, 400)
        assert isinstance(buffer, DeviceReplay)
        stored = ParallelRollouts(workers).gather_sync().for_each(StoreToBuffer(buffer))
        for _ in islice(stored, 9):
            pass
        draw, storage = buffer.sample(), buffer.storage
        assert draw is not None
        assert storage.arrays is not None
        assert storage.arrays.columns["observation"].shape[1:] == (40, 40, 1)
        batch, _ = sample_transitions(buffer.layout, storage.arrays, storage.priorities, draw.draws)
        stored.close()
    first, after = (np.asarray(batch[name])[:, 0, 0] for name in ("observation", "next_observation"))
    length = np.asarray(batch["length"], int)
    continues = ~np.asarray(batch["terminated"]).any(axis=1)
    assert continues.any()
    assert (np.diff(first.astype(int)) >= 0).all()
    assert (np.diff(first.astype(int)) <= 1).all()
    np.testing.assert_array_equal((after[:, -1] - first[:, -1])[continues], length[continues])
    one = continues & (length == 1)
    np.testing.assert_array_equal(after[one, :-1], first[one, 1:])


@pytest.mark.parametrize(
    ("name", "environment", "steps", "least", "options"),
    [
        (
            "dqn",
            "CartPole-v1",
            4_000,
            35,
            DISCRETE | {"hidden": (64,), "n_step": 3, "priority_exponent": 0.5},
        ),
        pytest.param("sac", Home, 1_400, -5, CONTINUOUS, marks=pytest.mark.slow),
        pytest.param("td3", Home, 1_400, -5, CONTINUOUS, marks=pytest.mark.slow),
    ],
)
def test_returns_rise(name: str, environment: Any, steps: int, least: float, options: dict[str, Any]) -> None:
    if name == "dqn":
        options |= {"hidden": (64,), "target_update_interval": 100, "exploration_fraction": 0.3}
    options = options | {"replay": "device"}
    with training(name, "inline", environment, seed=1, steps=steps, **options) as (plan, _):
        report = next(report for report in plan if report["time/total_timesteps"] >= steps)
    assert report["rollout/ep_rew_mean"] > least


def test_weights_are_the_same_on_every_engine() -> None:
    options = RAINBOW | {"replay": "device"}
    assert trained("dqn", "threads", 6, **options) == trained("dqn", "inline", 6, **options)


def test_the_number_of_workers_may_change(tmp_path: Path) -> None:
    config = SMALL["dqn"] | {"replay": "device", "n_step": 2, "buffer_size": 64}
    usual: Any = {"out": tmp_path / "run", "quiet": True, "engine": "inline"}
    rs.train("dqn", env="CartPole-v1", steps=96, workers=2, config=config, **usual)
    for workers, steps in ((4, 160), (1, 224)):
        run = rs.train("dqn", resume=True, workers=workers, steps=steps, **usual)
        assert int(run.metrics[-1]["time/total_timesteps"]) == steps
        assert 64 <= int(run.metrics[-1]["replay/size"]) <= 76  # whole rollouts, without abandoned windows


@pytest.mark.parametrize("on_failure", ["restart", pytest.param("drop", marks=pytest.mark.slow)])
def test_the_plan_goes_on_when_a_worker_dies(on_failure: Any) -> None:
    config = dqn.Config(**SMALL["dqn"] | {"replay": "device", "n_step": 2, "buffer_size": 64})
    with rs.engine("processes") as engine:
        task = Task(EnvSpec("CartPole-v1"), 10_000, workers=2)
        workers = dqn.DQN.workers(engine, config, task, on_failure=on_failure)
        plan = dqn.plan(workers, config)
        before = list(islice(plan, 6))[-1]
        kill(workers.actors[1])
        after = list(islice(plan, 8))[-1]
        assert after["train/n_updates"] > before["train/n_updates"]
        [event] = engine.events
        assert event.outcome == ("restarted" if on_failure == "restart" else "dropped")
        full = before["replay/size"]
        assert after["replay/size"] == pytest.approx(full if on_failure == "restart" else full / 2, abs=8)


# What goes wrong ---------------------------------------------------------------------------------


def test_too_little_memory_is_named_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(max_size=1_000)
    replay, saved = device_replay(case), device_replay(case)
    saved.insert(Rollouts(case, 0).round())
    monkeypatch.setattr(device_storage, "_memory", lambda _: 1_000)
    told = (
        r"replay on the device needs \S+ GB, and \S+ has 1e-06 GB; reduce buffer_size, or set replay to host"
    )
    with pytest.raises(rs.RollstreamError, match=told):
        replay.insert(Rollouts(case, 0).round())
    with pytest.raises(rs.RollstreamError, match=told):
        replay.load_state_dict(saved.state_dict())


def test_rollouts_of_some_workers_are_refused_where_those_of_all_are_needed() -> None:
    with training("dqn", "inline", replay="device") as (_, workers):
        buffer = dqn.make_buffer(workers, dqn.Config(**SMALL["dqn"], replay="device"), 16)
        stored = ParallelRollouts(workers).gather_async().for_each(StoreToBuffer(buffer))
        with pytest.raises(flow.OperatorError, match=r"2 of the 4 environments.*put gather_sync\(\) before"):
            next(stored)


def test_rollouts_of_another_length_are_refused() -> None:
    [chunk] = Rollouts(Case(length=3), 0).round()
    with pytest.raises(rs.RollstreamError, match=r"a rollout has 3 steps.* created for 2 steps of 2 env"):
        device_replay(Case()).insert([chunk])


def test_a_state_of_other_settings_is_refused() -> None:
    state = device_replay(Case(max_size=40)).state_dict()
    with pytest.raises(rs.RollstreamError, match="was saved with length 22, and has 8 now; resume with the"):
        device_replay(Case()).load_state_dict(state)


def test_a_dropped_worker_leaves_its_transitions_and_the_plan_goes_on() -> None:
    case = Case(workers=2, max_size=16)
    replay, rollouts = device_replay(case), Rollouts(case, 0)
    rollouts._fails = 0
    for _ in range(4):
        replay.insert(rollouts.round())
    assert replay.size == 16
    for left in (12, 8, 8):
        replay.insert(rollouts.round()[:1])
        assert replay.size == max(left, 8)
    draw = replay.sample()
    assert draw is not None
    assert set(draw.draws % 4) == {0, 1}
