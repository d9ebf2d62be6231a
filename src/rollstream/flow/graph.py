"""The graph of a plan: what runs where, and what is asynchronous. Nothing runs to make it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollstream.drawing.graph import GraphData, GraphEdge, GraphNode
from rollstream.drawing.mermaid import mermaid
from rollstream.drawing.svg import svg
from rollstream.drawing.text import text
from rollstream.engine import Actor
from rollstream.flow.actor_refs import actors_in, family, place_of
from rollstream.flow.errors import PlanError
from rollstream.flow.node import Node, ancestors
from rollstream.flow.operator import Operator
from rollstream.flow.runtime import name_operators
from rollstream.flow.stream import Iter


@dataclass(frozen=True, slots=True)
class Graph(GraphData):
    """Nodes, sources first, and the edges between them."""

    def text(self) -> str:
        """The graph for a terminal."""
        return text(self)

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart, which GitHub and many editors draw."""
        return mermaid(self)

    def svg(self) -> str:
        """The graph as a picture."""
        return svg(self)

    def __str__(self) -> str:
        return self.text()


def graph(stream: Iter[Any]) -> Graph:
    """The graph that ends in this stream."""
    if not isinstance(stream, Iter):
        raise PlanError(f"{stream!r} is not a plan yet; gather it, and draw the Iter you get")
    name_operators(stream._node)
    nodes = ancestors(stream._node)
    drawn = [
        GraphNode(own.name, own.kind, place_of(actors), len(actors) or 1, own.bound, own.location)
        for node in nodes
        for own in node.operators()
        for actors in [node.place(own)]
    ]
    by_reference: set[str] = set()
    edges = [edge for node in nodes for edge in _edges(node, by_reference)]
    edges += [
        GraphEdge(node.name, node.coupled.name, "limit")
        for node in nodes
        if node.coupled is not None and node.coupled in nodes
    ]
    extra, messages = _messages(nodes)
    return Graph((*drawn, *extra), (*edges, *messages))


def _edges(node: Node, by_reference: set[str]) -> Iterator[GraphEdge]:
    """Edges into a node's first operator, and between its operators.

    `by_reference` has the operators, so far, whose outputs are references.
    """
    before = [upstream.last_operator() for upstream in node.upstreams]
    for operator in node.operators():
        crosses = node.asynchronous and operator is node
        references = [source.name in by_reference for source in before]
        for source, own in zip(before, references, strict=True):
            yield GraphEdge(source.name, operator.name, "async" if crosses else "sync", own)
        if operator.kind == "put" or (any(references) and _passes_references(operator)):
            by_reference.add(operator.name)
        before = [operator]


def _passes_references(operator: Operator) -> bool:
    """Whether an operator that gets references passes them on, rather than something it made of them."""
    makes = operator.kind in ("for_each", "combine", "via")
    return not makes or getattr(operator.function, "passes_references", False)


def _messages(nodes: list[Node]) -> tuple[list[GraphNode], list[GraphEdge]]:
    """Arrows from operators that refer to actors to what runs on those actors, first of all to sources."""
    homes: dict[str, str] = {}
    for node in sorted(nodes, key=lambda node: len(node.upstreams) > 0):
        for actor in node.actors():
            homes.setdefault(actor.name, node.operators()[0].name)
    operators = [own for node in nodes for own in node.operators()]
    receivers = {own.name: [*actors_in(own.function), *own.receivers] for own in operators}
    others: dict[str, dict[str, Actor[Any]]] = {}
    for actor in (actor for actors in receivers.values() for actor in actors if actor.name not in homes):
        others.setdefault(family(actor), {})[actor.name] = actor
    extra: list[GraphNode] = []
    for actors in others.values():
        place = place_of(list(actors.values()))
        name = f"{place} (actor)" if place in receivers else place
        homes.update(dict.fromkeys(actors, name))
        extra.append(GraphNode(name, "actor", place, len(actors), "", ""))
    edges = [
        GraphEdge(sender, homes[actor.name], "message")
        for sender, actors in receivers.items()
        for actor in actors
    ]
    edges += [
        GraphEdge(homes[actor.name], own.name, "message") for own in operators for actor in own.receivers
    ]
    return extra, list(dict.fromkeys(edges))
