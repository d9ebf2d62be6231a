"""Where the time of a flow goes, node by node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from rollstream.engine import ActorEvent

_EVENTS = 10
"""The number of deaths shown; all are kept."""
_STRAGGLER = 2.0
"""A shard whose items take more than this many times the median is a straggler."""


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """The counters of one shard of a source."""

    actor: str
    items: int
    """Items of the source."""
    busy: float
    """Seconds that the source and the operators on this shard ran."""
    item_seconds: float = 0.0
    """Seconds per item: the median of the last 16."""


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """The counters of one operator."""

    name: str
    kind: str
    place: str
    """`driver`, or the actors it runs on."""
    copies: int
    """The number of actors it runs on."""
    items: int
    """Items it has put out."""
    dropped: int
    """Items a `filter` did not let through."""
    lost: int
    """Requests whose item never came, because an actor died."""
    busy: float
    """Seconds its own code ran, over all copies."""
    waiting: float
    """Seconds the driver was blocked because this node had nothing ready."""
    queue: int
    """Items that wait here, or were requested and have not come yet."""
    shards: tuple[ShardStatistics, ...] = ()
    """Of a source on actors: each of its shards, as last heard of."""

    @property
    def stragglers(self) -> Mapping[str, float]:
        """Actors of shards whose last items took more than twice the median time: how many times that."""
        took = {shard.actor: shard.item_seconds for shard in self.shards if shard.items}
        usual = median_low(took.values()) if took else 0.0
        return {actor: own / usual for actor, own in took.items() if own > _STRAGGLER * usual > 0}


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

    @property
    def stragglers(self) -> Mapping[str, float]:
        """Actors whose last items took more than twice the median of their source: how many times that."""
        return {actor: times for node in self.nodes for actor, times in node.stragglers.items()}

    def share(self, node: NodeStatistics) -> float:
        """The fraction of the time that a node was busy, averaged over copies that run side by side."""
        copies = node.copies if self.concurrent else 1
        return node.busy / copies / self.elapsed if self.elapsed else 0.0

    def __str__(self) -> str:
        rows = [("node", "where", "items", "dropped", "lost requests", "busy", "share", "waited", "queue")]
        rows += [self._cells(node) for node in self.nodes]
        columns = [
            column for column in zip(*rows, strict=True) if any(column[1:]) or not self.nodes
        ]  # a column that is empty throughout is left out
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(
                cell.ljust(width) if index < 2 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in zip(*columns, strict=True)
        ]
        lines.insert(1, "  ".join("─" * width for width in widths))
        events = [str(event) for event in self.events[-_EVENTS:]]
        if (more := len(self.events) - len(events)) > 0:
            events.insert(0, f"... {more} earlier deaths")
        total = f"{self.elapsed:.3f} s in all; * is the bottleneck"
        return "\n".join([*lines, total, *self.straggler_lines(), *events])

    def straggler_lines(self) -> list[str]:
        """A line per straggler."""
        return [
            f"{actor} takes {times:.1f} times as long as the median"
            for actor, times in self.stragglers.items()
        ]

    def _cells(self, node: NodeStatistics) -> tuple[str, ...]:
        return (
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
