"""Observation and action spaces: which are supported, and arrays for nested observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from gymnasium import Space, spaces

from rollstream.engine import RollstreamError

Observation: TypeAlias = Any
"""An array, or a dict or tuple of observations."""


class SpaceError(RollstreamError):
    """A space that an algorithm or a network does not support."""


def require_observation_space(space: Space[Any]) -> None:
    """Raise `SpaceError` if policies do not support an observation space, naming the part."""
    _require_supported(space, "the observation space")
    if not any(np.prod(part.shape or (1,)) for _, part in leaves(space)):
        raise SpaceError(
            f"the observation space is {space}, which has nothing to observe; add a part, such as a constant "
            f"gymnasium.spaces.Box(0, 1, (1,))"
        )


def _require_supported(space: Space[Any], path: str, *, nested: bool = False) -> None:
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            if name == "action_mask" and nested:
                raise SpaceError(
                    f"the action mask is {path}[{name!r}], inside another part; move it to the top of the "
                    f"observation space, or report it as info['action_mask']"
                )
            _require_supported(part, f"{path}[{name!r}]", nested=True)
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            _require_supported(part, f"{path}[{index}]", nested=True)
    elif not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise SpaceError(
            f"{path} is {space}; policies support Box, Discrete, MultiDiscrete, MultiBinary, and Dict and "
            f"Tuple of these. Wrap the environment in a gymnasium.ObservationWrapper that returns one of them"
        )


def require_action_space(space: Space[Any], kinds: tuple[type, ...], algorithm: str) -> None:
    """Raise `SpaceError` if an algorithm does not support an action space."""
    if not isinstance(space, kinds):
        supported = ", ".join(kind.__name__ for kind in kinds)
        raise SpaceError(
            f"{algorithm} supports action spaces of type {supported}, and this environment's action space is "
            f"{space}"
        )


def is_image(space: Space[Any]) -> bool:
    """Whether a space is of images: a Box of bytes or booleans with three axes."""
    return isinstance(space, spaces.Box) and space.dtype in (np.uint8, np.bool_) and len(space.shape) == 3


def channel_axis(shape: tuple[int, ...]) -> int:
    """The axis of an image's channels, counted from the end: the last, or the first if that is shorter.

    >>> channel_axis((84, 84, 3)), channel_axis((4, 84, 84)), channel_axis((7,))
    (-1, -3, -1)
    """
    return -3 if len(shape) == 3 and shape[0] < shape[2] else -1


def leaves(space: Space[Any], path: str = "") -> list[tuple[str, Space[Any]]]:
    """The parts of a space that are arrays, with their paths; without the action mask."""
    if isinstance(space, spaces.Dict):
        named = [(name, part) for name, part in space.spaces.items() if name != "action_mask"]
    elif isinstance(space, spaces.Tuple):
        named = [(str(index), part) for index, part in enumerate(space.spaces)]
    else:
        return [(path, space)]
    return [leaf for name, part in named for leaf in leaves(part, f"{path}/{name}")]


def leaf_values(space: Space[Any], observation: Any) -> list[Any]:
    """The arrays of an observation, in the order of `leaves`."""
    if isinstance(space, spaces.Dict):
        parts = [(part, observation[name]) for name, part in space.spaces.items() if name != "action_mask"]
    elif isinstance(space, spaces.Tuple):
        parts = list(zip(space.spaces, observation, strict=True))
    else:
        return [observation]
    return [value for part, own in parts for value in leaf_values(part, own)]


def replace_leaves(space: Space[Any], observation: Observation, new: Iterator[Any]) -> Observation:
    """The observation with other arrays, in the order of `leaves`."""
    if isinstance(space, spaces.Dict):
        return {
            name: observation[name] if name == "action_mask" else replace_leaves(part, observation[name], new)
            for name, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        return tuple(
            replace_leaves(part, own, new) for part, own in zip(space.spaces, observation, strict=True)
        )
    return next(new)


def zeros(space: Space[Any], *leading: int) -> Observation:
    """Zeros in the shape of observations, with leading axes."""
    if isinstance(space, spaces.Dict):
        return {name: zeros(part, *leading) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(zeros(part, *leading) for part in space.spaces)
    return np.zeros((*leading, *(space.shape or ())), _dtype(space))


def put(target: Observation, index: Any, value: Any) -> None:
    """Write an observation at an index of the leading axes."""
    if isinstance(target, Mapping):
        for name, part in target.items():
            put(part, index, value[name])
    elif isinstance(target, tuple):
        for part, own in zip(target, value, strict=True):
            put(part, index, own)
    else:
        target[index] = value


def take(source: Observation, index: Any) -> Observation:
    """The observation at an index of the leading axes; a view where NumPy makes one."""
    if isinstance(source, np.ndarray):  # the common case, and fast
        return source[index]
    if isinstance(source, Mapping):
        return {name: take(part, index) for name, part in source.items()}
    if isinstance(source, tuple):
        return tuple(take(part, index) for part in source)
    return source[index]


def reset_rows(state: Any, initial: Any, rows: Sequence[int]) -> Any:
    """A policy's recurrent state with some rows as at the start of an episode."""

    def reset(own: Any, fresh: Any) -> Any:
        changed = np.array(own)
        changed[rows] = np.asarray(fresh)[rows]
        return changed

    return jax.tree.map(reset, state, initial)


def _dtype(space: Space[Any]) -> Any:
    if space.dtype is not None and np.issubdtype(space.dtype, np.floating):
        return np.float32  # what networks compute with
    return space.dtype
