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
    edges = [edge for node in nodes for edge in _edges(node)]
    edges += [
        GraphEdge(node.name, node.coupled.name, "limit")
        for node in nodes
        if node.coupled is not None and node.coupled in nodes
    ]
    extra, messages = _messages(nodes)
    return Graph((*drawn, *extra), (*edges, *messages))


def _edges(node: Node) -> Iterator[GraphEdge]:
    """Edges into a node's first operator, and between its operators."""
    before = [upstream.last_operator() for upstream in node.upstreams]
    for operator in node.operators():
        crosses = node.asynchronous and operator is node
        for source in before:
            yield GraphEdge(source.name, operator.name, "async" if crosses else "sync")
        before = [operator]


def _messages(nodes: list[Node]) -> tuple[list[GraphNode], list[GraphEdge]]:
    """Arrows from operators that refer to actors to what runs on those actors, first of all to sources."""
    homes: dict[str, str] = {}
    for node in sorted(nodes, key=lambda node: len(node.upstreams) > 0):
        for actor in node.actors():
            homes.setdefault(actor.name, node.operators()[0].name)
    receivers = {own.name: actors_in(own.function) for node in nodes for own in node.operators()}
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
    return extra, list(dict.fromkeys(edges))
