"""Payloads on Ray: small ones are part of a message, large ones an object in Ray's store.

A payload travels as an *item*: its body, or a list of its body and the items of its parts. A body is pickled
bytes; or a tuple of those and the buffers kept out of band, which Ray keeps out of band, too, so that
a reader sees them in place; or the reference of an object that is one of these.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from rollstream.engine.errors import EngineClosed, ValueLost
from rollstream.engine.serialization import Payload, payload_of

INLINE = 1 << 16
"""Bytes up to which a payload is part of the message that carries it; Ray itself draws the line near here."""


class Buffers:
    """Out-of-band buffers, as they came or as they will be sent."""

    __slots__ = ("_views",)

    def __init__(self, views: Sequence[Any]):
        self._views = views

    def views(self) -> Sequence[Any]:
        """The buffers."""
        return self._views


class StoredPayload(Payload):
    """A payload whose body lies in Ray's store: it travels as a reference, and is fetched when opened."""

    __slots__ = ("reference",)

    def __init__(self, reference: Any, parts: Sequence[Any] = ()):
        super().__init__(b"", None, parts)
        self.reference = reference

    def fetch(self) -> Payload:
        """The payload itself, read in place if it lies on this machine."""
        if not ray.is_initialized():
            raise EngineClosed("the engine was closed, and the value ended with its cluster")
        try:
            payload = payload_from(ray.get(self.reference))
        except ObjectLostError as error:
            raise ValueLost(f"a value was lost with the actor or machine that held it: {error}") from error
        payload.parts = self.parts
        return payload


def is_large(payload: Payload) -> bool:
    """Whether a payload is too large to be part of a message."""
    return _size(payload) > INLINE


def size_of(payload: Payload) -> int:
    """Bytes of a payload and its parts, without those that lie in Ray's store."""
    return _size(payload) + sum(size_of(payload_of(part)) for part in payload.parts)


def _size(payload: Payload) -> int:
    views = () if payload.memory is None else payload.memory.views()
    return len(payload.data) + sum(len(view) if isinstance(view, bytes) else view.nbytes for view in views)


def store(payload: Payload) -> Payload:
    """A payload that shares no memory with its sender: copied once, into Ray's store if it is large."""
    if is_large(payload):
        return StoredPayload(ray.put(body_of(payload)), payload.parts)
    if payload.memory is not None:
        payload.memory = Buffers([bytes(view) for view in payload.memory.views()])
    return payload


# To and from what Ray carries --------------------------------------------------------------------


def body_of(payload: Payload) -> Any:
    """A payload without its parts."""
    if isinstance(payload, StoredPayload):
        return payload.reference
    if payload.memory is None:
        return payload.data
    return (payload.data, *map(pickle.PickleBuffer, payload.memory.views()))


def items_of(payload: Payload) -> list[Any]:
    """The parts of a payload. As arguments of a remote call, Ray makes sure that they are there."""
    return [item_of(payload_of(part)) for part in payload.parts]


def item_of(payload: Payload) -> Any:
    """A payload with its parts."""
    return [body_of(payload), *items_of(payload)] if payload.parts else body_of(payload)


def payload_from(item: Any, items: Sequence[Any] = ()) -> Payload:
    """The payload an item or a body was made of, with these parts."""
    if type(item) is list:
        item, *items = item
    parts = [payload_from(part) for part in items] if items else ()
    if type(item) is bytes:
        return Payload(item, None, parts)
    if type(item) is tuple:
        return Payload(item[0], Buffers(item[1:]), parts)
    return StoredPayload(item, parts)
