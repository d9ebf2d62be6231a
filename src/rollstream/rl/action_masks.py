"""Masks of the legal actions, which an environment reports in `info` or as a part of its observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rollstream.rl.spaces import SpaceError

Array = np.ndarray[Any, Any]


class ActionMasks:
    """Where an environment reports masks, and the checks that they fit its action space.

    Args:
        name: Of the environment, for errors.
        observations: Observation space of one environment.
        actions: Action space of one environment.
        info: What a reset returned: with a mask, or without.
    """

    def __init__(
        self,
        name: str,
        observations: gymnasium.Space[Any],
        actions: gymnasium.Space[Any],
        info: Mapping[str, Any],
    ):
        self._name = name
        self._actions = actions
        self._sizes = mask_sizes(actions)
        parts = observations.spaces if isinstance(observations, spaces.Dict) else {}
        in_observation = "action_mask" in parts
        self.in_info = not in_observation and "action_mask" in info
        """Whether masks are in `info`, and not in the observations."""
        self.present = in_observation or self.in_info
        """Whether there are masks."""
        self.size = sum(self._sizes)
        """Length of a mask."""
        self.space = observations
        """Observation space with the mask."""
        if self.present and not self._sizes:
            raise SpaceError(
                f"{name} reports an action mask, and its action space is {actions}; only Discrete and "
                f"MultiDiscrete actions can have one"
            )
        if in_observation:
            self._require_size(parts["action_mask"].shape)
        if self.in_info:
            self.space = spaces.Dict(
                {"observation": observations, "action_mask": spaces.MultiBinary(self.size)}
            )

    def read(self, mask: Any) -> Array:
        """A mask from `info` as one array."""
        joined = join_masks(mask)
        if np.shape(joined) != (self.size,):
            self._require_size(np.shape(joined))
        return joined

    def _require_size(self, shape: Any) -> None:
        if shape != (self.size,):
            raise SpaceError(
                f"{self._name} reports an action mask of shape {shape}, and its action space is "
                f"{self._actions}; report {self.size} numbers, one per action"
            )

    def require_legal(self, masks: Array, needed: Any = True) -> None:
        """Raise unless every mask `[B, size]` that is needed allows an action."""
        if (needed & ~allows_action(masks, self._sizes)).any():
            raise SpaceError(
                f"{self._name} reports an action mask that allows no action; at least one has to be legal "
                f"with every observation the policy acts on"
            )

    def require_none(self, info: Mapping[str, Any]) -> None:
        """Raise if there is a mask although the first reset reported none."""
        if "action_mask" in info and not self.present:
            raise self.incomplete("a step", "a reset")

    def incomplete(self, where: str = "a reset", missing: str = "a step") -> SpaceError:
        """The error for a mask that is not reported with every observation."""
        return SpaceError(
            f"{self._name} reports info['action_mask'] after {where}, but not after {missing}; report it "
            f"with every observation the policy acts on"
        )


def mask_sizes(actions: gymnasium.Space[Any]) -> list[int]:
    """Number of actions of each part of an action; empty if such actions have no mask."""
    if isinstance(actions, spaces.Discrete):
        return [int(actions.n)]
    return actions.nvec.ravel().tolist() if isinstance(actions, spaces.MultiDiscrete) else []


def allows_action(masks: Array, sizes: list[int]) -> Array:
    """Whether masks `[..., size]` allow an action, in each of its parts.

    >>> allows_action(np.array([[1, 0, 0, 1], [1, 1, 0, 0]]), [2, 2])
    array([ True, False])
    """
    starts = np.cumsum([0, *sizes[:-1]])
    return np.asarray(np.logical_or.reduceat(masks, starts, axis=-1).all(axis=-1))


def join_masks(mask: Any) -> Any:
    """One mask of a MultiDiscrete action, for which Gymnasium has a mask per part."""
    if isinstance(mask, (tuple, list)):
        return np.concatenate([np.atleast_1d(part) for part in mask], axis=-1)
    return mask
