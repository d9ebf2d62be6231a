"""Several environments stepped together, whatever way they begin new episodes.

Gymnasium's vector environments differ in when they reset: in the step that ends an episode, in the one after
it (which then is no step of anything), or when they are told. Here all look alike: a `Transition` has what to
act on next, the final observations of episodes that ended, and which rows were real steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rollstream.rl.env_checks import UNFIT, begun, require_fit, require_own
from rollstream.rl.env_state import load_environments, saved_environments
from rollstream.rl.spaces import Observation, SpaceError, channel_axis, put, take, zeros


class Transition(NamedTuple):
    """What one step of all environments led to."""

    observation: Observation
    """What to act on next, `[B, ...]`."""
    reward: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    ended: Sequence[int]
    """Where an episode ended, one way or the other."""
    final: Sequence[tuple[int, Observation]]
    """Index and final observation of episodes whose end the observations do not show any more."""
    real: np.ndarray[Any, Any] | None
    """Which rows were steps; the others only began an episode. `None` if all were."""

    @property
    def begun(self) -> list[int]:
        """Where the observation to act on next is the first of an episode."""
        begun = [index for index, _ in self.final]
        return begun if self.real is None else begun + np.flatnonzero(~self.real).tolist()


class Vector(ABC):
    """Environments side by side, of the same spaces."""

    count: int
    observation_space: gymnasium.Space[Any]
    """Of one environment; with the mask of legal actions in it, where there is one."""
    action_space: gymnasium.Space[Any]
    """Of one environment."""
    resets_late: bool = False
    """Whether some rows may be no steps."""

    @abstractmethod
    def reset(self, seeds: Sequence[int]) -> Observation:
        """Begin an episode in each, with a seed for each."""

    @abstractmethod
    def step(self, actions: np.ndarray[Any, Any]) -> Transition:
        """Act in each."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The environments' own state. Raises `UnknownState` where that is out of reach."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, after a reset."""

    @abstractmethod
    def close(self) -> None:
        """Let the environments go."""


class SyncVector(Vector):
    """Plain environments stepped one after the other; each begins anew in the step that ends its episode."""

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], count: int):
        self.count = count
        self._environments = [make() for _ in range(count)]
        first = self._environments[0]
        self.action_space = first.action_space
        self._masked = _has_mask(first, first.observation_space, first.action_space)
        self.observation_space = _with_mask(first.observation_space, first.action_space, self._masked)
        self._convert = actions_for(self.action_space)
        self._template = zeros(self.observation_space, count)
        self._plain = isinstance(self._template, np.ndarray)

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Each with its own seed."""
        observations = zeros(self.observation_space, self.count)
        for index, (environment, seed) in enumerate(zip(self._environments, seeds, strict=True)):
            put(observations, index, self._seen(*begun(environment, seed=int(seed))))
        return observations

    def step(self, actions: np.ndarray[Any, Any]) -> Transition:
        """One after the other."""
        observations = self._template.copy() if self._plain else zeros(self.observation_space, self.count)
        rewards = np.empty(self.count, np.float32)
        terminations, truncations = np.zeros((2, self.count), bool)
        final: list[tuple[int, Observation]] = []
        try:
            for index, (environment, action) in enumerate(
                zip(self._environments, self._convert(actions), strict=True)
            ):
                observation, reward, terminated, truncated, info = environment.step(action)
                rewards[index] = reward
                if terminated or truncated:
                    terminations[index], truncations[index] = terminated, truncated
                    final.append((index, _copied(self._seen(observation, info, final=True))))
                    observation, info = begun(environment)
                if self._plain:
                    observations[index] = observation
                else:
                    put(observations, index, self._seen(observation, info))
        except UNFIT as error:
            require_own(error, self._environments[0])
            raise
        ended = [index for index, _ in final]
        return Transition(observations, rewards, terminations, truncations, ended, final, None)

    def _seen(self, observation: Any, info: dict[str, Any], *, final: bool = False) -> Observation:
        if not self._masked:
            return observation
        if "action_mask" in info:
            mask = joined_mask(info["action_mask"])
        elif final:  # nobody acts on it
            mask = np.ones(self._template["action_mask"].shape[1:], np.int8)
        else:
            raise _without_mask(self._environments[0])
        return {"observation": observation, "action_mask": mask}

    def state_dict(self) -> dict[str, Any]:
        """Of each environment."""
        return {"environments": saved_environments(self._environments)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of each environment."""
        load_environments(self._environments, state["environments"])

    def close(self) -> None:
        """Each of them."""
        for environment in self._environments:
            environment.close()


class NativeVector(Vector):
    """A vector environment of Gymnasium, ALE or EnvPool, in any of the three ways to reset."""

    def __init__(self, environment: Any):
        self._environment = environment
        self.count = environment.num_envs
        self._mode = AutoresetMode(environment.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.action_space = environment.single_action_space
        space = environment.single_observation_space
        self._masked = _has_mask(environment, space, self.action_space)
        self.observation_space = _with_mask(space, self.action_space, self._masked)
        self.resets_late = self._mode is AutoresetMode.NEXT_STEP
        self._ended = np.zeros(self.count, bool)
        self._convert = actions_for(self.action_space, whole=True)

    def reset(self, seeds: Sequence[int]) -> Observation:
        """All from the first seed: a native environment spreads it itself."""
        self._ended = np.zeros(self.count, bool)
        observation, info = self._environment.reset(seed=int(seeds[0]))
        return self._seen(observation, info)

    def step(self, actions: np.ndarray[Any, Any]) -> Transition:
        """All at once."""
        observation, reward, terminated, truncated, info = self._environment.step(self._convert(actions))
        final: list[tuple[int, Observation]] = []
        before, self._ended = self._ended, np.logical_or(terminated, truncated)
        ended = np.flatnonzero(self._ended).tolist()
        needed, before_reset = True, None
        if self._mode is AutoresetMode.SAME_STEP and ended:
            final = self._final(info, ended)
        elif ended:
            needed = ~self._ended
        if self._mode is AutoresetMode.DISABLED and ended:
            before_reset = self._seen(observation, info, needed)
            final = [(index, _copied(take(before_reset, index))) for index in ended]
            observation, info = self._environment.reset(options={"reset_mask": self._ended})
            needed = self._ended
        real = None
        if self._mode is AutoresetMode.NEXT_STEP and before.any():
            real = ~before
            reward = np.where(before, 0, reward)
        return Transition(
            self._seen(observation, info, needed, before_reset),
            np.asarray(reward, np.float32),
            terminated,
            truncated,
            ended,
            final,
            real,
        )

    def _final(self, info: dict[str, Any], ended: list[int]) -> list[tuple[int, Observation]]:
        final = [(index, _copied(take(info["final_obs"], index))) for index in ended]
        if not self._masked:
            return final
        legal = self._legal(info.get("final_info", {}), needed=False)
        return [(index, {"observation": own, "action_mask": legal[index]}) for index, own in final]

    def _seen(
        self, observation: Any, info: dict[str, Any], needed: Any = True, before: Any = None
    ) -> Observation:
        seen = _copied(observation)  # some environments write into the same arrays again
        if not self._masked:
            return seen
        others = None if before is None else before["action_mask"]
        return {"observation": seen, "action_mask": self._legal(info, needed, others)}

    def _legal(self, info: dict[str, Any], needed: Any, others: Any = None) -> np.ndarray[Any, Any]:
        """Masks of all rows: where none is told and none is needed, that of others, or all actions."""
        told = np.broadcast_to(info.get("_action_mask", "action_mask" in info), self.count)
        if (needed & ~told).any():
            raise _without_mask(self._environment)
        space: Any = self.observation_space
        legal = zeros(space["action_mask"], self.count) + np.int8(1) if others is None else others.copy()
        for index in np.flatnonzero(told):
            legal[index] = joined_mask(info["action_mask"][index])
        return legal

    def state_dict(self) -> dict[str, Any]:
        """Of all at once."""
        [own] = saved_environments([self._environment])
        return {"environment": own, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of all at once."""
        load_environments([self._environment], [state["environment"]])
        self._ended = np.asarray(state["ended"], bool)

    def close(self) -> None:
        """All at once."""
        self._environment.close()


class FrameStack(Vector):
    """Shows the last few observations as one: along the channels of images, the last axis of others."""

    def __init__(self, inner: Vector, frames: int):
        self._inner = inner
        self._frames = frames
        self.count, self.action_space, self.resets_late = inner.count, inner.action_space, inner.resets_late
        space = inner.observation_space
        assert isinstance(space, spaces.Box)
        grey = len(space.shape) == 2 and space.dtype == np.uint8
        self._shape = (*space.shape, 1) if grey else space.shape
        self._axis = channel_axis(self._shape)
        low, high = (self._joined([own.reshape(self._shape)] * frames) for own in (space.low, space.high))
        if channel_axis(low.shape) != self._axis:
            raise SpaceError(
                f"frame_stack={frames}: so many images of shape {self._shape} have more channels than rows, "
                f"and would be read the wrong way; stack fewer"
            )
        self.observation_space = spaces.Box(low, high, dtype=space.dtype.type)
        self._stack = zeros(self.observation_space, self.count)

    def reset(self, seeds: Sequence[int]) -> Observation:
        """The first observation, several times."""
        self._stack = self._joined([self._framed(self._inner.reset(seeds))] * self._frames)
        return self._stack

    def step(self, actions: np.ndarray[Any, Any]) -> Transition:
        """One more, and the oldest goes."""
        step = self._inner.step(actions)
        newest = self._framed(step.observation)
        _, older = np.split(self._stack, [self._shape[self._axis]], self._axis)
        final = [
            (index, self._joined([older[index], last.reshape(self._shape)])) for index, last in step.final
        ]
        stack = self._joined([older, newest])
        if begun := step.begun:
            stack[begun] = self._joined([newest[begun]] * self._frames)
        self._stack = stack
        return step._replace(observation=stack, final=final)

    def _framed(self, observation: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return observation.reshape(self.count, *self._shape)

    def _joined(self, frames: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        return np.concatenate(frames, axis=self._axis)

    def state_dict(self) -> dict[str, Any]:
        """Also what is shown."""
        return {"inner": self._inner.state_dict(), "stack": self._stack}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also what is shown."""
        self._inner.load_state_dict(state["inner"])
        self._stack = np.asarray(state["stack"])

    def close(self) -> None:
        """As those inside."""
        self._inner.close()


def actions_for(space: gymnasium.Space[Any], *, whole: bool = False) -> Callable[[Any], Any]:
    """How a policy's actions, counted from 0 or any numbers, become those that an environment takes."""
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        if whole or start:
            return lambda actions: actions + start
        return list  # of numpy's integers, which a space checks faster than Python's
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        return lambda actions: np.rint(np.clip(actions, space.low, space.high)).astype(space.dtype)
    if isinstance(space, spaces.Box):
        return lambda actions: np.clip(actions, space.low, space.high).astype(space.dtype, copy=False)
    if isinstance(space, spaces.MultiDiscrete):
        return lambda actions: actions.reshape(-1, *space.shape) + space.start
    return lambda actions: actions


def _has_mask(environment: Any, observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]) -> bool:
    """Whether an environment tells beside its observations which actions are legal, and not in them."""
    observation, info = begun(environment, seed=0)
    if isinstance(environment, gymnasium.Env):
        require_fit(environment, observation)
    if isinstance(observations, spaces.Dict) and "action_mask" in observations.spaces:
        return False
    return "action_mask" in info and isinstance(actions, (spaces.Discrete, spaces.MultiDiscrete))


def _without_mask(environment: Any) -> SpaceError:
    spec = environment.spec
    name = type(environment.unwrapped).__name__ if spec is None else spec.id
    return SpaceError(
        f"{name} told by info['action_mask'] which actions are legal when it was reset, and does not after a "
        f"step; let it do so with every observation that is acted on"
    )


def _with_mask(space: gymnasium.Space[Any], actions: Any, masked: bool) -> gymnasium.Space[Any]:
    if not masked:
        return space
    size = int(actions.n) if isinstance(actions, spaces.Discrete) else int(actions.nvec.sum())
    return spaces.Dict({"observation": space, "action_mask": spaces.MultiBinary(size)})


def joined_mask(mask: Any) -> Any:
    """One mask of several choices, which Gymnasium has a part each for."""
    if isinstance(mask, (tuple, list)):
        return np.concatenate([np.atleast_1d(part) for part in mask])
    return mask


def _copied(observation: Observation) -> Observation:
    if isinstance(observation, dict):
        return {name: _copied(part) for name, part in observation.items()}
    if isinstance(observation, tuple):
        return tuple(_copied(part) for part in observation)
    floating = np.issubdtype(np.asarray(observation).dtype, np.floating)
    return np.array(observation, np.float32 if floating else None)
