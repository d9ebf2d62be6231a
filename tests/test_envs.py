"""Environments of every kind look alike to a worker, and what it records of them is what happened."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from small_envs import ENDINGS, Samples, Scripted, sampled, worker_of

from rollstream.engine import RollstreamError
from rollstream.flow import Context
from rollstream.rl.env_checks import BadEnvironment
from rollstream.rl.env_spec import EnvSpec, UnknownEnvironment
from rollstream.rl.env_state import UnknownState, load_environments, saved_environments
from rollstream.rl.frame_stack import FrameStack
from rollstream.rl.gae import add_gae
from rollstream.rl.networks import Encoder, flat_features
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.spaces import SpaceError, is_image, take
from rollstream.rl.vector import NativeVector, SyncVector, Vector, actions_for
from rollstream.rl.worker import RolloutWorker, WorkerSpec
from rollstream.state_codec import decode_state, encode_state
from rollstream.training.evaluation import Evaluator
from rollstream.training.inference import TrainedPolicy

Make = Callable[[], gymnasium.Env[Any, Any]]
MODES = {
    "next step": AutoresetMode.NEXT_STEP,
    "same step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}
WAYS = ["sync", *MODES]


def vector_of(way: str, make: Make, count: int) -> Vector:
    """Plain environments side by side: ours, or Gymnasium's with its own way to begin episodes."""
    if way == "sync":
        return SyncVector(make, count)
    return NativeVector(SyncVectorEnv([make] * count, copy=False, autoreset_mode=MODES[way]))


@pytest.fixture
def scripted_id(request: pytest.FixtureRequest) -> Iterator[str]:
    """The scripted environment under a name, with a vector environment of the asked-for way."""

    def vector(num_envs: int) -> SyncVectorEnv:
        return SyncVectorEnv([Scripted] * num_envs, copy=False, autoreset_mode=MODES[request.param])

    gymnasium.register("Scripted-v0", Scripted, vector_entry_point=vector)  # pyright: ignore[reportArgumentType]
    yield "Scripted-v0"
    del gymnasium.registry["Scripted-v0"]


class Known(eqx.Module):
    """A value that anybody can compute: 3 times the first number and the square of the second."""

    slope: Any
    outputs: int = eqx.field(static=True)

    def __call__(self, observation: Any) -> tuple[Any, Any]:
        return jnp.zeros(self.outputs), self.slope * observation[0] + observation[1] ** 2


def known(space: Any, distribution: Any, random: Any) -> Known:
    return Known(np.float32(3.0), distribution.output_size)


def value_of(observation: Any) -> float:
    return 3.0 * float(observation[0]) + float(observation[1]) ** 2


# Ways to begin an episode ------------------------------------------------------------------------


def episodes_of(vector: Vector, steps: int) -> list[list[Any]]:
    """Of each environment its whole episodes: observations, rewards, final observation, how they ended."""
    observation = vector.reset([4, 5, 6])
    open_ones: list[list[Any]] = [[] for _ in range(vector.count)]
    whole: list[list[Any]] = [[] for _ in range(vector.count)]
    for _ in range(steps):
        step = vector.step(np.array([len(own) % 3 for own in open_ones]))
        final = dict(step.final_observations)
        for i in range(vector.count):
            if step.mask is not None and not step.mask[i]:
                assert not open_ones[i], "a step that only resets, within an episode"
                assert step.reward[i] == 0
                continue
            open_ones[i].append((observation[i].tolist(), float(step.reward[i])))
            assert (i in step.ended) == bool(step.terminated[i] or step.truncated[i])
            if i in step.ended:
                last = final[i] if i in final else step.observation[i]
                whole[i].append(
                    [open_ones[i], np.array(last).tolist(), step.terminated[i], step.truncated[i]]
                )
                open_ones[i] = []
        observation = step.observation
    vector.close()
    return whole


def scripted_episodes(seed: int, count: int) -> list[Any]:
    """What a single scripted environment does, written by hand."""
    episodes = []
    for number in range(seed, seed + count):
        length, how = ENDINGS[number % len(ENDINGS)]
        steps = [
            ([float(np.float32(number / 10)), float(step)], step % 3 + 0.25 * (step + 1))
            for step in range(length)
        ]
        last = [float(np.float32(number / 10)), float(length)]
        episodes.append([steps, last, how in ("terminated", "both"), how in ("truncated", "both")])
    return episodes


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_reset_gives_the_same_episodes(way: str) -> None:
    seen = episodes_of(vector_of(way, Scripted, 3), steps=30)
    for seed, own in zip((4, 5, 6), seen, strict=True):
        assert len(own) >= 8
        whole = json.loads(json.dumps(own, default=float))
        assert whole == json.loads(json.dumps(scripted_episodes(seed, len(own))))


def test_environments_may_write_into_one_array() -> None:
    assert episodes_of(SyncVector(partial(Scripted, reuses=True), 3), 30) == episodes_of(
        SyncVector(Scripted, 3), 30
    )


@pytest.mark.parametrize("way", WAYS)
def test_steps_that_only_reset_are_masked(way: str) -> None:
    vector = vector_of(way, Scripted, 2)
    vector.reset([0, 1])
    ended = np.zeros(2, bool)
    for _ in range(12):
        step = vector.step(np.zeros(2, int))
        expected = ~ended if way == "next step" and ended.any() else None
        assert (step.mask is None) == (expected is None)
        if expected is not None:
            np.testing.assert_array_equal(step.mask, expected)
        ended = np.logical_or(step.terminated, step.truncated)
        first = [i for i in range(2) if step.observation[i][1] == 0]
        assert sorted(step.started) == first
    assert vector.has_reset_steps == (way == "next step")


def resets_of(count: int, steps: int) -> list[list[int]]:
    """When environments of "next step" only reset, for each from its seed on."""
    found: list[list[int]] = []
    for seed in range(count):
        resets, t = [], 0
        for number in range(seed, seed + steps):
            t += ENDINGS[number % len(ENDINGS)][0] + 1
            resets.append(t - 1)
        found.append([t for t in resets if t < steps])
    return found


# Advantages --------------------------------------------------------------------------------------


def unprocessed(worker: RolloutWorker) -> Any:
    """What the worker's postprocessing returns."""
    return worker._postprocess(worker.weights, worker._rollout())  # pyright: ignore[reportOptionalCall]


def expected_rows(first: Any, actions: Any, mask: Any) -> list[dict[str, Any]]:
    """What one scripted environment gives in a row of batches, stepped by hand."""
    environment = Scripted()
    observation, _ = environment.reset(seed=round(float(first[0]) * 10))
    rows: list[dict[str, Any]] = []
    total, length = 0.0, 0
    for action, is_step in zip(actions, mask, strict=True):
        if not is_step:
            rows.append({"mask": False})
            continue
        after, reward, terminated, truncated, _ = environment.step(action)
        total, length = total + reward, length + 1
        ended = terminated or truncated
        rows.append(
            {
                "mask": True,
                "observation": observation,
                "reward": reward,
                "value": value_of(observation),
                "next_value": 0.0 if terminated else value_of(after),
                "terminated": terminated,
                "truncated": truncated,
                "episode_return": total if ended else np.nan,
                "episode_length": length if ended else np.nan,
            }
        )
        observation = after
        if ended:
            (observation, _), total, length = environment.reset(), 0.0, 0
    return rows


def with_expected_advantages(rows: list[dict[str, Any]], gamma: float, gae_lambda: float) -> None:
    """Generalized advantages of one batch by their definition: discounted errors until the episode's end."""
    for start, row in enumerate(rows):
        if not row["mask"]:
            continue
        advantage, weight = 0.0, 1.0
        for later in rows[start:]:
            advantage += weight * (later["reward"] + gamma * later["next_value"] - later["value"])
            weight *= gamma * gae_lambda
            if later["terminated"] or later["truncated"]:
                break
        row["advantage"] = advantage
        row["value_target"] = advantage + row["value"]


@pytest.mark.parametrize("scripted_id", list(MODES), indirect=True)
@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not(
    scripted_id: str, vectorization: Any
) -> None:
    gamma, gae_lambda, length = 0.9, 0.8, 7

    def add_unfilled_gae(policy: ActorCriticPolicy) -> Any:
        """As a list, so that the worker leaves steps that only reset as they are."""
        add = add_gae(policy, gamma=gamma, gae_lambda=gae_lambda)
        return lambda weights, rollout: [add(weights, rollout)]

    spec = WorkerSpec(
        EnvSpec(scripted_id, vectorization=vectorization),
        num_envs=3,
        rollout_length=length,
        policy=partial(ActorCriticPolicy, network=known),
        postprocess=add_unfilled_gae,
        reward_norm_gamma=gamma,
    )
    worker = worker_of(spec)
    batches = [unprocessed(worker)[0] for _ in range(4)]
    for i in range(3):
        actions = np.concatenate([batch["action"][:, i] for batch in batches])
        mask = np.concatenate([batch.get("mask", np.ones((length, 3), bool))[:, i] for batch in batches])
        first = batches[0]["observation"][0, i]
        rows = expected_rows(first, actions, mask)
        for number, batch in enumerate(batches):
            own = rows[number * length : (number + 1) * length]
            with_expected_advantages(own, gamma, gae_lambda)
            for t, row in enumerate(own):
                for name in row.keys() - {"mask", "next_value"}:
                    np.testing.assert_allclose(
                        batch[name][t, i], row[name], rtol=1e-5, err_msg=f"{name} at {number}, {t}, {i}"
                    )
                if not row["mask"]:
                    assert np.isnan(batch["episode_return"][t, i])
                    assert not batch["terminated"][t, i]
                    assert not batch["truncated"][t, i]
    worker.close()


@pytest.mark.parametrize("scripted_id", ["next step"], indirect=True)
@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_discounted_returns_start_over_with_each_episode(scripted_id: str, vectorization: Any) -> None:
    environment = EnvSpec(scripted_id, vectorization=vectorization)
    policy = partial(ActorCriticPolicy, network=known)
    worker = worker_of(
        WorkerSpec(environment, num_envs=2, rollout_length=20, policy=policy, reward_norm_gamma=0.5)
    )
    batch = worker._rollout().columns
    for i in range(2):
        total = 0.0
        for t in range(20):
            total = total * 0.5 + batch["reward"][t, i]
            assert batch["discounted_return"][t, i] == pytest.approx(total, rel=1e-5)
            if batch["terminated"][t, i] or batch["truncated"][t, i]:
                total = 0.0
    worker.close()


def test_steps_that_only_reset_are_not_counted() -> None:
    class Counting:
        def note(self, **numbers: float) -> None:
            self.steps = numbers["steps"]

    context: Any = Counting()
    worker = worker_of(scripted_spec(20))
    worker.vector = vector_of("next step", Scripted, 2)
    worker.observation = worker.vector.reset([0, 1])
    worker.sample(context)
    assert context.steps == 40 - sum(len(own) for own in resets_of(2, 20)) < 40
    worker.close()


def scripted_spec(length: int, **more: Any) -> WorkerSpec:
    policy = more.pop("policy", partial(ActorCriticPolicy, network=known))
    return WorkerSpec(EnvSpec(Scripted, **more), num_envs=2, rollout_length=length, policy=policy)


# Memory ------------------------------------------------------------------------------------------


class Counting(ActorCriticPolicy):
    """Remembers how many steps it has made in an episode, and acts by that."""

    def initial_state(self, size: int) -> Any:
        return (np.zeros(size, np.int32),)

    def step(self, weights: Any, observation: Any, state: Any, noise: Any) -> tuple[Any, Any]:
        return state[0] % 3, (state[0] + 1,)


@pytest.mark.parametrize("way", WAYS)
def test_a_policy_forgets_between_episodes(way: str) -> None:
    worker = worker_of(scripted_spec(25, policy=partial(Counting, network=known)))
    worker.vector = vector_of(way, Scripted, 2)
    worker.observation = worker.vector.reset([0, 1])
    batch = worker._rollout().columns
    mask = batch.get("mask", np.ones((25, 2), bool))
    np.testing.assert_array_equal((batch["action"] % 3)[mask], (batch["observation"][..., 1] % 3)[mask])
    worker.close()


# Spaces ------------------------------------------------------------------------------------------


BOX = spaces.Box(-1, 1, (2, 3), np.float32)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-1, 1, (3,), np.float64),
    "number": spaces.Box(-1, 1, (), np.float32),
    "matrix": BOX,
    "discrete": spaces.Discrete(4),
    "discrete from 2": spaces.Discrete(4, start=2),
    "multi discrete": spaces.MultiDiscrete([3, 2], start=[1, -1]),
    "multi binary": spaces.MultiBinary(5),
    "image": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "dict": spaces.Dict(
        {"z": spaces.Discrete(3), "a": BOX, "in": spaces.Dict({"one": spaces.MultiBinary(2)})}
    ),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Tuple([BOX, spaces.Box(0, 9, (2,), np.int64)])]),
}


def samples_worker(observations: Any, length: int = 6, **more: Any) -> tuple[RolloutWorker, list[Samples]]:
    """A worker of two environments that keep what they showed and were given."""
    made: list[Samples] = []

    def make() -> Samples:
        made.append(Samples(observations, **more))
        return made[-1]

    return worker_of(WorkerSpec(EnvSpec(make), 2, length, ActorCriticPolicy)), made


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, tuple):
        for part, its in zip(one, other, strict=True):
            assert_same(part, its)
    else:
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6)


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_observations_of_every_space_are_recorded_as_shown(kind: str) -> None:
    worker, made = samples_worker(OBSERVATIONS[kind])
    batch = sampled(worker)
    for i, environment in enumerate(made):
        shown = environment.seen[:4] + environment.seen[5:7]  # the fifth was the end of an episode
        for t in range(6):
            assert_same(take(batch["observation"], (t, i)), shown[t])
    policy: Any = worker.policy
    evaluate = jax.jit(policy.evaluate_actions)
    log_prob, entropy, value = evaluate(worker.weights, batch["observation"], batch["action"])
    assert log_prob.shape == entropy.shape == value.shape == (6, 2)
    assert np.isfinite(value).all()
    assert len(np.unique(np.asarray(value).round(6))) > 3, "a value does not depend on what is seen"
    for t, i in ((0, 0), (5, 1)):
        alone = (take(batch[name], (slice(t, t + 1), i)) for name in ("observation", "action"))
        np.testing.assert_allclose(evaluate(worker.weights, *alone).value, value[t, i : i + 1], rtol=1e-4)


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (spaces.Discrete(3, start=5), 6, [0, 1, 0]),
        (spaces.MultiDiscrete([3, 2]), [2, 0], [0, 0, 1, 1, 0]),
        (spaces.MultiDiscrete([3, 2], start=[1, -1]), [3, -1], [0, 0, 1, 1, 0]),
        (spaces.MultiDiscrete(np.array([[2, 2], [2, 2]])), [[0, 1], [1, 0]], [1, 0, 0, 1, 0, 1, 1, 0]),
        (spaces.MultiBinary((2, 2)), [[0, 1], [1, 1]], [0, 1, 1, 1]),
        (spaces.Box(-9, 9, (2, 1)), [[2.5], [-1]], [2.5, -1]),
    ],
)
def test_observations_become_vectors(space: Any, value: Any, expected: list[float]) -> None:
    np.testing.assert_array_equal(flat_features(space, jnp.asarray(value)), expected)


def test_parts_of_an_observation_are_joined_and_a_mask_is_not_looked_at() -> None:
    space = spaces.Dict(
        {"b": spaces.Discrete(2), "a": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(4)}
    )
    encoder = Encoder(space, np.random.default_rng(0))
    one = {"b": jnp.int32(1), "a": jnp.array([0.5, -0.5]), "action_mask": jnp.ones(4)}
    assert sorted(np.asarray(encoder(one)).tolist()) == [-0.5, 0.0, 0.5, 1.0]
    assert encoder.size == 4


def test_images_may_have_their_channels_first() -> None:
    random = np.random.default_rng(0)
    image = random.integers(0, 255, (40, 36, 2), dtype=np.uint8)
    last = Encoder(spaces.Box(0, 255, (40, 36, 2), np.uint8), np.random.default_rng(0))
    first = Encoder(spaces.Box(0, 255, (2, 40, 36), np.uint8), np.random.default_rng(0))
    np.testing.assert_allclose(last(image), first(np.moveaxis(image, -1, 0)), rtol=1e-5)


def test_spaces_that_cannot_be_learned_with_are_named() -> None:
    odd = spaces.Dict({"ok": spaces.Discrete(2), "words": spaces.Tuple([spaces.Text(3)])})
    with pytest.raises(
        SpaceError, match=r"the observation space\['words'\]\[0\] is Text.*Wrap the environment"
    ):
        EnvSpec(lambda: Samples(odd)).make(1)
    with pytest.raises(SpaceError, match=r"of type Discrete, MultiDiscrete, MultiBinary, Box, and .* Text"):
        ActorCriticPolicy(BOX, spaces.Text(3))


EMPTY = {
    "only a mask": spaces.Dict({"action_mask": spaces.MultiBinary(2)}),
    "no parts": spaces.Dict({}),
    "no numbers": spaces.Box(0, 1, (0,)),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_a_space_with_nothing_to_observe_is_refused(kind: str) -> None:
    with pytest.raises(SpaceError, match=r"has nothing to observe; add a part, such as a constant"):
        EnvSpec(lambda: Samples(EMPTY[kind])).make(1)


# Actions -----------------------------------------------------------------------------------------


ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "discrete from -1": spaces.Discrete(3, start=-1),
    "multi discrete": spaces.MultiDiscrete([3, 2]),
    "multi discrete from 4": spaces.MultiDiscrete([3, 2], start=[4, 0]),
    "multi discrete matrix": spaces.MultiDiscrete(np.array([[3, 2], [2, 4]])),
    "box": spaces.Box(-0.1, 0.2, (2,), np.float32),
    "box of doubles": spaces.Box(np.array([-0.1, -9]), np.array([0.2, 9]), dtype=np.float64),
    "box matrix": spaces.Box(-0.1, 0.1, (2, 2), np.float32),
    "box of bytes": spaces.Box(200, 255, (2,), np.uint8),
    "multi binary": spaces.MultiBinary(3),
    "multi binary matrix": spaces.MultiBinary([2, 3]),
}


@pytest.mark.parametrize("way", ["sync", "next step"])
@pytest.mark.parametrize("kind", ACTIONS)
def test_environments_are_given_actions_of_their_space(kind: str, way: str) -> None:
    space = ACTIONS[kind]
    made: list[Samples] = []

    def make() -> Samples:
        made.append(Samples(spaces.Box(-1, 1, (2,)), space))
        return made[-1]

    policy = ActorCriticPolicy(spaces.Box(-1, 1, (2,)), space)
    vector = vector_of(way, make, 2)
    vector.reset([0, 1])
    outputs = jnp.zeros((4, 2, policy.distribution.output_size))
    random = np.random.default_rng(0)
    actions = np.asarray(policy.distribution.sample(outputs, policy.noise(random, 4, 2)))
    for action in actions:
        vector.step(action)
    taken = np.stack([environment.taken for environment in made], axis=1)
    if isinstance(space, spaces.Box):
        whole = np.issubdtype(space.dtype, np.integer)
        clipped = np.clip(actions, space.low, space.high)
        np.testing.assert_allclose(taken, np.rint(clipped) if whole else clipped, rtol=1e-6)
        assert len(np.unique(taken)) > 2
        assert (taken != actions).any(), "nothing was clipped"
        assert taken.dtype == space.dtype
    else:
        start: Any = getattr(space, "start", 0)
        np.testing.assert_array_equal(taken, actions.reshape(taken.shape) + start)
    vector.close()


@pytest.mark.parametrize("whole", [True, False])
def test_actions_of_whole_numbers_are_the_nearest_ones(whole: bool) -> None:
    taken = actions_for(spaces.Box(-3, 3, (1,), np.int64), whole=whole)(
        np.array([[-0.6], [0.4], [1.7], [9], [-9]])
    )
    assert taken.dtype == np.int64
    assert taken.ravel().tolist() == [-1, 0, 2, 3, -3]


def test_the_batch_keeps_actions_as_the_policy_drew_them() -> None:
    worker, made = samples_worker(spaces.Box(-1, 1, (2,)), action_space=ACTIONS["box"])
    batch = sampled(worker)
    taken = np.stack([environment.taken for environment in made], axis=1)
    assert (np.abs(batch["action"]) > 0.2).any()
    np.testing.assert_allclose(taken, actions_for(ACTIONS["box"])(batch["action"]))


MASKS: dict[str, tuple[spaces.Space[Any], list[Any]]] = {
    "discrete": (
        spaces.Discrete(4),
        [np.array(mask, np.int8) for mask in ([1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 0, 1])],
    ),
    "multi discrete": (
        spaces.MultiDiscrete([3, 2]),
        [
            (np.array(one, np.int8), np.array(two, np.int8))
            for one, two in (([1, 0, 1], [0, 1]), ([0, 1, 0], [1, 1]), ([1, 1, 1], [1, 0]))
        ],
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MASKS)
def test_actions_that_are_not_legal_are_never_taken(kind: str, way: str) -> None:
    """The environment checks each: its mask is another one every step."""
    actions, masks = MASKS[kind]
    make = partial(Samples, spaces.Box(-1, 1, (2,)), actions, masks, odd_length=5)
    worker = worker_of(WorkerSpec(EnvSpec(make), 2, 30, ActorCriticPolicy))
    worker.vector = vector_of(way, make, 2)
    worker.observation = worker.vector.reset([0, 1])
    batch = worker._rollout().columns
    mask = batch.get("mask", np.ones((30, 2), bool))
    seen = batch["observation"]["action_mask"]
    expected = [np.concatenate(mask) if isinstance(mask, tuple) else mask for mask in masks]
    for i in range(2):
        step = 0
        for t in np.flatnonzero(mask[:, i]):
            np.testing.assert_array_equal(seen[t, i], expected[step % 3])
            step = 0 if step == (3, 4)[i] else step + 1
    worker.close()


def test_the_undecidedness_of_masked_policies_is_that_of_legal_actions() -> None:
    actions, masks = MASKS["multi discrete"]
    worker, _ = samples_worker(spaces.Box(-1, 1, (2,)), action_space=actions, masks=masks)
    policy: Any = worker.policy
    weights = {name: 0 * value for name, value in worker.weights.items()}  # all legal actions are as likely
    batch = sampled(worker)
    _, entropy, _ = policy.evaluate_actions(weights, batch["observation"], batch["action"])
    legal = batch["observation"]["action_mask"]
    expected = np.log(legal[..., :3].sum(-1)) + np.log(legal[..., 3:].sum(-1))
    np.testing.assert_allclose(entropy, expected, atol=1e-6)


# Frames and rewards ------------------------------------------------------------------------------


def newest_of(history: list[Any], count: int) -> list[Any]:
    """The last few; at the beginning, the first one several times."""
    return ([history[0]] * count + history)[-count:]


@pytest.mark.parametrize("way", WAYS)
def test_stacked_frames_are_of_one_episode(way: str) -> None:
    vector = FrameStack(vector_of(way, Scripted, 2), 3)
    assert vector.observation_space.shape == (6,)
    observation = vector.reset([0, 1])
    history = [[own[-2:].tolist()] for own in observation]
    for _ in range(20):
        for i, own in enumerate(observation):
            np.testing.assert_array_equal(own.reshape(3, 2), newest_of(history[i], 3))
        step = vector.step(np.zeros(2, int))
        for i, last in step.final_observations:
            assert last[-1] == len(history[i]), "the final observation is the newest frame"
            np.testing.assert_array_equal(last.reshape(3, 2)[:2], newest_of(history[i], 2))
        for i, own in enumerate(step.observation):
            newest = own[-2:].tolist()
            history[i] = [newest] if i in step.started else [*history[i], newest]
        observation = step.observation
    vector.close()


IMAGES = {
    "channels last": ((10, 11, 3), (10, 11, 9), 2),
    "channels first": ((3, 10, 11), (9, 10, 11), 0),
    "grey": ((10, 11), (10, 11, 3), 2),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_stacked_images_are_images_of_more_channels(kind: str) -> None:
    shape, stacked, axis = IMAGES[kind]
    made: list[Samples] = []

    def make() -> Samples:
        made.append(Samples(spaces.Box(0, 255, shape, np.uint8)))
        return made[-1]

    def joined(images: list[Any]) -> Any:
        return np.stack(images, axis) if kind == "grey" else np.concatenate(images, axis)

    vector = EnvSpec(make, frame_stack=3).make(1)
    assert is_image(vector.observation_space)
    assert vector.observation_space.shape == stacked
    policy: Any = Frames()
    acting = TrainedPolicy(policy, {}, vector.observation_space, spaces.Discrete(2), frame_stack=3)
    observation = vector.reset([0])
    [environment] = made
    for _ in range(3):
        np.testing.assert_array_equal(observation[0], joined(newest_of(environment.seen, 3)))
        acting.act(environment.seen[-1])
        np.testing.assert_array_equal(policy.seen, observation)
        observation = vector.step(np.zeros(1, int)).observation
    end = vector.step(np.zeros(1, int))
    np.testing.assert_array_equal(end.final_observations[0][1], joined(environment.seen[2:5]))
    np.testing.assert_array_equal(end.observation[0], joined(environment.seen[5:] * 3))


class Frames:
    """Keeps what it is shown."""

    jit = False

    def initial_state(self, size: int) -> Any:
        return ()

    def step(self, weights: Any, observation: Any, state: Any, noise: Any) -> Any:
        self.seen = observation
        return np.zeros(1, int), state


@pytest.mark.parametrize("space", [spaces.Discrete(2), spaces.Box(-1, 1, ())])
def test_only_arrays_of_numbers_can_be_stacked(space: Any) -> None:
    with pytest.raises(
        UnknownEnvironment, match="only Box observations can be stacked, and the observation space of"
    ):
        EnvSpec(lambda: Samples(space), frame_stack=2).make(1)


def test_more_frames_than_an_image_has_rows_are_refused() -> None:
    make = partial(Samples, spaces.Box(0, 255, (10, 11, 3), np.uint8))
    with pytest.raises(SpaceError, match=r"images of shape \(10, 11, 3\) have more channels .*; stack fewer"):
        EnvSpec(make, frame_stack=4).make(1)


def test_clipped_rewards_are_learned_from_and_true_returns_recorded() -> None:
    def make() -> Samples:
        return Samples(spaces.Box(-1, 1, (2,)), reward=-2.5)

    batch = sampled(worker_of(WorkerSpec(EnvSpec(make), 2, 8, ActorCriticPolicy, clip_rewards=True)))
    assert (batch["reward"] == -1).all()
    returns = batch["episode_return"]
    assert (returns[~np.isnan(returns)] == -10).all()
    assert (batch["episode_length"][~np.isnan(returns)] == 4).all()
    assert (~np.isnan(returns)).sum() == 4


# Names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Cartpole-v1", r"there is no environment 'Cartpole-v1' .did you mean CartPole-v1"),
        ("CartPole-v7", r"there is no environment 'CartPole-v7' .did you mean CartPole-v1"),
        ("Nothing of the kind", r"there is no environment 'Nothing of the kind'"),
        ("envpool:Pong-v5", r"Pong-v5 needs .*: pip install 'rollstream\[envpool\]'"),
    ],
)
def test_an_environment_that_is_not_there(name: str, message: str) -> None:
    with pytest.raises(UnknownEnvironment, match=message):
        EnvSpec(name).make(1)


@pytest.mark.parametrize(
    ("error", "extra"),
    [
        (gymnasium.error.DependencyNotInstalled("MuJoCo is not installed, gymnasium[mujoco]"), "mujoco"),
        (gymnasium.error.DependencyNotInstalled("Box2D is not installed"), "box2d"),
        (ModuleNotFoundError("No module named 'ale_py'"), "atari"),
    ],
)
def test_a_missing_extra_is_named(error: Exception, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(gymnasium, "make", fail)
    with pytest.raises(
        UnknownEnvironment, match=rf"CartPole-v1 needs .*: pip install 'rollstream\[{extra}\]'"
    ):
        EnvSpec("CartPole-v1").make(1)


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_odd_options_are_named(vectorization: Any) -> None:
    with pytest.raises(
        UnknownEnvironment, match=r"CartPole-v1 does not take these options \(\{'speed': 3\}\)"
    ):
        EnvSpec("CartPole-v1", {"speed": 3}, vectorization=vectorization).make(1)


def test_options_reach_the_environment() -> None:
    vector = EnvSpec("CartPole-v1", {"sutton_barto_reward": True}).make(1)
    vector.reset([0])
    assert vector.step(np.array([0])).reward == [0]


class Pool(SyncVectorEnv):
    """As EnvPool has them: the seed is given when they are made, and that of a reset is ignored."""

    def __init__(self, name: str, num_envs: int, seed: int = 42):
        super().__init__([partial(gymnasium.make, name)] * num_envs)
        self.first: int | None = seed

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        seed, self.first = self.first, None
        return super().reset(seed=seed, options=options)


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What pools were seeded with, in a package like EnvPool."""
    seeds: list[int] = []

    def make(name: str, num_envs: int, seed: int = 42) -> Pool:
        seeds.append(seed)
        return Pool(name, num_envs, seed)

    module: Any = ModuleType("envpool")
    module.make_gymnasium = make
    monkeypatch.setitem(sys.modules, "envpool", module)
    return seeds


def test_a_pool_is_seeded_when_it_is_made(seeds: list[int]) -> None:
    def first(options: dict[str, Any], seed: int | None = None) -> Any:
        vector = EnvSpec("envpool:CartPole-v1", options).make(2, seed)
        observation = vector.reset([0, 1])
        vector.close()
        return observation.tolist()

    assert first({}, 1) == first({}, 1) != first({}, 2)
    assert first({"seed": 2}, 1) == first({}, 2)
    assert first({}) == first({})
    assert seeds == [1, 1, 2, 2, 2, 42, 42]


def test_an_evaluation_in_a_pool_is_seeded(seeds: list[int]) -> None:
    environment = EnvSpec("envpool:CartPole-v1")
    policy = ActorCriticPolicy(spaces.Box(-9, 9, (4,)), spaces.Discrete(2))
    with Evaluator(environment, policy, 3) as evaluator:
        evaluator(policy.init(0), 1)
    assert seeds == [3]


def test_environments_that_will_not_do_are_closed() -> None:
    closed: list[Any] = []

    class Closing(Samples):
        def close(self) -> None:
            closed.append(self)

    for space, frames in ((spaces.Text(3), 1), (spaces.Discrete(3), 2)):
        with pytest.raises(RollstreamError):
            EnvSpec(partial(Closing, space), frame_stack=frames).make(2)
    assert len(closed) == 4


def test_an_environment_without_a_vector_of_its_own() -> None:
    with pytest.raises(UnknownEnvironment, match="Acrobot-v1 has no vector environment of its own"):
        EnvSpec("Acrobot-v1", vectorization="native").make(2)


@pytest.mark.parametrize(("count", "kind"), [(2, SyncVector), (32, NativeVector)])
def test_many_environments_are_stepped_by_a_vector_of_their_own(count: int, kind: type) -> None:
    vector = EnvSpec("CartPole-v1").make(count)
    assert type(vector) is kind
    assert vector.reset(range(count)).shape == (count, 4)
    vector.close()


def test_cartpole_behaves_the_same_as_vector_and_plain() -> None:
    """Until an episode ends; then Gymnasium's vector environment has a step that only resets."""
    native, sync = (EnvSpec("CartPole-v1", vectorization=how).make(2) for how in ("native", "sync"))
    native.reset([3, 4])
    sync.reset([3, 4])
    state = native.state_dict()["environment"][0]["state"]
    for one, own in zip(sync._environments, state.T, strict=True):  # pyright: ignore[reportAttributeAccessIssue]
        one.unwrapped.state = tuple(own)
    for _ in range(6):
        ours, theirs = (vector.step(np.array([1, 0])) for vector in (sync, native))
        np.testing.assert_allclose(ours.observation, theirs.observation, rtol=1e-5)
        np.testing.assert_array_equal(ours.terminated, theirs.terminated)
    while not (ended := native.step(np.array([1, 0]))).ended:
        pass
    assert ended.terminated.any()
    after = native.step(np.array([1, 0]))
    assert after.mask is not None
    np.testing.assert_array_equal(~after.mask, ended.terminated)
    assert (np.abs(after.observation[after.started]) <= 0.05).all()
    native.close()
    sync.close()


# State -------------------------------------------------------------------------------------------


def through_json(state: Any) -> Any:
    """Written as JSON and arrays and read again, as checkpoints are."""
    structure, arrays = encode_state(state)
    return decode_state(json.loads(json.dumps(structure)), arrays)


def future(environment: Any, actions: Any, steps: int) -> list[Any]:
    """What happens, with resets, as plain numbers."""
    seen: list[Any] = []
    for number in range(steps):
        observation, reward, terminated, truncated, _ = environment.step(actions[number])
        seen.append([np.asarray(observation).tolist(), float(reward), bool(terminated), bool(truncated)])
        if terminated or truncated:
            seen.append(np.asarray(environment.reset()[0]).tolist())
    return seen


@pytest.mark.parametrize(
    "name",
    [
        "CartPole-v1",
        "Acrobot-v1",
        "Pendulum-v1",
        "MountainCar-v0",
        "FrozenLake-v1",
        "Taxi-v3",
        "Blackjack-v1",
    ],
)
def test_a_restored_environment_has_the_same_future(name: str) -> None:
    name = name if name in gymnasium.registry else f"{name[:-1]}4"
    environment, fresh = (EnvSpec(name, {"max_episode_steps": 40}).make_one() for _ in range(2))
    space = environment.action_space
    space.seed(0)
    actions = [space.sample() for _ in range(120)]
    environment.reset(seed=1)
    future(environment, actions, 25)
    state = through_json(saved_environments([environment]))
    expected = future(environment, actions[25:], 90)
    fresh.reset(seed=77)
    future(fresh, actions, 3)
    load_environments([fresh], state)
    assert future(fresh, actions[25:], 90) == expected


def test_physics_that_cannot_be_saved_is_named() -> None:
    pytest.importorskip("Box2D")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of its bindings, when they are loaded
        environment = EnvSpec("LunarLander-v3").make_one()
    environment.reset(seed=0)
    with pytest.raises(UnknownState, match=r"LunarLander\.world is of type Box2D\."):
        saved_environments([environment])
    environment.close()


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_a_worker_goes_on_from_its_saved_state(vectorization: Any) -> None:
    environment = EnvSpec("CartPole-v1", frame_stack=2, vectorization=vectorization)
    spec = WorkerSpec(environment, 3, 40, ActorCriticPolicy, reward_norm_gamma=0.9)
    worker, other = worker_of(spec), worker_of(spec, index=5)
    sampled(worker)
    state = through_json(worker.state_dict())
    other.load_state_dict(state)
    one, two = sampled(worker), sampled(other)
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
    assert one["terminated"].any()
    worker.close()
    other.close()


def test_workers_of_one_plan_see_and_do_different_things() -> None:
    spec = WorkerSpec(EnvSpec("CartPole-v1"), 2, 20, ActorCriticPolicy)
    workers = [worker_of(spec, index) for index in (0, 0, 1)]
    one, again, other = (sampled(worker) for worker in workers)
    for name in ("observation", "action"):
        np.testing.assert_array_equal(one[name], again[name])
        assert (one[name] != other[name]).any()
    for worker in workers:
        worker.close()


def test_a_worker_whose_environment_cannot_be_saved_begins_anew_the_same_way() -> None:
    def make() -> gymnasium.Env[Any, Any]:
        environment = gymnasium.make("CartPole-v1", disable_env_checker=True)
        environment.unwrapped.hidden = object()  # pyright: ignore[reportAttributeAccessIssue]
        return environment

    spec = WorkerSpec(EnvSpec(make), 2, 30, ActorCriticPolicy)
    worker = worker_of(spec)
    sampled(worker)
    state = through_json(worker.state_dict())
    assert state["environment"] is None
    assert state["reason"] == "CartPoleEnv.hidden is of type builtins.object"
    again = [worker_of(spec), worker_of(spec)]
    batches = []
    for other in again:
        other.load_state_dict(state)
        batches.append(sampled(other))
    np.testing.assert_array_equal(batches[0]["observation"], batches[1]["observation"])
    assert (batches[0]["observation"] != sampled(worker)["observation"]).any()
    for one in (worker, *again):
        one.close()


class Misbehaved(gymnasium.Env[Any, Any]):
    """Gives what it is told to."""

    observation_space = spaces.Box(-1, 1, (4,))
    action_space = spaces.Discrete(2)

    def __init__(self, begins: Any = ([0] * 4, {}), goes_on: Any = ([0] * 4, 0.0, False, False, {})):
        self.begins, self.goes_on = begins, goes_on

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.begins

    def step(self, action: Any) -> Any:
        if isinstance(self.goes_on, Exception):
            raise self.goes_on
        return self.goes_on


class Old(Misbehaved):
    def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.begins


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (Misbehaved, {"begins": (np.zeros(3), {})}, "the observation has shape (3,) instead of (4,)"),
        (Misbehaved, {"begins": np.zeros(4)}, "it returned ndarray"),
        (Misbehaved, {"begins": {0: 1}}, "it returned dict"),
        (Misbehaved, {"begins": (np.zeros(4), 1)}, "it returned tuple"),
        (Old, {}, "unexpected keyword argument 'seed'"),
    ],
)
def test_an_environment_that_begins_as_it_should_not(kind: Any, options: Any, reason: str) -> None:
    with pytest.raises(BadEnvironment) as raised:
        EnvSpec(kind, options).make(2)
    text = str(raised.value)
    assert text.startswith(
        f"reset(seed=...) of {kind.__name__} must return an observation of its space and a dict ("
    )
    assert reason in text
    assert "check_env" in text
    assert "\n" not in text


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((np.zeros(4), 0.0, False, {}), "ValueError: not enough values to unpack (expected 5, got 4)"),
        ((np.zeros(3), 0.0, False, False, {}), "could not broadcast input array from shape (3,)"),
        ((np.zeros(4), "much", False, False, {}), "could not convert string to float: 'much'"),
    ],
)
def test_an_environment_that_goes_on_as_it_should_not(given: Any, reason: str, limit: int | None) -> None:
    def make() -> Any:
        environment = Misbehaved(goes_on=given)
        return environment if limit is None else gymnasium.wrappers.TimeLimit(environment, limit)

    vector = EnvSpec(make).make(2)
    vector.reset([1, 2])
    with pytest.raises(BadEnvironment) as raised:
        vector.step(np.zeros(2, int))
    text = str(raised.value)
    wanted = "an observation of its space, a reward, terminated, truncated and a dict ("
    assert text.startswith(f"step(action) of Misbehaved must return {wanted}")
    assert reason in text
    assert "\n" not in text


def test_what_an_environment_raises_itself_stays_as_it_is() -> None:
    vector = EnvSpec(Misbehaved, {"goes_on": ValueError("mine")}).make(1)
    with pytest.raises(ValueError, match=r"^mine$"):
        vector.step(np.zeros(1, int))


# Statistics from the start -----------------------------------------------------------------------


@pytest.mark.parametrize("normalized", ["normalize_observations", "normalize_rewards"])
def test_a_worker_normalizes_from_its_first_rollout_on(normalized: str) -> None:
    """By the statistics of steps that it took before, which count nowhere; its episodes start anew."""
    gamma = 0.9 if normalized == "normalize_rewards" else None
    policy = partial(ActorCriticPolicy, **{normalized: True})
    worker = worker_of(WorkerSpec(EnvSpec(Scripted), 2, 5, policy, reward_norm_gamma=gamma))
    name = "return" if gamma else "observation"
    assert float(worker.weights[f"{name}.count"]) == 0
    rollout = worker.sample(_context())
    assert float(worker.weights[f"{name}.count"]) == 10  # a rollout
    assert rollout["observation"][0, :, 1].tolist() == [0, 0]
    assert (np.asarray(worker.weights[f"{name}.deviation"]) > 0).all()
    before = worker.weights
    worker.sample(_context())
    assert worker.weights is before
    worker.set_weights(1, {key: np.asarray(value) for key, value in before.items()})
    worker.sample(_context())
    assert float(worker.weights[f"{name}.count"]) == 10  # a rollout


def _context() -> Context:
    return Context("sample", ("worker", "sample", 0), None, {})
