"""Checks of what environments return: finite rewards and observations, discrete ones in their space."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from rollstream.rl.env_checks import BadEnvironment
from rollstream.rl.rollout import Rollout
from rollstream.rl.spaces import Observation, leaf_values, leaves

Array = np.ndarray[Any, Any]


class _Invalid(NamedTuple):
    """Where a value is invalid; the smallest comes first in time."""

    row: int
    after: bool
    """Whether the step of that row returned it; otherwise the policy acted on it in that row."""
    environment: int
    reason: str


def check_rollout(
    rollout: Rollout,
    observations: Observation | None,
    space: gymnasium.Space[Any],
    name: str,
    lengths: Callable[[], Array],
) -> None:
    """Raise `BadEnvironment`, naming the environment and the step, unless all values can be learned from.

    Args:
        rollout: As sampled.
        observations: Those of the rollout and the last one, `[T + 1, B, ...]`; `None` if the rollout has them
            on the device, where they are checked with one read.
        space: Observation space of one environment.
        name: Of the environment.
        lengths: Steps of each environment's episode before the rollout.
    """
    reward = rollout.columns["reward"]
    if not rollout.final_observations and _is_finite(reward) and _are_finite_floats(observations):
        return  # nearly always
    found: list[_Invalid] = []
    if not _is_finite(reward):
        for t, i in np.argwhere(~np.isfinite(reward))[:1].tolist():
            found.append(_Invalid(t, True, i, f"the reward is {reward[t, i]}"))
    if observations is None:
        observations = _read_if_invalid(space, rollout)
    if observations is not None:
        found += [_Invalid(t, False, i, why) for (t, i), why in _invalid_rows(space, observations, 2)]
    for t, i, final in rollout.final_observations:
        found += [_Invalid(t, True, i, why) for _, why in _invalid_rows(space, final, 0)]
    if found:
        raise _error(min(found), rollout, name, lengths())


def check_observation(
    observation: Observation, waiting: set[int], space: gymnasium.Space[Any], name: str, lengths: Array
) -> None:
    """Raise `BadEnvironment` unless the observations that a policy acts on are valid.

    Args:
        observation: Of all environments.
        waiting: Environments that are about to be reset: there it does not act.
        space: Observation space of one environment.
        name: Of the environment.
        lengths: Steps of each environment's episode so far.
    """
    rows = np.array([row for row in range(len(lengths)) if row not in waiting], int)
    if waiting:
        observation = jax.tree.map(lambda array: np.asarray(array)[rows], observation)
    for (row,), why in _invalid_rows(space, observation, 1)[:1]:
        raise _invalid(why, int(lengths[rows[row]]), name)


def check_step(action: Array, reward: Array, name: str, lengths: Array) -> None:
    """Raise `BadEnvironment` unless the rewards of a step, and the actions before it, are finite.

    Args:
        action: Of each environment.
        reward: Of each environment.
        name: Of the environment.
        lengths: Steps of each environment's episode, with this one.
    """
    if not _is_finite(reward):
        if np.issubdtype(action.dtype, np.floating) and not _is_finite(action):
            raise BadEnvironment(
                f"the policy chose an action that is NaN or infinite for {name}; its weights are broken"
            )
        row = int(np.flatnonzero(~np.isfinite(reward))[0])
        raise _invalid(f"the reward is {reward[row]}", int(lengths[row]), name)


def _invalid(reason: str, step: int, name: str) -> BadEnvironment:
    when = f"in step {step} of an episode of {name}" if step else f"after a reset of {name}"
    return BadEnvironment(f"{reason} {when}; all rewards and observations have to be valid")


def _read_if_invalid(space: gymnasium.Space[Any], rollout: Rollout) -> Observation | None:
    """Observations on the device `[T + 1, B, ...]`, read if one of them is invalid."""
    both = rollout.columns["observation"], rollout.last_observation
    floats: list[Any] = []
    indices: list[Any] = []
    for observation in both:
        for (_, part), array in zip(leaves(space), leaf_values(space, observation), strict=True):
            if isinstance(part, (spaces.Discrete, spaces.MultiDiscrete)):
                sizes = part.n if isinstance(part, spaces.Discrete) else part.nvec
                indices.append((array, part.start, sizes))
            elif np.issubdtype(array.dtype, np.floating):
                floats.append(array)
    if not floats and not indices:  # bytes of images are all valid
        return None
    if bool(_all_valid(floats, indices)):
        return None
    return jax.tree.map(lambda own, last: np.concatenate([own, np.asarray(last)[None]]), *both)


@jax.jit
def _all_valid(floats: list[Any], indices: list[Any]) -> Any:
    valid = [jnp.isfinite(array).all() for array in floats]
    valid += [((array >= start) & (array - start < size)).all() for array, start, size in indices]
    return jnp.stack(valid).all()


def _invalid_rows(
    space: gymnasium.Space[Any], observation: Observation, leading: int
) -> list[tuple[tuple[int, ...], str]]:
    """The first row, by its leading axes, where a part of the observations is invalid, and why."""
    if _are_finite_floats(observation):
        return []
    found: list[tuple[tuple[int, ...], str]] = []
    for (path, part), values in zip(leaves(space), leaf_values(space, observation), strict=True):
        array = np.asarray(values)
        if (valid := _valid(part, array)) is not None and not valid.all():
            first = tuple(np.argwhere(~valid)[0].tolist())
            label = f"part {path[1:]!r} of the observation" if path else "the observation"
            outside = "" if isinstance(part, spaces.Box) else f", outside of {part},"
            found.append((first[:leading], f"{label} is {array[first]}{outside}"))
    return found


def _valid(space: gymnasium.Space[Any], array: Array) -> Array | None:
    """Which numbers are valid; `None` if all are."""
    if isinstance(space, spaces.Box) and array.dtype.kind == "f":
        return None if _is_finite(array) else np.isfinite(array)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        index = array - space.start
        return (index >= 0) & (index < (space.n if isinstance(space, spaces.Discrete) else space.nvec))
    return None


def _are_finite_floats(observation: Observation | None) -> bool:
    """Whether observations are one array of finite numbers."""
    return type(observation) is np.ndarray and observation.dtype.kind == "f" and _is_finite(observation)


def _is_finite(array: Array) -> bool:
    """Whether all numbers are finite. They are if the sum of their squares is, which takes less time."""
    return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())


def _error(invalid: _Invalid, rollout: Rollout, name: str, lengths: Array) -> BadEnvironment:
    columns, i, row = rollout.columns, invalid.environment, invalid.row
    ends = np.flatnonzero((columns["terminated"] | columns["truncated"])[:row, i])
    start = ends[-1] + 1 if ends.size else 0
    taken = columns["mask"][start:row, i].sum() if "mask" in columns else row - start
    step = int(taken) + invalid.after + (0 if ends.size else int(lengths[i]))
    where = f"{name} (environment {i} of worker {rollout.worker})"
    actions = columns["action"][: row + invalid.after, i]
    if np.issubdtype(actions.dtype, np.floating) and not _is_finite(actions):
        return BadEnvironment(
            f"the policy chose an action that is NaN or infinite in step {step} of an episode of {where}, so "
            f"training has diverged; try a smaller learning rate"
        )
    return _invalid(invalid.reason, step, where)
