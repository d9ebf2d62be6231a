"""Saving and loading: a class names the attributes that make up its state, and this does the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

from rollstream.flow.provenance import Origin, decode, encode

Packet: TypeAlias = tuple[Any, Origin]


class Stateful:
    """State is plain data: what `saved` names as it is, what `queues` names as lists of packets."""

    saved: ClassVar[tuple[str, ...]] = ()
    queues: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on later."""
        plain = {name: getattr(self, name) for name in self.saved}
        plain = {name: list(value) if isinstance(value, list) else value for name, value in plain.items()}
        return plain | {name: encode_packets(getattr(self, name)) for name in self.queues}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        for name in self.saved:
            value = state[name]
            setattr(self, name, list(value) if isinstance(value, list) else value)
        for name in self.queues:
            setattr(self, name, decode_packets(state[name]))


def encode_packets(packets: Iterable[Packet]) -> list[Any]:
    """Packets as plain data."""
    return [[value, encode(origin)] for value, origin in packets]


def decode_packets(state: Iterable[Any]) -> deque[Packet]:
    """Packets from plain data."""
    return deque((value, decode(origin)) for value, origin in state)
