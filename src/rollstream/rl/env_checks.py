"""Checks that an environment follows Gymnasium's interface, with errors that say what it returned instead."""

from __future__ import annotations

import traceback
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rollstream.engine import RollstreamError

INTERFACE_ERRORS = (ValueError, TypeError, KeyError, IndexError)
"""Errors that a result of the wrong type or shape causes."""
_RESET, _STEP = "reset(seed=...)", "step(action)"
_CALLERS = ("rollstream.", "gymnasium.core", "gymnasium.wrappers.")
"""Modules that use the results of an environment."""


class BadEnvironment(RollstreamError):
    """An environment that does not follow Gymnasium's interface."""


def checked_reset(environment: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Reset an environment; raise `BadEnvironment` unless it returns an observation and a dict."""
    try:
        result = environment.reset(**options)
    except INTERFACE_ERRORS as error:
        explain(error, environment, _RESET)
        raise _failed(environment, error) from error
    except RollstreamError:
        raise
    except Exception as error:
        raise _failed(environment, error) from error
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise _bad(environment, _RESET, f"it returned {type(result).__name__}")
    return result


def check_observation(environment: Any, observation: Any) -> None:
    """Raise `BadEnvironment` if an observation does not match the observation space."""
    if (reason := space_mismatch(environment.observation_space, observation)) is not None:
        raise _bad(environment, _RESET, f"the observation {reason}")


def explain(error: Exception, environment: Any, method: str = _STEP) -> None:
    """Raise `BadEnvironment` unless the environment's own code raised the error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_globals.get("__name__", "").startswith(_CALLERS):
        raise _bad(environment, method, f"{type(error).__name__}: {error}") from error


def space_mismatch(space: gymnasium.Space[Any], observation: Any) -> str | None:
    """How an observation differs from its space in names and shapes; `None` if it does not.

    >>> space_mismatch(spaces.Box(-1, 1, (4,)), [1, 2, 3])
    'has shape (3,) instead of (4,)'
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        named = isinstance(space, spaces.Dict)
        for name, part in space.spaces.items() if named else enumerate(space.spaces):
            try:
                reason = space_mismatch(part, observation[name])
            except INTERFACE_ERRORS:
                return f"has no part {name!r}"
            if reason is not None:
                return f"has a part {name!r} that {reason}"
        return None
    try:
        shape = np.shape(observation)
    except ValueError:
        return "is not an array"
    if space.shape is None or _without_ones(shape) == _without_ones(space.shape):
        return None
    return f"has shape {shape} instead of {space.shape}"


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Leading axes of length 1 do not matter: assignment drops them."""
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def env_name(environment: Any) -> str:
    """The id of an environment, or else the name of its class."""
    return type(environment.unwrapped).__name__ if environment.spec is None else environment.spec.id


def _failed(environment: Any, error: Exception) -> BadEnvironment:
    return BadEnvironment(f"reset of {env_name(environment)} failed: {type(error).__name__}: {error}")


def _bad(environment: Any, method: str, reason: str) -> BadEnvironment:
    rest = ", a reward, terminated, truncated and a dict" if method == _STEP else " and a dict"
    return BadEnvironment(
        f"{method} of {env_name(environment)} must return an observation of its space{rest} "
        f"({' '.join(reason.split())}); gymnasium.utils.env_checker.check_env finds further problems"
    )
