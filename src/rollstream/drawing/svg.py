"""The graph of a plan as a picture in the manner of the paper: pink is asynchronous, dotted are messages."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import PurePath
from statistics import fmean
from typing import TypeAlias

from rollstream.drawing.graph import PINK, GraphData, GraphEdge, GraphNode

NAME, DETAIL, LEADING = 13.0, 10.5, 15.0
"""The sizes of the two fonts, and from line to line."""
PAD, CARD, GAP, SPACE, MARGIN = 11.0, 4.0, 38.0, 44.0, 20.0
"""Inside a box, between the cards of a stack, between columns, between rows, around the picture."""
STEP, HEAD = 8.0, 6.0
"""Between lines side by side, and the length of an arrow's head."""
INK, GREY, AMBER, BLUE, PALE, WHITE = "#1f2937", "#667085", "#c2700c", "#3f6fb5", "#eaf2fc", "#ffffff"
FONT = "-apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
LOOKS = {
    "sync": ("synchronous", INK, 'stroke-width="1.5"'),
    "async": ("asynchronous", PINK, 'stroke-width="2"'),
    "references": ("references", INK, 'stroke-width="1.4" stroke-dasharray="5 3"'),
    "message": ("actor messages", GREY, 'stroke-width="1.8" stroke-dasharray="0 4" stroke-linecap="round"'),
    "limit": ("rate limiter", AMBER, 'stroke-width="2.2" stroke-dasharray="7 3"'),
}

Spot: TypeAlias = str | tuple[int, int]
"""Where a node stands; or where a stream, by its index, passes a column."""
Area: TypeAlias = tuple[float, float, float, float]
"""Left, top, right, bottom."""
Path: TypeAlias = list[complex]
"""Points `x + yj`, so that a turn is a product."""
Arrows: TypeAlias = list[tuple[GraphEdge, Path]]


def svg(graph: GraphData) -> str:
    """The graph as a self-contained SVG file: boxes from left to right, and arrows between them."""
    pitch = max(_size(node)[1] for node in graph.nodes) + SPACE
    columns = _columns(graph)
    chains = _chains(graph, columns)
    heights = _heights(columns, chains, pitch)
    _add_actors(graph, columns, heights, pitch)
    boxes = _boxes(graph, columns, heights)
    arrows = _streams(graph, columns, chains, heights, boxes)
    arrows += _routes(graph, boxes, arrows)
    return _page(graph, boxes, arrows)


# Where the boxes stand ---------------------------------------------------------------------------


def _columns(graph: GraphData) -> dict[Spot, int]:
    """The column of each operator: the longest way to it from a source."""
    columns: dict[Spot, int] = {}
    for node in (node for node in graph.nodes if node.kind != "actor"):
        before = [columns[edge.source] for edge in graph.streams if edge.target == node.name]
        columns[node.name] = max(before, default=-1) + 1
    return columns


def _chains(graph: GraphData, columns: dict[Spot, int]) -> list[list[Spot]]:
    """The spots of each stream, with those where it passes a column: it needs room there like a box."""
    chains: list[list[Spot]] = []
    for index, edge in enumerate(graph.streams):
        passed = range(columns[edge.source] + 1, columns[edge.target])
        columns |= {(index, column): column for column in passed}
        chains.append([edge.source, *((index, column) for column in passed), edge.target])
    return chains


def _heights(columns: dict[Spot, int], chains: Sequence[list[Spot]], pitch: float) -> dict[Spot, float]:
    """The height of each spot: by turns in the middle of the spots before it, and of those after it."""
    layers = [[spot for spot in columns if columns[spot] == n] for n in range(max(columns.values()) + 1)]
    heights = {spot: pitch * row for layer in layers for row, spot in enumerate(layer)}
    pairs = [pair for chain in chains for pair in itertools.pairwise(chain)]
    for forward in (True, False, True, False, True):
        for layer in layers if forward else reversed(layers):
            near = {spot: [pair[not forward] for pair in pairs if pair[forward] == spot] for spot in layer}
            wanted = {spot: fmean(heights[other] for other in near[spot] or [spot]) for spot in layer}
            heights |= _spread(wanted, pitch)
    return heights


def _spread(wanted: dict[Spot, float], pitch: float) -> dict[Spot, float]:
    """Heights in the order of the wanted ones and as near to them as can be, but at least a pitch apart."""
    order = sorted(wanted, key=lambda spot: wanted[spot])
    groups: list[list[float]] = []
    for index, spot in enumerate(order):
        group = [wanted[spot] - pitch * index]
        while groups and fmean(groups[-1]) > fmean(group):
            group = groups.pop() + group
        groups.append(group)
    starts = [fmean(group) for group in groups for _ in group]
    return {spot: starts[index] + pitch * index for index, spot in enumerate(order)}


def _add_actors(graph: GraphData, columns: dict[Spot, int], heights: dict[Spot, float], pitch: float) -> None:
    """Actors that only get messages stand in the column of a sender, on its outer side."""
    for node in (node for node in graph.nodes if node.kind == "actor"):
        sender = next(edge.source for edge in graph.edges if edge.target == node.name)
        taken = [height for spot, height in heights.items() if columns[spot] == columns[sender]]
        above = heights[sender] - min(taken) < max(taken) - heights[sender]
        columns[node.name] = columns[sender]
        heights[node.name] = min(taken) - pitch if above else max(taken) + pitch


def _boxes(graph: GraphData, columns: dict[Spot, int], heights: dict[Spot, float]) -> dict[str, Area]:
    boxes, left = {}, 0.0
    for column in range(max(columns.values()) + 1):
        inside = [node for node in graph.nodes if columns[node.name] == column]
        right = left + max(_size(node)[0] for node in inside)
        for node in inside:
            middle, half = heights[node.name], _size(node)[1] / 2
            boxes[node.name] = (left, middle - half, right, middle + half)
        left = right + GAP
    return boxes


def _size(node: GraphNode) -> tuple[float, float]:
    lines = _lines(node)
    width = max(text_width(line, DETAIL if index else NAME) for index, line in enumerate(lines))
    return width + 2 * PAD + _stack(node), LEADING * max(len(lines), 2) + PAD + _stack(node)


def _lines(node: GraphNode) -> list[str]:
    place = "" if node.kind == "actor" else node.where
    return [node.name, *textwrap.wrap(place, 24), *textwrap.wrap(node.bound, 20)]


def _stack(node: GraphNode) -> float:
    """How far the cards behind the first one stand out."""
    return CARD * (min(node.copies, 3) - 1)


# Of the font size, as in DejaVu Sans: the widest of the fonts that a picture is likely to meet.
_WIDTHS = {
    "ijlI'": 0.3,
    " .,:;/\\!|ft": 0.4,
    'r()[]-"': 0.46,
    "DGHNOQU": 0.79,
    "w=<>+#~^&": 0.87,
    "mMW@%": 1.0,
}
_WIDTH = {sign: width for signs, width in _WIDTHS.items() for sign in signs}


def text_width(text: str, size: float) -> float:
    """About how wide a line of text is; rather too wide than too narrow."""
    return size * sum(_WIDTH.get(sign, 0.7 if sign.isupper() or sign > "~" else 0.64) for sign in text)


# Where the arrows run ----------------------------------------------------------------------------


def _streams(
    graph: GraphData,
    columns: dict[Spot, int],
    chains: list[list[Spot]],
    heights: dict[Spot, float],
    boxes: dict[str, Area],
) -> Arrows:
    """The points of each stream: out of a box, through the columns between, into a box."""
    sides = {columns[name]: box[::2] for name, box in boxes.items()}
    outward = sorted(chains, key=lambda chain: heights[chain[1]])
    inward = sorted(chains, key=lambda chain: heights[chain[-2]])
    paths: list[Path] = []
    for chain in chains:
        path = [complex(side, heights[spot]) for spot in chain for side in sides[columns[spot]]][1:-1]
        path[0] += _offset(chain, [other for other in outward if other[0] == chain[0]])
        path[-1] += _offset(chain, [other for other in inward if other[-1] == chain[-1]])
        paths.append(path)
    return list(zip(graph.streams, paths, strict=True))


def _offset(chain: list[Spot], chains: Sequence[list[Spot]]) -> complex:
    """Streams that share a side of a box touch it one below the other."""
    index = next(index for index, other in enumerate(chains) if other is chain)
    return 1.5j * STEP * (index - (len(chains) - 1) / 2)


def _routes(graph: GraphData, boxes: dict[str, Area], streams: Arrows) -> Arrows:
    """Messages and couplings, short ones first: over, under or between the boxes, where it costs least."""
    edges = [edge for edge in graph.edges if not edge.is_stream]
    edges.sort(key=lambda edge: abs(boxes[edge.source][0] - boxes[edge.target][0]))
    obstacles = [(_grown(box, STEP), 50.0) for box in boxes.values()]
    obstacles += [(_grown(area, STEP / 2), 3.0) for _, path in streams for area in _areas(path)]
    top = min(box[1] for box in boxes.values()) - STEP * (len(edges) + 2)
    bottom = max(box[3] for box in boxes.values()) + STEP * (len(edges) + 2)
    channels = [top + STEP * index for index in range(int((bottom - top) / STEP) + 1)]
    routes: Arrows = []
    for edge in edges:
        ports = [_port(boxes, edges, edge, name) for name in (edge.source, edge.target)]
        ways = _ways(boxes[edge.source], boxes[edge.target], ports[0], ports[1], channels)
        best = _cheapest(ways, obstacles)
        obstacles += [(_grown(area, STEP / 2), 6.0) for area in _areas(best)]
        routes.append((edge, best))
    return routes


def _port(boxes: dict[str, Area], edges: Sequence[GraphEdge], edge: GraphEdge, name: str) -> float:
    """Where on a box an arrow begins or ends: the farther its other end, the farther out."""
    here = [other for other in edges if name in (other.source, other.target)]
    here.sort(key=lambda other: -boxes[other.target if other.source == name else other.source][0])
    left, _, right, _ = boxes[name]
    return left + (right - left) * (here.index(edge) + 1) / (len(here) + 1)


def _ways(source: Area, target: Area, start: float, end: float, channels: Sequence[float]) -> Iterator[Path]:
    """Along one channel; along two, changing in the gap beside the target's column; or right around."""

    def out(y: float) -> Path:
        return [complex(start, _side(source, y)), complex(start, y)]

    def back(y: float) -> Path:
        return [complex(end, y), complex(end, _side(target, y))]

    gaps, far_gaps = ((box[0] - GAP / 2, box[2] + GAP / 2) for box in (source, target))
    near, far = ([y for y in channels if abs(y - _side(box, y)) < SPACE] for box in (source, target))
    yield from (out(y) + back(y) for y in channels)
    for y, x, z in itertools.product(near, far_gaps, far):
        yield [*out(y), complex(x, y), complex(x, z), *back(z)]
    beside, far_beside = ((box[1] - 1.5 * STEP, box[3] + 1.5 * STEP) for box in (source, target))
    outside = (*channels[:3], *channels[-3:])
    for a, x, y, z, b in itertools.product(beside, gaps, outside, far_gaps, far_beside):
        yield [*out(a), complex(x, a), complex(x, y), complex(z, y), complex(z, b), *back(b)]


def _side(box: Area, y: float) -> float:
    """The top of a box for what comes from above, else its bottom."""
    return box[1] if y < (box[1] + box[3]) / 2 else box[3]


def _cheapest(ways: Iterator[Path], obstacles: Sequence[tuple[Area, float]]) -> Path:
    best, least = [], math.inf
    for way in ways:
        if (cost := _cost(way, obstacles, least)) < least:
            best, least = way, cost
    return [point for point, _ in itertools.groupby(best)]


def _cost(path: Path, obstacles: Sequence[tuple[Area, float]], limit: float) -> float:
    """Its length, its turns, and how far it runs over obstacles; more than the limit is not counted out."""
    cost = 20.0 * len(path) + sum(abs(b - a) for a, b in itertools.pairwise(path))
    for left, top, right, bottom in _areas(path):
        if cost >= limit:
            break
        for area, weight in obstacles:
            width = min(right, area[2]) - max(left, area[0])
            height = min(bottom, area[3]) - max(top, area[1])
            if width >= 0 and height >= 0:
                cost += weight * max(width, height)
    return cost


def _areas(path: Path) -> Iterator[Area]:
    """The level and the upright parts of a path."""
    for a, b in itertools.pairwise(path):
        if a.real == b.real or a.imag == b.imag:
            yield min(a.real, b.real), min(a.imag, b.imag), max(a.real, b.real), max(a.imag, b.imag)


def _grown(area: Area, by: float) -> Area:
    return area[0] - by, area[1] - by, area[2] + by, area[3] + by


# Drawing -----------------------------------------------------------------------------------------


def _page(graph: GraphData, boxes: dict[str, Area], arrows: Arrows) -> str:
    areas = [*boxes.values(), *(area for _, path in arrows for area in _areas(path))]
    left, top = min(area[0] for area in areas) - MARGIN, min(area[1] for area in areas) - MARGIN
    right, bottom = max(area[2] for area in areas), max(area[3] for area in areas) + MARGIN + STEP
    legend, legend_right = _legend(graph, left + MARGIN, bottom)
    width, height = max(right, legend_right) + MARGIN - left, bottom + MARGIN - top
    size = f'width="{width:.1f}" height="{height:.1f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}',
        f'     viewBox="{left:.1f} {top:.1f} {width:.1f} {height:.1f}" font-family="{FONT}">',
        f"<title>Dataflow of {escape(', '.join(node.name for node in graph.nodes))}</title>",
        f'<rect class="background" x="{left:.1f}" y="{top:.1f}" {size} rx="10" fill="{WHITE}"/>',
        *(_stream(edge, path) if edge.is_stream else _route(edge.kind, path) for edge, path in arrows),
        *(_box(node, boxes[node.name]) for node in graph.nodes),
        *legend,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _box(node: GraphNode, area: Area) -> str:
    (left, top, right, bottom), stack, lines = area, _stack(node), _lines(node)
    middle = complex(left + right - stack, top + stack + bottom - LEADING * (len(lines) - 1)) / 2
    title = f"{node.kind} {PurePath(node.location).name}".strip()
    parts = [f"<title>{escape(title)}</title>", *_cards(node, area, "card")]
    for index, line in enumerate(lines):
        size, colour = (DETAIL, GREY) if index else (NAME, INK)
        parts.append(_text(line, middle + 1j * LEADING * index, size, colour, "middle"))
    return f'<g class="{"node parallel" if stack else "node"}">{"".join(parts)}</g>'


def _cards(node: GraphNode, area: Area, group: str) -> Iterator[str]:
    """One card, or a stack of two or three, from the back to the front."""
    left, top, right, bottom = area[0], area[1] + _stack(node), area[2] - _stack(node), area[3]
    size = f'width="{right - left:.1f}" height="{bottom - top:.1f}"'
    look = f'fill="{WHITE}" stroke="{INK}"' if node.on_driver else f'fill="{PALE}" stroke="{BLUE}"'
    radius = (bottom - top) / (2 if node.kind == "actor" else 8)
    for card in reversed(range(min(node.copies, 3))):
        corner = f'x="{left + CARD * card:.1f}" y="{top - CARD * card:.1f}"'
        yield f'<rect class="{group}" {corner} {size} rx="{radius:.1f}" {look}/>'


def _text(text: str, at: complex, size: float, colour: str, anchor: str) -> str:
    position = f'x="{at.real:.1f}" y="{at.imag + 0.35 * size:.1f}" text-anchor="{anchor}"'
    return f'<text {position} font-size="{size:g}" fill="{colour}">{escape(text)}</text>'


def _stream(edge: GraphEdge, path: Path) -> str:
    """Level where it passes a column, curved from one column to the next; dashed for references."""
    line = f"M{_point(path[0])}"
    for index, (a, b) in enumerate(itertools.pairwise([*path[:-1], path[-1] - HEAD])):
        half = (b - a).real / 2
        line += f"L{_point(b)}" if index % 2 else f"C{_point(a + half)} {_point(b - half)} {_point(b)}"
    look = LOOKS["references"][2] if edge.references else None
    return _arrow(edge.kind, "edge", line, _head(path[-1], 1), look)


def _route(kind: str, path: Path, group: str = "edge") -> str:
    """Straight with rounded corners; a coupling has a head at each end."""
    first, last, both = _way(path[1], path[0]), _way(path[-2], path[-1]), kind == "limit"
    line = f"M{_point(path[0] - HEAD * first * both)}"
    for before, corner, after in zip(path, path[1:], path[2:], strict=False):
        radius = min(STEP, abs(before - corner) / 2, abs(after - corner) / 2)
        enter, leave = corner + radius * _way(corner, before), corner + radius * _way(corner, after)
        line += f"L{_point(enter)}Q{_point(corner)} {_point(leave)}"
    line += f"L{_point(path[-1] - HEAD * last)}"
    return _arrow(kind, group, line, _head(path[-1], last) + (_head(path[0], first) if both else ""))


def _way(a: complex, b: complex) -> complex:
    """The direction from one point to another."""
    return (b - a) / abs(b - a)


def _head(tip: complex, way: complex) -> str:
    back, side = tip - 1.4 * HEAD * way, 0.6j * HEAD * way
    return f"M{_point(tip)}L{_point(back + side)}L{_point(back - side)}Z"


def _point(point: complex) -> str:
    return f"{point.real:.1f} {point.imag:.1f}"


def _arrow(kind: str, group: str, line: str, heads: str, look: str | None = None) -> str:
    _, colour, usual = LOOKS[kind]
    shaft = f'<path class="shaft" d="{line}" fill="none" stroke="{colour}" {look or usual}/>'
    return f'<g class="{group} {kind}">{shaft}<path d="{heads}" fill="{colour}"/></g>'


def _legend(graph: GraphData, x: float, y: float) -> tuple[list[str], float]:
    """A sample and a word for each kind of arrow that occurs, and for stacks; and where this ends."""
    occurring = {edge.kind for edge in graph.edges} | {
        "references" for edge in graph.edges if edge.references
    }
    kinds = [kind for kind in LOOKS if kind in occurring]
    stacks = [node for node in graph.nodes if node.copies > 1]
    parts: list[str] = []
    for kind in [*kinds, *["parallel"] * bool(stacks)]:
        if kind == "parallel":
            word, sample = kind, _cards(stacks[0], (x, y - 10, x + 32, y + 8), "key")
        else:
            word, sample = LOOKS[kind][0], [_route(kind, [complex(x, y), complex(x + 32, y)], "key")]
        parts += [*sample, _text(word, complex(x + 39, y), DETAIL, GREY, "start")]
        x += 39 + text_width(word, DETAIL) + MARGIN
    return parts, x - MARGIN
