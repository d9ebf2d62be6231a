"""Algorithms, one file each: settings, loss and plan. Found by name, imported when asked for."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rollstream.engine import RollstreamError

if TYPE_CHECKING:
    from rollstream.rl.algorithm import Algorithm

_HOMES = {
    "a2c": ("rollstream.algos.a2c", "A2C"),
    "a3c": ("rollstream.algos.a3c", "A3C"),
    "apex": ("rollstream.algos.apex", "APEX"),
    "ddpg": ("rollstream.algos.td3", "DDPG"),
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
    file, colon, attribute = name.rpartition(":")
    if colon and file.endswith(".py"):
        return _from_file(Path(file), attribute)
    raise UnknownAlgorithm(
        f"there is no algorithm {name!r}{nearest(name, _HOMES)}; there are {', '.join(_HOMES)}, and your "
        f"own as my_file.py:MyAlgorithm"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A question in brackets whether another name was meant, if one is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.4)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _from_file(file: Path, attribute: str) -> Algorithm[Any]:
    from rollstream.rl.algorithm import Algorithm

    if not file.is_file():
        raise UnknownAlgorithm(f"there is no file {file}, which {file}:{attribute} should be in")
    module = _module(file.resolve())
    own = {name for name, value in vars(module).items() if isinstance(value, Algorithm)}
    if attribute not in own:
        listed = f"it has {', '.join(sorted(own))}" if own else "write NAME = Algorithm(...) at its end"
        raise UnknownAlgorithm(f"{file} has no algorithm {attribute!r}; {listed}")
    return getattr(module, attribute)


def _module(file: Path) -> ModuleType:
    """A file as a module, imported once; its functions travel to workers by value."""
    import cloudpickle

    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # so that it finds its neighbours
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    cloudpickle.register_pickle_by_value(module)
    return module
