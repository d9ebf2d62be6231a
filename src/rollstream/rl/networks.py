"""Networks that turn one observation into a distribution's outputs and a value.

A network is an Equinox module, called with a single observation. One's own is a function away, with the
signature of `actor_critic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollstream.rl.distributions import Distribution, Gaussian
from rollstream.rl.spaces import SpaceError, is_image, leaves, values

Array = Any
ACTIVATIONS: dict[str, Any] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
_FEATURES = 512


class MLP(eqx.Module):
    """Layers with an activation after each."""

    layers: list[eqx.nn.Linear]
    activation: str = eqx.field(static=True)

    def __init__(self, size: int, hidden: Sequence[int], activation: str, key: Array):
        sizes, keys = [size, *hidden], jax.random.split(key, max(1, len(hidden)))
        self.layers = [
            orthogonal(before, after, np.sqrt(2), own)
            for before, after, own in zip(sizes, hidden, keys, strict=False)
        ]
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        """What comes out of the last layer."""
        for layer in self.layers:
            x = ACTIVATIONS[self.activation](layer(x))
        return x


class NatureCNN(eqx.Module):
    """The convolutions of Mnih et al. (2015, doi:10.1038/nature14236), for images with channels last."""

    convolutions: list[eqx.nn.Conv2d]
    dense: eqx.nn.Linear

    def __init__(self, shape: tuple[int, ...], key: Array):
        if min(shape[:2]) < 36:
            raise SpaceError(f"images of {shape[0]} x {shape[1]} are too small; give at least 36 x 36")
        keys = jax.random.split(key, 4)
        sizes = [(shape[2], 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        self.convolutions = [
            _orthogonal_weights(eqx.nn.Conv2d(*size, key=own), np.sqrt(2), own)
            for size, own in zip(sizes, keys, strict=False)
        ]
        flat = jax.eval_shape(self._convolved, jax.ShapeDtypeStruct(shape, jnp.float32)).size
        self.dense = orthogonal(flat, _FEATURES, np.sqrt(2), keys[3])

    def _convolved(self, image: Array) -> Array:
        x = jnp.moveaxis(image, -1, 0)
        for convolution in self.convolutions:
            x = jax.nn.relu(convolution(x))
        return x.reshape(-1)

    def __call__(self, image: Array) -> Array:
        """Features of an image of bytes."""
        return jax.nn.relu(self.dense(self._convolved(image.astype(jnp.float32) / 255)))


class Encoder(eqx.Module):
    """Any observation as one vector: images by convolutions, choices as one-hot, all parts joined."""

    images: dict[str, NatureCNN]
    space: gymnasium.Space[Any] = eqx.field(static=True)

    def __init__(self, space: gymnasium.Space[Any], key: Array):
        self.space = space
        parts = {path: part for path, part in leaves(space) if is_image(part)}
        keys = jax.random.split(key, max(1, len(parts)))
        self.images = {
            path: NatureCNN(part.shape or (), own)
            for (path, part), own in zip(parts.items(), keys, strict=False)
        }

    @property
    def size(self) -> int:
        """How long the vector is."""
        return sum(_FEATURES if is_image(part) else flat_size(part) for _, part in leaves(self.space))

    def __call__(self, observation: Any) -> Array:
        """One vector."""
        parts = [
            self.images[path](own) if is_image(part) else encoded(part, own)
            for (path, part), own in zip(leaves(self.space), values(self.space, observation), strict=True)
        ]
        return jnp.concatenate(parts)


class ActorCritic(eqx.Module):
    """One network that says what to do and another that says how good things are, over one encoder."""

    encoder: Encoder
    actor: MLP
    critic: MLP
    actor_head: eqx.nn.Linear
    critic_head: eqx.nn.Linear
    log_std: Array | None

    def __call__(self, observation: Any) -> tuple[Array, Array]:
        """Outputs and value."""
        features = self.encoder(observation)
        outputs = self.actor_head(self.actor(features))
        if self.log_std is not None:
            outputs = jnp.concatenate([outputs, self.log_std])
        return outputs, self.critic_head(self.critic(features))[0]


def actor_critic(
    space: gymnasium.Space[Any],
    distribution: Distribution,
    key: Array,
    *,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    log_std: float = 0.0,
) -> ActorCritic:
    """The usual network, with the usual initial weights (orthogonal, small at the end of the actor)."""
    keys = jax.random.split(key, 5)
    encoder = Encoder(space, keys[0])
    actor, critic = (MLP(encoder.size, hidden, activation, own) for own in keys[1:3])
    last = hidden[-1] if hidden else encoder.size
    gaussian = isinstance(distribution, Gaussian)
    outputs = distribution.outputs // 2 if gaussian else distribution.outputs
    return ActorCritic(
        encoder,
        actor,
        critic,
        orthogonal(last, outputs, 0.01, keys[3]),
        orthogonal(last, 1, 1.0, keys[4]),
        jnp.full(outputs, log_std) if gaussian else None,
    )


def orthogonal(before: int, after: int, gain: float, key: Array) -> eqx.nn.Linear:
    """A layer with orthogonal weights and no bias at first."""
    return _orthogonal_weights(eqx.nn.Linear(before, after, key=key), gain, key)


def _orthogonal_weights(layer: Any, gain: float, key: Array) -> Any:
    flat = (layer.weight.shape[0], int(np.prod(layer.weight.shape[1:])))
    weight = jax.nn.initializers.orthogonal(gain)(key, flat).reshape(layer.weight.shape)
    layer = eqx.tree_at(lambda own: own.weight, layer, weight)
    return eqx.tree_at(lambda own: own.bias, layer, jnp.zeros_like(layer.bias))


# Observations as vectors -------------------------------------------------------------------------


def flat_size(space: gymnasium.Space[Any]) -> int:
    """How long the vector of a space without images is."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    return int(np.prod(space.shape or (1,)))


def encoded(space: gymnasium.Space[Any], value: Array) -> Array:
    """One array as a vector of floats."""
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(value - int(space.start), int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        sizes = space.nvec.ravel()
        chosen = value.ravel()
        return jnp.concatenate([jax.nn.one_hot(chosen[i], int(size)) for i, size in enumerate(sizes)])
    return jnp.asarray(value, jnp.float32).reshape(-1)
