"""Acting in numpy is acting as the compiled policy does."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from gymnasium import spaces

from rollstream.rl.networks import actor_critic
from rollstream.rl.normalize import Moments
from rollstream.rl.policy import ActorCriticPolicy

ACTIONS = [spaces.Discrete(5), spaces.MultiDiscrete([3, 4]), spaces.Box(-1, 1, (2, 3))]
SEEN = spaces.Box(-1, 1, (2, 3))


def made(actions: spaces.Space[Any], *, normalize: bool, **options: Any) -> ActorCriticPolicy:
    def network(*about: Any) -> Any:
        return actor_critic(*about, **options)

    return ActorCriticPolicy(SEEN, actions, network, normalize=normalize)


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
        weights |= Moments(np.float32(9), seen[0], 9 * seen[1] ** 2).named("observation")
    acting = policy.quick(40)
    assert acting is not None
    observation, noise = random.standard_normal((40, 2, 3), np.float32), policy.noise(random, 40)
    action, state = acting(weights)(observation, (), noise)
    expected, _ = policy.step(weights, observation, (), noise)
    assert state == ()
    assert action.shape == expected.shape
    np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-4)


def test_what_is_large_or_not_plain_is_compiled() -> None:
    assert made(spaces.Discrete(2), normalize=False, hidden=(64, 64)).quick(64) is not None
    assert made(spaces.Discrete(2), normalize=False, hidden=(64, 64)).quick(65) is None
    assert made(spaces.Discrete(2), normalize=False, hidden=(256, 256)).quick(8) is None
    parts = spaces.Dict({"position": SEEN})
    assert ActorCriticPolicy(parts, spaces.Discrete(2)).quick(1) is None


def test_a_network_of_ones_own_is_asked_itself() -> None:
    space = spaces.Box(-1, 1, (3,))

    class Blind(eqx.Module):
        size: int = 3

        def __call__(self, observation: jax.Array) -> jax.Array:
            return 0 * observation

    def network(*arguments: Any) -> Any:
        return eqx.tree_at(lambda own: own.encoder, actor_critic(*arguments), Blind())

    assert ActorCriticPolicy(space, spaces.Discrete(2)).quick(2) is not None
    assert ActorCriticPolicy(space, spaces.Discrete(2), network).quick(2) is None
