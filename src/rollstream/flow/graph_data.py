"""The graph of a plan as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

EdgeKind: TypeAlias = Literal["sync", "async", "message", "limit"]


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operator of a plan."""

    name: str
    kind: str
    place: str
    """`driver`, or the actors it runs on."""
    copies: int
    """The number of actors it runs on: more than one for a parallel operator."""
    bound: str
    """The limit of the items held here: `num_async=2`, `buffer=16`; empty if it holds none."""
    location: str
    """`file:line` of the plan that added it."""


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """Items pass from one node to another, or messages do, or a rate limiter couples the two."""

    source: str
    target: str
    kind: EdgeKind


@dataclass(frozen=True, slots=True)
class GraphData:
    """Nodes, sources first, and the edges between them."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
