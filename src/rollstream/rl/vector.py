"""Vector environments with one interface for all of Gymnasium's autoreset modes.

Gymnasium's vector environments reset in the step that ends an episode (SAME_STEP), in the step after it,
which ignores its action (NEXT_STEP), or when asked to (DISABLED). A `VectorStep` has the observation to act
on next, the final observations of episodes that ended, and a mask of the steps that were not resets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rollstream.engine import RollstreamError
from rollstream.rl.action_masks import ActionMasks
from rollstream.rl.env_checks import INTERFACE_ERRORS, check_observation, checked_reset, env_name, explain
from rollstream.rl.env_state import load_environments, saved_environments
from rollstream.rl.spaces import Observation, put, take, zeros


class VectorStep(NamedTuple):
    """The result of one step of all environments."""

    observation: Observation
    """The observation to act on next, `[B, ...]`."""
    reward: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    ended: Sequence[int]
    """Environments whose episode ended."""
    final_observations: Sequence[tuple[int, Observation]]
    """Environment and final observation of ended episodes, where `observation` is that of a new one."""
    mask: np.ndarray[Any, Any] | None = None
    """False where the step only reset the environment; `None` if no step did."""
    success: Sequence[tuple[int, float]] = ()
    """Environment and `info["is_success"]` of ended episodes that report it."""

    @property
    def started(self) -> list[int]:
        """Environments where `observation` is the first of an episode."""
        started = [index for index, _ in self.final_observations]
        return started if self.mask is None else started + np.flatnonzero(~self.mask).tolist()


class Vector(ABC):
    """Several environments with the same spaces, stepped together."""

    count: int
    """Number of environments."""
    observation_space: gymnasium.Space[Any]
    """Observation space of one environment, including the action mask if there is one."""
    action_space: gymnasium.Space[Any]
    """Action space of one environment."""
    has_reset_steps: bool = False
    """Whether steps can be resets, which ignore their action (NEXT_STEP)."""

    @abstractmethod
    def reset(self, seeds: Sequence[int]) -> Observation:
        """Start an episode in each environment, with a seed for each."""

    def sample_tasks(self, generator: np.random.Generator, count: int) -> list[Any]:  # noqa: ARG002
        """Tasks of the environments' task distribution. Raises if they have none."""
        raise RollstreamError("only plain environments without stacked frames can be reset to a task")

    def reset_to_tasks(self, seeds: Sequence[int], tasks: Sequence[Any]) -> Observation:  # noqa: ARG002
        """Start an episode of a task in each environment; those after it are of the same task."""
        raise RollstreamError("only plain environments without stacked frames can be reset to a task")

    @abstractmethod
    def step(self, actions: np.ndarray[Any, Any]) -> VectorStep:
        """Act in each environment."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State of the environments. Raises `UnknownState` if it cannot be saved."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, after a reset."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""


class SyncVector(Vector):
    """Plain environments stepped one after the other, each reset in the step that ends its episode."""

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], count: int):
        self.count = count
        self._environments = [make() for _ in range(count)]
        first = self._environments[0]
        self.action_space = first.action_space
        self._masks = _masks(first, first.observation_space, first.action_space)
        self.observation_space = self._masks.space
        self._convert = actions_for(self.action_space)
        self._template = zeros(self.observation_space, count)
        self._plain = isinstance(self._template, np.ndarray)
        self._none = np.zeros(count, bool)
        self._none.flags.writeable = False

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Start an episode in each environment, with its own seed."""
        return self._reset([{"seed": int(seed)} for seed in seeds])

    def sample_tasks(self, generator: np.random.Generator, count: int) -> list[Any]:
        """Tasks that the environment's `sample_task` chooses."""
        first = self._environments[0]
        if not first.has_wrapper_attr("sample_task"):
            raise RollstreamError(
                f"{env_name(first)} has no sample_task(generator), so there are no tasks to adapt to; "
                f"try rollstream.envs:PointNavigation-v0"
            )
        sample = first.get_wrapper_attr("sample_task")
        try:
            return [sample(generator) for _ in range(count)]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RollstreamError(f"sample_task(generator) of {env_name(first)} failed: {reason}") from error

    def reset_to_tasks(self, seeds: Sequence[int], tasks: Sequence[Any]) -> Observation:
        """Start an episode of a task in each environment, with `options={"task": task}`."""
        pairs = zip(seeds, tasks, strict=True)
        return self._reset([{"seed": int(seed), "options": {"task": task}} for seed, task in pairs])

    def _reset(self, options: Sequence[dict[str, Any]]) -> Observation:
        observations = zeros(self.observation_space, self.count)
        for index, (environment, own) in enumerate(zip(self._environments, options, strict=True)):
            put(observations, index, self._with_mask(*checked_reset(environment, **own)))
        if self._masks.present:
            self._masks.require_legal(observations["action_mask"])
        return observations

    def step(self, actions: np.ndarray[Any, Any]) -> VectorStep:
        """Act in each environment, one after the other."""
        observations = self._template.copy() if self._plain else zeros(self.observation_space, self.count)
        rewards = np.empty(self.count, np.float32)
        terminations = truncations = self._none
        final: list[tuple[int, Observation]] = []
        success: list[tuple[int, float]] = []
        actions = self._convert(actions)
        try:
            for index, environment in enumerate(self._environments):
                # Iterating over an array would end with an IndexError, which takes 1 us.
                observation, reward, terminated, truncated, info = environment.step(actions[index])
                rewards[index] = reward
                if terminated or truncated:
                    if not final:
                        terminations, truncations = np.zeros((2, self.count), bool)
                    terminations[index], truncations[index] = terminated, truncated
                    final.append((index, _copied(self._with_mask(observation, info, final=True))))
                    if "is_success" in info:
                        success.append((index, float(info["is_success"])))
                    observation, info = checked_reset(environment)
                if self._plain:
                    observations[index] = observation
                    if info:
                        self._masks.require_none(info)
                else:
                    put(observations, index, self._with_mask(observation, info))
        except INTERFACE_ERRORS as error:
            explain(error, self._environments[0])
            raise
        if self._masks.present:
            self._masks.require_legal(observations["action_mask"])
        ended = [index for index, _ in final] if final else ()
        return VectorStep(observations, rewards, terminations, truncations, ended, final, None, success)

    def _with_mask(self, observation: Any, info: dict[str, Any], *, final: bool = False) -> Observation:
        if not self._masks.in_info:
            self._masks.require_none(info)
            return observation
        if "action_mask" in info:
            mask = self._masks.read(info["action_mask"])
        elif final:  # the policy does not act on it
            mask = np.ones(self._masks.size, np.int8)
        else:
            raise self._masks.incomplete()
        return {"observation": observation, "action_mask": mask}

    def state_dict(self) -> dict[str, Any]:
        """State of each environment."""
        return {"environments": saved_environments(self._environments)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore each environment."""
        load_environments(self._environments, state["environments"])

    def close(self) -> None:
        """Close each environment."""
        for environment in self._environments:
            environment.close()


class NativeVector(Vector):
    """A vector environment of Gymnasium, ALE or EnvPool, in any autoreset mode."""

    def __init__(self, environment: Any):
        self._environment = environment
        self.count = environment.num_envs
        self._mode = AutoresetMode(environment.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.action_space = environment.single_action_space
        space = environment.single_observation_space
        self._masks = _masks(environment, space, self.action_space)
        self.observation_space = self._masks.space
        self.has_reset_steps = self._mode is AutoresetMode.NEXT_STEP
        self._ended = np.zeros(self.count, bool)
        self._convert = actions_for(self.action_space, whole=True)

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Start an episode in each environment, with seeds derived from the first."""
        self._ended = np.zeros(self.count, bool)
        observation, info = self._environment.reset(seed=int(seeds[0]))
        return self._with_mask(observation, info)

    def step(self, actions: np.ndarray[Any, Any]) -> VectorStep:
        """Act in all environments at once."""
        observation, reward, terminated, truncated, info = self._environment.step(self._convert(actions))
        final: list[tuple[int, Observation]] = []
        before, self._ended = self._ended, np.logical_or(terminated, truncated)
        ended = np.flatnonzero(self._ended).tolist()
        same_step = self._mode is AutoresetMode.SAME_STEP
        success = _success(info.get("final_info", {}) if same_step else info, ended) if ended else []
        needed, before_reset = True, None
        if same_step and ended:
            final = self._final(info, ended)
        elif ended:
            needed = ~self._ended
        if self._mode is AutoresetMode.DISABLED and ended:
            before_reset = self._with_mask(observation, info, needed)
            final = [(index, _copied(take(before_reset, index))) for index in ended]
            observation, info = self._environment.reset(options={"reset_mask": self._ended})
            needed = self._ended
        mask = None
        if self._mode is AutoresetMode.NEXT_STEP and before.any():
            mask = ~before
            reward = np.where(before, 0, reward)
        return VectorStep(
            self._with_mask(observation, info, needed, before_reset),
            np.asarray(reward, np.float32),
            terminated,
            truncated,
            ended,
            final,
            mask,
            success,
        )

    def _final(self, info: dict[str, Any], ended: list[int]) -> list[tuple[int, Observation]]:
        final = [(index, _copied(take(info["final_obs"], index))) for index in ended]
        if not self._masks.in_info:
            return final
        legal = self._legal(info.get("final_info", {}), needed=False)
        return [(index, {"observation": own, "action_mask": legal[index]}) for index, own in final]

    def _with_mask(
        self, observation: Any, info: dict[str, Any], needed: Any = True, before: Any = None
    ) -> Observation:
        copied = _copied(observation)  # some environments reuse their arrays
        if self._masks.in_info:
            others = None if before is None else before["action_mask"]
            copied = {"observation": copied, "action_mask": self._legal(info, needed, others)}
        else:
            self._masks.require_none(info)
        if self._masks.present:
            self._masks.require_legal(copied["action_mask"], needed)
        return copied

    def _legal(self, info: dict[str, Any], needed: Any, others: Any = None) -> np.ndarray[Any, Any]:
        """Action masks; where none is reported or needed, those of `others`, or all ones."""
        reported = np.broadcast_to(info.get("_action_mask", "action_mask" in info), self.count)
        if (needed & ~reported).any():
            raise self._masks.incomplete()
        legal = np.ones((self.count, self._masks.size), np.int8) if others is None else others.copy()
        for index in np.flatnonzero(reported):
            legal[index] = self._masks.read(info["action_mask"][index])
        return legal

    def state_dict(self) -> dict[str, Any]:
        """State of the vector environment."""
        [own] = saved_environments([self._environment])
        return {"environment": own, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the vector environment."""
        load_environments([self._environment], [state["environment"]])
        self._ended = np.asarray(state["ended"], bool)

    def close(self) -> None:
        """Close the vector environment."""
        self._environment.close()


def actions_for(space: gymnasium.Space[Any], *, whole: bool = False) -> Callable[[Any], Any]:
    """A function from a policy's actions, counted from 0 or unbounded, to those of the action space."""
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        if whole or start:
            return lambda actions: actions + start
        return lambda actions: actions
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        return lambda actions: np.rint(np.clip(actions, space.low, space.high)).astype(space.dtype)
    if isinstance(space, spaces.Box):
        # As a row, because broadcasting takes 1 us; `clip` takes 5 us for a few numbers.
        low, high, dtype = space.low[None], space.high[None], space.dtype
        return lambda actions: np.minimum(np.maximum(actions, low), high).astype(dtype, copy=False)
    if isinstance(space, spaces.MultiDiscrete):
        return lambda actions: actions.reshape(-1, *space.shape) + space.start
    if isinstance(space, spaces.MultiBinary):
        return lambda actions: actions.astype(space.dtype, copy=False)
    return lambda actions: actions


def _masks(
    environment: Any, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]
) -> ActionMasks:
    observation, info = checked_reset(environment, seed=0)
    if isinstance(environment, gymnasium.Env):
        check_observation(environment, observation)
    return ActionMasks(env_name(environment), observations, actions, info)


def _success(info: dict[str, Any], ended: Sequence[int]) -> list[tuple[int, float]]:
    """`is_success` of ended episodes; Gymnasium marks which environments reported it."""
    if "is_success" not in info:
        return []
    reported = info.get("_is_success", np.ones(len(info["is_success"]), bool))
    return [(index, float(info["is_success"][index])) for index in ended if reported[index]]


def _copied(observation: Observation) -> Observation:
    if isinstance(observation, dict):
        return {name: _copied(part) for name, part in observation.items()}
    if isinstance(observation, tuple):
        return tuple(_copied(part) for part in observation)
    floating = np.issubdtype(np.asarray(observation).dtype, np.floating)
    return np.array(observation, np.float32 if floating else None)
