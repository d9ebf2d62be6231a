"""Distributions over actions against closed forms in double precision, and what is drawn from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollstream.rl.action_distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    MultiCategorical,
    distribution_for,
)
from rollstream.rl.spaces import SpaceError

DRAWS = 20_000


def softmax(logits: Any) -> np.ndarray[Any, Any]:
    """In double precision."""
    powers = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def entropy_of(probabilities: Any) -> Any:
    """0 log 0 is 0."""
    logarithms = np.log(np.where(probabilities > 0, probabilities, 1))
    return -(probabilities * logarithms).sum(axis=-1)


LOGITS = np.random.default_rng(0).normal(0, 2, (3, 2, 4)).astype(np.float32)


def test_categorical_log_prob_and_entropy() -> None:
    actions = Categorical(4)
    probabilities = softmax(LOGITS)
    chosen = np.random.default_rng(1).integers(0, 4, (3, 2))
    expected = np.log(np.take_along_axis(probabilities, chosen[..., None], -1)[..., 0])
    np.testing.assert_allclose(actions.log_prob(LOGITS, jnp.asarray(chosen)), expected, rtol=1e-5)
    np.testing.assert_allclose(actions.entropy(LOGITS), entropy_of(probabilities), rtol=1e-5)
    np.testing.assert_array_equal(actions.mode(LOGITS), LOGITS.argmax(-1))


def test_categorical_draws_are_as_frequent_as_likely() -> None:
    actions = Categorical(4)
    noise = actions.noise(np.random.default_rng(2), DRAWS)
    drawn = np.asarray(actions.sample(LOGITS[0, 0], noise))
    frequencies = np.bincount(drawn, minlength=4) / DRAWS
    np.testing.assert_allclose(frequencies, softmax(LOGITS[0, 0]), atol=0.015)


def test_logits_far_apart_stay_numbers() -> None:
    logits = jnp.array([1000.0, -1000.0, 0.0])
    actions = Categorical(3)
    assert float(actions.entropy(logits)) == 0
    assert float(actions.log_prob(logits, jnp.array(1))) == -2000
    grads = jax.grad(lambda own: actions.entropy(own) + actions.log_prob(own, jnp.array(0)))(logits)
    assert np.isfinite(grads).all()


MASK = np.array([[1, 0, 1, 1], [0, 0, 1, 0]], np.int8)


def test_masked_actions_are_never_drawn_and_do_not_count() -> None:
    actions = Categorical(4)
    logits = LOGITS[0].copy()
    logits[0, 1] = 50  # by far the likeliest, if it were legal
    masked = actions.masked(logits, MASK)
    expected = softmax(np.where(MASK, logits, -np.inf))
    drawn = np.asarray(actions.sample(masked, actions.noise(np.random.default_rng(3), DRAWS, 2)))
    for row in range(2):
        frequencies = np.bincount(drawn[:, row], minlength=4) / DRAWS
        assert (frequencies[MASK[row] == 0] == 0).all()
        np.testing.assert_allclose(frequencies, expected[row], atol=0.015)
    np.testing.assert_allclose(actions.entropy(masked), entropy_of(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        actions.log_prob(masked, jnp.array([2, 2])), np.log(expected[:, 2]), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(actions.mode(masked), np.where(MASK, logits, -np.inf).argmax(-1))


def test_no_gradient_reaches_actions_that_are_not_legal() -> None:
    actions = Categorical(4)

    def objective(logits: Any) -> Any:
        masked = actions.masked(logits, MASK)
        return jnp.sum(actions.entropy(masked) + actions.log_prob(masked, jnp.array([0, 2])))

    grads = np.asarray(jax.grad(objective)(jnp.asarray(LOGITS[0])))
    assert np.isfinite(grads).all()
    assert (grads[MASK == 0] == 0).all()
    assert (grads[0][MASK[0] == 1] != 0).all()


def test_without_any_legal_action_nothing_breaks() -> None:
    """As after an episode's end, whose final observation is only valued."""
    masked = Categorical(3).masked(jnp.array([0.1, 0.2, 0.3]), jnp.zeros(3))
    assert np.isfinite(Categorical(3).entropy(masked))


def test_several_choices_are_independent() -> None:
    actions = MultiCategorical([4, 2, 3])
    assert actions.output_size == 9
    outputs = np.random.default_rng(4).normal(0, 1, (5, 9)).astype(np.float32)
    parts = [softmax(own) for own in np.split(outputs, [4, 6], axis=-1)]
    chosen = np.random.default_rng(5).integers(0, [4, 2, 3], (5, 3))
    expected = sum(
        np.log(np.take_along_axis(part, chosen[:, i : i + 1], -1)[:, 0]) for i, part in enumerate(parts)
    )
    np.testing.assert_allclose(actions.log_prob(outputs, jnp.asarray(chosen)), expected, rtol=1e-5)
    np.testing.assert_allclose(actions.entropy(outputs), sum(entropy_of(part) for part in parts), rtol=1e-5)
    np.testing.assert_array_equal(
        actions.mode(outputs), np.stack([part.argmax(-1) for part in parts], axis=-1)
    )
    drawn = np.asarray(actions.sample(outputs[0], actions.noise(np.random.default_rng(6), DRAWS)))
    assert drawn.shape == (DRAWS, 3)
    joint = np.zeros((4, 2, 3))
    np.add.at(joint, tuple(drawn.T), 1 / DRAWS)
    np.testing.assert_allclose(joint, np.einsum("i,j,k->ijk", *(part[0] for part in parts)), atol=0.015)


def test_masks_of_several_choices() -> None:
    actions = MultiCategorical([3, 2])
    masked = actions.masked(jnp.zeros(5), jnp.array([1, 0, 1, 0, 1]))
    drawn = np.asarray(actions.sample(masked, actions.noise(np.random.default_rng(7), DRAWS)))
    assert set(drawn[:, 0]) == {0, 2}
    assert set(drawn[:, 1]) == {1}
    np.testing.assert_allclose(actions.entropy(masked), np.log(2), rtol=1e-5)
    np.testing.assert_allclose(actions.log_prob(masked, jnp.array([2, 1])), np.log(0.5), rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_gaussian_log_prob_and_entropy(shape: tuple[int, ...]) -> None:
    actions = DiagGaussian(spaces.Box(-np.inf, np.inf, shape))
    size = int(np.prod(shape))
    random = np.random.default_rng(8)
    mean, log_std = random.normal(0, 1, (2, 6, size))
    outputs = np.concatenate([mean, log_std], axis=-1).astype(np.float32)
    chosen = random.normal(0, 2, (6, *shape))
    std = np.exp(log_std)
    density = np.exp(-0.5 * ((chosen.reshape(6, size) - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(
        actions.log_prob(outputs, jnp.asarray(chosen)), np.log(density).sum(-1), rtol=2e-5
    )
    expected = 0.5 * np.log(2 * np.pi * np.e * std**2).sum(-1)
    np.testing.assert_allclose(actions.entropy(outputs), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actions.mode(outputs), mean.reshape(6, *shape), rtol=1e-6)
    assert actions.masked(outputs, jnp.zeros(3)) is outputs


def test_gaussian_draws_have_their_mean_and_deviation() -> None:
    actions = DiagGaussian(spaces.Box(-np.inf, np.inf, (2,)))
    outputs = jnp.array([1.0, -2.0, np.log(0.5), np.log(3.0)])
    drawn = np.asarray(actions.sample(outputs, actions.noise(np.random.default_rng(9), DRAWS)), np.float64)
    np.testing.assert_allclose(drawn.mean(0), [1, -2], atol=0.06)
    np.testing.assert_allclose(drawn.std(0), [0.5, 3], rtol=0.02)
    assert abs(np.mean((drawn[:, 0] - 1) * (drawn[:, 1] + 2)) / 1.5) < 0.02, "the two depend on each other"


def test_a_gaussian_whose_bounds_exclude_0_starts_at_their_center() -> None:
    space = spaces.Box(np.array([200, 0], np.float32), np.array([255, np.inf], np.float32))
    actions = DiagGaussian(space)
    drawn = np.asarray(actions.sample(jnp.zeros(4), actions.noise(np.random.default_rng(0), DRAWS)))
    np.testing.assert_allclose(drawn.mean(0), [227.5, 0], atol=0.5)
    np.testing.assert_allclose(drawn.std(0), [27.5, 1], rtol=0.02)
    log_prob = actions.log_prob(jnp.zeros((2, 4)), jnp.array([[227.5, 0.0], [255.0, 1.0]]))
    np.testing.assert_allclose(log_prob[0] - log_prob[1], 1.0, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_bernoulli_log_prob_entropy_and_draws(shape: tuple[int, ...]) -> None:
    actions = Bernoulli(shape)
    outputs = np.random.default_rng(0).normal(0, 1, (5, actions.output_size)).astype(np.float32)
    probabilities = 1 / (1 + np.exp(-outputs.astype(np.float64)))
    chosen = np.random.default_rng(1).integers(0, 2, (5, *shape))
    likely = np.where(chosen.reshape(5, -1), probabilities, 1 - probabilities)
    np.testing.assert_allclose(
        actions.log_prob(outputs, jnp.asarray(chosen)), np.log(likely).sum(-1), rtol=1e-5
    )
    both = np.stack([probabilities, 1 - probabilities], axis=-1)
    np.testing.assert_allclose(actions.entropy(outputs), entropy_of(both).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(actions.mode(outputs), (probabilities > 0.5).reshape(5, *shape))
    drawn = np.asarray(actions.sample(outputs[0], actions.noise(np.random.default_rng(2), DRAWS), np))
    assert drawn.shape == (DRAWS, *shape)
    np.testing.assert_allclose(drawn.reshape(DRAWS, -1).mean(0), probabilities[0], atol=0.015)


@pytest.mark.parametrize(
    ("space", "kind", "outputs"),
    [
        (spaces.Discrete(5, start=-2), Categorical, 5),
        (spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])), MultiCategorical, 14),
        (spaces.MultiBinary([2, 3]), Bernoulli, 6),
        (spaces.Box(-1, 1, (2, 3)), DiagGaussian, 12),
    ],
)
def test_each_space_has_its_distribution(space: Any, kind: type, outputs: int) -> None:
    distribution = distribution_for(space)
    assert type(distribution) is kind
    assert distribution.output_size == outputs
    one, other = (distribution.noise(np.random.default_rng(0), 3) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert one.dtype == np.float32


def test_a_space_without_one_is_named() -> None:
    with pytest.raises(
        SpaceError,
        match=r"PPO supports action spaces of type Discrete, MultiDiscrete, MultiBinary, Box, and .*Text",
    ):
        distribution_for(spaces.Text(3), "PPO")
