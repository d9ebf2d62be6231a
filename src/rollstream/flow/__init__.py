"""Flows: lazy streams over actors, the operators on them, and the graph they make."""

from rollstream.drawing.graph import GraphEdge, GraphNode
from rollstream.flow.errors import OperatorError, PlanError, StateError
from rollstream.flow.graph import Graph, graph
from rollstream.flow.provenance import Provenance, Span, Tally
from rollstream.flow.rate_limit import limit_ratio
from rollstream.flow.references import Stored
from rollstream.flow.sources import StreamActor, from_actors, from_items, from_iterable, from_poll
from rollstream.flow.stages import Context
from rollstream.flow.statistics import NodeStatistics, ShardStatistics, Statistics
from rollstream.flow.stream import Iter, ParIter
from rollstream.flow.union import union, union_async

__all__ = [
    "Context",
    "Graph",
    "GraphEdge",
    "GraphNode",
    "Iter",
    "NodeStatistics",
    "OperatorError",
    "ParIter",
    "PlanError",
    "Provenance",
    "ShardStatistics",
    "Span",
    "StateError",
    "Statistics",
    "Stored",
    "StreamActor",
    "Tally",
    "from_actors",
    "from_items",
    "from_iterable",
    "from_poll",
    "graph",
    "limit_ratio",
    "union",
    "union_async",
]
