"""Algorithms, one file each: settings, loss and plan. Found by name, imported when asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rollstream.engine import RollstreamError
from rollstream.user_code import file_and_name, load_from_file

if TYPE_CHECKING:
    from gymnasium import Space

    from rollstream.rl.algorithm import Algorithm

_HOMES = {
    "a2c": ("rollstream.algos.a2c", "A2C"),
    "a3c": ("rollstream.algos.a3c", "A3C"),
    "apex": ("rollstream.algos.apex", "APEX"),
    "ddpg": ("rollstream.algos.ddpg", "DDPG"),
    "dqn": ("rollstream.algos.dqn", "DQN"),
    "ppo": ("rollstream.algos.ppo", "PPO"),
    "sac": ("rollstream.algos.sac", "SAC"),
    "td3": ("rollstream.algos.td3", "TD3"),
}


class UnknownAlgorithm(RollstreamError):
    """There is no algorithm of that name, or none in that file."""


class _Algorithms(Mapping[str, "Algorithm[Any]"]):
    """Algorithms by name, each imported when it is asked for."""

    def __getitem__(self, name: str) -> Algorithm[Any]:
        module, attribute = _HOMES[name]
        return getattr(importlib.import_module(module), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


ALGORITHMS: Mapping[str, Algorithm[Any]] = _Algorithms()
"""Every algorithm that comes with the package."""


def algorithm(name: str) -> Algorithm[Any]:
    """The algorithm of a name, as `ppo`, or of a file, as `my_file.py:MyAlgorithm`."""
    if name in _HOMES:
        return ALGORITHMS[name]
    if (parts := file_and_name(name)) is not None:
        from rollstream.rl.algorithm import Algorithm

        return load_from_file(
            *parts, "algorithm", lambda value: isinstance(value, Algorithm), UnknownAlgorithm
        )
    raise UnknownAlgorithm(
        f"there is no algorithm {name!r}{nearest(name, _HOMES)}; there are {', '.join(_HOMES)}, and your "
        f"own as my_file.py:MyAlgorithm"
    )


def fitting(observations: Space[Any], actions: Space[Any]) -> list[str]:
    """The algorithms that can learn in an environment with these spaces."""
    from rollstream.rl.spaces import SpaceError

    names: list[str] = []
    for name, own in ALGORITHMS.items():
        with suppress(SpaceError):
            own.config().policy(observations, actions)
            names.append(name)
    return names


def home(name: str) -> str:
    """The module that an algorithm which comes with the package is in."""
    return _HOMES[name][0]


def nearest(name: str, known: Iterable[str]) -> str:
    """A question in brackets whether another name was meant, if one is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.4)
    return f" (did you mean {near[0]!r}?)" if near else ""
