"""Values that cannot be learned from are found in the rollout, and where they come from is named."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from small_envs import sampled, worker_of

import rollstream as rs
from rollstream.rl.env_checks import BadEnvironment
from rollstream.rl.env_spec import EnvSpec
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.rl.vector import NativeVector
from rollstream.rl.worker import WorkerSpec
from rollstream.training.evaluation import Evaluator

NUMBERS = spaces.Box(-np.inf, np.inf, (2,))


class Broken(gymnasium.Env[Any, Any]):
    """A step of its second episode has the given reward or observation; episodes have five steps."""

    action_space = spaces.Discrete(2)

    def __init__(
        self,
        step: int,
        reward: float = 0.0,
        observation: Any = None,
        space: Any = NUMBERS,
        truncated: bool = True,
    ):
        self.observation_space = space
        self._bad = step, reward, observation
        self._truncated = truncated
        self._episode = -2  # one reset for the spaces, and one with a seed

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode += 1
        self._step = 0
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        over = self._step == 5
        reward = self._bad[1] if self._is_bad() else 1.0
        return self._shown(), reward, over and not self._truncated, over and self._truncated, {}

    def _is_bad(self) -> bool:
        return self._episode == 1 and self._step == self._bad[0]

    def _shown(self) -> Any:
        bad = self._bad[2]
        return bad if self._is_bad() and bad is not None else self.observation_space.sample()


def samples(length: int = 3, **options: Any) -> None:
    worker = worker_of(WorkerSpec(EnvSpec(partial(Broken, **options)), 2, length, ActorCriticPolicy))
    for _ in range(30 // length):
        sampled(worker)


@pytest.mark.parametrize("length", [1, 3, 5, 30])
@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_no_number_is_named(step: int, value: float, length: int) -> None:
    with pytest.raises(
        BadEnvironment, match=rf"^the reward is {value} in step {step} of an episode of .*Broken"
    ):
        samples(length, step=step, reward=value)


@pytest.mark.parametrize("length", [1, 3, 5, 30])
@pytest.mark.parametrize("step", [0, 2, 5])
def test_an_observation_that_is_no_number_is_named(step: int, length: int) -> None:
    when = f"in step {step} of an episode" if step else "after a reset"
    message = rf"^the observation is nan {when} of .*Broken.* \(environment 0 of worker 0\); all rewards"
    with pytest.raises(BadEnvironment, match=message):
        samples(length, step=step, observation=np.array([0, np.nan], np.float32))


def test_a_last_observation_nobody_looks_at_may_be_anything() -> None:
    samples(step=5, observation=np.array([0, np.nan], np.float32), truncated=False)


def test_large_numbers_whose_sum_is_infinite_are_numbers() -> None:
    samples(step=2, observation=np.array([3e38, 3e38], np.float32))


SEVERAL = spaces.Dict({"place": spaces.Discrete(4, start=1), "cards": spaces.MultiDiscrete([3, 2])})


@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (spaces.Discrete(5), 5, r"the observation is 5, outside of Discrete\(5\), in step 2"),
        (
            spaces.Discrete(5, start=2),
            1,
            r"the observation is 1, outside of Discrete\(5, start=2\), in step 2",
        ),
        (SEVERAL, {"place": 0, "cards": [2, 1]}, r"part 'place' of the observation is 0, outside"),
        (SEVERAL, {"place": 1, "cards": [2, 2]}, r"part 'cards' of the observation is 2, outside"),
    ],
)
def test_an_observation_outside_of_its_discrete_space_is_named(
    space: Any, observation: Any, message: str
) -> None:
    with pytest.raises(BadEnvironment, match=message):
        samples(step=2, observation=observation, space=space)


def test_a_vector_environment_that_resets_in_the_next_step_counts_its_steps() -> None:
    make = partial(Broken, step=4, reward=np.nan)
    worker = worker_of(WorkerSpec(EnvSpec("CartPole-v1"), 2, 30, ActorCriticPolicy))
    worker.vector = NativeVector(SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.NEXT_STEP))
    worker.policy = ActorCriticPolicy(NUMBERS, Broken.action_space)
    worker._numpy_policy = None
    worker._step = worker.policy.step
    worker.set_weights(0, worker.policy.init(0))
    worker._reset()
    with pytest.raises(BadEnvironment, match="the reward is nan in step 4 of an episode"):
        sampled(worker)


def test_a_policy_that_diverged_is_not_the_environments_fault() -> None:
    class Echo(Broken):
        action_space: Any = spaces.Box(-1, 1, (1,))

        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return observation, float(action[0]), *rest

    worker = worker_of(WorkerSpec(EnvSpec(partial(Echo, step=9)), 1, 4, ActorCriticPolicy))
    worker.set_weights(1, {name: value * np.nan for name, value in worker.policy.init(0).items()})
    with pytest.raises(
        BadEnvironment, match=r"the policy chose an action that is NaN .* training has diverged"
    ):
        sampled(worker)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_training_says_it_in_one_sentence(algorithm: str) -> None:
    with pytest.raises(rs.RollstreamError, match="the reward is nan in step 3 of an episode of Broken"):
        rs.train(algorithm, env=Broken, env_kwargs={"step": 3, "reward": np.nan}, steps=2_000, quiet=True)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"reward": np.inf}, "the reward is inf in step 3 of an episode of Broken"),
        ({"observation": np.array([0, np.nan])}, "the observation is nan in step 3 of an episode of Broken"),
    ],
)
def test_an_evaluation_says_it_in_one_sentence(bad: dict[str, Any], message: str) -> None:
    spec = EnvSpec(Broken, {"step": 3} | bad)
    policy = ActorCriticPolicy(NUMBERS, Broken.action_space)
    with Evaluator(spec, policy) as evaluate, pytest.raises(BadEnvironment, match=message):
        evaluate(policy.init(0), episodes=100)


def test_an_evaluation_checks_what_a_reset_returns_and_not_what_a_policy_never_sees() -> None:
    policy = ActorCriticPolicy(NUMBERS, Broken.action_space)
    nan = np.array([np.nan, 0], np.float32)
    after_reset = EnvSpec(Broken, {"step": 0, "observation": nan})
    with (
        Evaluator(after_reset, policy) as evaluate,
        pytest.raises(BadEnvironment, match="after a reset of Broken"),
    ):
        evaluate(policy.init(0), episodes=100)
    at_the_end = EnvSpec(Broken, {"step": 5, "observation": nan})
    with Evaluator(at_the_end, policy) as evaluate:
        assert evaluate(policy.init(0), episodes=100).mean_length == 5


def test_an_evaluation_of_weights_that_are_nan_is_not_the_environments_fault() -> None:
    class Echo(Broken):
        action_space: Any = spaces.Box(-1, 1, (1,))

        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return observation, float(action[0]), *rest

    policy = ActorCriticPolicy(NUMBERS, Echo.action_space)
    weights = {name: value * np.nan for name, value in policy.init(0).items()}
    with (
        Evaluator(EnvSpec(partial(Echo, step=9)), policy) as evaluate,
        pytest.raises(BadEnvironment, match="its weights"),
    ):
        evaluate(weights, episodes=2)
