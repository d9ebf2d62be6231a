"""Environments that ship with Rollstream: `--env rollstream.envs:PointNavigation-v0`."""

from typing import Any

import gymnasium

from rollstream.envs.tasks import PointNavigation, VaryingPendulum

__all__ = ["PointNavigation", "VaryingPendulum"]

_KINDS: dict[str, tuple[Any, int]] = {
    "PointNavigation-v0": (PointNavigation, 100),
    "VaryingPendulum-v0": (VaryingPendulum, 200),
}
for _name, (_kind, _steps) in _KINDS.items():
    gymnasium.register(_name, _kind, max_episode_steps=_steps)
