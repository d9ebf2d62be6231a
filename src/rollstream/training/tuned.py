"""Tuned hyperparameters that come with the package, by algorithm and environment (`tuned.toml`)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def _all() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads(files("rollstream.training").joinpath("tuned.toml").read_text("utf-8"))


def tuned(algorithm: str, environment: str) -> dict[str, Any]:
    """Tuned hyperparameters of an algorithm for an environment; empty if there are none.

    >>> tuned("ppo", "CartPole-v1")["num_envs"]
    8
    >>> tuned("ppo", "Unheard-v0")
    {}
    """
    return dict(_all().get(algorithm, {}).get(environment, {}))


def tuned_environments(algorithm: str) -> tuple[str, ...]:
    """Environments an algorithm has tuned hyperparameters for."""
    return tuple(_all().get(algorithm, {}))
