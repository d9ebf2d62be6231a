"""The graph of a plan as plain data: what runs where, and what is asynchronous. Nothing runs to make it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rollstream.engine import Actor
from rollstream.engine.actor import DRIVER
from rollstream.flow.actor_refs import actors_in
from rollstream.flow.branches import Branch
from rollstream.flow.errors import PlanError
from rollstream.flow.gather import Gather
from rollstream.flow.limiter import Limit
from rollstream.flow.node import Chain, Node, ancestors
from rollstream.flow.runtime import name_nodes, operators
from rollstream.flow.statistics import family, place_of
from rollstream.flow.stream import Iter
from rollstream.flow.via import Via

EdgeKind: TypeAlias = Literal["sync", "async", "message", "limit"]


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operator of a plan."""

    name: str
    kind: str
    place: str
    """`driver`, or the actors it runs on."""
    copies: int
    """On how many actors it runs: more than one for a parallel operator."""
    bound: str
    """What limits the items held here: `num_async=2`, `buffer=16`; empty if it holds none."""
    location: str
    """`file:line` of the plan that added it."""


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """Items pass from one node to another, or messages do, or a rate limiter couples the two."""

    source: str
    target: str
    kind: EdgeKind


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes, sources first, and the edges between them."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]

    def text(self) -> str:
        """The graph for a terminal."""
        from rollstream.flow.drawing import text  # drawing needs Graph

        return text(self)

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart, which GitHub and many editors draw."""
        from rollstream.flow.drawing import mermaid

        return mermaid(self)

    def svg(self) -> str:
        """The graph as a picture."""
        from rollstream.flow.svg import svg

        return svg(self)

    def __str__(self) -> str:
        return self.text()


def graph(stream: Iter[Any]) -> Graph:
    """The graph that ends in this stream."""
    if not isinstance(stream, Iter):
        raise PlanError(f"{stream!r} is no plan yet; gather it, and draw the Iter you get")
    root = stream._node
    name_nodes(root)
    nodes = [node for node in ancestors(root) if not isinstance(node, Branch)]
    drawn = [item for node in nodes for item in _drawn(node)]
    edges = [edge for node in nodes for edge in _edges(node)]
    extra, messages = _messages(nodes)
    return Graph((*drawn, *extra), (*edges, *_couplings(nodes), *messages))


def _drawn(node: Node) -> Iterator[GraphNode]:
    if isinstance(node, Chain):
        for stage in node.stages:
            yield GraphNode(stage.name, stage.kind, DRIVER, 1, stage.bound(), stage.location)
        return
    place, copies = DRIVER, 1
    if isinstance(node, Gather):
        where, count = place_of([port.actor for port in node.ports]), len(node.ports)
        yield GraphNode(node.plan.name, "source", where, count, "", node.plan.location)
        for stage in node.plan.stages:
            yield GraphNode(stage.name, stage.kind, where, count, stage.bound(), stage.location)
    elif isinstance(node, Via):
        place, copies = place_of(node.actors), len(node.actors)
    yield GraphNode(node.name, node.kind, place, copies, node.bound(), node.location)


def _edges(node: Node) -> Iterator[GraphEdge]:
    """Edges into a node's first operator, and between the operators folded into it."""
    row = operators(node)
    for upstream in node.upstreams:
        last = upstream.upstreams[0] if isinstance(upstream, Branch) else upstream
        kind: EdgeKind = "async" if node.asynchronous else "sync"
        yield GraphEdge(operators(last)[-1].name, row[0].name, kind)
    for index in range(1, len(row)):
        crosses = isinstance(node, Gather) and index == len(row) - 1
        kind = "async" if crosses and node.asynchronous else "sync"
        yield GraphEdge(row[index - 1].name, row[index].name, kind)


def _couplings(nodes: Iterable[Node]) -> Iterator[GraphEdge]:
    for node in nodes:
        if isinstance(node, Limit) and node.inserts and node.partner is not None and node.partner in nodes:
            yield GraphEdge(node.name, node.partner.name, "limit")


def _messages(nodes: list[Node]) -> tuple[list[GraphNode], list[GraphEdge]]:
    """Arrows from operators that hold actor handles to what runs on those actors."""
    homes: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, Gather):
            homes.update((port.actor.name, node.plan.name) for port in node.ports)
        elif isinstance(node, Via):
            for actor in node.actors:
                homes.setdefault(actor.name, node.name)
    held = {
        stage.name: actors_in(stage.function)
        for node in nodes
        for stage in (node.plan.stages if isinstance(node, Gather) else getattr(node, "stages", ()))
    }
    strangers: dict[str, dict[str, Actor[Any]]] = {}
    for actor in (actor for actors in held.values() for actor in actors if actor.name not in homes):
        strangers.setdefault(family(actor), {})[actor.name] = actor
    taken = {operator.name for node in nodes for operator in operators(node)}
    extra: list[GraphNode] = []
    for actors in strangers.values():
        place = place_of(list(actors.values()))
        name = f"{place} (actor)" if place in taken else place
        homes.update(dict.fromkeys(actors, name))
        extra.append(GraphNode(name, "actor", place, len(actors), "", ""))
    edges = [
        GraphEdge(stage, homes[actor.name], "message") for stage, actors in held.items() for actor in actors
    ]
    return extra, list(dict.fromkeys(edges))
