"""The pictures in the README are those of its plans. Delete one and run this file to have it drawn anew."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import test_listings

import rollstream as rs
from rollstream import flow

ROOT = Path(__file__).parent.parent


def check_picture(name: str, plan: flow.Iter[Any]) -> None:
    graph = flow.graph(plan)
    nodes = tuple(replace(node, location="") for node in graph.nodes)  # lines move
    picture, path = flow.Graph(nodes, graph.edges).svg(), ROOT / "docs" / "images" / name
    if not path.exists():
        path.write_text(picture)
    assert path.read_text() == picture


def test_the_first_flow() -> None:
    code = re.search(r"## A first flow.*?```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    namespace: dict[str, Any] = {}
    exec(code[1], namespace)
    check_picture("first-flow.svg", namespace["plan"])


def test_apex() -> None:
    with rs.engine("inline") as engine:
        workers = engine.spawn(test_listings.RolloutActor, count=4, name="worker")
        replay = engine.spawn(test_listings.ReplayActor, count=2, name="replay")
        check_picture("apex.svg", test_listings.apex(workers, replay, 4))
