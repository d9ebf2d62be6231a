"""Saves and restores the state of environments that consist of plain data.

Many environments are numbers, arrays and a random generator: their attributes are saved as they are, and
`rollstream.state_codec` writes them to disk. Others hold a physics engine or an emulator, whose state cannot
be reached: they raise `UnknownState`, and start new episodes when a run is resumed.
"""

from __future__ import annotations

import copy
import enum
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs import registration

from rollstream.engine import RollstreamError
from rollstream.state_codec import serializable

_CONSTANT = (registration.EnvSpec, enum.Enum, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
"""Types of attributes that steps do not change."""


class UnknownState(RollstreamError):
    """The state of an environment cannot be saved."""


def saved_environments(environments: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """Return the attributes of each environment and its wrappers, outermost first.

    Objects that several attributes share are shared again after loading.
    """
    encoder = _Encoder()
    return [[encoder.layer(layer) for layer in _layers(environment)] for environment in environments]


def load_environments(environments: Sequence[Any], state: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Set the saved attributes of environments that were just made and reset."""
    decoder = _Decoder()
    for environment, layers in zip(environments, state, strict=True):
        for layer, own in zip(_layers(environment), layers, strict=True):
            decoder.layer(layer, own)


def _layers(environment: Any) -> Iterator[Any]:
    while True:
        yield environment
        if not isinstance(environment, (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)):
            return
        environment = environment.env


def _spaces(space: gymnasium.Space[Any]) -> Iterator[gymnasium.Space[Any]]:
    """Yield a space and all spaces in it."""
    yield space
    for value in vars(space).values():
        parts = value.values() if isinstance(value, Mapping) else value
        for part in parts if isinstance(value, (Mapping, list, tuple)) else [value]:
            if isinstance(part, gymnasium.Space):
                yield from _spaces(part)


def _draws(value: Any) -> bool:
    """Whether a value has a random generator; a space has one after its first sample."""
    if isinstance(value, gymnasium.Space):
        return any(_draws(part._np_random) for part in _spaces(value))
    return isinstance(value, np.random.Generator)


@serializable
@dataclass(frozen=True)
class Shared:
    """Refers to a mutable object that was encoded before."""

    index: int


@serializable
@dataclass(frozen=True)
class GeneratorState:
    """A `numpy.random.Generator`."""

    bit_generator: str
    state: dict[str, Any]


@serializable
@dataclass(frozen=True)
class SpaceGenerators:
    """The generators of a space and all spaces in it."""

    generators: list[Any]


@serializable
@dataclass(frozen=True)
class Deque:
    """A `collections.deque`."""

    items: list[Any]
    maxlen: int | None


class _Encoder:
    """Copies values; replaces generators, deques and repeated references by the classes above.

    Mutable objects are numbered in the order in which their encoding ends; a repeated one is encoded as its
    number.
    """

    def __init__(self) -> None:
        self._path = ""
        self._seen: dict[int, tuple[Any, int | None]] = {}
        """Objects and their numbers by identity; the number is `None` while an object is being encoded."""
        self._count = 0
        self._memory: dict[int, list[tuple[Any, str]]] = {}
        """Arrays and generators by the identity of the memory behind them, and where they are."""

    def layer(self, layer: Any) -> dict[str, Any]:
        """Encode the attributes of an environment or wrapper."""
        for kind in type(layer).__mro__:
            for name, value in vars(kind).items():
                if name not in vars(layer) and _draws(value):
                    raise UnknownState(f"{kind.__name__}.{name} is shared by all environments of its class")
        state: dict[str, Any] = {}
        for name, value in vars(layer).items():
            self._path = f"{type(layer).__name__}.{name}"
            if name == "env" or isinstance(value, _CONSTANT):
                continue
            if not isinstance(value, gymnasium.Space):
                state[name] = self._encode(value)
            elif _draws(value):
                state[name] = SpaceGenerators([self._encode(part._np_random) for part in _spaces(value)])
        return state

    def _encode(self, value: Any) -> Any:
        if type(value) in (type(None), bool, int, float, str):
            return value
        if isinstance(value, np.generic) and value.dtype.kind in "biufSU":
            return value
        if type(value) is tuple:
            return tuple(self._encode(part) for part in value)
        if id(value) in self._seen:
            index = self._seen[id(value)][1]
            if index is None:
                raise UnknownState(f"{self._path} contains itself")
            return Shared(index)
        self._seen[id(value)] = value, None
        encoded = self._encode_mutable(value)
        self._seen[id(value)] = value, self._count
        self._count += 1
        return encoded

    def _encode_mutable(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufSU":
            self._require_own_memory(value, _memory(value))
            return value.copy()
        if isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._require_own_memory(value, bits)
            return GeneratorState(type(bits).__name__, copy.deepcopy(dict(bits.state)))
        if type(value) is deque:
            return Deque([self._encode(part) for part in value], value.maxlen)
        if type(value) is list:
            return [self._encode(part) for part in value]
        if type(value) is dict:
            return {self._encode(key): self._encode(part) for key, part in value.items()}
        kind = type(value)
        raise UnknownState(f"{self._path} is of type {kind.__module__}.{kind.__qualname__}")

    def _require_own_memory(self, value: Any, memory: Any) -> None:
        """Raise if changing the value changes another one as well."""
        others = self._memory.setdefault(id(memory), [])
        for other, path in others:
            if not isinstance(value, np.ndarray) or np.shares_memory(value, other):
                raise UnknownState(f"{self._path} changes together with {path}")
        others.append((value, self._path))


def _memory(array: np.ndarray[Any, Any]) -> Any:
    """The object that owns an array's memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if array.base is None else array.base


class _Decoder:
    """Rebuilds values, numbered as they were encoded."""

    def __init__(self) -> None:
        self._seen: list[Any] = []

    def layer(self, layer: Any, state: Mapping[str, Any]) -> None:
        """Set the attributes of an environment or wrapper."""
        for name, value in state.items():
            if isinstance(value, SpaceGenerators):
                for space, generator in zip(_spaces(getattr(layer, name)), value.generators, strict=True):
                    space._np_random = self._decode(generator)
            else:
                setattr(layer, name, self._decode(value))

    def _decode(self, value: Any) -> Any:
        if isinstance(value, Shared):
            return self._seen[value.index]
        if type(value) is tuple:
            return tuple(self._decode(part) for part in value)
        if not isinstance(value, (np.ndarray, GeneratorState, Deque, list, dict)):
            return value
        decoded = self._decode_mutable(value)
        self._seen.append(decoded)
        return decoded

    def _decode_mutable(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, GeneratorState):
            bits = getattr(np.random, value.bit_generator)()
            bits.state = value.state
            return np.random.Generator(bits)
        if isinstance(value, Deque):
            return deque((self._decode(part) for part in value.items), value.maxlen)
        if isinstance(value, list):
            return [self._decode(part) for part in value]
        return {self._decode(key): self._decode(part) for key, part in value.items()}
