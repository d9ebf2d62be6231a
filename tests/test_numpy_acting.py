"""Acting in NumPy, and evaluating while acting, are what the jitted policy does."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from gymnasium import spaces
from small_envs import sampled, worker_of

from rollstream.algos import ppo
from rollstream.rl.algorithm import Task
from rollstream.rl.env_spec import EnvSpec
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


# Values of the forward pass that acted -----------------------------------------------------------


class Cautious(ActorCriticPolicy):
    """Acts in its own way."""

    def step(self, weights: Any, observation: Any, state: Any, noise: Any) -> Any:
        action, state = super().step(weights, observation, state, noise)
        return 0 * action, state


@pytest.mark.parametrize("environment", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize(("hidden", "passes"), [((600, 600), 0), ((8,), 1)], ids=["jax", "numpy"])
def test_steps_are_evaluated_once(
    environment: str, hidden: tuple[int, ...], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    config = ppo.Config(num_envs=8, rollout_length=16, minibatch_size=16, hidden=hidden)
    worker = worker_of(ppo.worker(config, Task(EnvSpec(environment), 1000)))
    policy: Any = worker.policy
    evaluate = policy.evaluate_actions
    with monkeypatch.context() as patch:
        patch.setattr(policy, "evaluate_actions", lambda *args: calls.append(1) or evaluate(*args))
        batch = sampled(worker)
    assert len(calls) == passes
    log_prob, _, value = policy.evaluate_actions(worker.weights, batch["observation"], batch["action"])
    np.testing.assert_allclose(batch["log_prob"], log_prob, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batch["value"], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hidden", [(600, 600), (8,)], ids=["jax", "numpy"])
def test_a_policy_that_acts_in_its_own_way_is_asked_to_act(hidden: tuple[int, ...]) -> None:
    config = ppo.Config(num_envs=8, rollout_length=16, minibatch_size=16)

    def make(observations: Any, actions: Any) -> Cautious:
        return Cautious(observations, actions, lambda *about: actor_critic(*about, hidden=hidden))

    worker = worker_of(ppo.worker(config, Task(EnvSpec("CartPole-v1"), 1000, policy=make)))
    policy: Any = worker.policy
    batch = sampled(worker)
    assert not batch["action"].any()
    log_prob, _, _ = policy.evaluate_actions(worker.weights, batch["observation"], batch["action"])
    np.testing.assert_allclose(batch["log_prob"], log_prob, rtol=1e-4, atol=1e-4)
