"""Joining streams: `union` by integer credits, `union_async` as items are ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from rollstream.flow.checks import require_whole
from rollstream.flow.errors import PlanError, plan_line
from rollstream.flow.node import END, Node, Pulled, ancestors
from rollstream.flow.operator import Packet
from rollstream.flow.stream import Iter, require_iter

T = TypeVar("T")


class UnionNode(Node):
    """What both unions share: upstream nodes, of which only those in `output` put out their items."""

    saved = (*Node.saved, "over")

    def __init__(self, name: str, location: str, upstreams: Sequence[Node], output: Sequence[int]):
        super().__init__(name, location, upstreams)
        self.output = frozenset(output)
        self.bound = "" if len(self.output) == len(upstreams) else f"output={sorted(self.output)}"
        self.over = [False] * len(self.upstreams)
        self._served: int | None = None

    def _is_over(self) -> bool:
        """Whether all streams in `output` have ended."""
        return True in self.over and all(self.over[i] for i in self.output)

    def pull(self) -> Pulled:
        """The next output; the end comes with that of the last stream in `output`."""
        if self._is_over():
            self.stop()
            return END
        served, self._served = self._served, None
        if served is not None:  # its consumer is back: it works while we look at the others
            self.upstreams[served].start(rows=self.asynchronous)  # an asynchronous edge ends a barrier
        return self._pull()

    def _pull(self) -> Pulled:
        raise NotImplementedError

    def _give(self, index: int, packet: Packet) -> Packet | None:
        """An item of a stream, if its items are put out."""
        self._served = index
        self.items += 1
        self.flow.progress += 1
        return packet if index in self.output else None


class Union(UnionNode):
    """Items of several streams by integer credits: `weights[i]` from stream i, then the next stream."""

    kind = "union"
    saved = (*UnionNode.saved, "turn", "credit")

    def __init__(self, *args: Any, weights: list[int]):
        super().__init__(*args)
        self.weights = weights
        self.bound = f"weights={weights}" + (f", {self.bound}" if self.bound else "")
        self.turn = 0
        self.credit = self.weights[0]

    def _pull(self) -> Pulled:
        """A stream that has ended is skipped; one that cannot run yet forfeits its turn."""
        flow, forfeited = self.flow, 0
        while True:
            turn, mark = self.turn, flow.progress
            if self.over[turn]:
                self._next_turn()
                continue
            packet = self.upstreams[turn].pull()
            if packet is END:
                self.over[turn] = True
                if self._is_over():
                    self.stop()
                    return END
            elif packet is not None:
                self.credit -= 1
                if self.credit == 0:
                    self._next_turn()
                return self._give(turn, packet)
            elif flow.progress == mark:
                if not flow.stalled():
                    return None
                if flow.progress != mark:
                    continue
                self._next_turn()
                forfeited += 1
                if forfeited >= self.over.count(False):  # it is the first one's turn again
                    return None

    def start(self, *, rows: bool = True) -> None:
        """Only the stream whose turn it is."""
        if not self.over[self.turn]:
            self.upstreams[self.turn].start(rows=rows)

    def _next_turn(self) -> None:
        self.turn = (self.turn + 1) % len(self.upstreams)
        self.credit = self.weights[self.turn]


class UnionAsync(UnionNode):
    """Whatever is ready of several streams, in turn; of a split's branches the larger backlog first."""

    kind = "union_async"
    asynchronous = True
    saved = (*UnionNode.saved, "last")

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.last = len(self.upstreams) - 1
        self._branches = [[node for node in ancestors(up) if node.shared] for up in self.upstreams]

    def _pull(self) -> Pulled:
        for index in self._order():
            packet = self.upstreams[index].pull()
            if packet is END:
                self.over[index] = True
                self.flow.progress += 1
            elif packet is not None:
                self.last = index
                return self._give(index, packet)
        return None

    def _order(self) -> list[int]:
        """The streams to try: the one after the last served first, but a larger backlog before a smaller."""
        count = len(self.upstreams)
        order = [(self.last + 1 + i) % count for i in range(count)]
        order = [index for index in order if not self.over[index]]
        if any(self._branches):
            order.sort(key=lambda index: -max((b.held() for b in self._branches[index]), default=0))
        return order

    def start(self, *, rows: bool = True) -> None:
        """Every stream that has not ended."""
        for index, upstream in enumerate(self.upstreams):
            if not self.over[index]:
                upstream.start(rows=rows)


def union(
    iters: Sequence[Iter[T]],
    weights: Sequence[int] | None = None,
    output: Sequence[int] | None = None,
    *,
    name: str | None = None,
) -> Iter[T]:
    """Take `weights[i]` items from stream i, then the next stream's turn: exact and deterministic.

    `output` lists the streams whose items are put out; the others run too, and their items end here. A
    stream that has ended is skipped, one that cannot run yet forfeits its turn. Ends with its outputs.
    """
    weights = [1] * len(iters) if weights is None else list(weights)
    if len(weights) != len(iters):
        raise PlanError(f"{len(weights)} weights for {len(iters)} streams; give one weight per stream")
    for weight in weights:
        require_whole("weights", weight, 1)
    nodes, output = _upstreams("union", iters, output)
    _refuse_coupled(nodes)
    return iters[0]._into(Union(name or "union", plan_line(), nodes, output, weights=weights))


def union_async(
    iters: Sequence[Iter[T]], output: Sequence[int] | None = None, *, name: str | None = None
) -> Iter[T]:
    """Take whatever is ready, in turn; of a split's branches, the one with the larger backlog first.

    `output` lists the streams whose items are put out; the others run too, and their items end here.
    """
    nodes, output = _upstreams("union_async", iters, output)
    return iters[0]._into(UnionAsync(name or "union_async", plan_line(), nodes, output))


def _upstreams(
    kind: str, iters: Sequence[Iter[Any]], output: Sequence[int] | None
) -> tuple[list[Node], Sequence[int]]:
    if not iters:
        raise PlanError(f"{kind} needs at least one stream")
    if output is not None and (not output or not all(0 <= index < len(iters) for index in output)):
        raise PlanError(
            f"output={list(output)}: give indices of streams, 0 to {len(iters) - 1}, at least one"
        )
    for stream in iters:
        require_iter(kind, stream)
    return [stream._use(kind) for stream in iters], range(len(iters)) if output is None else output


def _refuse_coupled(nodes: Sequence[Node]) -> None:
    """Credits cannot join streams that a split or a rate limiter couples already."""
    seen: set[Node] = set()
    coupled: set[Node | None] = set()
    for node in nodes:
        above = ancestors(node)
        if shared := [own for own in above if own in seen]:
            split = shared[-1]
            raise PlanError(
                f"a union with weights over branches of one split ({split.name} at {split.location}) could "
                f"block itself; join them by union_async"
            )
        if any(own in coupled or own.coupled in seen for own in above):
            raise PlanError(
                "these streams are coupled by a rate limiter and by the union's weights; "
                "keep one of them: join them by union_async, or leave out limit_ratio"
            )
        seen.update(above)
        coupled.update(own.coupled for own in above)
