"""Builds an algorithm's Config from tuned and given hyperparameters, and from JSON."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from rollstream.algos import having, nearest
from rollstream.rl.algorithm import Algorithm, AlgorithmConfig
from rollstream.training.tuned import tuned
from rollstream.training.validation import ConfigError, validate

C = TypeVar("C", bound=AlgorithmConfig)


def resolve_config(
    algorithm: Algorithm[C], environment: str, config: C | Mapping[str, Any] | None = None
) -> C:
    """Return the Config to train with: the given one, or given hyperparameters on top of the tuned ones.

    >>> from rollstream.algos.ppo import PPO
    >>> config = resolve_config(PPO, "CartPole-v1", {"epochs": 3})
    >>> config.epochs, config.rollout_length
    (3, 32)
    """
    if config is None or isinstance(config, Mapping):
        return config_from_dict(algorithm, tuned(algorithm.name, environment) | dict(config or {}))
    if not isinstance(config, algorithm.config):
        raise ConfigError(
            f"config is a {_full_name(type(config))}; {algorithm.name} takes a "
            f"{_full_name(algorithm.config)}, or a dict of some of its fields"
        )
    _validate(algorithm, {name: getattr(config, name) for name in _field_names(algorithm)})
    return config


def config_from_dict(algorithm: Algorithm[C], values: Mapping[str, Any]) -> C:
    """Build a Config; fields that are missing have the algorithm's defaults."""
    hints, known = typing.get_type_hints(algorithm.config), _field_names(algorithm)
    for name in map(str, values):
        if name not in known:
            raise ConfigError(
                f"{algorithm.name} has no hyperparameter {name!r}{nearest(name, known) or having(name)}; it "
                f"has {', '.join(known)}"
            )
    values = {name: _lists_to_tuples(hints[name], value) for name, value in values.items()}
    _validate(algorithm, values)
    return algorithm.config(**values)


def _validate(algorithm: Algorithm[Any], values: Mapping[str, Any]) -> None:
    validate(algorithm.config, values, "config {}={!r}".format)


def _field_names(algorithm: Algorithm[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(algorithm.config)]


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _lists_to_tuples(hint: Any, value: Any) -> Any:
    """JSON has lists where a Config has tuples."""
    origins = [typing.get_origin(part) for part in (hint, *typing.get_args(hint))]
    return _to_tuple(value) if tuple in origins else value


def _to_tuple(value: Any) -> Any:
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value
