"""How Q values and actors become actions: alike in NumPy and JAX, explored as often as epsilon, in bounds."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from small_envs import Samples, worker_of

from rollstream.algos import dqn, sac, td3
from rollstream.rl.action_distributions import (
    BoundedDistribution,
    Categorical,
    NoisyDeterministic,
    TanhNormal,
)
from rollstream.rl.actor_policy import ActorPolicy
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.networks import head_network, q_network
from rollstream.rl.q_policy import QPolicy
from rollstream.rl.rollout import rollout_for_replay
from rollstream.rl.spaces import SpaceError
from rollstream.rl.worker import WorkerSpec

SEEN = spaces.Box(-1, 1, (2, 3))
CHOICES = spaces.Discrete(4)
BOXES = {
    "one number": spaces.Box(-2, 2, (1,)),
    "not around 0": spaces.Box(np.array([-1, 0], np.float32), np.array([3, 0.5], np.float32)),
    "a matrix": spaces.Box(-3, 1, (2, 3)),
    "a number that is fixed": spaces.Box(np.array([-1, 2], np.float32), np.array([1, 2], np.float32)),
}
MASKED = spaces.Dict({"observation": SEEN, "action_mask": spaces.MultiBinary(4)})


def q_policy(observations: spaces.Space[Any] = SEEN, num_atoms: int = 1, **options: Any) -> QPolicy:
    network = partial(q_network, hidden=(8,), num_atoms=num_atoms, **options)
    return QPolicy(observations, CHOICES, network, num_atoms=num_atoms, value_range=(-2.0, 5.0))


def actor(
    distribution: Categorical | BoundedDistribution,
    observations: spaces.Space[Any] = SEEN,
    **options: Any,
) -> ActorPolicy:
    return ActorPolicy(observations, CHOICES, distribution, partial(head_network, hidden=(8,), **options))


def random_weights(policy: Any, epsilon: Any = 0.3) -> dict[str, Any]:
    random = np.random.default_rng(1)
    weights = {
        name: random.standard_normal(np.shape(own), np.float32) for name, own in policy.init(3).items()
    }
    return weights | {"epsilon": np.float32(epsilon)}


# Numpy and compiled ------------------------------------------------------------------------------

POLICIES: dict[str, Any] = {
    "values": q_policy,
    "values of a dueling network": partial(q_policy, dueling=True),
    "distributions of values": partial(q_policy, num_atoms=5),
    "distributions of values of a dueling network": partial(q_policy, num_atoms=5, dueling=True),
    "squashed": lambda **options: actor(TanhNormal(BOXES["not around 0"]), **options),
    "a squashed matrix": lambda **options: actor(TanhNormal(BOXES["a matrix"]), **options),
    "steady": lambda **options: actor(NoisyDeterministic(BOXES["not around 0"], 0.3), **options),
    "categories": lambda **options: actor(Categorical(4), **options),
}


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
@pytest.mark.parametrize("kind", POLICIES)
def test_both_ways_act_alike(kind: str, activation: str) -> None:
    policy, random = POLICIES[kind](activation=activation), np.random.default_rng(2)
    assert policy.acts_in_numpy(60)
    for epsilon in (0.0, 0.3, 1.0):
        weights = random_weights(policy, epsilon)
        observation, noise = random.standard_normal((60, 2, 3), np.float32), policy.noise(random, 60)
        action, state = policy.numpy_step(weights, 60)(observation, (), noise)
        expected, _ = policy.step(weights, observation, (), noise)
        assert state == ()
        assert action.shape == expected.shape
        np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-4)


def test_each_environment_may_explore_in_its_own_way() -> None:
    policy, random = q_policy(), np.random.default_rng(0)
    bold = np.linspace(0, 1, 50, dtype=np.float32)[:, None]
    weights = random_weights(policy) | {"epsilon": bold}
    observation, noise = random.standard_normal((50, 2, 3), np.float32), policy.noise(random, 50)
    action, _ = policy.numpy_step(weights, 50)(observation, (), noise)
    np.testing.assert_array_equal(action, policy.step(weights, observation, (), noise)[0])
    best = np.asarray(policy.step(weights, observation, (), None)[0])
    explores = noise[:, -1:] < bold
    np.testing.assert_array_equal(action[~explores[:, 0]], best[~explores[:, 0]])
    assert (action != best).any()


def test_what_is_large_or_not_plain_acts_in_jax() -> None:
    assert q_policy().acts_in_numpy(4)
    assert not q_policy(MASKED).acts_in_numpy(4)
    assert not QPolicy(SEEN, CHOICES, partial(q_network, hidden=(512, 512))).acts_in_numpy(8)
    assert not actor(Categorical(4), MASKED).acts_in_numpy(4)
    assert not QPolicy(spaces.Box(0, 255, (36, 36, 1), np.uint8), CHOICES).acts_in_numpy(1)


# At random and greedy ----------------------------------------------------------------------------


def assert_uniform(counts: Any) -> None:
    """By the chi-square statistic: with 3 degrees of freedom it is above 16.3 once in a thousand times."""
    expected = np.sum(counts) / len(counts)
    assert ((np.asarray(counts) - expected) ** 2 / expected).sum() < 16.3, counts


@pytest.mark.parametrize("kind", ["values", "distributions of values", "categories"])
def test_with_epsilon_1_every_action_is_as_likely(kind: str) -> None:
    policy = POLICIES[kind]()
    weights = random_weights(policy, 1.0)
    observation = np.tile(np.random.default_rng(0).standard_normal((1, 2, 3), np.float32), (8000, 1, 1))
    noise = policy.noise(np.random.default_rng(5), 8000)
    action, _ = policy.step(weights, observation, (), noise)
    assert_uniform(np.bincount(action, minlength=4))


@pytest.mark.parametrize("make", [q_policy, lambda seen: actor(Categorical(4), seen)])
def test_only_legal_actions_are_taken_however_often_at_random(make: Any) -> None:
    policy, random = make(MASKED), np.random.default_rng(3)
    count = 6000
    mask = np.tile(np.array([[1, 0, 1, 1], [0, 0, 1, 0]], np.int8), (count // 2, 1))
    observation = {
        "observation": np.tile(random.standard_normal((1, 2, 3), np.float32), (count, 1, 1)),
        "action_mask": mask,
    }
    for epsilon in (0.0, 0.5, 1.0):
        action = np.asarray(
            policy.step(random_weights(policy, epsilon), observation, (), policy.noise(random, count))[0]
        )
        assert mask[np.arange(count), action].all()
        assert (action[1::2] == 2).all()
        if epsilon == 1.0:
            assert_uniform(np.bincount(action[::2], minlength=4)[[0, 2, 3]])
    best = np.asarray(policy.step(random_weights(policy), observation, (), None)[0])
    assert mask[np.arange(count), best].all()


def test_with_epsilon_0_the_best_action_is_taken() -> None:
    for kind in ("values", "values of a dueling network", "distributions of values"):
        policy, random = POLICIES[kind](), np.random.default_rng(0)
        weights = random_weights(policy, 0.0)
        observation = random.standard_normal((50, 2, 3), np.float32)
        values = np.asarray(policy.q_values(weights, observation))
        for noise in (policy.noise(random, 50), None):
            action, _ = policy.step(weights, observation, (), noise)
            np.testing.assert_array_equal(action, values.argmax(-1))
        assert len(set(values.argmax(-1))) > 1


def test_values_of_distributions_are_their_means() -> None:
    policy = q_policy(num_atoms=5)
    weights = random_weights(policy)
    observation = np.random.default_rng(0).standard_normal((7, 2, 3), np.float32)
    logits = np.asarray(policy.outputs(weights, observation), np.float64)
    assert logits.shape == (7, 4, 5)
    likely = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = (likely * np.linspace(-2, 5, 5)).sum(-1)
    np.testing.assert_allclose(policy.q_values(weights, observation), expected, rtol=1e-4)


def test_epsilon_is_how_often_actions_are_random() -> None:
    policy = q_policy()
    observation = np.tile(np.random.default_rng(0).standard_normal((1, 2, 3), np.float32), (20_000, 1, 1))
    noise = policy.noise(np.random.default_rng(5), 20_000)
    action, _ = policy.step(random_weights(policy, 0.4), observation, (), noise)
    largest = np.bincount(action, minlength=4).max() / 20_000
    assert largest == pytest.approx(0.6 + 0.4 / 4, abs=0.015)


def test_categories_are_as_likely_as_their_logits_say() -> None:
    policy = actor(Categorical(4))
    logits = np.tile(np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32)), (20_000, 1))
    noise = policy.noise(np.random.default_rng(0), 20_000)
    found = np.bincount(policy._sample(logits, noise, 0.0, np), minlength=4) / 20_000
    np.testing.assert_allclose(found, [0.1, 0.2, 0.3, 0.4], atol=0.015)


# Bounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("make", [TanhNormal, partial(NoisyDeterministic, noise_std=0.5)])
def test_actions_reach_the_bounds_and_no_further(box: spaces.Box, make: Any) -> None:
    distribution, random = make(box), np.random.default_rng(0)
    policy = actor(distribution)
    outputs = random.normal(0, 5, (4000, distribution.output_size)).astype(np.float32)
    size = int(np.prod(box.shape))
    if distribution.output_size > size:
        outputs[:, size:] = -1
    for epsilon in (0.0, 1.0):
        action = np.asarray(policy._sample(outputs, policy.noise(random, 4000), epsilon, np))
        assert action.shape == (4000, *box.shape)
        assert action.dtype == np.float32
        slack = 1e-6 * np.abs([box.low, box.high]).max()
        assert (action >= box.low - slack).all()
        assert (action <= box.high + slack).all()
        np.testing.assert_allclose(action.min(0), box.low, atol=0.02)
        np.testing.assert_allclose(action.max(0), box.high, atol=0.02)
    best = np.asarray(distribution.mode(outputs))
    assert best.shape == action.shape
    np.testing.assert_allclose(best.max(0), box.high, atol=0.02)


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_with_epsilon_1_numbers_are_uniform_within_the_bounds(box: spaces.Box) -> None:
    policy = actor(TanhNormal(box))
    outputs = np.full((8000, policy.distribution.output_size), 3.0, np.float32)
    action = policy._sample(outputs, policy.noise(np.random.default_rng(1), 8000), 1.0, np)
    for values, low, high in zip(action.reshape(8000, -1).T, box.low.ravel(), box.high.ravel(), strict=True):
        if low < high:
            assert_uniform(np.histogram(values, 4, (float(low), float(high)))[0])
        else:
            assert (values == low).all()


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_scale_and_unscale_are_inverse(box: spaces.Box) -> None:
    distribution, random = TanhNormal(box), np.random.default_rng(0)
    flat = random.uniform(-1, 1, (5, 7, distribution.size)).astype(np.float32)
    moves = (box.low < box.high).ravel()
    action = distribution.from_unit_range(flat)
    assert action.shape == (5, 7, *box.shape)
    again = distribution.to_unit_range(action)
    assert np.isfinite(again).all()
    np.testing.assert_allclose(again[..., moves], flat[..., moves], atol=1e-5)
    np.testing.assert_allclose(distribution.from_unit_range(again), action, atol=1e-5)
    np.testing.assert_allclose(distribution.from_unit_range(-np.ones(distribution.size, np.float32)), box.low)
    np.testing.assert_allclose(distribution.from_unit_range(np.ones(distribution.size, np.float32)), box.high)


def test_the_noise_of_a_steady_actor_is_as_large_as_told() -> None:
    policy = actor(NoisyDeterministic(spaces.Box(-10, 10, (1,)), 0.2))
    outputs = np.zeros((20_000, 1), np.float32)
    action = policy._sample(outputs, policy.noise(np.random.default_rng(0), 20_000), 0.0, np)
    assert action.std() == pytest.approx(2.0, rel=0.02)
    assert action.mean() == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("algorithm", [sac, td3], ids=["sac", "td3"])
@pytest.mark.parametrize(
    "box",
    [
        spaces.Box(-np.inf, np.inf, (1,)),
        spaces.Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32)),
        spaces.Box(-3e38, 3e38, (1,)),  # finite, and yet not meant
    ],
    ids=["none", "half", "immense"],
)
def test_actions_without_bounds_are_refused(box: spaces.Box, algorithm: Any) -> None:
    with pytest.raises(
        SpaceError,
        match=r"the action space has no bounds \(Box.*\); use ppo or a2c, or set bounds with (.*)$",
    ) as refused:
        algorithm.make_policy(algorithm.Config(), SEEN, box)
    advice = str(refused.value).partition("set bounds with ")[2]
    bounded = eval(advice, {"gymnasium": gymnasium, "env": Samples(SEEN, box)})
    algorithm.make_policy(algorithm.Config(), SEEN, bounded.action_space)


# With a worker -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "options", "actions"),
    [
        (dqn, {}, spaces.Discrete(3, start=5)),
        (dqn, {"num_atoms": 3, "dueling": True}, spaces.Discrete(3, start=-1)),
        (sac, {"hidden": (8,)}, spaces.Discrete(3, start=5)),
        (sac, {"hidden": (8,)}, BOXES["a matrix"]),
        (sac, {"hidden": (8,)}, spaces.Box(0, 7, (2,), np.int64)),
        (sac, {"hidden": (8,)}, spaces.Box(200, 255, (2,), np.uint8)),
        (td3, {"hidden": (8,)}, spaces.Box(-128, 127, (2,), np.int8)),
        (td3, {"hidden": (8,)}, spaces.Box(-1, 2, (2,), np.float64)),
        (td3, {"hidden": (512, 512)}, BOXES["a number that is fixed"]),
    ],
    ids=str,
)
def test_environments_are_given_actions_of_their_space(
    algorithm: Any, options: dict[str, Any], actions: spaces.Space[Any]
) -> None:
    made: list[Samples] = []

    def make() -> Samples:
        made.append(Samples(SEEN, actions))
        return made[-1]

    policy = partial(algorithm.make_policy, algorithm.Config(**options))
    worker = worker_of(WorkerSpec(EnvSpec(make), 2, 12, policy, rollout_for_replay))
    rollout = worker._rollout()
    assert len(made[0].taken) >= 12  # and each was of the space, or it would have raised
    assert rollout.columns["action"].shape == (12, 2, *(actions.shape or ()))
    if isinstance(actions, spaces.Box) and np.issubdtype(actions.dtype, np.integer):
        assert len(np.unique(made[0].taken)) > 4
    if isinstance(actions, spaces.Discrete):
        assert set(rollout.columns["action"].ravel()) == {0, 1, 2}
