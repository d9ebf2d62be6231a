"""From what a person says to an algorithm's settings, and from settings to JSON and back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from rollstream.algos import nearest
from rollstream.engine import RollstreamError
from rollstream.rl.algorithm import Algorithm
from rollstream.training.tuned import tuned

C = TypeVar("C")


class SettingsError(RollstreamError):
    """Settings that an algorithm does not have."""


def configured(algorithm: Algorithm[C], environment: str, config: C | Mapping[str, Any] | None = None) -> C:
    """The settings to train with: those given as a whole, or some on top of the tuned ones.

    >>> from rollstream.algos.ppo import PPO
    >>> config = configured(PPO, "CartPole-v1", {"epochs": 3})
    >>> config.epochs, config.rollout_length
    (3, 32)
    """
    if config is None or isinstance(config, Mapping):
        return settings(algorithm, tuned(algorithm.name, environment) | dict(config or {}))
    if not isinstance(config, algorithm.config):
        raise SettingsError(
            f"config is a {type(config).__module__}.{type(config).__qualname__}; {algorithm.name} takes a "
            f"{algorithm.config.__module__}.{algorithm.config.__qualname__}, or a dict of some of its options"
        )
    return config


def settings(algorithm: Algorithm[C], options: Mapping[str, Any]) -> C:
    """An algorithm's settings from options by name; the others are as the algorithm has them."""
    hints = typing.get_type_hints(algorithm.config)
    known = [field.name for field in dataclasses.fields(typing.cast(Any, algorithm.config))]
    for name in options:
        if name not in known:
            raise SettingsError(
                f"{algorithm.name} has no option {name!r}{nearest(name, known)}; it has {', '.join(known)}"
            )
    return algorithm.config(**{name: _as(hints[name], value) for name, value in options.items()})


def as_json(config: Any) -> dict[str, Any]:
    """Settings by name, for `config.json`."""
    return dataclasses.asdict(config)


def _as(hint: Any, value: Any) -> Any:
    """JSON has lists where settings have tuples."""
    return tuple(value) if isinstance(value, list) and typing.get_origin(hint) is tuple else value
