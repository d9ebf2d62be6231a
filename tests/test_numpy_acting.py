"""Acting in NumPy is acting as the jitted policy does."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from gymnasium import spaces

from rollstream.rl.networks import actor_critic
from rollstream.rl.normalize import Moments
from rollstream.rl.policy import ActorCriticPolicy

ACTIONS = [spaces.Discrete(5), spaces.MultiDiscrete([3, 4]), spaces.Box(-1, 1, (2, 3)), spaces.MultiBinary(3)]
SEEN = spaces.Box(-1, 1, (2, 3))


def made(actions: spaces.Space[Any], *, normalize: bool, **options: Any) -> ActorCriticPolicy:
    def network(*about: Any) -> Any:
        return actor_critic(*about, **options)

    return ActorCriticPolicy(SEEN, actions, network, normalize_observations=normalize)


@pytest.mark.parametrize("actions", ACTIONS, ids=str)
@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
@pytest.mark.parametrize("normalize", [False, True])
def test_both_ways_act_alike(actions: spaces.Space[Any], activation: str, normalize: bool) -> None:
    random = np.random.default_rng(1)
    policy = made(actions, normalize=normalize, activation=activation, log_std=-0.5)
    weights = {
        name: random.standard_normal(np.shape(own), np.float32) for name, own in policy.init(3).items()
    }
    if normalize:
        seen = random.standard_normal((2, 6), np.float32)
        weights |= Moments(np.float32(9), seen[0], 9 * seen[1] ** 2).as_weights("observation")
    assert policy.acts_in_numpy(40)
    observation, noise = random.standard_normal((40, 2, 3), np.float32), policy.noise(random, 40)
    action, state = policy.numpy_step(weights, 40)(observation, (), noise)
    expected, _ = policy.step(weights, observation, (), noise)
    assert state == ()
    assert action.shape == expected.shape
    np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-4)


def test_what_is_large_or_not_plain_acts_in_jax() -> None:
    assert made(spaces.Discrete(2), normalize=False, hidden=(64, 64)).acts_in_numpy(64)
    assert not made(spaces.Discrete(2), normalize=False, hidden=(64, 64)).acts_in_numpy(65)
    assert not made(spaces.Discrete(2), normalize=False, hidden=(256, 256)).acts_in_numpy(8)
    parts = spaces.Dict({"position": SEEN})
    assert not ActorCriticPolicy(parts, spaces.Discrete(2)).acts_in_numpy(1)


def test_a_network_of_ones_own_is_asked_itself() -> None:
    space = spaces.Box(-1, 1, (3,))

    class Blind(eqx.Module):
        size: int = 3

        def __call__(self, observation: jax.Array) -> jax.Array:
            return 0 * observation

    def network(*arguments: Any) -> Any:
        return eqx.tree_at(lambda own: own.encoder, actor_critic(*arguments), Blind())

    assert ActorCriticPolicy(space, spaces.Discrete(2)).acts_in_numpy(2)
    assert not ActorCriticPolicy(space, spaces.Discrete(2), network).acts_in_numpy(2)
