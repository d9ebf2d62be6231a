"""The part of a flow that lives on a source actor: its method, and the chain of operators behind it."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rollstream.engine import Deferred, EngineError
from rollstream.engine.slot import ActorSlot, wants_context
from rollstream.flow.chain import Chain
from rollstream.flow.errors import OperatorError, PlanError
from rollstream.flow.node import END, End, Pulled
from rollstream.flow.operator import Operator, Packet
from rollstream.flow.provenance import Origin
from rollstream.flow.references import dereferenced
from rollstream.flow.stages import Context, Stage
from rollstream.flow.trace import Recorder, TimeSpan

Counters: TypeAlias = list[float]
"""Items received, items out, seconds busy and items held, of the source and then of each stage."""
Reply: TypeAlias = tuple[Packet | None, int, Counters, Sequence[TimeSpan]]
"""An item, or `None` at the end; the actor's incarnation; counters; spans for a trace."""


def without_gauges(counters: Counters) -> Counters:
    """Counters with 0 for the items held, which say how many there are now, not how many there were."""
    return [0 if index % 4 == 3 else counter for index, counter in enumerate(counters)]


@dataclass
class ShardPlan:
    """What each shard runs: a method of its actor, then its own copy of each stage."""

    source: Operator
    method: str
    stages: list[Stage] = field(default_factory=list)
    traced: bool = False


class ShardSource:
    """Calls the actor's method; a deferred reply is "not ready" until it is complete."""

    def __init__(self, plan: ShardPlan, slot: ActorSlot, resume: Callable[[], None], record: Recorder | None):
        self._name = plan.source.name
        self._location = plan.source.location
        self._slot = slot
        self._shard, restarts = slot.context.name, slot.context.restarts
        self._stream = self._name if not restarts else f"{self._name} {restarts}"
        self._method = getattr(slot.instance, plan.method)
        self._wants_context = wants_context(self._method)
        self._context: Context | None = None
        self._deferred: Deferred[Any] | None = None
        self._late: tuple[Any, BaseException | None] | None = None
        self._resume = resume
        self._record = record
        self.over = False
        self.items = 0
        self.busy = 0.0

    def pull(self) -> Pulled:
        """The next item of this actor, or `None` while its reply is deferred."""
        if self.over:
            return END
        try:
            value = self._call() if self._deferred is None else self._late_value()
        except StopIteration:
            self.over = True
            return END
        except (Exception, SystemExit) as error:
            raise OperatorError.of(error, self._name, self._location, self._shard) from None
        if self._deferred is not None:
            return None
        origin = self._context.origin if self._context else (self._shard, self._stream, self.items)
        self.items += 1
        return value, origin

    def stop(self) -> None:
        """Nothing to let go of."""

    def _call(self) -> Any:
        start = time.perf_counter()
        if self._wants_context:
            origin = (self._shard, self._stream, self.items)
            self._context = Context(self._name, origin, self._slot.instance, {})
            value = self._method(context=self._context)
        else:
            value = self._method()
        end = time.perf_counter()
        self.busy += end - start
        if self._record is not None:
            self._record((self._name, start, end))
        if isinstance(value, Deferred):
            self._deferred = value
            value.then(self._arrived)
            return self._late_value()
        return value

    def _late_value(self) -> Any:
        if self._late is None or self._deferred is None:
            return None
        self.busy += self._deferred.busy
        (value, error), self._late, self._deferred = self._late, None, None
        if error is not None:
            raise error
        return value

    def _arrived(self, value: Any, error: BaseException | None) -> None:
        self._late = (value, error)
        self._slot.afterwards.append(self._resume)  # not in the middle of the method that completed it


class Shard:
    """One shard: answers each request with the next output of its chain, in order."""

    def __init__(self, plan: ShardPlan, slot: ActorSlot):
        self._spans: list[TimeSpan] = []
        record = self._spans.append if plan.traced else None
        self._source = ShardSource(plan, slot, self._resume, record)
        self._stages = [_copied(stage) for stage in plan.stages]
        for stage in self._stages:
            stage.instance, stage.put = slot.instance, slot.context.put
        self._chain = Chain(self._source, self._stages, slot.context.name)
        self._chain.record = record
        self._pull = self._chain.pull if self._stages else self._source.pull
        self._waiting: deque[Deferred[Reply]] = deque()
        self._incarnation = slot.context.restarts

    def pull(self) -> Reply | Deferred[Reply]:
        """The next output; a deferred reply while the source has none."""
        if not self._waiting and (packet := self._pull()) is not None:
            return self._reply(packet)
        self._waiting.append(Deferred())
        return self._waiting[-1]

    def _reply(self, packet: Packet | End) -> Reply:
        items = self._source.items
        counters = [items, items, self._source.busy, 0]
        for stage in self._stages:
            counters += (stage.received, stage.items, stage.busy, stage.held())
        spans: Sequence[TimeSpan] = ()
        if self._spans:
            spans = self._spans[:]
            self._spans.clear()
        return None if packet is END else packet, self._incarnation, counters, spans

    def _resume(self) -> None:
        """The source has its item: answer the requests that wait."""
        while self._waiting:
            try:
                packet = self._pull()
            except Exception as error:
                self._waiting.popleft().reject(error)
                continue
            if packet is None:
                return
            self._waiting.popleft().resolve(self._reply(packet))

    def state_dict(self) -> dict[str, Any]:
        """The chain's state and the source's position."""
        return {"items": self._source.items, "over": self._source.over, "chain": self._chain.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._source.items, self._source.over = state["items"], state["over"]
        self._chain.load_state_dict(state["chain"])


def _copied(stage: Stage) -> Stage:
    try:
        return copy.deepcopy(stage)
    except Exception as error:
        raise cannot_be_copied(stage, error) from error


def cannot_be_copied(stage: Stage, error: Exception) -> PlanError:
    """An error that names the operator that cannot go to its shards."""
    return PlanError(
        f"{stage.name} ({stage.location}) cannot be copied, but each shard has its own copy of an "
        f"operator: {error}; create what it holds in its first call"
    )


# Messages to an actor's slot; shards are kept beside the instance under the flow's key.


def install(slot: ActorSlot, key: str, plan: ShardPlan | None) -> None:
    """Begin a shard, or end it when there is no plan."""
    if plan is None:
        slot.context.local.pop(key, None)
    else:
        slot.context.local[key] = Shard(plan, slot)


def pull(slot: ActorSlot, key: str) -> Reply | Deferred[Reply]:
    """Ask a shard for its next output."""
    try:
        shard = slot.context.local[key]
    except KeyError:
        raise EngineError(
            f"{slot.context.name} has no shard of this flow: it could not be restarted"
        ) from None
    return shard.pull()


def shard_state(slot: ActorSlot, key: str) -> dict[str, Any]:
    """Ask a shard for its state."""
    return slot.context.local[key].state_dict()


def load_shard_state(slot: ActorSlot, key: str, state: Mapping[str, Any]) -> None:
    """Restore a shard's state."""
    slot.context.local[key].load_state_dict(state)


def run_method(slot: ActorSlot, method: str, value: Any, context: tuple[str, Origin] | None) -> Any:
    """Call a method for a `via` node; the reply is its result and the time it took.

    `context` has the node's name and the item's origin, for a method that asks for a context.
    """
    value = dereferenced(value)
    start = time.perf_counter()
    if context is None:
        result = getattr(slot.instance, method)(value)
    else:
        result = getattr(slot.instance, method)(value, context=Context(*context, slot.instance, {}))
    spent = time.perf_counter() - start
    if not isinstance(result, Deferred):
        return result, spent
    late: Deferred[Any] = Deferred()
    result.then(lambda v, error: late.resolve((v, spent)) if error is None else late.reject(error))
    return late
