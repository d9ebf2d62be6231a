"""Graphs drawn as text, as Mermaid and as pictures."""

import functools
import itertools
import random
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

import pytest

import rollstream as rs
from rollstream import flow
from rollstream.drawing.svg import text_width
from rollstream.flow import Graph, GraphEdge, GraphNode

Area = tuple[float, float, float, float]
SVG = "{http://www.w3.org/2000/svg}"
TIMES = "\N{MULTIPLICATION SIGN}"
AWKWARD = 'a <b> & "c" #1; `d` *e*'


class Worker:
    def sample(self) -> int:
        return 0


class Replay(Worker):
    pass


class Learner:
    def train(self, batch: Any) -> Any:
        return batch


class Operator:
    def __init__(self, *actors: Any):
        self.actors = actors

    def __call__(self, item: Any) -> Any:
        return item


class ComputeGradients(Operator):
    pass


class ApplyGradients(Operator):
    pass


class StoreToBuffer(Operator):
    pass


class UpdateWeights(Operator):
    pass


class UpdatePriorities(Operator):
    pass


def a3c(engine: rs.Engine) -> flow.Iter[Any]:
    workers = engine.spawn(Worker, count=4)
    gradients = flow.from_actors(workers, "sample").for_each(ComputeGradients()).gather_async()
    return gradients.for_each(ApplyGradients(workers)).for_each(len, name="Report")


def ape_x(engine: rs.Engine) -> flow.Iter[Any]:
    workers, replay = engine.spawn(Worker, count=8), engine.spawn(Replay, count=2)
    [learner] = engine.spawn(Learner)
    store = flow.from_actors(workers, "sample").gather_async(num_async=2)
    learn = flow.from_actors(replay, "sample").gather_async(num_async=4)
    store, learn = flow.limit_ratio(store, learn, 8, min_size=10)
    store = store.for_each(StoreToBuffer(replay)).for_each(UpdateWeights(workers))
    learn = learn.via(learner, "train", in_flight=2).for_each(UpdatePriorities(replay))
    return flow.union_async([store, learn], output=[1]).for_each(len, name="Report")


def twin_trainer(engine: rs.Engine) -> flow.Iter[Any]:
    workers, replay = engine.spawn(Worker, count=4), engine.spawn(Replay)
    left, right = flow.from_actors(workers, "sample").gather_async().split(2, buffer=4)
    left = left.batch(16).for_each(UpdateWeights(workers), name="PPO")
    right = right.for_each(StoreToBuffer(replay)).prefetch(2).for_each(UpdateWeights(workers), name="DQN")
    return flow.union_async([left, right])


def tangle(engine: rs.Engine) -> flow.Iter[Any]:
    """Bare branches, streams past several columns, messages every way, an actor outside the flow."""
    workers, others = engine.spawn(Worker, count=3), engine.spawn(Replay, count=2)
    [learner], [logger] = engine.spawn(Learner), engine.spawn(Learner, name="Logger")
    a, b, c = flow.from_actors(workers, "sample").for_each(ComputeGradients()).gather_sync().split(3)
    d, e = flow.from_actors(others, "sample").gather_async().split(2)
    third = flow.from_actors(engine.spawn(Worker, name="Third"), "sample", name="third").gather_sync()
    inner = flow.union_async([a, c, e.for_each(UpdateWeights(workers, logger))])
    inner = flow.union_async([inner, b.via(learner, "train", in_flight=3)]).batch(2)
    third = third.for_each(StoreToBuffer(workers, learner, logger))
    return flow.union_async([d, inner.for_each(UpdatePriorities(others)), third])


def central(engine: rs.Engine) -> flow.Iter[Any]:
    """Workers that ask another actor for every item, which answers them."""
    [inference], workers = engine.spawn(Learner, name="inference"), engine.spawn(Worker, count=4)
    items = flow.from_actors(workers, "sample", receivers=[inference]).gather_async(num_async=2)
    return items.batch(4).for_each(UpdateWeights(inference)).for_each(len, name="Report")


def one_node(_: rs.Engine) -> flow.Iter[Any]:
    return flow.from_items([1, 2, 3])


def drawn(plan: Callable[[rs.Engine], flow.Iter[Any]]) -> Graph:
    with rs.engine("inline") as engine:
        return flow.graph(plan(engine))


def awkward() -> Graph:
    nodes = (
        GraphNode(AWKWARD, "source", "W[0..1]", 2, "", "plan.py:1"),
        GraphNode("end", "union", "driver", 1, "weights=[1, 2]", "plan.py:2"),
        GraphNode("W, <V>", "actor", "W, <V>", 2, "", ""),
    )
    return Graph(nodes, (GraphEdge(AWKWARD, "end", "async"), GraphEdge("end", "W, <V>", "message")))


def random_graph(seed: int) -> Graph:
    """Operators that each take one to three earlier ones, and messages between any two of them."""
    choose = random.Random(seed)
    names = [f"operator {index}" for index in range(choose.randrange(2, 14))]
    nodes = [GraphNode(name, "for_each", "A[0..3]", choose.choice([1, 1, 2, 4]), "", "") for name in names]
    edges: list[GraphEdge] = []
    for index, name in enumerate(names):
        before = choose.choices(names[:index], k=choose.randrange(4)) if index else []
        edges += [GraphEdge(other, name, choose.choice(["sync", "async"])) for other in before]
    pairs = list(itertools.permutations(names, 2))
    edges += [GraphEdge(*pair, "message") for pair in choose.sample(pairs, k=min(3, len(pairs)))]
    return Graph(tuple(nodes), tuple(edges))


PLANS = [a3c, ape_x, twin_trainer, tangle, central, one_node]
GRAPHS = [pytest.param(drawn(plan), id=plan.__name__) for plan in PLANS]
GRAPHS.append(pytest.param(awkward(), id="awkward"))
every_graph = pytest.mark.parametrize("graph", GRAPHS)
many_graphs = pytest.mark.parametrize(
    "graph", [*GRAPHS, *(pytest.param(random_graph(seed), id=f"random-{seed}") for seed in range(25))]
)


# Text --------------------------------------------------------------------------------------------


def test_a_straight_plan_as_text() -> None:
    expected = f"""
        ◉ Worker.sample      on Worker[0..3] {TIMES}4
        │
        ◉ ComputeGradients   on Worker[0..3] {TIMES}4
        ┊
        ● gather_async       num_async=1
        │
        ● ApplyGradients     ⇢ Worker.sample
        │
        ● Report

        ◉ runs on actors   ┊ asynchronous   ⇢ sends messages to"""
    assert drawn(a3c).text() == textwrap.dedent(expected).strip()


def test_a_split_and_a_union_as_text() -> None:
    expected = f"""
        ◉ Worker.sample      on Worker[0..3] {TIMES}4
        ┊
        ● gather_async       num_async=1
        │
        ● split              buffer=4
        ├──╮
        │  │
        ●  │ batch           batch of 16
        │  │
        ●  │ PPO             ⇢ Worker.sample
        ┊  │
        ┊  ● StoreToBuffer   ⇢ Replay
        ┊  ┊
        ┊  ● prefetch        up to 2 ahead
        ┊  │
        ┊  ● DQN             ⇢ Worker.sample
        ┊  ┊
        ├┈┈╯
        ● union_async

        ◉ runs on actors   ┊ asynchronous   ⇢ sends messages to"""
    assert drawn(twin_trainer).text() == textwrap.dedent(expected).strip()


def test_a_limiter_and_messages_as_text() -> None:
    lines = drawn(ape_x).text().splitlines()
    details = {line.split("● ")[1].split()[0]: line for line in lines if "● " in line}
    assert details["limit_ratio.inserts"].endswith(
        "8 samples per insert, at least 10 · ⇄ limit_ratio.samples"
    )
    assert details["limit_ratio.samples"].endswith("⇄ limit_ratio.inserts")
    assert details["StoreToBuffer"].endswith("⇢ Replay.sample")
    assert lines[lines.index("● union_async              output=[1]") - 1] == "├┈┈╯"


def test_a_lane_is_crossed_not_cut() -> None:
    nodes = tuple(GraphNode(name, "for_each", "driver", 1, "", "") for name in "abcde")
    pairs = [("a", "d"), ("b", "e"), ("c", "d"), ("d", "e")]
    rows = Graph(nodes, tuple(GraphEdge(*pair, "sync") for pair in pairs)).text().splitlines()
    assert rows[rows.index("●  │ d") - 1] == "├──┼──╯"


@every_graph
def test_text_has_every_operator_and_fits_a_terminal(graph: Graph) -> None:
    text = graph.text()
    assert all(node.name in text and node.bound in text for node in graph.nodes)
    assert max(len(line) for line in text.splitlines()) <= 100
    body = text.partition("\n\n")[0]
    assert body.count("●") + body.count("◉") == sum(node.kind != "actor" for node in graph.nodes)
    assert "\x1b" not in text
    assert str(graph) == text


@many_graphs
def test_text_draws_each_stream(graph: Graph) -> None:
    """Forks and joins have one corner for each stream beyond the first of an operator."""
    streams = [edge for edge in graph.edges if edge.kind in ("sync", "async")]
    more = sum(count - 1 for count in Counter(edge.source for edge in streams).values())
    fewer = sum(count - 1 for count in Counter(edge.target for edge in streams).values())
    text = graph.text()
    assert sum(text.count(sign) for sign in "┬╮") == more
    assert sum(text.count(sign) for sign in "┴╯") == fewer


# Mermaid -----------------------------------------------------------------------------------------


@many_graphs
def test_mermaid_has_every_edge_once_between_declared_nodes(graph: Graph) -> None:
    lines = [line.strip() for line in graph.mermaid().splitlines()]
    assert lines[0] == "flowchart LR"
    declared = [match[1] for line in lines if (match := re.match(r"(n\d+)[\[(]+\".*\"[\])]+$", line))]
    assert sorted(declared) == sorted(f"n{index}" for index in range(len(graph.nodes)))
    names = {f"n{index}": node.name for index, node in enumerate(graph.nodes)}
    arrows = {"sync": "-->", "async": "-->", "message": "-.->", "limit": '<==>|"rate limiter"|'}
    found = [match.groups() for line in lines if (match := re.match(r"(n\d+) (.*) (n\d+)$", line))]
    expected = [(edge.source, arrows[edge.kind], edge.target) for edge in graph.edges]
    assert [(names[source], arrow, names[target]) for source, arrow, target in found] == expected


@every_graph
def test_mermaid_marks_what_is_asynchronous(graph: Graph) -> None:
    found = re.findall(r"linkStyle ([\d,]+) stroke:#\w+", graph.mermaid())
    indices = [str(index) for index, edge in enumerate(graph.edges) if edge.kind == "async"]
    assert found == ([",".join(indices)] if indices else [])


def test_mermaid_frames_what_runs_on_the_same_actors() -> None:
    source = drawn(a3c).mermaid()
    frame = [
        f'subgraph p0["on Worker[0..3] {TIMES}4"]',
        'n0[["Worker.sample"]]',
        'n1[["ComputeGradients"]]',
        "end",
    ]
    assert [line.strip() for line in source.splitlines()][1:5] == frame
    assert source.count("subgraph") == 1


def test_mermaid_escapes_labels() -> None:
    lines = awkward().mermaid().splitlines()
    assert lines[2].strip() == 'n0[["a #60;b#62; #38; #34;c#34; #35;1; #96;d#96; #42;e#42;"]]'
    assert '    n2(["W, #60;V#62;"])' in lines


# Pictures ----------------------------------------------------------------------------------------


@functools.cache
def picture(graph: Graph) -> ElementTree.Element:
    return ElementTree.fromstring(graph.svg())


def groups(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [group for group in root.iter(f"{SVG}g") if kind in group.attrib["class"].split()]


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name])


def card_area(card: ElementTree.Element) -> Area:
    left, top = number(card, "x"), number(card, "y")
    return left, top, left + number(card, "width"), top + number(card, "height")


def cards(node: ElementTree.Element) -> list[Area]:
    return [card_area(card) for card in node.iter(f"{SVG}rect") if card.attrib["class"] == "card"]


def box(node: ElementTree.Element) -> Area:
    """All of a node's cards."""
    lefts, tops, rights, bottoms = zip(*cards(node), strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


def boxes_of(graph: Graph) -> dict[str, Area]:
    found = [box(node) for node in groups(picture(graph), "node")]
    return dict(zip((node.name for node in graph.nodes), found, strict=True))


def points_along(shaft: str) -> Iterator[complex]:
    """Points close to each other on a path of straight lines and curves."""
    here = 0j
    for command, arguments in re.findall(r"([MLCQ])([^MLCQ]*)", shaft):
        values = [float(value) for value in arguments.split()]
        controls = [here, *(complex(*pair) for pair in zip(values[::2], values[1::2], strict=True))]
        for step in range(101 if command != "M" else 0):
            curve = controls
            while len(curve) > 1:
                curve = [a + (b - a) * step / 100 for a, b in itertools.pairwise(curve)]
            yield curve[0]
        here = controls[-1]


@many_graphs
def test_a_picture_has_one_box_a_node_and_a_stack_for_a_parallel_one(graph: Graph) -> None:
    found = groups(picture(graph), "node")
    names = [next(node.iter(f"{SVG}text")).text for node in found]
    assert names == [node.name for node in graph.nodes]
    assert [len(cards(node)) for node in found] == [min(node.copies, 3) for node in graph.nodes]


@many_graphs
def test_boxes_do_not_touch_and_lie_inside_the_picture(graph: Graph) -> None:
    root = picture(graph)
    boxes = [box(node) for node in groups(root, "node")]
    for one, other in itertools.combinations(boxes, 2):
        apart = one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
        assert apart
    left, top, width, height = (float(value) for value in root.attrib["viewBox"].split())
    assert all(left < x and top < y and x2 < left + width and y2 < top + height for x, y, x2, y2 in boxes)


@every_graph
def test_text_fits_its_box(graph: Graph) -> None:
    for node in groups(picture(graph), "node"):
        left, top, right, bottom = cards(node)[-1]
        for line in node.iter(f"{SVG}text"):
            half = text_width(line.text or "", number(line, "font-size")) / 2
            assert left <= number(line, "x") - half
            assert number(line, "x") + half <= right
            assert top <= number(line, "y") - number(line, "font-size") / 2
            assert number(line, "y") <= bottom


@many_graphs
def test_arrows_run_from_box_to_box_and_through_none(graph: Graph) -> None:
    root = picture(graph)
    boxes = boxes_of(graph)
    left, top, width, height = (float(value) for value in root.attrib["viewBox"].split())
    arrows = groups(root, "edge")
    assert Counter(arrow.attrib["class"] for arrow in arrows) == Counter(
        f"edge {edge.kind}" for edge in graph.edges
    )
    for arrow in arrows:
        for point in points_along(arrow[0].attrib["d"]):
            assert left < point.real < left + width
            assert top < point.imag < top + height
            assert not any(inside(point, area) for area in boxes.values())


def inside(point: complex, area: Area) -> bool:
    """Within an area and not just on its border, which numbers with one digit miss by a little."""
    left, top, right, bottom = area
    return left + 0.5 < point.real < right - 0.5 and top + 0.5 < point.imag < bottom - 0.5


def test_arrows_meet_the_boxes_they_connect() -> None:
    graph = drawn(a3c)
    root = picture(graph)
    boxes = boxes_of(graph)
    for edge, arrow in zip(graph.edges, groups(root, "edge"), strict=True):
        if edge.kind == "message":
            continue
        shaft, head = arrow
        start = next(points_along(shaft.attrib["d"]))
        tip = float(head.attrib["d"].split()[0].removeprefix("M"))
        assert start.real == pytest.approx(boxes[edge.source][2], abs=0.5)
        assert tip == pytest.approx(boxes[edge.target][0], abs=0.5)


def test_kinds_of_arrows_look_different() -> None:
    root = picture(drawn(ape_x))
    looks = {
        kind: {
            (shaft.attrib["stroke"], shaft.attrib.get("stroke-dasharray")) for shaft, _ in groups(root, kind)
        }
        for kind in ("sync", "async", "message", "limit")
    }
    assert all(len(look) == 1 for look in looks.values())
    assert len(set.union(*looks.values())) == 4
    [[_, heads]] = [arrow for arrow in groups(root, "limit") if "edge" in arrow.attrib["class"]]
    assert heads.attrib["d"].count("M") == 2


@every_graph
def test_the_legend_explains_what_occurs_and_nothing_else(graph: Graph) -> None:
    root = picture(graph)
    kinds = {group.attrib["class"].split()[1] for group in groups(root, "key")}
    assert kinds == {edge.kind for edge in graph.edges}
    words = {text.text for text in root.findall(f"{SVG}text")}
    assert ("parallel" in words) == any(node.copies > 1 for node in graph.nodes)


def test_a_picture_is_accessible_and_stands_alone() -> None:
    graph = awkward()
    root = picture(graph)
    assert root.attrib["role"] == "img"
    assert AWKWARD in (root[0].text or "")
    assert root[0].tag == f"{SVG}title"
    assert AWKWARD not in graph.svg()
    assert "href" not in graph.svg()
    background = root.find(f"{SVG}rect")
    assert background is not None
    assert background.attrib["fill"] == "#ffffff"


def test_a_picture_has_no_folders_of_the_author() -> None:
    assert "/" not in re.sub(r"http://www.w3.org/2000/svg|</|/>", "", drawn(tangle).svg())
