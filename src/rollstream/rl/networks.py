"""Networks: Equinox modules that map one observation to distribution outputs, values or Q values.

JAX maps them over batches (`jax.vmap`). A network of your own is a function with the signature of
`actor_critic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from rollstream.rl.action_distributions import ActionDistribution, DiagGaussian
from rollstream.rl.initializers import orthogonal
from rollstream.rl.matrix_products import product
from rollstream.rl.spaces import channel_axis, is_image, leaf_values, leaves

Array = Any
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
_NATURE_FROM = 36
"""Images of this size and more fit the convolutions of the Nature network."""
_NUMPY_LIMIT = 1 << 18
"""Multiplications of a layer up to which BLAS stays in one thread (OpenBLAS: 4 x 65536): results then do not
depend on the number of threads."""


class Dense(eqx.Module):
    """A fully connected layer."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        """The layer's output for one vector."""
        return product(self.weight, x) + self.bias


class Convolution(eqx.Module):
    """A convolution of an image `[channels, height, width]`, without padding."""

    weight: Array
    bias: Array
    stride: int = eqx.field(static=True)

    def __call__(self, image: Array) -> Array:
        """The layer's output."""
        branches = {
            "cpu": lambda own: self._as_product(own),
            "default": lambda own: self._as_convolution(own),
        }
        return lax.platform_dependent(image, **branches) + self.bias

    def _as_convolution(self, image: Array) -> Array:
        strides = (self.stride, self.stride)
        return lax.conv_general_dilated(image[None], self.weight, strides, "VALID")[0]

    def _as_product(self, image: Array) -> Array:
        """The same as one matrix product: on a CPU, XLA's convolution is 30 times slower inside a loop.

        The pixels of a stride become channels, so that a filter covers few positions. Filters are a multiple
        of the stride wide.
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
    """A multilayer perceptron, with an activation after every layer."""

    layers: list[Dense]
    activation: str = eqx.field(static=True)

    def __init__(self, size: int, hidden: Sequence[int], activation: str, random: Generator):
        sizes = [size, *hidden]
        self.layers = [dense(before, after, np.sqrt(2), random) for before, after in pairwise(sizes)]
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        """The output of the last layer for one vector."""
        activation = ACTIVATIONS[self.activation]
        for layer in self.layers:
            x = activation(layer(x))
        return x


class CNN(eqx.Module):
    """Convolutions and a dense layer, as many and as large as an image allows.

    From 36 x 36 on it is the network of Mnih et al. (2015, doi:10.1038/nature14236), from 16 x 16 on a
    smaller one, and below that of MinAtar's baselines (arXiv:1903.03176). Under 36 x 36, convolutions are
    followed by layer normalization (arXiv:1607.06450) instead of a division by 255: bytes of grids are often
    small numbers, such as 0 and 1.

    Channels come last, or first if that axis is shorter, as in ALE's vector environments.
    """

    convolutions: list[Convolution]
    last: Dense
    channels: int = eqx.field(static=True)
    """The channel axis."""
    normalized: bool = eqx.field(static=True)
    """Whether convolutions are normalized."""
    divisor: float = eqx.field(static=True)
    """What pixels are divided by."""

    def __init__(self, space: gymnasium.Space[Any], random: Generator):
        assert isinstance(space, spaces.Box)
        self.channels = channel_axis(space.shape)
        size = int(np.delete(space.shape, self.channels).min())
        self.normalized = size < _NATURE_FROM
        self.divisor = 1.0 if self.normalized else max(1.0, float(space.high.max()))
        self.convolutions = []
        before = space.shape[self.channels]
        convolutions, features = _cnn_sizes(size)
        for after, width, stride in convolutions:
            weight = orthogonal((after, before, width, width), np.sqrt(2), random)
            self.convolutions.append(Convolution(weight, np.zeros((after, 1, 1), np.float32), stride))
            before = after
        image = jax.ShapeDtypeStruct(space.shape, jnp.float32)
        flat = jax.eval_shape(lambda own: self._convolved(own), image).size  # the method has no hash yet
        self.last = dense(flat, features, np.sqrt(2), random)

    def _convolved(self, image: Array) -> Array:
        x = jnp.moveaxis(image, self.channels, 0)
        for convolution in self.convolutions:
            x = convolution(x)
            x = jax.nn.relu(jax.nn.standardize(x, axis=None, epsilon=1e-8) if self.normalized else x)
        return x.reshape(-1)

    def __call__(self, image: Array) -> Array:
        """Features of an image."""
        return jax.nn.relu(self.last(self._convolved(image.astype(jnp.float32) / self.divisor)))


def _cnn_sizes(size: int) -> tuple[list[tuple[int, int, int]], int]:
    """Filters, width and stride of each convolution, and features, given the shorter side of an image."""
    if size >= _NATURE_FROM:
        return [(32, 8, 4), (64, 4, 2), (64, 3, 1)], 512
    if size >= 16:
        return [(16, 4, 2), (32, 4, 2)], 128
    return [(16, 3, 1)] if size >= 3 else [], 128


class Encoder(eqx.Module):
    """Any observation as one vector: images by a CNN, discrete parts one-hot, concatenated."""

    images: dict[str, CNN]
    space: gymnasium.Space[Any] = eqx.field(static=True)

    def __init__(self, space: gymnasium.Space[Any], random: Generator):
        self.space = space
        self.images = {path: CNN(part, random) for path, part in leaves(space) if is_image(part)}

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(
            len(self.images[path].last.bias) if is_image(part) else flat_size(part)
            for path, part in leaves(self.space)
        )

    def __call__(self, observation: Any) -> Array:
        """The vector."""
        parts = leaves(self.space)
        vectors = [
            self.images[path](own) if is_image(part) else flat_features(part, own)
            for (path, part), own in zip(parts, leaf_values(self.space, observation), strict=True)
        ]
        return jnp.concatenate(vectors)


def hidden_sizes(
    space: gymnasium.Space[Any], hidden: Sequence[int] | None, default: Sequence[int]
) -> Sequence[int]:
    """The sizes, or by default none for images, which go from the CNN straight to the heads."""
    if hidden is not None:
        return hidden
    return () if all(is_image(part) for _, part in leaves(space)) else default


class ActorCritic(eqx.Module):
    """An actor and a critic over a shared encoder."""

    encoder: Encoder
    actor: MLP
    critic: MLP
    actor_head: Dense
    critic_head: Dense
    log_std: Array | None

    def __call__(self, observation: Any) -> tuple[Array, Array]:
        """Distribution outputs and value."""
        features = self.encoder(observation)
        outputs, value = self.actor_head(self.actor(features)), self.critic_head(self.critic(features))[0]
        return outputs if self.log_std is None else with_log_std(outputs, self.log_std, jnp), value


def with_log_std(mean: Array, log_std: Array, xp: Any) -> Array:
    """Outputs of a normal distribution: means, then log standard deviations."""
    return xp.concatenate([mean, xp.broadcast_to(log_std, mean.shape)], axis=-1)


def actor_critic(
    space: gymnasium.Space[Any],
    distribution: ActionDistribution,
    random: Generator,
    *,
    hidden: Sequence[int] | None = None,
    activation: str = "tanh",
    log_std: float = 0.0,
) -> ActorCritic:
    """The default actor-critic network: orthogonal initialization, small in the actor's last layer."""
    encoder, hidden = Encoder(space, random), hidden_sizes(space, hidden, (64, 64))
    actor, critic = (MLP(encoder.size, hidden, activation, random) for _ in range(2))
    last = hidden[-1] if hidden else encoder.size
    return ActorCritic(encoder, actor, critic, *actor_critic_heads(last, distribution, log_std, random))


def actor_critic_heads(
    size: int, distribution: ActionDistribution, log_std: float, random: Generator
) -> tuple[Dense, Dense, Array | None]:
    """The last layers of actor and critic, and the log standard deviations of a normal distribution."""
    gaussian = isinstance(distribution, DiagGaussian)
    outputs = distribution.output_size // 2 if gaussian else distribution.output_size
    stds = np.full(outputs, log_std, np.float32) if gaussian else None
    return dense(size, outputs, 0.01, random), dense(size, 1, 1.0, random), stds


class QNetwork(eqx.Module):
    """Q values of all actions, `[actions]`; with atoms, logits of their return distributions."""

    encoder: Encoder
    body: MLP
    head: Dense
    value_head: Dense | None
    """The state value of a dueling network (Wang et al., 2016, arXiv:1511.06581)."""
    num_atoms: int = eqx.field(static=True)

    def __call__(self, observation: Any) -> Array:
        """Q values of one observation."""
        hidden = self.body(self.encoder(observation))
        value = [] if self.value_head is None else [self.value_head(hidden)]
        return q_outputs(self.num_atoms, self.head(hidden), *value)


def q_outputs(num_atoms: int, head: Array, value: Array | None = None) -> Array:
    """Q values, or logits of atoms, from the heads' outputs `[..., actions * atoms]` and `[..., atoms]`."""
    if num_atoms == 1 and value is None:
        return head
    outputs = head.reshape(*head.shape[:-1], -1, num_atoms)
    if value is not None:
        outputs = value[..., None, :] + outputs - outputs.mean(axis=-2, keepdims=True)
    return outputs[..., 0] if num_atoms == 1 else outputs


def q_network(
    space: gymnasium.Space[Any],
    actions: int,
    random: Generator,
    *,
    hidden: Sequence[int] | None = None,
    activation: str = "relu",
    dueling: bool = False,
    num_atoms: int = 1,
) -> QNetwork:
    """The default Q network."""
    encoder, hidden = Encoder(space, random), hidden_sizes(space, hidden, (64, 64))
    body = MLP(encoder.size, hidden, activation, random)
    last = hidden[-1] if hidden else encoder.size
    value = dense(last, num_atoms, 1.0, random) if dueling else None
    return QNetwork(encoder, body, dense(last, actions * num_atoms, 1.0, random), value, num_atoms)


class HeadNetwork(eqx.Module):
    """An actor, or a critic that also takes the action."""

    encoder: Encoder
    body: MLP
    head: Dense

    def __call__(self, observation: Any, *action: Array) -> Array:
        """Outputs for one observation, and one action if given."""
        features = [self.encoder(observation), *(own.reshape(-1) for own in action)]
        return self.head(self.body(jnp.concatenate(features)))


def head_network(
    space: gymnasium.Space[Any],
    outputs: int,
    random: Generator,
    *,
    action_size: int = 0,
    hidden: Sequence[int] | None = None,
    activation: str = "relu",
    gain: float = 1.0,
) -> HeadNetwork:
    """The default actor, or with `action_size` the default critic; `gain` scales the last layer at first."""
    encoder = Encoder(space, random)
    if action_size:  # a critic has to combine its features with the action
        hidden = (256, 256) if hidden is None else hidden
    hidden = hidden_sizes(space, hidden, (256, 256))
    body = MLP(encoder.size + action_size, hidden, activation, random)
    last = hidden[-1] if hidden else encoder.size + action_size
    return HeadNetwork(encoder, body, dense(last, outputs, gain, random))


def acts_in_numpy(space: gymnasium.Space[Any], network: Any, kind: type, num_envs: int) -> bool:
    """Whether a network can act with NumPy: ours, not your own, on a plain Box, and small.

    Calling a jitted function costs more than a small network: with 8 CartPoles and two layers of 64, a step
    takes 87 us instead of 127, environments included.
    """
    if type(network) is not kind or type(network.encoder) is not Encoder:
        return False
    if not isinstance(space, spaces.Box) or is_image(space):
        return False
    layers = [own for own in jax.tree.leaves(network) if np.ndim(own) == 2]
    return max(layer.size for layer in layers) * num_envs <= _NUMPY_LIMIT


def dense(before: int, after: int, gain: float, random: Generator) -> Dense:
    """A layer with orthogonal initialization and zero bias."""
    return Dense(orthogonal((after, before), gain, random), np.zeros(after, np.float32))


# Observations as vectors -------------------------------------------------------------------------


def flat_size(space: gymnasium.Space[Any]) -> int:
    """Length of the vector of a space other than images."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    return int(np.prod(space.shape or (1,)))


def flat_features(space: gymnasium.Space[Any], value: Array) -> Array:
    """One array as a vector of floats; discrete values one-hot."""
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(value - int(space.start), int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        sizes = space.nvec.ravel()
        chosen = (value - space.start).ravel()
        return jnp.concatenate([jax.nn.one_hot(chosen[i], int(size)) for i, size in enumerate(sizes)])
    return jnp.asarray(value, jnp.float32).reshape(-1)
