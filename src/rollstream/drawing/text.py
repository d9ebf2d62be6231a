"""A graph as text for a terminal: one line per operator, one lane per stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from rollstream.drawing.graph import GraphData, GraphEdge, GraphNode

FAR = 48
"""Details begin in this column at the latest, however long a name is."""

Lanes: TypeAlias = list[GraphEdge | None]


def text(graph: GraphData) -> str:
    """The graph for a terminal, sources first: one line per operator, one lane per stream."""
    rows = list(_rows(graph))
    column = min(FAR, max((len(left) for left, detail in rows if detail), default=0))
    lines = [f"{left:{column}}   {detail}" if detail else left for left, detail in rows]
    key = _key(graph)
    return "\n".join([*lines, "", key] if key else lines)


def _rows(graph: GraphData) -> Iterator[tuple[str, str]]:
    """Lanes and names, which stand on the left, and the details of an operator."""
    lanes: Lanes = []
    for node in (node for node in graph.nodes if node.kind != "actor"):
        if any(lanes):
            yield _signs(lanes), ""
        ends = [lane for lane, edge in enumerate(lanes) if edge is not None and edge.target == node.name]
        if len(ends) > 1:
            yield _fork(lanes, ends, "┴╯"), ""
        own = ends[0] if ends else _free(lanes, 0)
        for lane in ends:
            lanes[lane] = None
        yield f"{_signs(lanes, own, '●' if node.on_driver else '◉')} {node.name}", _details(graph, node)
        starts: list[int] = []
        for edge in (edge for edge in graph.streams if edge.source == node.name):
            starts.append(_free(lanes, starts[-1] + 1) if starts else own)
            lanes[starts[-1]] = edge
        if len(starts) > 1:
            yield _fork(lanes, starts, "┬╮"), ""


def _free(lanes: Lanes, first: int) -> int:
    """The first lane from this one on that no stream runs in."""
    lanes.append(None)
    return next(lane for lane in range(first, len(lanes)) if lanes[lane] is None)


def _signs(lanes: Lanes, own: int = -1, mark: str = "") -> str:
    return "  ".join(mark if lane == own else _sign(edge) for lane, edge in enumerate(lanes)).rstrip()


def _sign(edge: GraphEdge | None) -> str:
    return " " if edge is None else "┊" if edge.kind == "async" else "│"


def _fork(lanes: Lanes, ends: Sequence[int], corners: str) -> str:
    """A line from the first of these lanes to the others, across the lanes between them."""
    cells = [f"  {_sign(edge)}" for edge in lanes]
    cells[ends[0]] = "  ├"
    for lane in range(ends[0] + 1, ends[-1] + 1):
        edge = lanes[next(end for end in ends if end >= lane)]
        dash = "┈" if edge is not None and edge.kind == "async" else "─"
        passing = "┼" if lanes[lane] else dash
        cells[lane] = 2 * dash + (corners[lane == ends[-1]] if lane in ends else passing)
    return "".join(cells)[2:].rstrip()


def _details(graph: GraphData, node: GraphNode) -> str:
    details = [node.where, node.bound]
    details += [
        f"⇢ {edge.target}" for edge in graph.edges if edge.kind == "message" and edge.source == node.name
    ]
    actors = {own.name for own in graph.nodes if own.kind == "actor"}
    details += [
        f"⇠ {edge.source}" for edge in graph.edges if edge.target == node.name and edge.source in actors
    ]
    for edge in graph.edges:
        if edge.kind == "limit" and node.name in (edge.source, edge.target):
            details.append(f"⇄ {edge.target if edge.source == node.name else edge.source}")
    return " · ".join(detail for detail in details if detail)


def _key(graph: GraphData) -> str:
    kinds = {edge.kind for edge in graph.edges}
    signs = {
        "async": "┊ asynchronous",
        "message": "⇢ sends messages to",
        "limit": "⇄ coupled by a rate limiter",
    }
    actors = {node.name for node in graph.nodes if node.kind == "actor"}
    if any(edge.source in actors for edge in graph.edges):
        signs["message"] += ", ⇠ is sent messages by"
    placed = ["◉ runs on actors"] if any(not node.on_driver for node in graph.nodes) else []
    return "   ".join([*placed, *(sign for kind, sign in signs.items() if kind in kinds)])
