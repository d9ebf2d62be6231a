"""What environments have to give, and what is said of those that give something else."""

from __future__ import annotations

import traceback
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rollstream.engine import RollstreamError

UNFIT = (ValueError, TypeError, KeyError, IndexError)
"""What is raised by whoever takes something for what it is not."""
_RESET, _STEP = "reset(seed=...)", "step(action)"
_TAKERS = ("rollstream.", "gymnasium.core", "gymnasium.wrappers.")
"""Modules that take what an environment gives."""


class BadEnvironment(RollstreamError):
    """An environment that does not do what Gymnasium says it should."""


def begun(environment: Any, **seed: int) -> tuple[Any, dict[str, Any]]:
    """The first observation of an episode, and the info with it."""
    try:
        given = environment.reset(**seed)
    except UNFIT as error:
        require_own(error, environment, _RESET)
        raise
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], dict):
        raise _bad(environment, _RESET, f"it gave {type(given).__name__}")
    return given


def require_fit(environment: Any, observation: Any) -> None:
    """Raise if the first observation of an environment is not as its space says."""
    if (reason := misfit(environment.observation_space, observation)) is not None:
        raise _bad(environment, _RESET, f"the observation {reason}")


def require_own(error: Exception, environment: Any, method: str = _STEP) -> None:
    """Raise a better error, unless one was raised by the code of the environment itself."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_globals.get("__name__", "").startswith(_TAKERS):
        raise _bad(environment, method, f"{type(error).__name__}: {error}") from error


def misfit(space: gymnasium.Space[Any], observation: Any) -> str | None:
    """What about an observation is not as a space says; only names and shapes are looked at.

    >>> misfit(spaces.Box(-1, 1, (4,)), [1, 2, 3])
    'has shape (3,) instead of (4,)'
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        named = isinstance(space, spaces.Dict)
        for name, part in space.spaces.items() if named else enumerate(space.spaces):
            try:
                reason = misfit(part, observation[name])
            except UNFIT:
                return f"has no part {name!r}"
            if reason is not None:
                return f"has a part {name!r} which {reason}"
        return None
    try:
        shape = np.shape(observation)
    except ValueError:
        return "is not an array"
    if space.shape is None or _without_ones(shape) == _without_ones(space.shape):
        return None
    return f"has shape {shape} instead of {space.shape}"


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Leading axes of one do not matter: arrays are assigned without them."""
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def _bad(environment: Any, method: str, reason: str) -> BadEnvironment:
    name = type(environment.unwrapped).__name__ if environment.spec is None else environment.spec.id
    rest = ", a reward, terminated, truncated and a dict" if method == _STEP else " and a dict"
    return BadEnvironment(
        f"{method} of {name} has to give an observation of its space{rest} ({' '.join(reason.split())}); "
        f"gymnasium.utils.env_checker.check_env tells what else is wrong"
    )
