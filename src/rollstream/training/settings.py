"""From what a person says to an algorithm's settings, and from settings to JSON and back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from rollstream.algos import nearest
from rollstream.rl.algorithm import Algorithm
from rollstream.training.tuned import tuned
from rollstream.training.validation import SettingsError, require_values

C = TypeVar("C")


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
    require_values(algorithm.config, {name: getattr(config, name) for name in _names(algorithm)})
    return config


def settings(algorithm: Algorithm[C], options: Mapping[str, Any]) -> C:
    """An algorithm's settings from options by name; the others are as the algorithm has them."""
    hints = typing.get_type_hints(algorithm.config)
    known = _names(algorithm)
    for name in options:
        if name not in known:
            raise SettingsError(
                f"{algorithm.name} has no option {name!r}{nearest(name, known)}; it has {', '.join(known)}"
            )
    values = {name: _as(hints[name], value) for name, value in options.items()}
    require_values(algorithm.config, values)
    return algorithm.config(**values)


def _names(algorithm: Algorithm[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(algorithm.config)]


def as_json(config: Any) -> dict[str, Any]:
    """Settings by name, for `config.json`."""
    return dataclasses.asdict(config)


def _as(hint: Any, value: Any) -> Any:
    """JSON has lists where settings have tuples."""
    kinds = [typing.get_origin(part) for part in (hint, *typing.get_args(hint))]
    return _tupled(value) if tuple in kinds else value


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
