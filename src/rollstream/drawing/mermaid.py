"""A graph as a Mermaid flowchart."""

from __future__ import annotations

from rollstream.drawing.graph import PINK, GraphData, GraphEdge, GraphNode

_ARROWS = {"sync": "-->", "async": "-->", "message": "-.->", "limit": '<==>|"rate limiter"|'}


def mermaid(graph: GraphData) -> str:
    """The graph as a Mermaid flowchart: a frame around what runs on actors, pink what is asynchronous."""
    ids = {node.name: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = ["flowchart LR"]
    for index, place in enumerate(dict.fromkeys(_frame(node) for node in graph.nodes)):
        inside = [f"{ids[node.name]}{_label(node)}" for node in graph.nodes if _frame(node) == place]
        if place:
            inside = [f'subgraph p{index}["{_escape(place)}"]', *(f"    {line}" for line in inside), "end"]
        lines += inside
    lines += [f"{ids[edge.source]} {_arrow(edge)} {ids[edge.target]}" for edge in graph.edges]
    pink = [str(index) for index, edge in enumerate(graph.edges) if edge.kind == "async"]
    lines += [f"linkStyle {','.join(pink)} stroke:{PINK},stroke-width:2px"] if pink else []
    return "\n    ".join(lines) + "\n"


def _arrow(edge: GraphEdge) -> str:
    return f"{_ARROWS[edge.kind]}|ref|" if edge.references else _ARROWS[edge.kind]


def _frame(node: GraphNode) -> str:
    """What is written on the frame a node stands in; empty for none."""
    return "" if node.kind == "actor" else node.where


def _label(node: GraphNode) -> str:
    """Mermaid's shapes: a rectangle, one with doubled sides for several copies, a rounded one for actors."""
    left, right = ("([", "])") if node.kind == "actor" else ("[[", "]]") if node.copies > 1 else ("[", "]")
    label = "<br/>".join(_escape(line) for line in (node.name, node.bound) if line)
    return f'{left}"{label}"{right}'


def _escape(label: str) -> str:
    """Mermaid's own entities; a star or a backtick would begin its markup."""
    return "".join(f"#{ord(sign)};" if sign in '#"<>&`*' else sign for sign in label)
