"""The graph of a plan as plain data, for those who draw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rollstream.engine.actor import DRIVER

PINK = "#e0287d"
"""The colour of asynchronous edges, as in the paper's figures."""
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

    @property
    def on_driver(self) -> bool:
        """Whether it runs on the driver rather than on actors."""
        return self.place == DRIVER

    @property
    def where(self) -> str:
        """The actors it runs on, and their number; empty for the driver."""
        copies = f" ×{self.copies}" if self.copies > 1 else ""  # noqa: RUF001
        return "" if self.on_driver else f"on {self.place}{copies}"


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """Items pass from one node to another, or messages do, or a rate limiter couples the two."""

    source: str
    target: str
    kind: EdgeKind
    references: bool = False
    """Whether references pass along it, to items that stay on the actors that made them."""

    @property
    def is_stream(self) -> bool:
        """Whether items pass along it."""
        return self.kind in ("sync", "async")


@dataclass(frozen=True, slots=True)
class GraphData:
    """Nodes, sources first, and the edges between them."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]

    @property
    def streams(self) -> list[GraphEdge]:
        """The edges that items pass along."""
        return [edge for edge in self.edges if edge.is_stream]
