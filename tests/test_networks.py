"""Layers compute what they say, whichever way."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from rollstream.engine import RollstreamError
from rollstream.rl.action_distributions import Categorical
from rollstream.rl.initializers import orthogonal, orthonormal_columns
from rollstream.rl.matrix_products import product
from rollstream.rl.networks import CNN, Convolution, actor_critic, head_network, q_network
from rollstream.rl.packed_tree import PackedTree, PublishedWeights
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


@pytest.mark.parametrize("matrix", [np.ones((3, 3)), np.diag([1.0, -1e-9, 2.0]), np.diag([-3.0, 1.0])])
def test_matrices_that_are_nearly_singular_are_made_orthogonal(matrix: Any) -> None:
    q = orthonormal_columns(matrix)
    np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-6)
    assert (np.diag(q.T @ matrix) > -1e-9).all()


def test_all_actions_are_about_as_likely_at_first() -> None:
    policy = ActorCriticPolicy(spaces.Box(-1, 1, (6,)), spaces.Discrete(4))
    observations = np.random.default_rng(1).uniform(-1, 1, (50, 6)).astype(np.float32)
    for seed in range(3):
        for action in range(4):
            log_prob = policy.evaluate_actions(policy.init(seed), observations, np.full(50, action))[0]
            np.testing.assert_allclose(np.exp(log_prob), 0.25, atol=0.02)


def test_images_are_looked_at_as_numbers_from_0_to_1() -> None:
    network = CNN(spaces.Box(0, 255, (36, 40, 3), np.uint8), np.random.default_rng(0))
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


@pytest.mark.parametrize(
    "shape",
    [
        (7, 7, 3),
        (10, 10, 4),
        (10, 10, 10),
        (3, 7, 7),
        (20, 35, 3),
        (35, 35, 1),
        (4, 3, 1),
        (2, 2, 2),
        (1, 9, 1),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, pytest.param(np.bool_, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_images_of_any_size_become_features(shape: tuple[int, ...], dtype: Any) -> None:
    space = spaces.Box(0, 1, shape, dtype)
    policy = ActorCriticPolicy(space, spaces.Discrete(3))
    images = np.stack([space.sample() for _ in range(4)])
    outputs, value = policy.outputs(policy.init(0), images)
    assert np.isfinite(outputs).all()
    assert len(np.unique(value)) > 1
    assert np.isfinite(policy.outputs(policy.init(0), np.zeros_like(images))[0]).all()


def test_images_go_from_the_convolutions_to_the_heads() -> None:
    image, vector = spaces.Box(0, 255, (36, 36, 3), np.uint8), spaces.Box(-1, 1, (3,))
    random, categorical = np.random.default_rng(0), Categorical(3)
    network = actor_critic(image, categorical, random)
    assert (network.actor.layers, network.actor_head.weight.shape) == ([], (3, 512))
    assert q_network(image, 3, random).head.weight.shape == (3, 512)
    assert head_network(image, 3, random).head.weight.shape == (3, 512)
    assert len(actor_critic(image, categorical, random, hidden=(8,)).actor.layers) == 1
    assert len(actor_critic(vector, categorical, random).actor.layers) == 2
    both = spaces.Dict({"image": image, "vector": vector})
    assert len(actor_critic(both, categorical, random).actor.layers) == 2
    masked = spaces.Dict({"observation": image, "action_mask": spaces.MultiBinary(3)})
    assert actor_critic(masked, categorical, random).actor.layers == []
    assert (
        len(head_network(image, 1, random, action_size=2).body.layers) == 2
    )  # Q is not linear in the action


def test_weights_that_are_published_are_unpacked_as_they_were() -> None:
    weights = {
        "network.weight": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
        "observation.count": jnp.float32(7),
        "epsilon": np.full((2, 1), 0.5, np.float32),
        "updates": np.int32((1 << 24) + 1),  # float32 does not have it
    }
    packing = PackedTree(weights)
    published = PublishedWeights(packing, packing.pack(weights))
    for found, kind in (published.on_host(), np.ndarray), (published.on_device(jax.devices()[0]), jax.Array):
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            assert isinstance(found[name], kind)
            assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
            np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a": np.zeros(3, np.float32)}, r"\['a'\] was float32\[2\] and is float32\[3\] now"),
        ({"b": np.zeros(3, np.float32)}, r"\['b'\] was int32\[3\] and is float32\[3\] now"),
        ({"c": np.zeros(3, np.float32)}, "the same structure"),
    ],
)
def test_arrays_that_an_update_has_changed_are_not_packed(changed: dict[str, Any], message: str) -> None:
    """Others that are packed with them would be cut in the wrong places."""
    tree = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.int32)}
    with pytest.raises(RollstreamError, match=message):
        PackedTree(tree).pack(tree | changed)


def test_large_arrays_are_not_packed() -> None:
    tree = {"large": jnp.ones((4, 4)), "small": jnp.ones(3), "other": jnp.zeros(2)}
    packing = PackedTree(tree, large=64)
    packed, large = packing.pack(tree)
    assert (packed.shape, large.shape) == ((5,), (4, 4))
    jax.tree.map(np.testing.assert_array_equal, packing.unpack((packed, large)), tree)


@pytest.mark.parametrize("order", [1, 2])
def test_gradients_of_products_over_a_batch(order: int) -> None:
    """Also those of gradients, and of weights that are a batch themselves."""
    random = np.random.default_rng(2)
    weight, rows = random.normal(size=(5, 3)), random.normal(size=(7, 3))

    def loss(multiply: Any, weight: Any, rows: Any) -> Any:
        return jnp.sum(jnp.sin(jax.vmap(multiply, (None, 0))(weight, rows)))

    def derived(multiply: Any) -> Any:
        first = jax.grad(partial(loss, multiply), argnums=(0, 1))
        if order == 1:
            return first(weight, rows)
        return jax.grad(lambda *own: sum(jnp.sum(grad**3) for grad in first(*own)), argnums=(0, 1))(
            weight, rows
        )

    for found, expected in zip(derived(product), derived(jnp.matmul), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    stacked = random.normal(size=(2, 5, 3))
    found = jax.vmap(jax.vmap(product, (None, 0)), (0, None))(stacked, rows)
    np.testing.assert_allclose(found, np.einsum("koi,ni->kno", stacked, rows), rtol=1e-4, atol=1e-4)
