"""Advantages, losses, their gradients and updates against versions in numpy and double precision."""

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rollstream.algos import a2c, a3c, ppo
from rollstream.engine import RollstreamError
from rollstream.rl.algorithm import Task
from rollstream.rl.batch import Batch
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.gae import bootstrap_values, compute_gae
from rollstream.rl.learner import Learner
from rollstream.rl.networks import actor_critic
from rollstream.rl.normalize import (
    CLIP,
    Moments,
    combine_moments,
    compute_moments,
    flatten_boxes,
    normalize_observation,
)
from rollstream.rl.operators import StandardizeFields
from rollstream.rl.params import trainable
from rollstream.rl.policy import ActorCriticPolicy, apply_network
from rollstream.rl.update_metrics import Diverged
from rollstream.rl.updates import explained_variance, minibatch_permutations, scan_minibatches

Weights = dict[str, Any]
OBSERVATIONS = spaces.Box(-np.inf, np.inf, (2,))
ACTIONS: dict[str, spaces.Space[Any]] = {"discrete": spaces.Discrete(3), "box": spaces.Box(-1, 1, (2,))}
T, B = 4, 3


# Advantages --------------------------------------------------------------------------------------


def test_generalized_advantages_by_their_definition() -> None:
    random = np.random.default_rng(0)
    reward, value, after = random.normal(size=(3, 12, 5))
    terminated, truncated = random.random((2, 12, 5)) < 0.2
    next_value = np.where(terminated, 0.0, after)
    found = jax.jit(partial(compute_gae, gamma=0.9, gae_lambda=0.7))(
        reward, value, next_value, terminated | truncated
    )
    for i in range(5):
        for t in range(12):
            expected, weight = 0.0, 1.0
            for k in range(t, 12):
                beyond = 0.0 if terminated[k, i] else after[k, i]
                expected += weight * (reward[k, i] + 0.9 * beyond - value[k, i])
                weight *= 0.9 * 0.7
                if terminated[k, i] or truncated[k, i]:
                    break
            assert float(found[t, i]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_values_after_a_step_are_bootstrapped() -> None:
    """From the next observation, the final one of a truncated episode, or not at all after termination."""
    value, last_value = np.array([[1.0], [2.0], [3.0], [4.0]]), np.array([5.0])
    final_value = np.array([[np.nan], [7.0], [8.0], [np.nan]])
    terminated = np.array([[False], [False], [True], [False]])
    found = bootstrap_values(value, last_value, final_value, terminated)
    assert np.asarray(found).tolist() == [[2.0], [7.0], [0.0], [5.0]]


# A network in numpy ------------------------------------------------------------------------------


def log_prob_entropy_value(
    weights: Weights, observation: Any, action: Any, kind: str
) -> tuple[Any, Any, Any]:
    """One hidden layer each for actor and critic, in double precision."""

    def through(layers: str, head: str) -> Any:
        hidden = np.tanh(observation @ weights[f"{layers}.weight"].T + weights[f"{layers}.bias"])
        return hidden @ weights[f"{head}.weight"].T + weights[f"{head}.bias"]

    outputs = through("network.actor.layers[0]", "network.actor_head")
    value = through("network.critic.layers[0]", "network.critic_head")[..., 0]
    if kind == "discrete":
        logarithms = outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))
        chosen = np.take_along_axis(logarithms, action[..., None], -1)[..., 0]
        return chosen, -(np.exp(logarithms) * logarithms).sum(-1), value
    log_std = weights["network.log_std"]
    each = -0.5 * ((action - outputs) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    entropy = np.full(value.shape, (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum())
    return each.sum(-1), entropy, value


def loss_of(algorithm: ModuleType, config: Any, kind: str, weights: Weights, rows: Any) -> dict[str, float]:
    """Both losses, as their papers have them."""
    log_prob, entropy, value = log_prob_entropy_value(weights, rows["observation"], rows["action"], kind)
    ratio = np.exp(log_prob - rows["log_prob"])
    if algorithm is ppo:
        low, high = 1 - config.clip_range, 1 + config.clip_range
        gain = np.minimum(ratio * rows["advantage"], np.clip(ratio, low, high) * rows["advantage"])
    else:
        gain = log_prob * rows["advantage"]
    error = (value - rows["value_target"]) ** 2
    policy_loss = "policy_gradient_loss" if algorithm is ppo else "policy_loss"
    parts = {
        policy_loss: -gain.mean(),
        "value_loss": error.mean(),
        "entropy_loss": -entropy.mean(),
    }
    parts["loss"] = (
        parts[policy_loss]
        + config.value_coefficient * parts["value_loss"]
        + config.entropy_coefficient * parts["entropy_loss"]
    )
    if algorithm is ppo:
        parts["clip_fraction"] = (np.abs(ratio - 1) > config.clip_range).mean()
        parts["approx_kl"] = (ratio - 1 - np.log(ratio)).mean()
    return parts


def gradients_of(algorithm: ModuleType, config: Any, kind: str, weights: Weights, rows: Any) -> Weights:
    """The gradient of the loss, by small differences."""
    grads = {}
    for name, value in weights.items():
        grads[name] = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            sides = []
            for change in (1e-6, -1e-6):
                moved = value.copy()
                moved[index] += change
                sides.append(loss_of(algorithm, config, kind, weights | {name: moved}, rows)["loss"])
            grads[name][index] = (sides[0] - sides[1]) / 2e-6
    return grads


def clipped(grads: Weights, limit: float) -> Weights:
    norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    return {name: slope * min(1.0, limit / norm) for name, slope in grads.items()}


def in_double(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64 if np.asarray(leaf).dtype.kind == "f" else None), tree
    )


def example(algorithm: ModuleType, kind: str, **more: Any) -> tuple[Any, ActorCriticPolicy, Weights, Batch]:
    """Settings, a policy, weights with some spread, and a batch."""
    settings = {
        "hidden": (3,),
        "num_envs": B,
        "rollout_length": T,
        "entropy_coefficient": 0.3,
        "value_coefficient": 0.7,
        "max_grad_norm": 0.1,
        "learning_rate": 0.01,
        **more,
    }
    if algorithm is ppo:
        settings = {"epochs": 1, "minibatch_size": T * B, **settings}
    config = algorithm.Config(**settings)
    policy = algorithm.make_policy(config, OBSERVATIONS, ACTIONS[kind])
    random = np.random.default_rng(1)
    weights = {
        name: (value + random.normal(0, 0.5, np.shape(value))).astype(np.float32)
        if name.startswith("network")
        else value
        for name, value in policy.init(0).items()
    }
    action = random.integers(0, 3, (T, B)) if kind == "discrete" else random.normal(size=(T, B, 2))
    observation = random.normal(size=(T, B, 2))
    log_prob, _, value = log_prob_entropy_value(in_double(weights), observation, action, kind)
    batch = Batch(
        observation=observation,
        action=action,
        log_prob=log_prob + random.normal(0, 0.3, (T, B)),
        advantage=random.normal(size=(T, B)),
        value=value,
        value_target=random.normal(size=(T, B)),
    )
    return (
        config,
        policy,
        weights,
        batch.map(lambda own: own.astype(np.float32) if own.dtype == float else own),
    )


def task(steps: int = 1000) -> Task:
    return Task(EnvSpec("CartPole-v1"), steps)


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("algorithm", [ppo, a2c], ids=["ppo", "a2c"])
def test_losses_gradients_and_updates(algorithm: ModuleType, kind: str) -> None:
    config, policy, weights, batch = example(algorithm, kind)
    rows = in_double(dict(batch))
    expected = loss_of(algorithm, config, kind, in_double(weights), rows)
    arguments = (config, config.clip_range) if algorithm is ppo else (config,)

    @jax.jit
    def both(weights: Weights, batch: Batch) -> Any:
        return jax.grad(partial(algorithm.loss, policy, *arguments, batch), has_aux=True)(weights)

    grads, metrics = both(weights, batch)
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-4), name
    if algorithm is ppo:
        assert 0 < expected["clip_fraction"] < 1, "nothing is clipped, or everything"
    numeric = gradients_of(algorithm, config, kind, in_double(weights), rows)
    for name in weights:
        np.testing.assert_allclose(grads[name], numeric[name], rtol=1e-3, atol=1e-5, err_msg=name)

    learner = algorithm.learner(config, task(), policy)
    learner.weights = weights
    known = learner.train(batch)
    limited = clipped(numeric, config.max_grad_norm)
    for name in weights:
        slope = limited[name]
        if algorithm is ppo:  # Adam's first step
            change = slope / (np.abs(slope) + 1e-5)
        else:
            change = slope / (0.1 * np.abs(slope) + 1e-5)
        expected_weights = in_double(weights[name]) - config.learning_rate * change
        np.testing.assert_allclose(
            learner.weights[name], expected_weights, rtol=1e-4, atol=2e-5, err_msg=name
        )
    norm = np.sqrt(sum((grad**2).sum() for grad in numeric.values()))
    assert known["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert known["learning_rate"] == config.learning_rate
    assert (learner.version, learner.steps) == (1, T * B)


def test_a_gradient_computed_elsewhere_moves_the_weights_as_one_computed_here() -> None:
    config, policy, weights, batch = example(a2c, "discrete", normalize_observations=True)
    here = a2c.learner(config, task(), policy)
    there = a3c.learner(a3c.Config(**vars(config)), task(), policy)
    here.weights = there.weights = weights
    here.train(batch)
    compute: Any = a3c.worker(a3c.Config(**vars(config)), task()).gradients
    there.apply_gradients(*jax.jit(compute(policy))(weights, batch), steps=T * B)
    assert here.weights.keys() == there.weights.keys()
    for name, value in here.weights.items():
        np.testing.assert_allclose(there.weights[name], value, rtol=1e-5, atol=1e-6)
    assert float(there.weights["observation.count"]) == T * B
    assert (there.version, there.steps) == (1, T * B)


def test_explained_variance() -> None:
    target = np.array([1.0, 2.0, 3.0, 4.0])
    assert float(explained_variance(target + 5, target)) == 1
    assert float(explained_variance(np.zeros(4), target)) == 0
    assert float(explained_variance(-target, target)) == pytest.approx(-3)
    assert np.isnan(explained_variance(target, np.ones(4)))


def test_standardized_columns_have_mean_0_and_deviation_1() -> None:
    column = np.random.default_rng(2).normal(3, 5, (6, 4)).astype(np.float32)
    result = StandardizeFields(["advantage"])(Batch(advantage=column, reward=column))
    assert result["reward"] is column
    np.testing.assert_allclose(result["advantage"], (column - column.mean()) / column.std(), rtol=1e-5)
    same = StandardizeFields(["advantage"])(Batch(advantage=np.ones((2, 2), np.float32)))
    np.testing.assert_array_equal(same["advantage"], np.zeros((2, 2)))


# Minibatches -------------------------------------------------------------------------------------


@given(count=st.integers(1, 40), epochs=st.integers(1, 3), data=st.data())
def test_every_row_comes_up_once_an_epoch(count: int, epochs: int, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([size for size in range(1, count + 1) if count % size == 0]))
    order = minibatch_permutations(np.random.default_rng(0), count, epochs=epochs, minibatch_size=size)
    assert order.shape == (epochs * count // size, size)
    for epoch in order.reshape(epochs, count):
        assert sorted(epoch) == list(range(count))


def test_epochs_are_in_different_orders() -> None:
    first, second = minibatch_permutations(np.random.default_rng(0), 50, epochs=2, minibatch_size=50)
    assert (first != second).any()
    assert (first != np.arange(50)).any()


def test_minibatches_see_the_rows_of_the_order_one_after_the_other() -> None:
    rows = {"a": jnp.arange(6), "b": {"c": -jnp.arange(6)}}
    order = minibatch_permutations(np.random.default_rng(3), 6, epochs=2, minibatch_size=3)

    def step(carry: Any, own: Any) -> Any:
        seen, number = carry
        return (seen.at[number].set(own["a"]), number + 1), {
            "sum": jnp.sum(own["a"]),
            "none": jnp.sum(own["a"] + own["b"]["c"]),
        }

    (seen, number), metrics = scan_minibatches(step, (jnp.zeros((4, 3), int), 0), rows, order)
    np.testing.assert_array_equal(seen, order)
    assert int(number) == 4
    assert float(metrics["sum"]) == 7.5, "the mean over minibatches of the sum"
    assert float(metrics["none"]) == 0


def test_the_first_minibatch_that_is_not_finite_is_reported() -> None:
    def step(carry: Any, own: Any) -> Any:
        loss = jnp.sum(own["a"] / own["b"])
        return carry + loss, {"loss": loss, "size": carry + jnp.sum(own["b"])}

    rows = {"a": jnp.arange(4.0), "b": jnp.array([1.0, 1.0, 0.0, 1.0])}
    order = np.array([[0, 1], [2, 3], [1, 3]])
    carry, metrics = scan_minibatches(step, jnp.float32(0), rows, order)
    assert np.isinf(carry)
    assert np.isinf(metrics["loss"])
    assert float(metrics["size"]) == 2, "which is infinite only in the minibatch after"


def test_what_is_random_in_updates_depends_on_the_seed_and_goes_on_after_a_resume() -> None:
    _, policy, _, batch = example(ppo, "discrete")

    def update(weights: Weights, state: Any, _: Batch, noise: Any, schedules: Any) -> Any:
        return weights, state, {"noise": noise}

    def learner(seed: int) -> Learner:
        return Learner(
            policy, update, optax.identity(), random_inputs=lambda random: random.random(), seed=seed
        )

    def drawn(learner: Learner) -> list[float]:
        return [learner.train(batch)["noise"] for _ in range(3)]

    assert len(set(drawn(learner(1)))) == 3
    assert drawn(learner(1)) == drawn(learner(1)) != drawn(learner(2))
    first, resumed = learner(1), learner(1)
    drawn(first)
    resumed.load_state_dict(first.state_dict())
    assert drawn(first) == drawn(resumed)


# Statistics --------------------------------------------------------------------------------------


def test_moments_of_parts_are_those_of_all() -> None:
    random = np.random.default_rng(4)
    parts = [random.normal(50, 3, (count, 2)).astype(np.float32) for count in (5, 1, 40, 7)]
    moments = Moments.empty(2)
    assert np.asarray(moments.std).tolist() == [1, 1]
    for part in parts:
        moments = combine_moments(moments, compute_moments(part))
    together = np.concatenate(parts).astype(np.float64)
    assert float(moments.count) == 53
    np.testing.assert_allclose(moments.mean, together.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.std, together.std(0), rtol=1e-4)
    again = Moments.from_weights(moments.as_weights("observation"), "observation")
    assert again is not moments
    np.testing.assert_array_equal(again.mean, moments.mean)


def test_moments_of_nothing_change_nothing() -> None:
    moments = compute_moments(np.array([1.0, 5.0], np.float32))
    assert [float(part) for part in moments] == [2, 3, 8]
    nothing = combine_moments(moments, Moments.empty())
    assert [float(part) for part in nothing] == [2, 3, 8]


SPACE = spaces.Dict(
    {
        "choice": spaces.Discrete(3),
        "matrix": spaces.Box(-9, 9, (2, 2)),
        "image": spaces.Box(0, 255, (36, 36, 1), np.uint8),
        "number": spaces.Box(-9, 9, ()),
        "action_mask": spaces.MultiBinary(2),
    }
)


def test_numbers_are_normalized_and_nothing_else() -> None:
    SPACE.seed(0)
    samples = [SPACE.sample() for _ in range(30)]
    together = {name: np.stack([sample[name] for sample in samples]) for name in SPACE.spaces}
    vectors = flatten_boxes(SPACE, together)
    assert vectors.shape == (30, 5)
    result = normalize_observation(SPACE, together, compute_moments(vectors))
    for name in ("choice", "image", "action_mask"):
        np.testing.assert_array_equal(result[name], together[name])
    for name in ("matrix", "number"):
        column = together[name].astype(np.float64)
        np.testing.assert_allclose(
            result[name], (column - column.mean(0)) / column.std(0), rtol=1e-4, atol=1e-4
        )
    far = together | {"number": np.full(30, 1e6, np.float32)}
    assert (np.asarray(normalize_observation(SPACE, far, compute_moments(vectors))["number"]) == CLIP).all()


def test_nothing_to_normalize_is_no_error() -> None:
    policy = ActorCriticPolicy(spaces.Discrete(3), spaces.Discrete(2), normalize_observations=True)
    assert not policy.normalize_observations
    batch = Batch(observation=np.zeros((2, 2), int))
    assert policy.batch_statistics(batch) == {}


def test_the_learner_keeps_statistics_of_steps_and_normalizes_by_them() -> None:
    config, policy, weights, batch = example(
        a2c, "discrete", normalize_observations=True, normalize_rewards=True
    )
    batch["discounted_return"] = np.random.default_rng(5).normal(2, 4, (T, B)).astype(np.float32)
    learner = a2c.learner(config, task(), policy)
    learner.weights = weights
    learner.train(batch)
    learner.train(batch)
    rows, returns = batch["observation"].reshape(T * B, 2), batch["discounted_return"]
    observation = Moments.from_weights(learner.weights, "observation")
    scaled = Moments.from_weights(learner.weights, "return")
    assert float(observation.count) == 2 * len(rows)
    np.testing.assert_allclose(observation.mean, rows.mean(0), rtol=1e-4)
    np.testing.assert_allclose(observation.std, rows.std(0), rtol=1e-4)
    np.testing.assert_allclose(scaled.std, returns.std(), rtol=1e-4)
    brought = (rows - rows.mean(0)) / rows.std(0)
    plain = a2c.make_policy(a2c.Config(hidden=(3,)), OBSERVATIONS, ACTIONS["discrete"])
    np.testing.assert_allclose(
        policy.value(learner.weights, rows),
        plain.value(trainable(learner.weights), brought),
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("algorithm", [a2c, ppo], ids=["a2c", "ppo"])
def test_the_first_batch_is_trained_on_with_its_own_statistics(algorithm: ModuleType) -> None:
    """As if they had been there before, however large the observations are; and they count once."""
    config, policy, weights, batch = example(algorithm, "discrete", normalize_observations=True)
    batch["observation"] = 1e4 + 1e4 * batch["observation"]
    empty = weights | Moments.empty(2).as_weights("observation")
    first = algorithm.learner(config, task(), policy)
    first.weights = empty
    first.train(batch)
    known = algorithm.learner(config, task(), policy)
    known.weights = weights | policy.batch_statistics(batch)
    known.train(batch)
    for name, value in trainable(known.weights).items():
        np.testing.assert_allclose(first.weights[name], value, rtol=1e-5, atol=1e-7)
    assert float(first.weights["observation.count"]) == T * B


def test_moments_of_large_values_are_exact() -> None:
    """The mean of values around a million, added up in single precision, would be off by their deviation."""
    random = np.random.default_rng(6)
    values = (1e6 + random.normal(0, 1, (5_000, 2))).astype(np.float32)
    moments = combine_moments(compute_moments(values[:3_000]), compute_moments(values[3_000:]))
    together = values.astype(np.float64)
    np.testing.assert_allclose(moments.mean, together.mean(0), atol=0.1)
    np.testing.assert_allclose(moments.std, together.std(0), rtol=0.01)


# Policies of one's own ---------------------------------------------------------------------------


class OwnOutputs(ActorCriticPolicy):
    """Ignores what it is told about normalization."""

    def outputs(self, weights: Weights, observation: Any) -> Any:
        return apply_network(self.params.module(weights), self.observation_space, observation)


@pytest.mark.parametrize("algorithm", [a2c, ppo, a3c], ids=["a2c", "ppo", "a3c"])
def test_a_policy_of_ones_own_normalizes_as_configured(algorithm: ModuleType) -> None:
    own = replace(task(), policy=partial(ActorCriticPolicy, network=partial(actor_critic, hidden=(3,))))
    config = algorithm.Config(normalize_observations=True, normalize_rewards=True)
    policy = algorithm.worker(config, own).policy(OBSERVATIONS, ACTIONS["discrete"])
    assert policy.normalize_observations
    assert policy.normalize_rewards
    assert {"observation.count", "return.count"} <= policy.init(0).keys()
    plain = algorithm.worker(algorithm.Config(), own).policy(OBSERVATIONS, ACTIONS["discrete"])
    assert not plain.normalize_observations


class OwnStep(ActorCriticPolicy):
    """Acts by itself."""

    def step(self, weights: Weights, observation: Any, state: Any, noise: Any) -> Any:
        return super().step(weights, observation, state, noise)


@pytest.mark.parametrize("policy", [OwnOutputs, OwnStep])
def test_a_policy_that_cannot_normalize_is_refused(policy: type) -> None:
    own = replace(task(), policy=policy)
    spec = ppo.worker(ppo.Config(normalize_observations=True), own)
    with pytest.raises(
        RollstreamError, match=f"normalize_observations is on, but {policy.__name__} does not normalize"
    ):
        spec.policy(OBSERVATIONS, ACTIONS["discrete"])

    class Normalizing(policy):
        """Follows the advice."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.normalize_observations = True

    own = replace(own, policy=Normalizing)
    assert ppo.worker(ppo.Config(normalize_observations=True), own).policy(OBSERVATIONS, ACTIONS["discrete"])
    assert ppo.worker(ppo.Config(), own).policy(OBSERVATIONS, ACTIONS["discrete"])


# Optimizers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tf_like", [False, True])
def test_the_first_step_of_rmsprop(tf_like: bool) -> None:
    """Ten times the learning rate, since the mean square starts at 0; little if it starts at 1."""
    optimizer = a2c.make_optimizer(a2c.Config(rmsprop_tf_like=tf_like))
    gradient = {"a": jnp.array([0.3, -0.1])}
    step, _ = optimizer.update(gradient, optimizer.init(gradient))
    square = np.asarray(gradient["a"], np.float64) ** 2
    root = np.sqrt(0.99 + 0.01 * square + 1e-5) if tf_like else np.sqrt(0.01 * square) + 1e-5
    updates: Any = step
    np.testing.assert_allclose(updates["a"], gradient["a"] / root, rtol=1e-4)


# What goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [ppo, a2c], ids=["ppo", "a2c"])
def test_nan_stops_the_update(algorithm: ModuleType) -> None:
    config, policy, weights, batch = example(algorithm, "discrete")
    learner = algorithm.learner(config, task(), policy)
    learner.weights = weights
    learner.train(batch)
    before, state = learner.weights, learner.state_dict()
    policy_loss = "policy_gradient_loss" if algorithm is ppo else "policy_loss"
    for column, named in (
        ("advantage", f"{policy_loss} is nan in update 2, and so are grad_norm, loss; the weights"),
        ("value_target", "value_loss is nan in update 2, and so are grad_norm, loss; the weights"),
        ("observation", f"entropy_loss is nan in update 2, and so are {policy_loss}, value_loss"),
    ):
        broken = batch[column].copy()
        broken[:] = np.nan
        with pytest.raises(Diverged, match=named):
            learner.train(Batch(batch | {column: broken}))
        assert learner.weights is before
        assert (learner.version, learner.steps) == (1, T * B)
        for one, other in zip(learner.state_dict()["state"], state["state"], strict=True):
            np.testing.assert_array_equal(one, other)


def test_an_infinite_gradient_stops_the_update() -> None:
    config, policy, weights, _ = example(a2c, "discrete")
    learner = a3c.learner(a3c.Config(**vars(config)), task(), policy)
    learner.weights = weights
    with pytest.raises(Diverged, match="grad_norm is inf in update 1"):
        learner.apply_gradients(trainable(weights), {"loss": 1.0, "grad_norm": np.inf}, 5)
    assert learner.weights is weights
    assert (learner.version, learner.steps) == (0, 0)
    learner.apply_gradients(trainable(weights), {"loss": 1.0, "explained_variance": np.nan}, 5)
    assert (learner.version, learner.steps) == (1, 5)


def test_weights_of_another_network_are_refused() -> None:
    config, policy, _, _ = example(a2c, "discrete")
    other = a2c.Config(hidden=(5,))
    state = a2c.learner(other, task(), a2c.make_policy(other, OBSERVATIONS, ACTIONS["discrete"])).state_dict()
    with pytest.raises(
        RollstreamError, match=r"these weights are of another network: network.actor.* is \(5,\), not \(3,\)"
    ):
        a2c.learner(config, task(), policy).load_state_dict(state)


def test_minibatches_must_fit_the_batch() -> None:
    with pytest.raises(RollstreamError, match="set minibatch_size to a divisor of 2048"):
        ppo.Config(minibatch_size=100)


def test_schedules_decay_to_the_end_of_the_training() -> None:
    config = ppo.Config(learning_rate=0.4, learning_rate_decay=True, clip_range=0.2, clip_range_decay=True)
    assert config.schedules(0.25) == pytest.approx({"learning_rate": 0.3, "clip_range": 0.15})
    assert ppo.Config(learning_rate=0.4).schedules(0.25) == {"learning_rate": 0.4, "clip_range": 0.2}
    _, policy, weights, _ = example(a2c, "discrete")
    learner = a3c.learner(a3c.Config(learning_rate=0.4, learning_rate_decay=True), task(steps=48), policy)
    learner.weights = weights
    rates = [learner.apply_gradients(trainable(weights), {}, T * B)["learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1, 0, 0])
