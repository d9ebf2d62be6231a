"""Acting in numpy, for small networks: calling a compiled function costs more than what it computes.

With 8 CartPoles and two layers of 64, a step of all takes 87 us instead of 127, environments included.
Products of matrices this small are computed by one thread, so results do not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box

from rollstream.rl.networks import MLP, ActorCritic, Dense, Encoder
from rollstream.rl.normalize import LIMIT, Moments
from rollstream.rl.spaces import is_image

if TYPE_CHECKING:
    from rollstream.rl.policy import ActorCriticPolicy, Weights

Array = np.ndarray[Any, Any]
Act = Callable[[Array, Any, Array], tuple[Array, Any]]
"""Actions and the policy's state, from observations, the state before and noise."""
SMALL = 1 << 18
"""Multiplications of one layer up to which BLAS stays in one thread (OpenBLAS: 4 x 65536)."""
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),  # which cannot overflow
}


def quick_layers(
    space: Space[Any], body: MLP, head: Dense, sizes: Weights, count: int
) -> Callable[[Weights], Callable[[Array], Array]] | None:
    """Makes, of weights, what computes these layers for so many observations; `None` if they are large.

    Body and head hold names of weights where their arrays would be.
    """
    layers = [*body.layers, head]
    if not isinstance(space, Box) or is_image(space):
        return None
    if max(sizes[layer.weight].size for layer in layers) * count > SMALL:
        return None
    activation = ACTIVATIONS[body.activation]

    def under(weights: Weights) -> Callable[[Array], Array]:
        numbers = [(np.asarray(weights[own.weight]).T, np.asarray(weights[own.bias])) for own in layers]
        if count > 1:  # one row is as quick without, and weights may be there for one step only
            numbers = [(np.ascontiguousarray(matrix), bias) for matrix, bias in numbers]
        *hidden, (last, shift) = numbers

        def outputs(x: Array) -> Array:
            for matrix, bias in hidden:
                x = x.dot(matrix)  # half as long as `@`, for arrays this small
                x += bias
                x = activation(x)
            return x.dot(last) + shift

        return outputs

    return under


def is_usual(network: Any, kind: type) -> bool:
    """Whether a network is of just this kind, over the usual encoder: one's own may compute anything."""
    return type(network) is kind and type(network.encoder) is Encoder


def quick_actor(policy: ActorCriticPolicy, count: int) -> Callable[[Weights], Act] | None:
    """Makes, of weights, what acts as `policy.step` does for so many observations; `None` if it is large."""
    network = policy.named.template()
    if not is_usual(network, ActorCritic) or type(network.actor) is not MLP:
        return None
    made = quick_layers(policy.observation_space, network.actor, network.actor_head, policy.init(0), count)
    if made is None:
        return None
    distribution = policy.distribution

    def under(weights: Weights) -> Act:
        compute = made(weights)
        spread = mean = scale = None
        if network.log_std is not None:
            spread = np.tile(np.asarray(weights[network.log_std]), (count, 1))
        if policy.normalize:
            moments = Moments(*(np.asarray(own) for own in Moments.of(weights, "observation")))
            mean, scale = moments.mean, np.asarray(moments.scale)

        def act(observation: Array, state: Any, noise: Array) -> tuple[Array, Any]:
            x = observation.reshape(count, -1)
            if mean is not None:
                x = np.clip((x - mean) / scale, -LIMIT, LIMIT)
            outputs = compute(x)
            if spread is not None:
                outputs = np.concatenate([outputs, spread], axis=-1)
            return distribution.sample(outputs, noise, np), state

        return act

    return under
