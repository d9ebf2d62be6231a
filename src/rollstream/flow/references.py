"""Items that stay where they were made: the driver passes references on, and metadata about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollstream.engine import Engine, Ref
from rollstream.engine.errors import ValueLost
from rollstream.flow.operator import Packet
from rollstream.flow.provenance import Origin
from rollstream.flow.stages import Stage

T = TypeVar("T")
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Stored(Generic[T, F]):
    """A value that stayed on the actor that made it, as an item of a stream.

    Pass `ref` on in a message, and it arrives as the value; `via` does so by itself. `ref.get()` opens it.
    """

    ref: Ref[T]
    metadata: F
    """What `ParIter.put` was told to send beside it."""


class PutStage(Stage):
    """Stores every item on its actor, and sends a reference instead."""

    kind = "put"

    def __init__(
        self,
        name: str,
        location: str,
        value: Callable[[Any], Any] | None,
        metadata: Callable[[Any], Any] | None,
    ):
        super().__init__(name, location, (value, metadata))
        self._value = value
        self._metadata = metadata

    def push(self, value: Any, origin: Origin) -> Packet:
        """The reference, and the metadata."""
        metadata = None if self._metadata is None else self._metadata(value)
        return Stored(self.put(value if self._value is None else self._value(value)), metadata), origin


def dereferenced(item: Any) -> Any:
    """An item as whoever receives it sees it: the value of a stored one, also in a list or tuple."""
    if isinstance(item, Stored):
        return item.ref.get()
    if type(item) in (list, tuple) and any(isinstance(part, Stored) for part in item):
        return type(item)(dereferenced(part) for part in item)
    return item


def is_lost(item: Any) -> bool:
    """Whether a value it refers to went down with the actor or machine that held it."""
    try:
        without_refs(item)
    except ValueLost:
        return True
    return False


# In states, which are plain data, values take the place of references ------------------------------

_REF, _STORED = "$ref", "$stored"


def without_refs(state: Any) -> Any:
    """A state with the values of its references."""
    if isinstance(state, Stored):
        return {_STORED: [state.ref.get(), state.metadata]}
    if isinstance(state, Ref):
        return {_REF: state.get()}
    return _mapped(without_refs, state)


def with_refs(engine: Engine, state: Any) -> Any:
    """The state that `without_refs` was given, with values stored anew."""
    if type(state) is dict and _STORED in state:
        value, metadata = state[_STORED]
        return Stored(engine.put(value), metadata)
    if type(state) is dict and _REF in state:
        return engine.put(state[_REF])
    return _mapped(lambda part: with_refs(engine, part), state)


def _mapped(function: Callable[[Any], Any], state: Any) -> Any:
    if type(state) is dict:
        return {key: function(part) for key, part in state.items()}
    return type(state)(map(function, state)) if type(state) in (list, tuple) else state
