"""Which code a run folder may name.

A folder is data. The algorithms of this package and the ids of registered environments are loaded from it
without asking. Everything else that its `config.json` names (a file, a module, a function) is code, and is
imported only if the user names it again, trusts the folder, or has trained it: the settings that name code
are then remembered, as a checksum, in a file of the user's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollstream.algos import ALGORITHMS
from rollstream.training.identity import digest
from rollstream.training.run_folder import RunError
from rollstream.user_code import file_and_name

_COMPATIBILITY = "GymV2"
"""Ids of Gymnasium's compatibility environments begin with it; an argument of these names a module."""


class UntrustedCode(RunError):
    """A run folder names code, and nobody has said that it may run."""


def names_code(kind: str, source: Any) -> bool:
    """Whether what `config.json` says is imported from outside of this package and Gymnasium's registry.

    >>> names_code("env", "CartPole-v1"), names_code("env", "my_module:Mine-v0")
    (False, True)
    >>> names_code("env", "rollstream.envs:PointNavigation-v0")
    False
    """
    if source is None:
        return False
    if kind == "algorithm":
        return source not in ALGORITHMS
    if kind == "env" and isinstance(source, str):
        module = source.rpartition(":")[0]
        return (
            module not in ("", "envpool", "rollstream.envs")
            or source.endswith(".py")
            or source.startswith(_COMPATIBILITY)
        )
    return True


def sources(content: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.json` names as algorithm, environment and policy."""
    task = content["task"]
    return {
        "algorithm": content["algorithm"],
        "env": task["environment"]["source"],
        "policy": task["policy"],
    }


def require_trust(folder: Path, kind: str, source: Any) -> None:
    """Raise `UntrustedCode`: the folder names code and is not trusted."""
    named = source if isinstance(source, str) else f"{source.get('module')}.{source.get('name')}"
    again = f"{kind}=..." if isinstance(source, dict) else f"{kind}={named}"
    name_it = (
        "give it again in Python (rs.load, rs.train)" if kind == "policy" else f"name it again with {again}"
    )
    raise UntrustedCode(
        f"config.json of {folder} names code, {kind} {named}, and a run folder is data: {name_it}, or trust "
        f"the folder with trust=True"
    )


# Memory ------------------------------------------------------------------------------------------


def remember(folder: Path, content: Mapping[str, Any]) -> None:
    """Remember that this user trained the run, unless it names no code, or a file inside the folder."""
    if not any(names_code(*item) for item in sources(content).items()) or is_remembered(folder, content):
        return
    with suppress(OSError, RuntimeError):  # without a home, or with a full disk, nothing is remembered
        path = _memory()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{_key(content)}\n")


def is_remembered(folder: Path, content: Mapping[str, Any]) -> bool:
    """Whether this user trained the run with the code that `config.json` names."""
    if any(_is_inside(folder, source) for source in sources(content).values()):
        return False  # whoever made the folder wrote the file
    with suppress(OSError, RuntimeError), _memory().open() as file:
        state = os.fstat(file.fileno())
        is_private = state.st_uid == os.geteuid() and not state.st_mode & 0o022
        return is_private and f"{_key(content)}\n" in file
    return False


def _key(content: Mapping[str, Any]) -> str:
    options = content["task"]["environment"]["options"]
    return digest([content["id"], sources(content), options])


def _is_inside(folder: Path, source: Any) -> bool:
    parts = file_and_name(source) if isinstance(source, str) else None
    return parts is not None and parts[0].resolve().is_relative_to(folder.resolve())


def _memory() -> Path:
    """`rollstream/trained_runs` in the folder for state that the XDG specification names."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "rollstream/trained_runs"
