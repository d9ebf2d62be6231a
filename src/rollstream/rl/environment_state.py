"""The state of an environment as plain data, for those that are made of plain data.

Many environments are numbers, arrays and a random generator; those are saved and go on where they were.
Others hold a physics engine or an emulator, whose state is out of reach: they say so, and are begun anew.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from rollstream.engine import RollstreamError

_CONSTANT = (
    gymnasium.Space,
    EnvSpec,
    enum.Enum,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
)
"""What belongs to an environment and does not change with its steps."""


class UnknownState(RollstreamError):
    """An environment whose state cannot be saved."""


def saved_environment_state(environment: Any) -> list[dict[str, Any]]:
    """The attributes of an environment and its wrappers, outermost first."""
    return [_layer(layer) for layer in _layers(environment)]


def load_environment_state(environment: Any, state: list[dict[str, Any]]) -> None:
    """Give an environment, just made and reset, the attributes of a saved one."""
    for layer, own in zip(_layers(environment), state, strict=True):
        for name, value in own.items():
            setattr(layer, name, _decoded(value))


def _layers(environment: Any) -> Iterator[Any]:
    while True:
        yield environment
        if not isinstance(environment, (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)):
            return
        environment = environment.env


def _layer(layer: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if name == "env" or isinstance(value, _CONSTANT):
            continue
        try:
            state[name] = _encoded(value)
        except UnknownState as unknown:
            raise UnknownState(f"{type(layer).__name__}.{name} is {unknown}") from None
    return state


def _encoded(value: Any) -> Any:
    """Plain data; what JSON does not know is marked."""
    if type(value) in (type(None), bool, int, float, str):
        return value
    if isinstance(value, np.str_):
        return str(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "SU":  # a map of letters, say
        return {"text": [value.dtype.str, value.astype(str).tolist()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": value.copy()}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"scalar": np.asarray(value)}
    if isinstance(value, np.random.Generator):
        return {"generator": [type(value.bit_generator).__name__, _encoded(value.bit_generator.state)]}
    if type(value) is deque:
        return {"deque": [_encoded(part) for part in value], "limit": value.maxlen}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(part) for part in value]}
    if type(value) is dict:
        return {"dict": [[_encoded(key), _encoded(part)] for key, part in value.items()]}
    raise UnknownState(f"of type {type(value).__module__}.{type(value).__qualname__}")


def _decoded(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    [(kind, value), *more] = state.items()
    if kind == "array":
        return np.array(value)
    if kind == "text":
        return np.array(value[1]).astype(value[0])
    if kind == "scalar":
        return np.asarray(value)[()]
    if kind == "generator":
        bits = getattr(np.random, value[0])()
        bits.state = _decoded(value[1])
        return np.random.Generator(bits)
    if kind == "dict":
        return {_decoded(key): _decoded(part) for key, part in value}
    parts = [_decoded(part) for part in value]
    return deque(parts, more[0][1]) if kind == "deque" else tuple(parts) if kind == "tuple" else parts
