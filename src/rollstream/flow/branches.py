"""Nodes where streams part and meet: `split` and the unions; and `prefetch`, which works ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.flow.node import OVER, Node, Pulled, ancestors
from rollstream.flow.state import Packet, decode_packets, encode_packets


class Split(Node):
    """Every item to every branch, through buffers of at most `buffer` items."""

    kind = "split"
    saved = (*Node.saved, "over")

    def __init__(self, name: str, location: str, upstream: Node, count: int, buffer: int):
        super().__init__(name, location, [upstream])
        self.buffer = buffer
        self.buffers: list[deque[Packet] | None] = [deque() for _ in range(count)]
        """What waits for each branch; `None` once the branch wants no more."""
        self.over = False

    def serve(self, branch: int) -> Pulled:
        """The branch's next item: from its buffer, else from upstream if every other buffer has room."""
        if (own := self.buffers[branch]) is None:
            return OVER
        if own:
            return own.popleft()
        if self.over:
            return OVER
        if self.full():
            return None
        packet = self.upstreams[0].pull()
        if packet is None:
            return None
        if packet is OVER:
            self.over = True
            return OVER
        for buffer in self.buffers:
            if buffer is not None and buffer is not own:
                buffer.append(packet)
        self.items += 1
        assert self.flow is not None
        self.flow.progress += 1
        return packet

    def full(self) -> list[int]:
        """The branches whose buffers have no room."""
        return [i for i, b in enumerate(self.buffers) if b is not None and len(b) >= self.buffer]

    def leave(self, branch: int) -> None:
        """A branch wants no more; the last one to leave stops what is upstream."""
        self.buffers[branch] = None
        if all(buffer is None for buffer in self.buffers):
            self.stop()

    def held(self) -> int:
        """Items that wait for a branch."""
        return sum(len(buffer) for buffer in self.buffers if buffer is not None)

    def bound(self) -> str:
        """The size of each buffer."""
        return f"buffer={self.buffer}"

    def blocked(self) -> str | None:
        """A full buffer that nobody empties."""
        if full := self.full():
            branches = " and ".join(f"branch {branch}" for branch in full)
            return (
                f"{self.name} ({self.location}) holds {self.buffer} of {self.buffer} items for {branches}, "
                f"which nobody pulls; join its branches by union_async, or give it a larger buffer"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """The buffers."""
        buffers = [None if buffer is None else encode_packets(buffer) for buffer in self.buffers]
        return {**super().state_dict(), "buffers": buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        self.buffers = [None if buffer is None else decode_packets(buffer) for buffer in state["buffers"]]


class Branch(Node):
    """One branch of a split."""

    kind = "branch"

    def __init__(self, split: Split, index: int):
        super().__init__(f"{split.name}[{index}]", split.location, [split])
        self.split = split
        self.index = index

    def pull(self) -> Pulled:
        """The split's next item for this branch."""
        packet = self.split.serve(self.index)
        if packet is not None and packet is not OVER:
            self.items += 1
        return packet

    def backlog(self) -> int:
        """How many items wait for this branch."""
        return len(self.split.buffers[self.index] or ())

    def stop(self) -> None:
        """Leave the split to the other branches."""
        if not self.stopped:
            self.stopped = True
            self.split.leave(self.index)


class Union(Node):
    """Items of several streams by integer credits: `weights[i]` from stream i, then the next stream."""

    kind = "union"
    saved = (*Node.saved, "over", "turn", "credit")

    def __init__(
        self,
        name: str,
        location: str,
        upstreams: Sequence[Node],
        weights: Sequence[int],
        output: Sequence[int],
    ):
        super().__init__(name, location, upstreams)
        self.weights = list(weights)
        self.output = frozenset(output)
        self.over = [False] * len(self.upstreams)
        self._served: int | None = None
        self.turn = 0
        self.credit = self.weights[0]

    def pull(self) -> Pulled:
        """The next output. A stream that has ended is skipped; one that cannot run forfeits its turn."""
        flow, forfeited = self.flow, 0
        assert flow is not None
        if self._served is not None:  # its consumer is back
            self.upstreams[self._served].start(rows=False)
            self._served = None
        while not all(self.over[i] for i in self.output):
            turn = self.turn
            if self.over[turn]:
                self._next_turn()
                continue
            mark = flow.progress
            packet = self.upstreams[turn].pull()
            if packet is None:
                if flow.progress != mark:
                    continue
                if not flow.stalled():
                    return None
                if flow.progress != mark:
                    continue
                self._next_turn()
                forfeited += 1
                if forfeited >= self.over.count(False):  # it is the first one's turn again
                    return None
            elif packet is OVER:
                self.over[turn] = True
            else:
                forfeited = 0
                self.credit -= 1
                if self.credit == 0:
                    self._next_turn()
                self.items += 1
                self._served = turn
                flow.progress += 1
                return packet if turn in self.output else None
        self.stop()
        return OVER

    def start(self, *, rows: bool = True) -> None:
        """Only the stream whose turn it is."""
        if not self.over[self.turn]:
            self.upstreams[self.turn].start(rows=rows)

    def _next_turn(self) -> None:
        self.turn = (self.turn + 1) % len(self.upstreams)
        self.credit = self.weights[self.turn]

    def bound(self) -> str:
        """The weights."""
        return f"weights={self.weights}{_given(self)}"


class UnionAsync(Node):
    """Whatever is ready of several streams, in turn; of a split's branches the larger backlog first."""

    kind = "union_async"
    asynchronous = True
    saved = (*Node.saved, "over", "last")

    def __init__(self, name: str, location: str, upstreams: Sequence[Node], output: Sequence[int]):
        super().__init__(name, location, upstreams)
        self.output = frozenset(output)
        self.over = [False] * len(self.upstreams)
        self._served: int | None = None
        self.last = len(self.upstreams) - 1
        self._branches = [
            [node for node in ancestors(up) if isinstance(node, Branch)] for up in self.upstreams
        ]

    def pull(self) -> Pulled:
        """The next output of whichever stream has one."""
        flow = self.flow
        assert flow is not None
        if not all(self.over[i] for i in self.output):
            if self._served is not None:  # its consumer is back: let it work while we look at the others
                served, self._served = self._served, None
                self.upstreams[served].start()
            if (packet := self._serve()) is None:
                return None
            flow.progress += 1
            return packet if self.last in self.output else None
        self.stop()
        return OVER

    def _serve(self) -> Packet | None:
        for index in self._order():
            packet = self.upstreams[index].pull()
            if packet is OVER:
                self.over[index] = True
                self.flow.progress += 1  # pyright: ignore[reportOptionalMemberAccess]
            elif packet is not None:
                self.last = index
                self._served = index
                self.items += 1
                return packet
        return None

    def _order(self) -> list[int]:
        """The streams to try: the one after the last served first, but a larger backlog before a smaller."""
        count = len(self.upstreams)
        order = [(self.last + 1 + i) % count for i in range(count)]
        order = [index for index in order if not self.over[index]]
        if any(self._branches):
            order.sort(key=lambda index: -max((b.backlog() for b in self._branches[index]), default=0))
        return order

    def bound(self) -> str:
        """Which streams it gives, if not all."""
        return _given(self).lstrip(", ")

    def start(self, *, rows: bool = True) -> None:
        """Every stream that has not ended."""
        for index, upstream in enumerate(self.upstreams):
            if not self.over[index]:
                upstream.start(rows=rows)


class Prefetch(Node):
    """Pulls up to `count` items ahead, without waiting for them; the last of these is only asked for."""

    kind = "prefetch"
    asynchronous = True
    saved = (*Node.saved, "over")
    queues = ("buffer",)

    def __init__(self, name: str, location: str, upstream: Node, count: int):
        super().__init__(name, location, [upstream])
        self.count = count
        self.buffer: deque[Packet] = deque()
        self.over = False

    def pull(self) -> Pulled:
        """The oldest item; what is upstream begins the next before this one is handled."""
        upstream = self.upstreams[0]
        while not self.over and len(self.buffer) < self.count:
            packet = upstream.pull()
            if packet is None:
                break
            if packet is OVER:
                self.over = True
            else:
                self.buffer.append(packet)
        if not self.buffer:
            return OVER if self.over else None
        if not self.over:
            upstream.start()
        self.items += 1
        return self.buffer.popleft()

    def held(self) -> int:
        """Items pulled ahead."""
        return len(self.buffer)

    def bound(self) -> str:
        """How far ahead."""
        return f"up to {self.count} ahead"


def _given(union: Union | UnionAsync) -> str:
    everything = len(union.output) == len(union.upstreams)
    return "" if everything else f", output={sorted(union.output)}"
