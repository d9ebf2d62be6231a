"""Working ahead of the consumer."""

from __future__ import annotations

from collections import deque

from rollstream.flow.node import END, Node, Pulled
from rollstream.flow.operator import Packet


class Prefetch(Node):
    """Pulls up to `count` items ahead, without waiting for them; the last of these is only requested."""

    kind = "prefetch"
    asynchronous = True
    saved = (*Node.saved, "over")
    queues = ("buffer",)

    def __init__(self, name: str, location: str, upstream: Node, count: int):
        super().__init__(name, location, [upstream])
        self.count = count
        self.bound = f"up to {count} ahead"
        self.buffer: deque[Packet] = deque()
        self.over = False

    def pull(self) -> Pulled:
        """The oldest item; upstream nodes begin the next before this one is handled."""
        upstream = self.upstreams[0]
        while not self.over and len(self.buffer) < self.count:
            packet = upstream.pull()
            if packet is None:
                break
            if packet is END:
                self.over = True
            else:
                self.buffer.append(packet)
        if not self.buffer:
            return END if self.over else None
        if not self.over:
            upstream.start()
        self.items += 1
        return self.buffer.popleft()
