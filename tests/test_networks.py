"""Layers compute what they say, whichever way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollstream.rl.networks import Convolution, NatureCNN, orthogonal
from rollstream.rl.policy import ActorCriticPolicy


@pytest.mark.parametrize(
    ("height", "width", "size", "stride"), [(84, 84, 8, 4), (20, 23, 4, 2), (9, 7, 3, 1)]
)
def test_a_convolution_as_a_product_is_the_same(height: int, width: int, size: int, stride: int) -> None:
    random = np.random.default_rng(0)
    image = random.standard_normal((3, height, width)).astype(np.float32)
    weight = random.standard_normal((5, 3, size, size)).astype(np.float32)

    def both(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer = Convolution(weight, np.zeros((5, 1, 1), np.float32), stride)
        return layer._as_product(image), layer._as_convolution(image)

    product, convolution = both(jnp.asarray(weight))
    np.testing.assert_allclose(product, convolution, rtol=1e-4, atol=1e-4)
    one, other = (jax.grad(lambda own, i=i: (both(own)[i] ** 2).sum())(jnp.asarray(weight)) for i in range(2))
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-1)


def test_every_rotation_is_as_likely_at_first() -> None:
    first = [orthogonal((3, 3), 1.0, np.random.default_rng(seed))[0, 0] for seed in range(200)]
    assert abs(np.mean(first)) < 0.1


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_initial_weights_are_orthogonal(shape: tuple[int, int]) -> None:
    weight = orthogonal(shape, 2.0, np.random.default_rng(0))
    product = weight @ weight.T if shape[0] <= shape[1] else weight.T @ weight
    np.testing.assert_allclose(product, 4 * np.eye(min(shape)), atol=1e-5)


def test_all_actions_are_about_as_likely_at_first() -> None:
    policy = ActorCriticPolicy(spaces.Box(-1, 1, (6,)), spaces.Discrete(4))
    observations = np.random.default_rng(1).uniform(-1, 1, (50, 6)).astype(np.float32)
    for seed in range(3):
        for action in range(4):
            log_prob = policy.evaluate_actions(policy.init(seed), observations, np.full(50, action))[0]
            np.testing.assert_allclose(np.exp(log_prob), 0.25, atol=0.02)


def test_images_are_looked_at_as_numbers_from_0_to_1() -> None:
    network = NatureCNN((36, 40, 3), np.random.default_rng(0))
    image = np.random.default_rng(1).integers(0, 256, (36, 40, 3), dtype=np.uint8)
    x = np.moveaxis(image, -1, 0) / np.float32(255)
    for layer in network.convolutions:
        filters, channels, size, _ = layer.weight.shape
        windows = np.lib.stride_tricks.sliding_window_view(x, (channels, size, size))[0]
        windows = windows[:: layer.stride, :: layer.stride].reshape(-1, channels * size * size)
        rows = (x.shape[1] - size) // layer.stride + 1
        x = np.maximum(layer.weight.reshape(filters, -1) @ windows.T, 0).reshape(filters, rows, -1)
    expected = np.maximum(network.last.weight @ x.reshape(-1), 0)
    np.testing.assert_allclose(network(jnp.asarray(image)), expected, rtol=1e-4, atol=1e-4)
