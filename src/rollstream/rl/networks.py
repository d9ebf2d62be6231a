"""Networks that turn one observation into a distribution's outputs and a value.

A network is an Equinox module, called with a single observation. One's own is a function away, with the
signature of `actor_critic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import lax
from numpy.random import Generator

from rollstream.rl.distributions import Distribution, Gaussian
from rollstream.rl.spaces import SpaceError, channel_axis, is_image, leaves, values

Array = Any
ACTIVATIONS: dict[str, Any] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
_FEATURES = 512


class Dense(eqx.Module):
    """A layer of weights and biases."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        """One vector from another."""
        return self.weight @ x + self.bias


class Convolution(eqx.Module):
    """Filters moved over an image `[channels, height, width]`."""

    weight: Array
    bias: Array
    stride: int = eqx.field(static=True)

    def __call__(self, image: Array) -> Array:
        """One image from another."""
        ways = {"cpu": lambda own: self._as_product(own), "default": lambda own: self._as_convolution(own)}
        return lax.platform_dependent(image, **ways) + self.bias

    def _as_convolution(self, image: Array) -> Array:
        strides = (self.stride, self.stride)
        return lax.conv_general_dilated(image[None], self.weight, strides, "VALID")[0]

    def _as_product(self, image: Array) -> Array:
        """The same as one product of matrices: on a CPU, XLA convolves 30 times slower inside a loop.

        Pixels of a stride become channels, so that a filter covers few places. It is whole strides wide.
        """
        filters, channels, size, _ = self.weight.shape
        stride, wide = self.stride, size // self.stride
        high, across = ((own - size) // stride + 1 for own in image.shape[1:])
        rows, columns = high + wide - 1, across + wide - 1
        used = image[:, : rows * stride, : columns * stride].reshape(channels, rows, stride, columns, stride)
        deep = used.transpose(0, 2, 4, 1, 3).reshape(-1, rows, columns)
        near = [deep[:, i : i + high, j : j + across] for i in range(wide) for j in range(wide)]
        weight = self.weight.reshape(filters, channels, wide, stride, wide, stride)
        weight = weight.transpose(0, 1, 3, 5, 2, 4).reshape(filters, -1)
        return (weight @ jnp.stack(near, axis=1).reshape(weight.shape[1], -1)).reshape(filters, high, across)


class MLP(eqx.Module):
    """Layers with an activation after each."""

    layers: list[Dense]
    activation: str = eqx.field(static=True)

    def __init__(self, size: int, hidden: Sequence[int], activation: str, random: Generator):
        sizes = [size, *hidden]
        self.layers = [dense(before, after, np.sqrt(2), random) for before, after in pairwise(sizes)]
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        """What comes out of the last layer."""
        for layer in self.layers:
            x = ACTIVATIONS[self.activation](layer(x))
        return x


class NatureCNN(eqx.Module):
    """The convolutions of Mnih et al. (2015, doi:10.1038/nature14236).

    Channels come last; or first, if they are the fewest, as in the vector environments for Atari.
    """

    convolutions: list[Convolution]
    last: Dense
    channels: int = eqx.field(static=True)
    """The axis they are along."""

    def __init__(self, shape: tuple[int, ...], random: Generator):
        self.channels = channel_axis(shape)
        height, width = np.delete(shape, self.channels)
        if min(height, width) < 36:
            raise SpaceError(f"images of {height} x {width} are too small; give at least 36 x 36")
        sizes = [(shape[self.channels], 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        self.convolutions = [
            Convolution(
                orthogonal((after, before, size, size), np.sqrt(2), random),
                np.zeros((after, 1, 1), np.float32),
                stride,
            )
            for before, after, size, stride in sizes
        ]
        image = jax.ShapeDtypeStruct(shape, jnp.float32)
        flat = jax.eval_shape(lambda own: self._convolved(own), image).size  # the method has no hash yet
        self.last = dense(flat, _FEATURES, np.sqrt(2), random)

    def _convolved(self, image: Array) -> Array:
        x = jnp.moveaxis(image, self.channels, 0)
        for convolution in self.convolutions:
            x = jax.nn.relu(convolution(x))
        return x.reshape(-1)

    def __call__(self, image: Array) -> Array:
        """Features of an image of bytes."""
        return jax.nn.relu(self.last(self._convolved(image.astype(jnp.float32) / 255)))


class Encoder(eqx.Module):
    """Any observation as one vector: images by convolutions, choices as one-hot, all parts joined."""

    images: dict[str, NatureCNN]
    space: gymnasium.Space[Any] = eqx.field(static=True)

    def __init__(self, space: gymnasium.Space[Any], random: Generator):
        self.space = space
        self.images = {
            path: NatureCNN(part.shape or (), random) for path, part in leaves(space) if is_image(part)
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
    actor_head: Dense
    critic_head: Dense
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
    random: Generator,
    *,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    log_std: float = 0.0,
) -> ActorCritic:
    """The usual network, with the usual initial weights (orthogonal, small at the end of the actor)."""
    encoder = Encoder(space, random)
    actor, critic = (MLP(encoder.size, hidden, activation, random) for _ in range(2))
    last = hidden[-1] if hidden else encoder.size
    gaussian = isinstance(distribution, Gaussian)
    outputs = distribution.outputs // 2 if gaussian else distribution.outputs
    return ActorCritic(
        encoder,
        actor,
        critic,
        dense(last, outputs, 0.01, random),
        dense(last, 1, 1.0, random),
        np.full(outputs, log_std, np.float32) if gaussian else None,
    )


class QNetwork(eqx.Module):
    """The value of every action, `[actions]`; or logits of its distribution, `[actions, atoms]`."""

    encoder: Encoder
    body: MLP
    head: Dense
    value_head: Dense | None
    """If there is one, actions are compared with each other only (Wang et al., 2016, arXiv:1511.06581)."""
    atoms: int = eqx.field(static=True)

    def __call__(self, observation: Any) -> Array:
        """Of all actions."""
        features = self.body(self.encoder(observation))
        each = self.head(features).reshape(-1, self.atoms)
        if self.value_head is not None:
            each = self.value_head(features) + each - each.mean(axis=0)
        return each[:, 0] if self.atoms == 1 else each


def q_network(
    space: gymnasium.Space[Any],
    actions: int,
    random: Generator,
    *,
    hidden: Sequence[int] = (64, 64),
    activation: str = "relu",
    dueling: bool = False,
    atoms: int = 1,
) -> QNetwork:
    """The usual network over any observation."""
    encoder = Encoder(space, random)
    body = MLP(encoder.size, hidden, activation, random)
    last = hidden[-1] if hidden else encoder.size
    value = dense(last, atoms, 1.0, random) if dueling else None
    return QNetwork(encoder, body, dense(last, actions * atoms, 1.0, random), value, atoms)


class Head(eqx.Module):
    """Numbers from an observation, and from an action if one is given: an actor, or a critic."""

    encoder: Encoder
    body: MLP
    head: Dense

    def __call__(self, observation: Any, *action: Array) -> Array:
        """The numbers."""
        features = [self.encoder(observation), *(own.reshape(-1) for own in action)]
        return self.head(self.body(jnp.concatenate(features)))


def network_head(
    space: gymnasium.Space[Any],
    outputs: int,
    random: Generator,
    *,
    actions: int = 0,
    hidden: Sequence[int] = (256, 256),
    activation: str = "relu",
    gain: float = 1.0,
) -> Head:
    """The usual network from observations, and so many numbers of an action, to so many outputs."""
    encoder = Encoder(space, random)
    body = MLP(encoder.size + actions, hidden, activation, random)
    last = hidden[-1] if hidden else encoder.size + actions
    return Head(encoder, body, dense(last, outputs, gain, random))


def dense(before: int, after: int, gain: float, random: Generator) -> Dense:
    """A layer with orthogonal weights and no bias at first."""
    return Dense(orthogonal((after, before), gain, random), np.zeros(after, np.float32))


def orthogonal(shape: tuple[int, ...], gain: float, random: Generator) -> Array:
    """Weights whose rows, or columns, are orthogonal (Saxe et al., 2014, arXiv:1312.6120)."""
    rows, columns = shape[0], int(np.prod(shape[1:]))
    q, r = np.linalg.qr(random.standard_normal((max(rows, columns), min(rows, columns))))
    q *= np.sign(np.diag(r))  # so that every rotation is as likely
    return (gain * (q if rows >= columns else q.T)).reshape(shape).astype(np.float32)


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
        chosen = (value - space.start).ravel()
        return jnp.concatenate([jax.nn.one_hot(chosen[i], int(size)) for i, size in enumerate(sizes)])
    return jnp.asarray(value, jnp.float32).reshape(-1)
