"""The graph of a plan as a picture in the manner of the paper: pink is asynchronous, dotted are messages."""

from __future__ import annotations

import itertools
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import PurePath
from statistics import fmean
from typing import TypeAlias

from rollstream.flow.drawing import FLOW, PINK, where
from rollstream.flow.graph import Graph, GraphEdge, GraphNode
from rollstream.flow.statistics import DRIVER

NAME, DETAIL, LEADING = 13.0, 10.5, 15.0
"""Sizes of the two fonts, and from line to line."""
PAD, CARD, GAP, SPACE, MARGIN, STEP = 11.0, 4.0, 42.0, 44.0, 20.0, 8.0
"""Inside a box, between stacked cards, between columns, between rows, around it all, between parallel lines."""
INK, GREY, AMBER, BLUE, PALE = "#1f2937", "#667085", "#c2700c", "#3f6fb5", "#eaf2fc"
LOOKS = {
    "sync": ("synchronous", INK, 'stroke-width="1.5"'),
    "async": ("asynchronous", PINK, 'stroke-width="2"'),
    "message": ("actor messages", GREY, 'stroke-width="1.8" stroke-dasharray="0.1 4.2" stroke-linecap="round"'),
    "limit": ("rate limiter", AMBER, 'stroke-width="2.2" stroke-dasharray="7 3"'),
}

Path: TypeAlias = list[tuple[float, float]]
Area: TypeAlias = tuple[float, float, float, float]
"""Left, top, right, bottom."""
Spot: TypeAlias = str | tuple[int, int]
"""Where a node stands; or where a stream, by its index, passes a column."""
Spots: TypeAlias = dict[Spot, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A node with its place in the picture."""

    node: GraphNode
    lines: tuple[str, ...]
    area: Area

    @property
    def stack(self) -> float:
        """How far the cards behind the first one stand out."""
        return CARD * (min(self.node.copies, 3) - 1)

    def edge(self, y: float) -> float:
        """The top for what comes from above, else the bottom."""
        return self.area[1] if y < (self.area[1] + self.area[3]) / 2 else self.area[3]


def svg(graph: Graph) -> str:
    """The graph as a picture that needs nothing else: boxes from left to right, and arrows between them.

    Args:
        graph: The graph to draw.

    Returns:
        The text of an SVG file.
    """
    columns = _columns(graph)
    chains = _chains(graph, columns)
    rows = _rows(columns, chains)
    _add_actors(graph, columns, rows)
    boxes = _boxes(graph, columns, rows)
    streams = _streams(graph, columns, chains, rows, boxes)
    routes = _routes(graph, boxes, streams)
    return _page(graph, boxes, streams, routes)


# Where the boxes stand ---------------------------------------------------------------------------


def _flow(graph: Graph) -> list[GraphEdge]:
    return [edge for edge in graph.edges if edge.kind in FLOW]


def _columns(graph: Graph) -> dict[Spot, int]:
    """The column of each operator: the longest way to it from a source."""
    columns: dict[Spot, int] = {}
    for node in (node for node in graph.nodes if node.kind != "actor"):
        before = [columns[edge.source] for edge in _flow(graph) if edge.target == node.name]
        columns[node.name] = max(before, default=-1) + 1
    return columns


def _chains(graph: Graph, columns: dict[Spot, int]) -> list[list[Spot]]:
    """The spots of each stream, those included where it passes a column; they need room like nodes."""
    chains: list[list[Spot]] = []
    for index, edge in enumerate(_flow(graph)):
        passed = {(index, column): column for column in range(columns[edge.source] + 1, columns[edge.target])}
        columns.update(passed)
        chains.append([edge.source, *passed, edge.target])
    return chains


def _rows(columns: dict[Spot, int], chains: Sequence[Sequence[Spot]]) -> Spots:
    """The row of each spot: as near to the rows of the spots before it, then after it, as there is room."""
    neighbours: dict[int, dict[Spot, list[Spot]]] = {-1: defaultdict(list), 1: defaultdict(list)}
    for before, after in (pair for chain in chains for pair in itertools.pairwise(chain)):
        neighbours[1][after].append(before)
        neighbours[-1][before].append(after)
    layers = [[spot for spot in columns if columns[spot] == index] for index in range(_count(columns))]
    rows: Spots = {spot: row for layer in layers for row, spot in enumerate(layer)}
    for way in (1, -1, 1, -1, 1):
        for layer in layers[::way]:
            rows |= _spread({spot: fmean(rows[near] for near in neighbours[way][spot] or [spot]) for spot in layer})
    return rows


def _count(columns: dict[Spot, int]) -> int:
    return max(columns.values(), default=-1) + 1


def _spread(wanted: Spots) -> Spots:
    """Rows at least one apart, in the order of the wanted ones and as near to them as can be."""
    order = sorted(wanted, key=lambda spot: wanted[spot])
    groups: list[list[float]] = []
    for index, spot in enumerate(order):
        group = [wanted[spot] - index]
        while groups and fmean(groups[-1]) > fmean(group):
            group = groups.pop() + group
        groups.append(group)
    starts = [fmean(group) for group in groups for _ in group]
    return {spot: starts[index] + index for index, spot in enumerate(order)}


def _add_actors(graph: Graph, columns: dict[Spot, int], rows: Spots) -> None:
    """Actors that only get messages stand in the column of a sender, on its outer side."""
    for node in (node for node in graph.nodes if node.kind == "actor"):
        sender = next(edge.source for edge in graph.edges if edge.target == node.name)
        taken = [rows[spot] for spot in rows if columns[spot] == columns[sender]]
        above = rows[sender] - min(taken) < max(taken) - rows[sender]
        columns[node.name] = columns[sender]
        rows[node.name] = min(taken) - 1 if above else max(taken) + 1


def _boxes(graph: Graph, columns: dict[Spot, int], rows: Spots) -> dict[str, Box]:
    """The boxes; from here on rows are heights."""
    lines = {node.name: _lines(node) for node in graph.nodes}
    sizes = {node.name: _size(node, lines[node.name]) for node in graph.nodes}
    pitch = max((height for _, height in sizes.values()), default=0.0) + SPACE
    rows.update({spot: row * pitch for spot, row in rows.items()})
    boxes: dict[str, Box] = {}
    left = 0.0
    for column in range(_count(columns)):
        inside = [node for node in graph.nodes if columns[node.name] == column]
        right = left + max(sizes[node.name][0] for node in inside)
        for node in inside:
            middle, half = rows[node.name], sizes[node.name][1] / 2
            boxes[node.name] = Box(node, lines[node.name], (left, middle - half, right, middle + half))
        left = right + GAP
    return boxes


def _lines(node: GraphNode) -> tuple[str, ...]:
    place = "" if node.kind == "actor" else where(node)
    return (node.name, *textwrap.wrap(place, 24), *textwrap.wrap(node.bound, 20))


def _size(node: GraphNode, lines: Sequence[str]) -> tuple[float, float]:
    stack = CARD * (min(node.copies, 3) - 1)
    width = max(text_width(line, DETAIL if index else NAME) for index, line in enumerate(lines))
    return width + 2 * PAD + stack, LEADING * max(len(lines), 2) + PAD + stack


# In hundredths of the font size, of DejaVu Sans: the widest of the fonts that a picture is likely to meet.
_WIDTHS = {"ijlI'|": 30, " .,:;/\\!ft": 39, 'r()[]-"': 43, "_cszkvxyJ*": 57, "DGHNUOQ": 79, "w=<>+×#~@%&": 87, "mMW": 98}
_WIDTH = {sign: width for signs, width in _WIDTHS.items() for sign in signs}


def text_width(text: str, size: float) -> float:
    """About how wide a line of text is; rather too wide than too narrow."""
    return sum(_WIDTH.get(sign, 69 if sign.isupper() else 64) for sign in text) * size / 100


# Where the arrows run ----------------------------------------------------------------------------


def _streams(
    graph: Graph, columns: dict[Spot, int], chains: list[list[Spot]], rows: Spots, boxes: dict[str, Box]
) -> list[Path]:
    """The points of each stream: out of a box, through the columns between, into a box."""
    sides = {columns[name]: (box.area[0], box.area[2]) for name, box in boxes.items()}
    paths: list[Path] = []
    for index, chain in enumerate(chains):
        outputs = sorted((rows[other[1]], i) for i, other in enumerate(chains) if other[0] == chain[0])
        inputs = sorted((rows[other[-2]], i) for i, other in enumerate(chains) if other[-1] == chain[-1])
        start, end = outputs.index((rows[chain[1]], index)), inputs.index((rows[chain[-2]], index))
        path = [(sides[columns[chain[0]]][1], rows[chain[0]] + (start - (len(outputs) - 1) / 2) * STEP * 1.5)]
        for spot in chain[1:-1]:
            path += [(side, rows[spot]) for side in sides[columns[spot]]]
        path.append((sides[columns[chain[-1]]][0], rows[chain[-1]] + (end - (len(inputs) - 1) / 2) * STEP * 1.5))
        paths.append(path)
    return paths


def _routes(graph: Graph, boxes: dict[str, Box], streams: Sequence[Path]) -> list[tuple[GraphEdge, Path]]:
    """Messages and couplings, the short ones first: over, under and between the boxes, where it costs least."""
    edges = [edge for edge in graph.edges if edge.kind not in FLOW]
    edges.sort(key=lambda edge: abs(boxes[edge.source].area[0] - boxes[edge.target].area[0]))
    obstacles = [(_grown(box.area, STEP), 50.0) for box in boxes.values()]
    obstacles += [(area, 3.0) for path in streams for area in _areas(path)]
    top = min((box.area[1] for box in boxes.values()), default=0.0) - STEP * len(edges)
    bottom = max((box.area[3] for box in boxes.values()), default=0.0) + STEP * len(edges)
    channels = [top + STEP * index for index in range(-2, int((bottom - top) / STEP) + 3)]
    routes: list[tuple[GraphEdge, Path]] = []
    for edge in edges:
        ports = [_port(boxes, edges, edge, name) for name in (edge.source, edge.target)]
        ways = _ways(boxes[edge.source], boxes[edge.target], ports[0], ports[1], channels)
        best = min(ways, key=lambda way: _cost(way, obstacles))
        obstacles += [(area, 6.0) for area in _areas(best)]
        routes.append((edge, best))
    return routes


def _port(boxes: dict[str, Box], edges: Sequence[GraphEdge], edge: GraphEdge, name: str) -> float:
    """Where on a box an arrow begins or ends: the farther the other end, the farther out."""
    here = [other for other in edges if name in (other.source, other.target)]
    here.sort(key=lambda other: -boxes[other.target if other.source == name else other.source].area[0])
    left, _, right, _ = boxes[name].area
    return left + (right - left) * (here.index(edge) + 1) / (len(here) + 1)


def _ways(start: Box, end: Box, left: float, right: float, channels: Sequence[float]) -> Iterator[Path]:
    """Along one channel; or along two, and in the gap beside the target's column from one to the other."""
    for y in channels:
        yield [(left, start.edge(y)), (left, y), (right, y), (right, end.edge(y))]
    first = [y for y in channels if abs(y - start.edge(y)) < SPACE]
    second = [y for y in channels if abs(y - end.edge(y)) < SPACE]
    for y, z, gap in itertools.product(first, second, (end.area[0] - GAP / 2, end.area[2] + GAP / 2)):
        yield [(left, start.edge(y)), (left, y), (gap, y), (gap, z), (right, z), (right, end.edge(z))]


def _cost(path: Path, obstacles: Sequence[tuple[Area, float]]) -> float:
    cost = 20.0 * len(path)
    for (a, b), (c, d) in itertools.pairwise(path):
        left, top, right, bottom = min(a, c), min(b, d), max(a, c), max(b, d)
        cost += right - left + bottom - top
        for area, weight in obstacles:
            width, height = min(right, area[2]) - max(left, area[0]), min(bottom, area[3]) - max(top, area[1])
            if width >= 0 and height >= 0:
                cost += weight * max(width, height)
    return cost


def _areas(path: Path) -> Iterator[Area]:
    """What the level and upright parts of a path take up."""
    for (a, b), (c, d) in itertools.pairwise(path):
        if a == c or b == d:
            yield _grown((min(a, c), min(b, d), max(a, c), max(b, d)), STEP / 2 + 1)


def _grown(area: Area, by: float) -> Area:
    return area[0] - by, area[1] - by, area[2] + by, area[3] + by


# Drawing -----------------------------------------------------------------------------------------


def _page(graph: Graph, boxes: dict[str, Box], streams: Sequence[Path], routes: list[tuple[GraphEdge, Path]]) -> str:
    points = [point for path in [*streams, *(path for _, path in routes)] for point in path]
    points += [point for box in boxes.values() for point in (box.area[:2], box.area[2:])] or [(0.0, 0.0)]
    left, top = min(x for x, _ in points), min(y for _, y in points)
    right, bottom = max(x for x, _ in points), max(y for _, y in points)
    legend, width = _legend(graph, left, bottom + MARGIN + NAME)
    left, top, bottom = left - MARGIN, top - MARGIN, bottom + (2.2 * MARGIN + NAME if legend else MARGIN)
    width = max(right - left + MARGIN, width + 2 * MARGIN)
    title = "Dataflow of " + ", ".join(node.name for node in graph.nodes)
    body = [
        *(_stream(edge.kind, path) for edge, path in zip(_flow(graph), streams, strict=True)),
        *(_route(edge.kind, path) for edge, path in routes),
        *(_box(box) for box in boxes.values()),
        *legend,
    ]
    frame = f'x="{left + 0.5:.1f}" y="{top + 0.5:.1f}" width="{width - 1:.1f}" height="{bottom - top - 1:.1f}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{bottom - top:.0f}" '
        f'viewBox="{left:.1f} {top:.1f} {width:.1f} {bottom - top:.1f}" text-anchor="middle" fill="{INK}" '
        f"font-family=\"-apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif\">",
        f"<title>{escape(title)}</title>",
        f'<rect class="background" {frame} rx="10" fill="#ffffff" stroke="#e4e7ec"/>',
        *body,
        "</svg>\n",
    ])  # fmt: skip


def _box(box: Box) -> str:
    left, top, right, bottom = box.area
    actors = box.node.place != DRIVER
    look = f'fill="{PALE if actors else "#ffffff"}" stroke="{BLUE if actors else INK}" stroke-width="1.2"'
    size = f'width="{right - left - box.stack:.1f}" height="{bottom - top - box.stack:.1f}"'
    offsets = [CARD * card for card in reversed(range(min(box.node.copies, 3)))]
    radius = 14 if box.node.kind == "actor" else 5
    cards = [
        f'<rect class="card" x="{left + offset:.1f}" y="{top + box.stack - offset:.1f}" {size} rx="{radius}" {look}/>'
        for offset in offsets
    ]
    x = (left + right - box.stack) / 2
    y = (top + box.stack + bottom) / 2 - LEADING * (len(box.lines) - 1) / 2 + 0.35 * NAME
    texts = [
        f'<text x="{x:.1f}" y="{y + LEADING * index:.1f}" font-size="{DETAIL if index else NAME:g}" '
        f'fill="{GREY if index else INK}">{escape(line)}</text>'
        for index, line in enumerate(box.lines)
    ]
    added = f", {PurePath(box.node.location).name}" if box.node.location else ""
    title = f"<title>{escape(box.node.kind + added)}</title>"
    return f'<g class="node{" parallel" if box.stack else ""}">{title}{"".join(cards + texts)}</g>'


def _stream(kind: str, path: Path) -> str:
    """Level within columns, curved between them."""
    tip = path[-1]
    path = [*path[:-1], (tip[0] - 6, tip[1])]
    line = f"M{path[0][0]:.1f} {path[0][1]:.1f}"
    for index, ((a, b), (c, d)) in enumerate(itertools.pairwise(path)):
        bend = f"C{(a + c) / 2:.1f} {b:.1f} {(a + c) / 2:.1f} {d:.1f}" if index % 2 == 0 else "L"
        line += f"{bend} {c:.1f} {d:.1f}"
    return _arrow(kind, line, [_head(tip, (1, 0))])


def _route(kind: str, path: Path) -> str:
    """Straight, with rounded corners; a coupling has a head at each end."""
    path = [point for point, following in itertools.pairwise([*path, (None, None)]) if point != following]
    down, up = _way(path[-2], path[-1]), _way(path[1], path[0])
    heads = [_head(path[-1], down)] + ([_head(path[0], up)] if kind == "limit" else [])
    path[-1] = _moved(path[-1], down, -6)
    path[0] = _moved(path[0], up, -6 if kind == "limit" else 0)
    line = f"M{path[0][0]:.1f} {path[0][1]:.1f}"
    for before, corner, after in zip(path, path[1:], path[2:], strict=False):
        radius = min(7.0, *(abs(corner[0] - p[0]) / 2 + abs(corner[1] - p[1]) / 2 for p in (before, after)))
        enter, leave = _moved(corner, _way(corner, before), radius), _moved(corner, _way(corner, after), radius)
        line += f"L{enter[0]:.1f} {enter[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {leave[0]:.1f} {leave[1]:.1f}"
    return _arrow(kind, f"{line}L{path[-1][0]:.1f} {path[-1][1]:.1f}", heads)
