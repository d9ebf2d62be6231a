"""The state of environments as plain data, for those that are made of plain data.

Many environments are numbers, arrays and a random generator; those are saved and go on where they were.
Others hold a physics engine or an emulator, whose state is out of reach: they say so, and are begun anew.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs import registration

from rollstream.engine import RollstreamError

_CONSTANT = (registration.EnvSpec, enum.Enum, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
"""What belongs to an environment and does not change with its steps."""


class UnknownState(RollstreamError):
    """An environment whose state cannot be saved."""


def saved_environments(environments: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """Of each environment the attributes, and those of its wrappers, outermost first.

    What two attributes share is shared again when it is loaded.
    """
    saving = _Saving()
    return [[saving.layer(layer) for layer in _layers(one)] for one in environments]


def load_environments(environments: Sequence[Any], state: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Give environments, just made and reset, the attributes of saved ones."""
    loading = _Loading()
    for environment, layers in zip(environments, state, strict=True):
        for layer, own in zip(_layers(environment), layers, strict=True):
            loading.layer(layer, own)


def _layers(environment: Any) -> Iterator[Any]:
    while True:
        yield environment
        if not isinstance(environment, (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)):
            return
        environment = environment.env


def _spaces(space: gymnasium.Space[Any]) -> Iterator[gymnasium.Space[Any]]:
    """A space and those in it."""
    yield space
    for value in vars(space).values():
        parts = value.values() if isinstance(value, Mapping) else value
        for part in parts if isinstance(value, (Mapping, list, tuple)) else [value]:
            if isinstance(part, gymnasium.Space):
                yield from _spaces(part)


def _draws(value: Any) -> bool:
    """Whether there is a random generator in it: a space has one from its first sample on."""
    if isinstance(value, gymnasium.Space):
        return any(_draws(part._np_random) for part in _spaces(value))
    return isinstance(value, np.random.Generator)


class _Saving:
    """Makes plain data of values; what JSON does not know is marked.

    What can be changed has a number, in the order in which all of it was seen; where it is seen again, the
    number is written.
    """

    def __init__(self) -> None:
        self._path = ""
        self._seen: dict[int, tuple[Any, int | None]] = {}
        """Values and their numbers by identity; the number is given when all parts have theirs."""
        self._count = 0
        self._owned: dict[int, list[tuple[Any, str]]] = {}
        """Arrays or generators by the identity of what is behind them, and where they are."""

    def layer(self, layer: Any) -> dict[str, Any]:
        """The attributes of an environment or wrapper."""
        for kind in type(layer).__mro__:
            for name, value in vars(kind).items():
                if name not in vars(layer) and _draws(value):
                    raise UnknownState(f"{kind.__name__}.{name} draws for all environments of its class")
        state: dict[str, Any] = {}
        for name, value in vars(layer).items():
            self._path = f"{type(layer).__name__}.{name}"
            if name == "env" or isinstance(value, _CONSTANT):
                continue
            if not isinstance(value, gymnasium.Space):
                state[name] = self._encoded(value)
            elif _draws(value):
                state[name] = {"space": [self._encoded(part._np_random) for part in _spaces(value)]}
        return state

    def _encoded(self, value: Any) -> Any:
        if type(value) in (type(None), bool, int, float, str):
            return value
        if isinstance(value, np.str_):
            return str(value)
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return {"scalar": np.asarray(value)}
        if type(value) is tuple:
            return {"tuple": [self._encoded(part) for part in value]}
        if id(value) in self._seen:
            number = self._seen[id(value)][1]
            if number is None:
                raise UnknownState(f"{self._path} is a part of itself")
            return {"same": number}
        self._seen[id(value)] = value, None
        state = self._changeable(value)
        self._seen[id(value)] = value, self._count
        self._count += 1
        return state

    def _changeable(self, value: Any) -> dict[str, Any]:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufSU":
            self._own(value, _memory(value))
            if value.dtype.kind in "SU":  # a map of letters, say
                return {"text": [value.dtype.str, value.astype(str).tolist()]}
            return {"array": value.copy()}
        if isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._own(value, bits)
            return {"generator": [type(bits).__name__, self._encoded(bits.state)]}
        if type(value) is deque:
            return {"deque": [self._encoded(part) for part in value], "limit": value.maxlen}
        if type(value) is list:
            return {"list": [self._encoded(part) for part in value]}
        if type(value) is dict:
            return {"dict": [[self._encoded(key), self._encoded(part)] for key, part in value.items()]}
        kind = type(value)
        raise UnknownState(f"{self._path} is of type {kind.__module__}.{kind.__qualname__}")

    def _own(self, value: Any, behind: Any) -> None:
        """Raise if a change of the value is one of another value, too."""
        others = self._owned.setdefault(id(behind), [])
        for other, path in others:
            if not isinstance(value, np.ndarray) or np.shares_memory(value, other):
                raise UnknownState(f"{self._path} changes together with {path}")
        others.append((value, self._path))


def _memory(array: np.ndarray[Any, Any]) -> Any:
    """What an array is a view of, or itself."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if array.base is None else array.base


class _Loading:
    """Makes values of plain data again, numbered as they were when saved."""

    def __init__(self) -> None:
        self._seen: list[Any] = []

    def layer(self, layer: Any, state: Mapping[str, Any]) -> None:
        """Set the attributes of an environment or wrapper."""
        for name, value in state.items():
            if isinstance(value, dict) and "space" in value:
                for space, generator in zip(_spaces(getattr(layer, name)), value["space"], strict=True):
                    space._np_random = self._decoded(generator)
            else:
                setattr(layer, name, self._decoded(value))

    def _decoded(self, state: Any) -> Any:
        if not isinstance(state, dict):
            return state
        [(kind, value), *more] = state.items()
        if kind == "same":
            return self._seen[value]
        if kind == "scalar":
            return np.asarray(value)[()]
        if kind == "tuple":
            return tuple(self._decoded(part) for part in value)
        made = self._changeable(kind, value, dict(more))
        self._seen.append(made)
        return made

    def _changeable(self, kind: str, value: Any, more: Mapping[str, Any]) -> Any:
        if kind == "array":
            return np.array(value)
        if kind == "text":
            return np.array(value[1]).astype(value[0])
        if kind == "generator":
            bits = getattr(np.random, value[0])()
            bits.state = self._decoded(value[1])
            return np.random.Generator(bits)
        if kind == "dict":
            return {self._decoded(key): self._decoded(part) for key, part in value}
        parts = [self._decoded(part) for part in value]
        return deque(parts, more["limit"]) if kind == "deque" else parts
