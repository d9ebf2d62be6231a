"""A chain of synchronous operators, run as one loop: on the driver, or on each shard of a `ParIter`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollstream.flow.errors import OperatorError
from rollstream.flow.node import END, Node, Pulled, Scheduler
from rollstream.flow.operator import Operator
from rollstream.flow.provenance import RowOrigin, merged
from rollstream.flow.stages import Stage
from rollstream.flow.trace import Recorder


class Chain(Node):
    """Runs items through stages, one after the other.

    Outputs that one stage made at once wait in its `out`; `stack` holds the indices of such stages, the
    deepest last, so that order is kept and each pull runs the chain for one item only.
    """

    kind = "chain"
    saved = (*Node.saved, "stack", "flushing")

    def __init__(self, upstream: Any, stages: Iterable[Stage], shard: str | None = None):
        super().__init__("chain", "", [upstream])
        self.upstream = upstream
        self.stages: list[Stage] = list(stages)
        self.shard = shard
        self.record: Recorder | None = None
        self.stack: list[int] = []
        self.flushing: int | None = None

    def operators(self) -> Sequence[Operator]:
        """The stages."""
        return self.stages

    def pull(self) -> Pulled:
        """Run items through the stages until one comes out."""
        stages, stack, clock, record = self.stages, self.stack, time.perf_counter, self.record
        count = len(stages)
        while True:
            if stack:
                index = stack[-1]
                stage = stages[index]
                value, origin = stage.out.popleft()
                stage.items += 1
                if not stage.out:
                    stack.pop()
                index += 1
            elif self.flushing is not None:
                if not self._flush():
                    return END
                continue
            else:
                packet = self.upstream.pull()
                if packet is None:
                    return None
                if packet is END:
                    self.flushing = 0
                    continue
                if not count:
                    return packet
                value, origin = packet
                index = 0
            stage = stages[0]
            try:
                last = clock()
                while index < count:
                    stage = stages[index]
                    stage.received += 1
                    if stage.plain is not None:
                        value = stage.plain(value)
                        if type(origin) is RowOrigin:  # it may no longer be one element per shard
                            origin = merged(origin)
                    else:
                        packet = stage.push(value, origin)
                        if stage.out:
                            stack.append(index)
                        if stage.left == 0:
                            self._end(index)
                        if packet is None:
                            stage.busy += clock() - last
                            break
                        value, origin = packet
                    stage.items += 1
                    now = clock()
                    stage.busy += now - last
                    if record is not None:
                        record((stage.name, last, now))
                    last = now
                    index += 1
                else:
                    return value, origin
            except (Exception, SystemExit) as error:
                raise OperatorError.of(error, stage.name, stage.location, self.shard) from None

    def _flush(self) -> bool:
        """Let the next stage put out its last output; false when all have."""
        assert self.flushing is not None
        while self.flushing < len(self.stages):
            stage, index = self.stages[self.flushing], self.flushing
            self.flushing += 1
            if (packet := stage.flush()) is not None:
                stage.out.append(packet)
                self.stack.append(index)
                return True
        return False

    def _end(self, index: int) -> None:
        """A stage wants no more input: stop what is before it, flush what is after it."""
        self.flushing = max(index + 1, self.flushing or 0)
        for early in self.stages[:index]:
            early.out.clear()
        self.stack[:] = [waiting for waiting in self.stack if waiting >= index]
        self.upstream.stop()

    def start(self, *, rows: bool = True) -> None:
        """Only once the outputs that wait here are gone: they belong to the item being handled."""
        if not self.stack and self.flushing is None:
            self.upstream.start(rows=rows)

    def forget(self, lost: Callable[[Any], bool]) -> None:
        """Remove them from the stages."""
        for stage in self.stages:
            stage.forget(lost)
        self.stack = [index for index in self.stack if self.stages[index].out]

    def open(self, flow: Scheduler) -> None:
        """Make the flow's actors known to the stages."""
        super().open(flow)
        self.record = None if flow.tracer is None else flow.tracer.span
        for index, stage in enumerate(self.stages):
            stage.actors = flow.actors
            if stage.left == 0:
                self._end(index)

    def state_dict(self) -> dict[str, Any]:
        """Also the stages' states, by name."""
        return {**super().state_dict(), "stages": {stage.name: stage.state_dict() for stage in self.stages}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also the stages' states."""
        super().load_state_dict(state)
        for stage in self.stages:
            stage.load_state_dict(state["stages"][stage.name])
