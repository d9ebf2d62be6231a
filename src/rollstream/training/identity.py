"""What ties a checkpoint to its run: the run's id, the settings that decide its numbers, and the spaces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypedDict

import gymnasium
import numpy as np
from gymnasium import spaces

from rollstream.training.run_folder import RunError
from rollstream.user_code import file_and_name


class Identity(TypedDict):
    """What a checkpoint carries of its run."""

    id: str
    sha256: str
    """Of the settings."""
    settings: dict[str, Any]
    spaces: list[str]
    """Observation space and action space, as policies see them."""


Spaces = tuple[gymnasium.Space[Any], gymnasium.Space[Any]]


def identity(content: Mapping[str, Any], of_spaces: Spaces) -> Identity:
    """The identity of a run, given its `config.json` and its spaces."""
    own = settings(content)
    return {"id": content["id"], "sha256": digest(own), "settings": own, "spaces": describe_spaces(of_spaces)}


def settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """What in `config.json` decides the numbers of a run, by name.

    Files may move, and steps, workers, engine, evaluation and checkpoints may change on resume.
    """
    environment = content["task"]["environment"]
    source = environment["source"]
    if isinstance(source, str):
        parts = file_and_name(source)
        name = source if parts is None else parts[1]
    else:
        name = source["name"].rpartition(".")[2]
    own = {"algorithm": content["name"], "env": name, "env_kwargs": environment["options"]}
    own |= {"frame_stack": environment["frame_stack"], "vectorization": environment["vectorization"]}
    own |= {"seed": content["task"]["seed"]}
    own |= {f"config {name}": value for name, value in content["config"].items()}
    return own


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def other_run(found: Mapping[str, Any], content: Mapping[str, Any], *, may_change: bool) -> str | None:
    """Why a checkpoint does not belong to the run that `config.json` describes; `None` if it does.

    Args:
        found: the identity that the checkpoint carries.
        content: of `config.json`.
        may_change: whether other settings are meant.
    """
    if found.get("id") != content["id"] or not isinstance(found.get("spaces"), list):
        return "belongs to another run"
    own = settings(content)
    if found.get("sha256") == digest(own):
        return None
    trained: Mapping[str, Any] = found.get("settings") or {}
    for name in [*own, *trained]:
        can_change = name.startswith("config ") or name in ("seed", "env_kwargs")
        if (before := trained.get(name)) != (now := own.get(name)) and not (may_change and can_change):
            fix = "restore it, or resume with allow_changes=True" if can_change else "restore it"
            return f"was trained with {name} {before!r}, and config.json says {now!r} ({fix})"
    return None if may_change else "was trained with other settings than config.json says"


# Spaces ------------------------------------------------------------------------------------------


def require_same_spaces(environment: str, found: Spaces, trained: list[str]) -> None:
    """Raise if an environment does not have the spaces that a run was trained on."""
    for kind, here, there in zip(("observation", "action"), describe_spaces(found), trained, strict=False):
        if here != there:
            raise RunError(
                f"{environment} has the {kind} space {here}, and this run was trained on {there}: use an "
                f"environment with the same spaces"
            )


def describe_spaces(found: Spaces) -> list[str]:
    """Observation and action space as text; bounds matter to actions, which are scaled to them."""
    return [_describe(found[0], bounds=False), _describe(found[1], bounds=True)]


def _describe(space: gymnasium.Space[Any], *, bounds: bool) -> str:
    if isinstance(space, spaces.Dict):
        parts = [f"{name}: {_describe(part, bounds=bounds)}" for name, part in space.spaces.items()]
        return f"Dict({', '.join(parts)})"
    if isinstance(space, spaces.Tuple):
        return f"Tuple({', '.join(_describe(part, bounds=bounds) for part in space.spaces)})"
    if isinstance(space, spaces.Discrete):
        return f"Discrete({space.n})" if space.start == 0 else f"Discrete({space.n}, start={space.start})"
    if isinstance(space, spaces.MultiDiscrete):
        return f"MultiDiscrete({np.asarray(space.nvec).tolist()})"
    if isinstance(space, spaces.Box):
        limits = f"{_bound(space.low)}, {_bound(space.high)}, " if bounds else ""
        return f"Box({limits}{space.shape}, {space.dtype})"
    return f"{type(space).__name__}({space.shape}, {space.dtype})"


def _bound(values: np.ndarray[Any, Any]) -> str:
    """One number if all are equal, else all of them."""
    listed = values.reshape(-1).tolist()
    return str(listed[0] if len(set(listed)) == 1 else listed)
