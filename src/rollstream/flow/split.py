"""Splitting a stream: every item to every branch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rollstream.flow.node import END, Node, Pulled
from rollstream.flow.operator import Operator, Packet


class Split(Node):
    """Every item to every branch, through buffers of at most `buffer` items."""

    kind = "split"
    saved = (*Node.saved, "over")

    def __init__(self, name: str, location: str, upstream: Node, count: int, buffer: int):
        super().__init__(name, location, [upstream])
        self.buffer = buffer
        self.bound = f"buffer={buffer}"
        self.branches = [Branch(self, index) for index in range(count)]
        self.over = False

    def serve(self, branch: Branch) -> Pulled:
        """The next item for a branch whose buffer is empty, if every other buffer has room."""
        if self.over:
            return END
        if self._full():
            return None
        packet = self.upstreams[0].pull()
        if packet is None:
            return None
        if packet is END:
            self.over = True
            return END
        for other in self.branches:
            if other is not branch and not other.stopped:
                other.buffer.append(packet)
        self.items += 1
        self.flow.progress += 1
        return packet

    def _full(self) -> list[Branch]:
        return [b for b in self.branches if not b.stopped and len(b.buffer) >= self.buffer]

    def leave(self) -> None:
        """A branch wants no more; the last one to leave stops what is upstream."""
        if all(branch.stopped for branch in self.branches):
            self.stop()

    def held(self) -> int:
        """Items that wait for a branch."""
        return sum(branch.held() for branch in self.branches)

    def blocked(self) -> str | None:
        """A full buffer that nobody empties."""
        if full := self._full():
            branches = " and ".join(f"branch {branch.index}" for branch in full)
            return (
                f"{self.name} ({self.location}) holds {self.buffer} of {self.buffer} items for {branches}, "
                f"which nobody pulls; join its branches by union_async, or give it a larger buffer"
            )
        return None


class Branch(Node):
    """One branch of a split; in graphs and statistics it is part of the split."""

    kind = "branch"
    queues = ("buffer",)
    shared = True

    def __init__(self, split: Split, index: int):
        super().__init__("branch", split.location, [split])
        self.split = split
        self.index = index
        self.buffer: deque[Packet] = deque()

    def operators(self) -> Sequence[Operator]:
        """None of its own."""
        return []

    def pull(self) -> Pulled:
        """From the buffer, else from the split."""
        if self.stopped:
            return END
        packet = self.buffer.popleft() if self.buffer else self.split.serve(self)
        if packet is not None and packet is not END:
            self.items += 1
        return packet

    def stop(self) -> None:
        """Leave the split to the other branches."""
        if not self.stopped:
            self.stopped = True
            self.buffer.clear()
            self.split.leave()
