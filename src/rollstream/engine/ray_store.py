"""What travels through Ray: small parcels as they are, large ones as one object in Ray's store.

A parcel travels as an *item*: its body, or a list of its body and the items of its parts. A body is pickled
bytes; or a tuple of those and the buffers kept apart, which Ray keeps apart, too, so that a reader sees them
in place; or the reference of an object that is one of these.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from rollstream.engine.errors import EngineClosed, EngineError
from rollstream.engine.wire import Parcel, parcel_of

INLINE = 1 << 16
"""Bytes up to which a parcel is part of the message that carries it; Ray itself draws the line near here."""


class Buffers:
    """Buffers as they came, or as they will go."""

    __slots__ = ("_views",)

    def __init__(self, views: Sequence[Any]):
        self._views = views

    def views(self) -> Sequence[Any]:
        """The buffers."""
        return self._views


class Stored(Parcel):
    """A parcel whose body lies in Ray's store: it travels as a reference, and is fetched when opened."""

    __slots__ = ("reference",)

    def __init__(self, reference: Any, parts: Sequence[Any] = ()):
        super().__init__(b"", None, parts)
        self.reference = reference

    def fetched(self) -> Parcel:
        """The parcel itself, read in place if it lies on this machine."""
        if not ray.is_initialized():
            raise EngineClosed("the engine was closed, and the value has gone with its cluster")
        try:
            parcel = parcel_from(ray.get(self.reference))
        except ObjectLostError as error:
            raise EngineError(
                f"a value was lost with the actor or the machine that held it: {error}"
            ) from error
        parcel.parts = self.parts
        return parcel


def is_large(parcel: Parcel) -> bool:
    """Whether a parcel is too large to be part of a message."""
    size = len(parcel.data)
    if parcel.memory is not None:
        size += sum(view.nbytes for view in parcel.memory.views())
    return size > INLINE


def stowed(parcel: Parcel) -> Parcel:
    """A parcel that shares no memory with its sender: copied once, into Ray's store if it is large."""
    if is_large(parcel):
        return Stored(ray.put(body_of(parcel)), parcel.parts)
    if parcel.memory is not None:
        parcel.memory = Buffers([bytes(view) for view in parcel.memory.views()])
    return parcel


# To and from what Ray carries --------------------------------------------------------------------


def body_of(parcel: Parcel) -> Any:
    """A parcel without its parts."""
    if isinstance(parcel, Stored):
        return parcel.reference
    if parcel.memory is None:
        return parcel.data
    return (parcel.data, *map(pickle.PickleBuffer, parcel.memory.views()))


def items_of(parcel: Parcel) -> list[Any]:
    """The parts of a parcel. As arguments of a remote call, Ray sees to it that they are there."""
    return [item_of(parcel_of(part)) for part in parcel.parts]


def item_of(parcel: Parcel) -> Any:
    """A parcel with its parts."""
    return [body_of(parcel), *items_of(parcel)] if parcel.parts else body_of(parcel)


def parcel_from(item: Any, items: Sequence[Any] = ()) -> Parcel:
    """The parcel an item or a body was made of, with these parts."""
    if type(item) is list:
        item, *items = item
    parts = [parcel_from(part) for part in items] if items else ()
    if type(item) is bytes:
        return Parcel(item, None, parts)
    if type(item) is tuple:
        return Parcel(item[0], Buffers(item[1:]), parts)
    return Stored(item, parts)
