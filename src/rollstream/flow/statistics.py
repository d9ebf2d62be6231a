"""Where the time of a flow goes, node by node."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rollstream.engine import Actor, ActorEvent
from rollstream.engine.actor import DRIVER
from rollstream.flow.gather import Gather
from rollstream.flow.node import Chain, Node
from rollstream.flow.runtime import Flow
from rollstream.flow.stages import Stage
from rollstream.flow.via import Via

_EVENTS = 10
"""How many deaths are shown; all are kept."""


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """One operator so far: how much it did, and how long it worked and was waited for."""

    name: str
    kind: str
    place: str
    """`driver`, or the actors it runs on."""
    copies: int
    """On how many actors it runs."""
    items: int
    """Items it has given."""
    dropped: int
    """Items a `filter` did not let through."""
    lost: int
    """Items that never came, because an actor died."""
    busy: float
    """Seconds its own code ran, over all copies."""
    waiting: float
    """Seconds the driver was blocked because this node had nothing ready."""
    queue: int
    """Items that wait here, or were asked for and have not come yet."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """A frozen snapshot of a flow's counters."""

    elapsed: float
    nodes: tuple[NodeStatistics, ...]
    concurrent: bool = True
    """Whether actors run beside the driver; on `inline` all share its thread."""
    events: tuple[ActorEvent, ...] = ()
    """Actors of the engine that died, and what became of them."""

    def __getitem__(self, name: str) -> NodeStatistics:
        for node in self.nodes:
            if node.name == name:
                return node
        names = ", ".join(node.name for node in self.nodes) or "none, before the first item"
        raise KeyError(f"no node {name!r}; the nodes are: {names}")

    @property
    def bottleneck(self) -> str | None:
        """The name of the busiest node of the busiest place; `None` before anything ran."""
        load: dict[str, float] = {}
        for node in self.nodes:
            load[node.place] = load.get(node.place, 0.0) + node.busy / node.copies
        if not any(load.values()):
            return None
        place = max(load, key=lambda name: load[name])
        there = [node for node in self.nodes if node.place == place or not self.concurrent]
        return max(there, key=lambda node: node.busy).name

    def share(self, node: NodeStatistics) -> float:
        """The part of the time that a node worked, on average over its copies if they work side by side."""
        copies = node.copies if self.concurrent else 1
        return node.busy / copies / self.elapsed if self.elapsed else 0.0

    def __str__(self) -> str:
        rows = [("node", "where", "items", "dropped", "lost", "busy", "share", "waited", "queue")]
        for node in self.nodes:
            rows.append(
                (
                    node.name + (" *" if node.name == self.bottleneck else ""),
                    node.place,
                    f"{node.items:,}",
                    f"{node.dropped:,}" if node.dropped else "",
                    f"{node.lost:,}" if node.lost else "",
                    f"{node.busy:.3f} s",
                    f"{self.share(node):.0%}",
                    f"{node.waiting:.3f} s" if node.waiting else "",
                    str(node.queue) if node.queue else "",
                )
            )
        shown = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
        rows = [tuple(row[column] for column in shown) for row in rows] if len(rows) > 1 else rows
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "  ".join("─" * width for width in widths))
        events = [str(event) for event in self.events[-_EVENTS:]]
        if (more := len(self.events) - len(events)) > 0:
            events.insert(0, f"... {more} earlier deaths")
        return "\n".join([*lines, f"{self.elapsed:.3f} s in all; * is the bottleneck", *events])


def statistics_of(flow: Flow) -> Statistics:
    """The counters of a flow as they are now; safe from any thread."""
    end = flow.ended or time.perf_counter()
    rows = [row for node in list(flow.nodes) for row in _rows(node)]
    concurrent = flow.engine is not None and flow.engine.concurrent
    events = () if flow.engine is None else tuple(flow.engine.events)
    return Statistics(end - flow.started if flow.started else 0.0, tuple(rows), concurrent, events)


def place_of(actors: list[Actor[Any]]) -> str:
    """`worker[0..3]` for four workers, a name for one actor, names for a few of several kinds."""
    names = [actor.name for actor in actors]
    bases = {family(actor) for actor in actors}
    indices = [actor.index for actor in actors]
    if len(names) > 1 and len(bases) == 1 and indices == list(range(indices[0], indices[-1] + 1)):
        return f"{bases.pop()}[{indices[0]}..{indices[-1]}]"
    return ", ".join(names)


def family(actor: Actor[Any]) -> str:
    """The name that actors spawned together share."""
    return actor.name.partition("[")[0]


def _rows(node: Node) -> list[NodeStatistics]:
    if isinstance(node, Chain):
        return [_stage_row(stage) for stage in node.stages]
    if isinstance(node, Gather):
        return [*_shard_rows(node), _node_row(node, DRIVER, 1)]
    if isinstance(node, Via):
        return [_node_row(node, place_of(node.actors), len(node.actors))]
    return [] if node.kind == "branch" else [_node_row(node, DRIVER, 1)]


def _node_row(node: Node, place: str, copies: int) -> NodeStatistics:
    return NodeStatistics(
        node.name, node.kind, place, copies, node.items, 0, node.lost, node.busy, node.waiting, node.held()
    )


def _stage_row(stage: Stage) -> NodeStatistics:
    dropped = stage.received - stage.items if stage.kind == "filter" else 0
    return NodeStatistics(
        stage.name, stage.kind, DRIVER, 1, stage.items, dropped, 0, stage.busy, 0.0, stage.held()
    )


def _shard_rows(gather: Gather) -> list[NodeStatistics]:
    """Counters as the shards last reported them, summed."""
    place, copies = place_of([port.actor for port in gather.ports]), len(gather.ports)
    width = 2 + 4 * len(gather.plan.stages)
    meters = [port.total() for port in gather.ports if port.meters]
    total = [sum(column) for column in zip(*meters, strict=True)] or [0] * width
    rows = [NodeStatistics(gather.plan.name, "source", place, copies, int(total[0]), 0, 0, total[1], 0.0, 0)]
    for position, stage in enumerate(gather.plan.stages):
        received, items, busy, held = total[2 + 4 * position : 6 + 4 * position]
        dropped = int(received - items) if stage.kind == "filter" else 0
        rows.append(
            NodeStatistics(
                stage.name, stage.kind, place, copies, int(items), dropped, 0, busy, 0.0, int(held)
            )
        )
    return rows
