"""What is remembered is what happened, and samples come when they may, on every engine and after a death."""

import math
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from learning_runs import training
from scripts import PATIENCE, eventually
from small_envs import Scripted

import rollstream as rs
from rollstream.algos import dqn
from rollstream.engine import ActorContext, Deadlock, Deferred, Ref
from rollstream.flow import Context, Stored
from rollstream.replay import (
    ArraySpec,
    Field,
    Fifo,
    InsertRefused,
    Queue,
    RateLimiter,
    ReplayError,
    SampleRefused,
    Sequences,
    SignatureError,
    Table,
    Transitions,
)
from rollstream.replay.buffer import Chunk, ReplayBatch, ReplayBuffer, transition_buffer
from rollstream.replay.priorities import PRIORITY_EPSILON
from rollstream.replay.service import ReplayShard, ReplayShards
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.off_policy import transition_signature
from rollstream.rl.replay_operators import (
    NormalizeProbabilities,
    Replay,
    StoreToBuffer,
    UpdatePriorities,
    rollout_chunk,
)
from rollstream.rl.rollout import Rollout, rollout_for_replay
from rollstream.rl.training_step import replay_columns
from rollstream.rl.vector import NativeVector, SyncVector
from rollstream.rl.worker import RolloutWorker, WorkerSpec
from rollstream.testing import kill

ENGINES = ["inline", "threads", "processes"]
MODES = {
    "next step": AutoresetMode.NEXT_STEP,
    "same step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}


# What a worker did -------------------------------------------------------------------------------


def scripted_worker(way: str = "sync", length: int = 7, restarts: int = 0, index: int = 0) -> RolloutWorker:
    spec = WorkerSpec(
        EnvSpec(Scripted), 2, length, partial(dqn.make_policy, dqn.Config()), rollout_for_replay, seed=4
    )
    worker = RolloutWorker(spec, context=ActorContext("worker", index, 2, restarts))
    worker.set_weights(0, worker.policy.init(0))
    if way == "sync":
        assert isinstance(worker.vector, SyncVector)
    else:
        worker.vector = NativeVector(SyncVectorEnv([Scripted] * 2, copy=False, autoreset_mode=MODES[way]))
        worker.observation = worker.vector.reset([4, 5])
    return worker


def rollout_of(worker: RolloutWorker) -> Rollout:
    return worker.sample(Context("sample", ("worker", "sample", 0), None, {}))


def buffer_of(n_step: int = 1, **options: Any) -> ReplayBuffer:
    signature = transition_signature(Scripted.observation_space, Scripted.action_space)
    options = {"max_size": 1000, "min_size": 1, "batch_size": 5000} | options
    return transition_buffer(signature, 0, n_step=n_step, **options)


def items_of(buffer: ReplayBuffer) -> list[dict[str, Any]]:
    """All transitions in the order they came, by drawing so many that none is left out."""
    samples = buffer.sample()
    assert samples is not None
    _, first = np.unique(samples.keys, return_index=True)
    assert len(first) == buffer.table.size
    rows = {name: np.asarray(value)[first] for name, value in samples.columns.items()}
    return [{name: value[i] for name, value in rows.items()} for i in range(len(first))]


def expected_transitions(first: Any, actions: Any, real: Any, n_step: int) -> list[tuple[Any, ...]]:
    """What one scripted environment does, stepped by hand, in windows of n steps."""
    environment = Scripted()
    observation, _ = environment.reset(seed=round(float(first[0]) * 10))
    steps: list[tuple[Any, ...]] = []
    found: list[tuple[Any, ...]] = []

    def window(start: int) -> tuple[Any, ...]:
        own = steps[start : start + n_step]
        begins, taken, got, after, died = zip(*own, strict=True)
        return (begins[0], taken[0], got, died, () if died[-1] else after[-1])

    for action, is_real in zip(actions, real, strict=True):
        if not is_real:
            assert not steps, "a row that is no step, within an episode"
            continue
        before = tuple(np.asarray(observation, np.float32).tolist())
        observation, reward, terminated, truncated, _ = environment.step(int(action))
        after = tuple(np.asarray(observation, np.float32).tolist())
        steps.append((before, int(action), reward, after, bool(terminated)))
        if len(steps) >= n_step:
            found.append(window(len(steps) - n_step))
        if terminated or truncated:
            found += [window(start) for start in range(max(0, len(steps) - n_step + 1), len(steps))]
            (observation, _), steps = environment.reset(), []
    return found


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("way", ["sync", *MODES])
def test_what_is_remembered_is_what_the_environments_did(way: str, n_step: int) -> None:
    """Over the borders of rollouts, too, and through every kind of end."""
    worker, buffer = scripted_worker(way, length=3), buffer_of(n_step)
    store = StoreToBuffer(buffer)
    rollouts = [rollout_of(worker) for _ in range(10)]
    for rollout in rollouts:
        store(rollout)
    columns = [rollout.columns for rollout in rollouts]
    real = np.concatenate([own.get("mask", np.ones((3, 2), bool)) for own in columns])
    actions = np.concatenate([own["action"] for own in columns])
    assert (way == "next step") == (not real.all())
    expected: list[tuple[Any, ...]] = []
    for i in range(2):
        first = columns[0]["observation"][0, i]
        expected += expected_transitions(first, actions[:, i], real[:, i], n_step)
    assert len(expected) >= 40
    assert sorted(map(known_of, items_of(buffer))) == sorted(expected)
    assert store.env_steps == buffer.env_steps == real.sum()
    worker.close()


def known_of(item: dict[str, Any]) -> tuple[Any, ...]:
    """A transition as plain numbers; where it ended in a terminal state nobody looks at what is after it."""
    length = int(item["length"])
    assert not item["reward"][length:].any()
    assert not item["terminated"][length:].any()
    terminated = item["terminated"][:length].tolist()
    after = () if terminated[-1] else tuple(item["next_observation"].tolist())
    begin, rewards = tuple(item["observation"].tolist()), tuple(item["reward"][:length].tolist())
    return (begin, int(item["action"]), rewards, tuple(terminated), after)


def test_a_worker_that_was_restarted_does_not_go_on_with_an_episode() -> None:
    before, after = scripted_worker(length=4), scripted_worker(length=4, restarts=1)
    buffer = buffer_of(3)
    store = StoreToBuffer(buffer)
    for worker in (before, before, after, after):
        store(rollout_of(worker))
    items = items_of(buffer)
    for item in items:
        episode, step = item["observation"]
        if not item["terminated"].any():
            assert item["next_observation"][0] == episode
            assert item["next_observation"][1] == step + item["length"]
    assert [rollout_of(worker).after_reset for worker in (after, scripted_worker())] == [False, True]


def test_rollouts_of_two_workers_are_streams_of_their_own() -> None:
    chunks = [rollout_chunk(rollout_of(scripted_worker(index=index)), 10) for index in (0, 1)]
    assert [chunk.streams.tolist() for chunk in chunks] == [[0, 1], [2, 3]]
    assert [chunk.env_steps for chunk in chunks] == [24, 24]
    assert [chunk.columns["action"].dtype for chunk in chunks] == [np.int32, np.int32]


def test_a_row_of_rollouts_is_stored_and_its_episodes_reported() -> None:
    rollouts = [rollout_of(scripted_worker(index=index, length=20)) for index in (0, 1)]
    both, each = buffer_of(), buffer_of()
    report = StoreToBuffer(both)(rollouts)
    reports = [StoreToBuffer(each)(rollout) for rollout in rollouts]
    assert report["replay/size"] == both.table.size == each.table.size == 80
    np.testing.assert_array_equal(report["episodes"], np.concatenate([own["episodes"] for own in reports]))
    assert len(report["episodes"]) > 10


# Sampling from a buffer --------------------------------------------------------------------------


def chunk(values: Any, priorities: Any = None, **more: Any) -> Chunk:
    """One stream that sees these values; the rewards are the same, and nothing ends."""
    values = np.asarray(values, np.float32)
    columns = {
        "observation": np.stack([values, values], -1)[:, None],
        "action": np.zeros((len(values), 1), np.int32),
        "reward": values[:, None],
        "terminated": np.zeros((len(values), 1), bool),
        "truncated": np.zeros((len(values), 1), bool),
    }
    if priorities is not None:
        priorities = np.asarray(priorities, np.float64)[:, None]
    last = np.full((1, 2), values[-1] + 1, np.float32)
    return Chunk(columns, last, [], np.array([0]), priorities=priorities, **more)


def test_no_sample_comes_before_there_is_enough() -> None:
    buffer = buffer_of(min_size=10, batch_size=4)
    found = Replay(buffer)
    stored = []
    for size in range(1, 12):
        buffer.insert(chunk([size], env_steps=size))
        samples = buffer.sample()
        stored.append(samples is not None)
        if samples is not None:
            assert samples.env_steps == size
            assert samples.columns["reward"].shape == (4, 1)
    assert stored == [False] * 9 + [True] * 2
    assert next(found).env_steps == 11


def test_the_same_seed_and_number_draw_the_same() -> None:
    signature = transition_signature(Scripted.observation_space, Scripted.action_space)

    def drawn(number: int, seed: int) -> list[float]:
        buffer = transition_buffer(signature, number, max_size=99, min_size=1, batch_size=20, seed=seed)
        buffer.insert(chunk(np.arange(50)))
        samples = buffer.sample()
        assert samples is not None
        return samples.columns["reward"][:, 0].tolist()

    assert drawn(0, 1) == drawn(0, 1)
    assert len({tuple(drawn(number, seed)) for number in (0, 1) for seed in (1, 2)}) == 4


def test_items_with_large_td_errors_are_sampled_more_often_and_others_too() -> None:
    buffer = buffer_of(priority_exponent=1.0, batch_size=4000)
    buffer.insert(chunk(np.arange(10)))
    samples = buffer.sample()
    assert samples is not None
    keys, first = np.unique(samples.keys, return_index=True)
    value = samples.columns["reward"][first, 0]
    td_error = np.where(value == 3, 9.0, 1.0)
    td_error[value == 5] = 0
    report = {"priority": (keys, td_error + PRIORITY_EPSILON), "train/loss": 1.0}
    context = Context("update", ("buffer", "sample", 0), None, {})
    assert UpdatePriorities(buffer)(report, context) == {"train/loss": 1.0}
    again = buffer.sample()
    assert again is not None
    counts = np.bincount(again.columns["reward"][:, 0].astype(int), minlength=10) / 4000
    assert counts[3] == pytest.approx(9 / 17, abs=0.03)
    assert counts[5] < 0.001
    probabilities = again.columns["relative_probability"] * again.min_probability
    np.testing.assert_allclose(probabilities[again.columns["reward"][:, 0] == 3], 9 / 17, rtol=1e-4)
    assert buffer.table.sampler.total_weight == pytest.approx(17, abs=1e-4)
    assert buffer.table.sampler.total_weight > 17  # an item without any error has a chance


# Shards weigh as one -----------------------------------------------------------------------------


def weighed(weigh: NormalizeProbabilities, samples: ReplayBatch, shard: int) -> ReplayBatch:
    """A batch of a shard as the learner sees it."""
    context = Context("NormalizeProbabilities", (f"replay[{shard}]", "sample", 0), None, {})
    stored = Stored(Ref(samples), samples.min_probability)
    assert weigh(stored, context) is stored
    return replace(samples, columns=replay_columns(samples, context))


def weights_of(samples: ReplayBatch, beta: float = 0.7) -> dict[float, float]:
    """The importance weight of every item, by its reward."""
    return dict(
        zip(
            samples.columns["reward"][:, 0].tolist(),
            samples.columns["relative_probability"] ** -beta,
            strict=True,
        )
    )


@pytest.mark.parametrize("even", [True, False])
def test_two_shards_weigh_as_one_large_table(even: bool) -> None:
    random = np.random.default_rng(0)
    priorities = random.uniform(0.5, 2, (2, 20))
    if even:  # the same in all: then an item is as likely as in one table of both
        priorities[1] *= (priorities[0] ** 0.6).sum() ** (1 / 0.6) / (priorities[1] ** 0.6).sum() ** (1 / 0.6)
    else:
        priorities[1] *= 5
    shards = [buffer_of(priority_exponent=0.6) for _ in range(2)]
    for number, shard in enumerate(shards):
        shard.insert(chunk(100 * number + np.arange(20), priorities[number]))
    weigh, found = NormalizeProbabilities(), {}
    for turn in range(2):  # in the first turn the least of the second is not known yet
        for number, shard in enumerate(shards):
            samples = shard.sample()
            assert samples is not None
            seen = weighed(weigh, samples, number)
            if turn:
                found |= weights_of(seen)
    mass = priorities**0.6
    within = mass / mass.sum(1, keepdims=True)
    drawn = (mass / mass.sum() if even else within / 2).ravel()
    expected = (drawn / drawn.min()) ** -0.7
    names = [100 * number + i for number in range(2) for i in range(20)]
    np.testing.assert_allclose([found[name] for name in names], expected, rtol=1e-4)
    assert max(found.values()) == pytest.approx(1)
    if even:
        large = buffer_of(priority_exponent=0.6)
        for number in range(2):
            large.insert(chunk(100 * number + np.arange(20), priorities[number], after_reset=True))
        one = large.sample()
        assert one is not None
        same = weights_of(one)
        np.testing.assert_allclose([found[name] for name in names], [same[name] for name in names], rtol=1e-4)


def test_weighing_goes_on_from_a_saved_state() -> None:
    shard, weigh = buffer_of(priority_exponent=0.6), NormalizeProbabilities()
    shard.insert(chunk(np.arange(5), [1, 2, 3, 4, 5]))
    samples = shard.sample()
    assert samples is not None
    weighed(weigh, samples, 0)
    again = NormalizeProbabilities()
    again.load_state_dict(weigh.state_dict())
    rare = ReplayBatch(samples.columns, samples.keys, 0, samples.min_probability * 4)
    one, other = weighed(weigh, rare, 1), weighed(again, rare, 1)
    np.testing.assert_array_equal(one.columns["relative_probability"], other.columns["relative_probability"])
    np.testing.assert_allclose(
        one.columns["relative_probability"], 4 * samples.columns["relative_probability"]
    )


# Clients outside a flow --------------------------------------------------------------------------


def shard_buffer(
    number: int, rate_limiter: Any = None, windowing: Any = None, batch_size: int = 2
) -> ReplayBuffer:
    """A buffer of a shard; with a limiter, a queue."""
    signature = transition_signature(Scripted.observation_space, Scripted.action_space)
    if rate_limiter is None:
        return transition_buffer(signature, number, max_size=99, min_size=4, batch_size=batch_size)
    windowing = windowing or Transitions(1)
    table = Table(
        {**signature, "truncated": ArraySpec((), np.dtype(bool))},
        {"reward": Field("reward", "steps")},
        max_size=99,
        max_length=windowing.max_length,
        sampler=Fifo(),
        remover=Fifo(),
        rate_limiter=rate_limiter,
        max_times_sampled=1,
    )
    return ReplayBuffer(table, windowing, batch_size=batch_size)


def rewards(samples: ReplayBatch) -> list[float]:
    return samples.columns["reward"][:, 0].tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sample_is_answered_by_a_later_insert(engine: str) -> None:
    with rs.engine(engine) as opened:
        shards = ReplayShards(opened, shard_buffer, 2)
        early = [shards.actors[1].call("sample") for _ in range(2)]
        assert shards.insert(1, chunk([0, 1, 2])) == 3
        assert not any(own.done for own in early)
        assert shards.insert(0, chunk([7, 8, 9])) == 3
        assert shards.insert(3, chunk([3], env_steps=4)) == 1
        for own in early:
            samples = own.result(timeout=PATIENCE)
            assert samples.env_steps == 4
            assert set(rewards(samples)) <= {0, 1, 2, 3}
        assert set(rewards(shards.sample(1))) <= {0, 1, 2, 3}
        assert [(info.size, info.samples) for info in shards.info()] == [(3, 0), (4, 6)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sample_that_was_given_up_takes_nothing(engine: str) -> None:
    with rs.engine(engine) as opened:
        shards = ReplayShards(opened, partial(shard_buffer, rate_limiter=Queue(9)))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                shards.sample(timeout=0.01)
        assert shards.insert(0, chunk([0, 1, 2, 3])) == 4
        assert shards.info()[0].samples == 0
        assert rewards(shards.sample(timeout=PATIENCE)) == [0, 1]
        assert rewards(shards.sample(timeout=PATIENCE)) == [2, 3]
        assert shards.info()[0].size == 0


def test_a_sample_that_can_never_come_is_named_and_takes_nothing() -> None:
    with rs.engine("inline") as engine:
        shards = ReplayShards(engine, partial(shard_buffer, rate_limiter=Queue(9)))
        with pytest.raises(Deadlock, match=r"no reply to replay.sample can come"):
            shards.sample()
        shards.insert(0, chunk([0, 1]))
        assert rewards(shards.sample()) == [0, 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_chunk_that_waits_for_room_is_refused_to_who_sent_it_and_to_nobody_else(engine: str) -> None:
    with rs.engine(engine) as opened:
        shards = ReplayShards(opened, partial(shard_buffer, rate_limiter=Queue(3)))
        assert shards.insert(0, chunk([0, 1])) == 2
        wrong = chunk([2, 3])
        wrong = replace(
            wrong, columns={**wrong.columns, "reward": wrong.columns["reward"].astype(np.float64)}
        )
        late = [shards.actors[0].call("insert", own) for own in (wrong, chunk([4, 5]))]
        assert rewards(shards.sample()) == [0, 1]
        with pytest.raises(SignatureError, match="'reward' is float64"):
            late[0].result(timeout=PATIENCE)
        assert late[1].result(timeout=PATIENCE) == 2
        assert rewards(shards.sample()) == [4, 5]


def test_a_sample_waits_for_more_where_items_go_as_they_are_sampled() -> None:
    limiter = RateLimiter(1.0, 1, -math.inf, math.inf)
    with rs.engine("threads") as engine:
        shards = ReplayShards(engine, partial(shard_buffer, rate_limiter=limiter, batch_size=4))
        assert shards.insert(0, chunk([0, 1, 2])) == 3
        late = shards.actors[0].call("sample")
        assert shards.info()[0].size == 3
        assert shards.insert(0, chunk([3, 4])) == 2
        assert rewards(late.result(timeout=PATIENCE)) == [0, 1, 2, 3]


def test_batches_that_a_limiter_would_never_allow_are_refused() -> None:
    with pytest.raises(ReplayError, match=r"within 0 to 8.* never allows a batch of 9; reduce batch_size"):
        shard_buffer(0, rate_limiter=Queue(8), batch_size=9)
    assert shard_buffer(0, rate_limiter=Queue(9), batch_size=9).batch_size == 9


@pytest.mark.parametrize("engine", ENGINES)
def test_inserts_wait_for_room_and_go_on_in_order(engine: str) -> None:
    with rs.engine(engine) as opened:
        shards = ReplayShards(opened, partial(shard_buffer, rate_limiter=Queue(3)))
        assert shards.insert(0, chunk([0, 1])) == 2
        late = [shards.actors[0].call("insert", chunk([2 * i, 2 * i + 1])) for i in (1, 2)]
        assert shards.info()[0].size == 2
        assert not any(own.done for own in late)
        assert rewards(shards.sample()) == [0, 1]
        assert late[0].result(timeout=PATIENCE) == 2
        assert shards.info()[0].size == 2
        assert rewards(shards.sample()) == [2, 3]
        assert late[1].result(timeout=PATIENCE) == 2
        assert rewards(shards.sample()) == [4, 5]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_insert_that_was_given_up_stores_nothing_and_those_behind_it_go_on(engine: str) -> None:
    with rs.engine(engine) as opened:
        shards = ReplayShards(opened, partial(shard_buffer, rate_limiter=Queue(3)))
        shards.insert(0, chunk([0, 1]))
        with pytest.raises(TimeoutError):
            shards.insert(0, chunk([8, 9]), timeout=0.01)
        assert shards.insert(0, chunk([2])) == 1
        assert [rewards(shards.sample())] == [[0, 1]]
        assert shards.info()[0].size == 1
        with pytest.raises(TimeoutError):
            shards.sample(timeout=0.01)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_whoever_waits_behind_one_that_gave_up_is_served(engine: str) -> None:
    with rs.engine(engine) as opened:
        shards = ReplayShards(opened, partial(shard_buffer, rate_limiter=Queue(3)))
        shards.insert(0, chunk([0, 1]))
        [actor] = shards.actors
        actor.call("insert", chunk([8, 9]), "gives up")
        behind = actor.call("insert", chunk([2]), "waits")
        assert actor.call("cancel", "gives up").result() is True
        assert actor.call("cancel", "gives up").result() is False
        assert behind.result(timeout=PATIENCE) == 1


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_whether_an_insert_was_in_time_is_what_the_table_says(engine: str) -> None:
    """However short the time: what raises is not stored, and what is stored does not raise."""
    with rs.engine(engine) as opened:
        shards = ReplayShards(opened, shard_buffer)
        stored = 0
        for number in range(50):
            try:
                stored += shards.insert(0, chunk([number]), timeout=0.0)
            except TimeoutError:
                assert shards.info()[0].inserts == stored
        assert shards.info()[0].inserts == stored


def test_what_was_not_stored_is_not_gone_on_from() -> None:
    """Neither its own first observation, nor what was before it."""
    shard = ReplayShard(lambda _: buffer_of(n_step=1, batch_size=2), context=ActorContext("replay", 0, 1))
    shard.buffer.table.rate_limiter = Queue(3)
    with pytest.raises(InsertRefused):
        shard.buffer.insert(chunk([0, 1, 2, 3]))
    assert shard.buffer.table.storage.num_used == 0
    assert shard.insert(chunk([4, 5])) == 2
    assert isinstance(shard.insert(chunk([6, 7]), "late"), Deferred)
    assert shard.cancel("late")
    assert not shard.cancel("late")
    shard.sample()
    assert shard.insert(chunk([8, 9])) == 2
    columns = shard.buffer.table.sample(2, np.random.default_rng(0)).columns
    seen = columns["observation"][:, 0]
    np.testing.assert_array_equal(columns["next_observation"][:, 0], seen + 1)
    infos = shard.info()
    assert (infos.size, infos.episodes) == (4, 2)


def test_a_queue_counts_items_not_steps() -> None:
    """Of four steps one sequence comes; of one step two transitions of three steps may."""
    with rs.engine("inline") as engine:
        shards = ReplayShards(
            engine, partial(shard_buffer, rate_limiter=Queue(1), windowing=Sequences(4), batch_size=1)
        )
        assert shards.insert(0, chunk([0, 1, 2, 3]), timeout=1) == 1
        late = shards.actors[0].call("insert", chunk([4, 5, 6, 7]))
        assert shards.sample().columns["reward"].tolist() == [[0, 1, 2, 3]]
        assert late.result() == 1
        assert shards.sample().columns["reward"].tolist() == [[4, 5, 6, 7]]

    with rs.engine("inline") as engine:
        shards = ReplayShards(
            engine, partial(shard_buffer, rate_limiter=Queue(2), windowing=Transitions(3), batch_size=1)
        )
        assert shards.insert(0, chunk([0, 1])) == 0
        assert shards.insert(0, chunk([2])) == 1
        end = chunk([3])
        end.columns["terminated"][:] = True
        late = shards.actors[0].call("insert", end)  # completes three
        assert not late.done
        with pytest.raises(TimeoutError):
            shards.insert(0, end, timeout=0.01)
        assert shards.sample().columns["reward"].tolist() == [[0, 1, 2]]
        assert shards.info()[0].size == 0


def test_priorities_of_an_earlier_incarnation_are_ignored() -> None:
    make = partial(buffer_of, priority_exponent=1.0)
    shards = [
        ReplayShard(lambda _: make(), context=ActorContext("replay", 0, 1, restarts)) for restarts in (0, 1)
    ]
    for shard in shards:
        shard.insert(chunk(np.arange(5)))
    samples = shards[0].sample()
    assert isinstance(samples, ReplayBatch)
    new = samples.keys, np.full(len(samples.keys), 50.0)
    shards[1].update_priorities(new, shards[0].state_dict()["incarnation"])
    assert shards[1].buffer.table.sampler.total_weight == 5
    shards[1].update_priorities(new, shards[1].state_dict()["incarnation"])
    assert shards[1].buffer.table.sampler.total_weight == 250


def test_a_shard_goes_on_from_its_saved_state() -> None:
    one, other = (ReplayShard(shard_buffer, context=ActorContext("replay", 0, 1)) for _ in range(2))
    one.insert(chunk(np.arange(9)))
    one.sample()
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        first, second = one.sample(), other.sample()
        assert isinstance(first, ReplayBatch)
        assert isinstance(second, ReplayBatch)
        np.testing.assert_array_equal(first.keys, second.keys)
        assert rewards(first) == rewards(second)


def test_what_may_not_be_sampled_is_refused() -> None:
    buffer = buffer_of(min_size=3)
    buffer.insert(chunk([1]))
    with pytest.raises(SampleRefused):
        buffer.table.sample(2, np.random.default_rng(0))


# Deaths ------------------------------------------------------------------------------------------

APEX = {"num_envs": 4, "rollout_length": 10, "batch_size": 16, "hidden": (8,), "n_step": 3}
APEX |= {"samples_per_insert": 2.0, "report_every": 20, "learning_starts": 160, "target_update_interval": 1}


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_shard_that_is_killed_comes_back_empty_and_the_plan_goes_on(shards: int) -> None:
    with training("apex", "processes", replay_shards=shards, **APEX) as (plan, workers):
        actors = [actor for name, actor in workers.engine.actors.items() if name.startswith("replay")]

        def first_is_known(report: dict[str, Any]) -> bool:
            """Whether more is known of than the others have: of that, 20 at least are the first's."""
            others = sum(actor.call("info").result().size for actor in actors[1:])
            return report.get("replay/size", 0) >= others + 20

        report = next(own for own in islice(plan, 5000) if first_is_known(own))
        has_jax = eval("lambda _: 'jax' in __import__('sys').modules")  # by value: without this module
        assert not any(actor.apply(has_jax).result() for actor in actors)
        assert report["replay/lost_items"] == 0
        kill(actors[0])
        eventually(lambda: workers.engine.events)
        updates = workers.learner.version
        report = next(own for own in islice(plan, 5000) if "replay/lost_items" in own)  # at once
        [event] = workers.engine.events
        assert (event.outcome, event.actor) == ("restarted", actors[0].name)
        assert report["replay/lost_items"] >= 20
        learned = (own for own in islice(plan, 5000) if "train/loss" in own)
        report = next(own for own in learned if workers.learner.version > updates + 6)
        assert np.isfinite(report["train/loss"])
        info = actors[0].call("info").result()
        assert info.size == info.inserts > 0  # all of it of this life


class Laborious(Scripted):
    """Takes its time."""

    def step(self, action: Any) -> Any:
        for _ in range(20):
            np.linalg.qr(np.ones((30, 30)))
        return super().step(action)


@pytest.mark.parametrize(
    ("way", "shards"),
    [
        ("slow workers", 1),
        pytest.param("slow learner", 2, marks=pytest.mark.slow),
        pytest.param("killed worker", 2, marks=pytest.mark.slow),
    ],
)
def test_transitions_are_learned_from_as_often_as_configured_whoever_is_slow_or_dies(
    way: str, shards: int
) -> None:
    """What is reported is within what the limiter lets either side be ahead, and what is under way."""
    ratio, chunk_steps, batch = 2.0, 20, APEX["batch_size"]
    settings: dict[str, Any] = (
        APEX
        | {"n_step": 1, "replay_shards": shards}
        | ({"hidden": (512, 512)} if way == "slow learner" else {})
    )
    environment = Laborious if way == "slow workers" else Scripted
    with training("apex", "processes", environment, **settings) as (plan, workers):
        report = list(islice(plan, 25))[-1]
        if way == "killed worker":
            kill(workers.actors[0])
            eventually(lambda: workers.engine.events)
            report = list(islice(plan, 25))[-1]
            assert [event.outcome for event in workers.engine.events] == ["restarted"]
        while "replay/samples_per_insert" not in report:
            report = next(plan)
        inserted = report["time/total_timesteps"] - settings["learning_starts"]
        ahead = max(1.0, ratio * chunk_steps / batch)  # batches: the limiter's error buffer
        under_way = 2 * 2 * chunk_steps * ratio + 2 * batch
        tolerance = (ahead * batch + under_way) / inserted
        assert inserted > 300
        assert report["replay/samples_per_insert"] == pytest.approx(ratio, abs=tolerance)
        assert tolerance < ratio


@pytest.mark.slow
def test_what_a_shard_had_is_lost_once() -> None:
    """However many empty answers it gives before it has something again, and the other goes on meanwhile."""
    with training("apex", "processes", replay_shards=2, **APEX) as (plan, workers):
        reports = [next(plan) for _ in range(20)]
        assert {report.get("replay/lost_items", 0) for report in reports} == {0}
        shards = [workers.engine.actors[f"replay[{number}]"] for number in range(2)]
        had = shards[1].call("info").result()
        kill(shards[1])
        trained = (report for report in islice(plan, 5000) if "replay/lost_items" in report)
        first = next(report for report in trained if report["replay/lost_items"])
        reports = list(islice(trained, 20))
        [lost] = {report["replay/lost_items"] for report in [first, *reports]}
        stored_since = 100  # at most: the limiter lets either side be ahead, and chunks are in flight
        assert had.size - stored_since <= lost <= had.size, "as much as it had, when it was last sampled"
        sizes = [shard.call("info").result().size for shard in shards]
        assert reports[-1]["replay/size"] <= sum(sizes)
        assert had.size > stored_since
        known = (report["replay/size"] for report in trained)
        assert any(size >= sum(sizes) - stored_since for size in known), "it counts again once it is sampled"


@pytest.mark.slow
def test_the_only_shard_may_begin_anew_when_inserts_have_to_wait_for_samples() -> None:
    """It has nothing to sample from, and is told nothing before it is sampled from."""
    with training("apex", "processes", **APEX) as (plan, workers):
        versions, learner = [], workers.remote_learner
        receive = learner.receive

        def receive_and_kill(version: int, weights: Any) -> None:
            receive(version, weights)
            if version in (11, 14, 15, 18):
                kill(workers.engine.actors["replay"])
            versions.append(version)

        learner.receive = receive_and_kill
        for _ in range(40):
            next(plan)
    assert versions[-1] > 60


@pytest.mark.slow
def test_windows_that_are_longer_than_rollouts_do_not_stop_the_plan() -> None:
    settings = APEX | {"rollout_length": 1, "n_step": 6, "learning_starts": 8, "samples_per_insert": 16.0}
    with training("apex", "inline", **settings) as (plan, workers):
        for _ in range(40):
            next(plan)
        assert workers.learner.version > 20
