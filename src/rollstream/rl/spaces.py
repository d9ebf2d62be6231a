"""What is known of an environment's spaces, and which of them can be learned with."""

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
    """A space that an algorithm or a network cannot do with."""


def require_observations(space: Space[Any], path: str = "the observation space") -> None:
    """Raise, naming the part, if a policy cannot look at observations of this space."""
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            require_observations(part, f"{path}[{name!r}]")
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            require_observations(part, f"{path}[{index}]")
    elif not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise SpaceError(
            f"{path} is {space}; policies look at Box, Discrete, MultiDiscrete, MultiBinary and at Dict and "
            f"Tuple of these. Wrap the environment (gymnasium.ObservationWrapper) so that it gives one"
        )


def require_actions(space: Space[Any], kinds: tuple[type, ...], who: str) -> None:
    """Raise, naming what would do, if an algorithm cannot act in this space."""
    if not isinstance(space, kinds):
        known = ", ".join(kind.__name__ for kind in kinds)
        raise SpaceError(
            f"{who} acts in spaces of kind {known}, and this environment's action space is {space}"
        )


def is_image(space: Space[Any]) -> bool:
    """Whether a space is that of images: bytes, with height, width and channels."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


def channel_axis(shape: tuple[int, ...]) -> int:
    """The axis of an image's channels, counted from the end: the last, or the first if it is shorter.

    >>> channel_axis((84, 84, 3)), channel_axis((4, 84, 84)), channel_axis((7,))
    (-1, -3, -1)
    """
    return -3 if len(shape) == 3 and shape[0] < shape[2] else -1


def leaves(space: Space[Any], path: str = "") -> list[tuple[str, Space[Any]]]:
    """The parts of a space that are arrays, with their names; a mask of legal actions is not looked at."""
    if isinstance(space, spaces.Dict):
        named = [(name, part) for name, part in space.spaces.items() if name != "action_mask"]
    elif isinstance(space, spaces.Tuple):
        named = [(str(index), part) for index, part in enumerate(space.spaces)]
    else:
        return [(path, space)]
    return [leaf for name, part in named for leaf in leaves(part, f"{path}/{name}")]


def values(space: Space[Any], observation: Any) -> list[Any]:
    """The arrays of an observation, in the order of `leaves`."""
    if isinstance(space, spaces.Dict):
        parts = [(part, observation[name]) for name, part in space.spaces.items() if name != "action_mask"]
    elif isinstance(space, spaces.Tuple):
        parts = list(zip(space.spaces, observation, strict=True))
    else:
        return [observation]
    return [value for part, own in parts for value in values(part, own)]


def replaced(space: Space[Any], observation: Observation, new: Iterator[Any]) -> Observation:
    """The same observation with other arrays, taken in the order of `leaves`."""
    if isinstance(space, spaces.Dict):
        return {
            name: observation[name] if name == "action_mask" else replaced(part, observation[name], new)
            for name, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        return tuple(replaced(part, own, new) for part, own in zip(space.spaces, observation, strict=True))
    return next(new)


def zeros(space: Space[Any], *leading: int) -> Observation:
    """Arrays for observations of a space, with leading axes before their own."""
    if isinstance(space, spaces.Dict):
        return {name: zeros(part, *leading) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(zeros(part, *leading) for part in space.spaces)
    return np.zeros((*leading, *(space.shape or ())), _dtype(space))


def put(target: Observation, index: Any, value: Any) -> None:
    """Write an observation into arrays, at some index of their leading axes."""
    if isinstance(target, Mapping):
        for name, part in target.items():
            put(part, index, value[name])
    elif isinstance(target, tuple):
        for part, own in zip(target, value, strict=True):
            put(part, index, own)
    else:
        target[index] = value


def take(source: Observation, index: Any) -> Observation:
    """Observations at some index of the leading axes; views where numpy gives views."""
    if isinstance(source, Mapping):
        return {name: take(part, index) for name, part in source.items()}
    if isinstance(source, tuple):
        return tuple(take(part, index) for part in source)
    return source[index]


def forgotten(state: Any, initial: Any, begun: Sequence[int]) -> Any:
    """What a policy remembers of each environment, as it is at first where an episode has begun."""

    def forget(own: Any, fresh: Any) -> Any:
        changed = np.array(own)
        changed[begun] = np.asarray(fresh)[begun]
        return changed

    return jax.tree.map(forget, state, initial)


def _dtype(space: Space[Any]) -> Any:
    if space.dtype is not None and np.issubdtype(space.dtype, np.floating):
        return np.float32  # what networks compute with
    return space.dtype
