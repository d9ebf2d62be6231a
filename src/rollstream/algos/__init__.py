"""Algorithms, one file each: settings, worker, loss, learner and plan. Imported when first used."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.engine import RollstreamError
from rollstream.user_code import file_and_name, load_from_file

if TYPE_CHECKING:
    from rollstream.rl.algorithm import Algorithm, Task

_REGISTRY = {
    "a2c": ("rollstream.algos.a2c", "A2C"),
    "a3c": ("rollstream.algos.a3c", "A3C"),
    "apex": ("rollstream.algos.apex", "APEX"),
    "appo": ("rollstream.algos.appo", "APPO"),
    "ddpg": ("rollstream.algos.ddpg", "DDPG"),
    "dqn": ("rollstream.algos.dqn", "DQN"),
    "impala": ("rollstream.algos.impala", "IMPALA"),
    "maml": ("rollstream.algos.maml", "MAML"),
    "ppo": ("rollstream.algos.ppo", "PPO"),
    "r2d2": ("rollstream.algos.r2d2", "R2D2"),
    "sac": ("rollstream.algos.sac", "SAC"),
    "td3": ("rollstream.algos.td3", "TD3"),
}


SB3_NAMES = {
    "batch_size": "minibatch_size",
    "ent_coef": "entropy_coefficient",
    "exploration_final_eps": "final_epsilon",
    "gradient_steps": "utd_ratio",
    "lr": "learning_rate",
    "n_envs": "num_envs",
    "n_epochs": "epochs",
    "n_quantiles": "num_quantiles",
    "n_steps": "rollout_length",
    "net_arch": "hidden",
    "top_quantiles_to_drop_per_net": "dropped_quantiles",
    "train_freq": "rollout_length",
    "vf_coef": "value_coefficient",
}
"""Hyperparameters as Stable-Baselines3 names them, where the name differs."""


class UnknownAlgorithm(RollstreamError):
    """There is no algorithm of that name, or none in that file."""


class _Algorithms(Mapping[str, "Algorithm[Any]"]):
    """Algorithms by name, each imported when first used."""

    def __getitem__(self, name: str) -> Algorithm[Any]:
        module, attribute = _REGISTRY[name]
        return getattr(importlib.import_module(module), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(_REGISTRY)

    def __len__(self) -> int:
        return len(_REGISTRY)


ALGORITHMS: Mapping[str, Algorithm[Any]] = _Algorithms()
"""All algorithms of the package."""


def algorithm(name: str) -> Algorithm[Any]:
    """Look up an algorithm by name, such as `ppo`, or by file, such as `my_file.py:MyAlgorithm`."""
    if name in _REGISTRY:
        return ALGORITHMS[name]
    if (parts := file_and_name(name)) is not None:
        from rollstream.rl.algorithm import Algorithm

        return load_from_file(
            *parts, "algorithm", lambda value: isinstance(value, Algorithm), UnknownAlgorithm
        )
    raise UnknownAlgorithm(
        f"there is no algorithm {name!r}{nearest(name, _REGISTRY)}; there are {', '.join(_REGISTRY)}, and "
        f"your own as my_file.py:MyAlgorithm"
    )


def supporting(task: Task) -> list[str]:
    """Names of the algorithms that support the spaces of an environment, and need nothing else of it."""
    from rollstream.rl.spaces import SpaceError

    task, spaces = replace(task, workers=0, policy=None), task.spaces()
    names: list[str] = []
    for name, algorithm in ALGORITHMS.items():
        with suppress(SpaceError):
            spec = algorithm.worker(algorithm.config(), task)
            spec.policy(*spaces)
            if spec.tasks is None:
                names.append(name)
    return names


def having(hyperparameter: str) -> str:
    """Which algorithms have a hyperparameter, as the end of a sentence; empty if none has it.

    >>> having("tau")
    ', which ddpg, sac and td3 have'
    """
    configs = {name: fields(algorithm.config) for name, algorithm in ALGORITHMS.items()}
    owners = [name for name, own in configs.items() if hyperparameter in {field.name for field in own}]
    if len(owners) < 2:
        return f", which {owners[0]} has" if owners else ""
    return f", which {', '.join(owners[:-1])} and {owners[-1]} have"


def module_of(name: str) -> str:
    """The module of an algorithm of the package."""
    return _REGISTRY[name][0]


def summary(name: str) -> str:
    """The first line of an algorithm's file, without importing it, which would be slow."""
    spec = importlib.util.find_spec(module_of(name))
    assert spec is not None
    assert spec.origin is not None
    documentation = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
    return documentation.partition("\n")[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """A question whether another name was meant, in parentheses, if one is similar."""
    known = list(known)
    if (usual := SB3_NAMES.get(name.lower())) in known:
        return f" (did you mean {usual!r}?)"
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
