"""The part of a flow that lives on a source actor: its method, and the chain of operators behind it."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from rollstream.engine import Deferred, EngineError
from rollstream.engine.actor import ActorSlot, cannot_exit, wants_context
from rollstream.flow.errors import OperatorError, PlanError, StateError
from rollstream.flow.node import OVER, Chain, Over, Pulled
from rollstream.flow.provenance import Origin
from rollstream.flow.stages import Context, Packet, Stage

ITEM, END = 0, 1
Meters: TypeAlias = list[float]
Reply: TypeAlias = tuple[int, Any, Any, int, Meters, list[tuple[str, float, float]] | None]
"""`ITEM` or `END`, a value, its origin, the actor's restarts, the operators' counters, spans for a trace."""


def is_gauge(index: int) -> bool:
    """Whether a place in the counters is a length now rather than a count so far."""
    return index >= 2 and (index - 2) % 4 == 3


@dataclass
class ShardPlan:
    """What a source actor is asked to run: the same for every shard, each with its own copy of the stages."""

    name: str
    location: str
    method: str
    stages: list[Stage]
    base: str
    traced: bool = False


class ShardSource:
    """Calls the actor's method; a deferred reply is "not ready" until it is complete."""

    def __init__(self, plan: ShardPlan, cell: ActorSlot):
        self._plan = plan
        self._cell = cell
        self._shard = cell.context.name
        self._stream = plan.name if not cell.context.restarts else f"{plan.name} {cell.context.restarts}"
        self._instance = cell.instance
        self._method = getattr(cell.instance, plan.method)
        self._wants_context = wants_context(self._method)
        self._context: Context | None = None
        self._deferred = False
        self._late: tuple[Any, BaseException | None] | None = None
        self.over = False
        self.items = 0
        self.busy = 0.0
        self.resume: Any = None
        self.spans: SpanList | None = None

    def pull(self) -> Pulled:
        """The next item of this actor, or `None` while its reply is deferred."""
        if self.over:
            return OVER
        try:
            if self._deferred:
                value = self._late_value()
            else:
                start = time.perf_counter()
                if self._wants_context:
                    self._context = Context(
                        self._plan.name, (self._shard, self._stream, self.items), self._instance, {}
                    )
                    value = self._method(context=self._context)
                else:
                    value = self._method()
                end = time.perf_counter()
                self.busy += end - start
                if self.spans is not None:
                    self.spans.span(self._shard, self._plan.name, start, end)
                if isinstance(value, Deferred):
                    self._deferred = True
                    value.then(self._arrived)
                    value = self._late_value()
        except StopIteration:
            self.over = True
            return OVER
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit):
                error = cannot_exit(self._plan.name, error)
            raise OperatorError.of(error, self._plan.name, self._plan.location, self._shard) from None
        if self._deferred:
            return None
        origin = self._context._origin if self._context else (self._shard, self._stream, self.items)
        self.items += 1
        return value, origin

    def stop(self) -> None:
        """Nothing to let go of."""

    def _late_value(self) -> Any:
        if self._late is None:
            return None
        (value, error), self._late, self._deferred = self._late, None, False
        if error is not None:
            raise error
        return value

    def _arrived(self, value: Any, error: BaseException | None) -> None:
        self._late = (value, error)
        self._cell.afterwards.append(self.resume)  # not in the middle of the method that completed it


class SpanList:
    """Spans recorded on a shard, on their way to the trace with the next reply."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    def span(self, place: str | None, name: str, start: float, end: float) -> None:  # noqa: ARG002
        """One operator on one item; the place is known where the reply goes."""
        self.spans.append((name, start, end))

    def take(self) -> list[tuple[str, float, float]]:
        """The spans since the last reply."""
        spans, self.spans = self.spans, []
        return spans


class Shard:
    """One shard: answers each request with the next output of its chain, in order."""

    def __init__(self, plan: ShardPlan, cell: ActorSlot):
        self._source = ShardSource(plan, cell)
        self._source.resume = self._resume
        self._stages = [_copied(stage) for stage in plan.stages]
        for stage in self._stages:
            stage.instance = cell.instance
        self._chain = Chain(self._source, self._stages, cell.context.name)
        self._pull = self._chain.pull if self._stages else self._source.pull
        self._spans = SpanList() if plan.traced else None
        self._source.spans = self._chain.tracer = self._spans
        self._waiting: deque[Deferred[Reply]] = deque()
        self._life = cell.context.restarts

    def pull(self) -> Reply | Deferred[Reply]:
        """The next output; a deferred reply while the source has none."""
        if not self._waiting and (packet := self._pull()) is not None:
            return self._reply(packet)
        self._waiting.append(Deferred())
        return self._waiting[-1]

    def _reply(self, packet: Packet | Over) -> Reply:
        meters = [self._source.items, self._source.busy]
        for stage in self._stages:
            meters += (stage.received, stage.items, stage.busy, stage.held())
        spans = None if self._spans is None else self._spans.take()
        if packet is OVER:
            return END, None, None, self._life, meters, spans
        return ITEM, packet[0], packet[1], self._life, meters, spans

    def _resume(self) -> None:
        """The source has its item: answer who waits."""
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
        """Go on from a saved state."""
        self._source.items, self._source.over = state["items"], state["over"]
        self._chain.load_state_dict(state["chain"])


def _copied(stage: Stage) -> Stage:
    try:
        return copy.deepcopy(stage)
    except Exception as error:
        raise cannot_be_copied(stage, error) from error


def cannot_be_copied(stage: Stage, error: Exception) -> PlanError:
    """An error that says which operator cannot go to its shards."""
    return PlanError(
        f"{stage.name} ({stage.location}) cannot be copied, but each shard has its own copy of an "
        f"operator: {error}; make what it holds where it is first called"
    )


# Messages to an actor's cell; shards are kept beside the instance under the flow's key.


def install(cell: ActorSlot, key: str, plan: ShardPlan | None) -> None:
    """Begin a shard, or end it when there is no plan."""
    if plan is None:
        cell.context.local.pop(key, None)
    else:
        cell.context.local[key] = Shard(plan, cell)


def pull(cell: ActorSlot, key: str) -> Reply | Deferred[Reply]:
    """Ask a shard for its next output."""
    try:
        shard = cell.context.local[key]
    except KeyError:
        raise EngineError(
            f"{cell.context.name} has no shard of this flow: it could not be restarted"
        ) from None
    return shard.pull()


def shard_state(cell: ActorSlot, key: str) -> dict[str, Any]:
    """Ask a shard for its state."""
    return cell.context.local[key].state_dict()


def load_shard_state(cell: ActorSlot, key: str, state: Mapping[str, Any]) -> None:
    """Give a shard its state."""
    cell.context.local[key].load_state_dict(state)


def actor_state(cell: ActorSlot, folder: Path | None) -> Any:
    """The state of an actor that offers one; or which file in a folder it is going to be in."""
    if folder is not None and hasattr(cell.instance, "begin_save"):
        name = f"actor-{quote(cell.context.name, safe='[]')}.safetensors"
        cell.instance.begin_save(folder / name)
        return {_FILE: name}
    return cell.instance.state_dict() if hasattr(cell.instance, "state_dict") else None


def finish_save(cell: ActorSlot) -> str | None:
    """Wait until an actor has written its state; what went wrong, if anything did."""
    return cell.instance.finish_save() if hasattr(cell.instance, "finish_save") else None


def external_files(state: Mapping[str, Any]) -> list[str]:
    """The files that belong to a flow's state."""
    own = [each for each in state["actors"].values() if isinstance(each, Mapping)]
    return [each[_FILE] for each in own if _FILE in each]


def found(state: Any, folder: Path | None, here: bool) -> Any:
    """An actor's state; of one in a file its path, or what is in it, if it is to be read here."""
    if not isinstance(state, Mapping) or _FILE not in state:
        return state
    if folder is None:
        raise StateError(f"this state goes with the file {state[_FILE]}: say in which folder that is")
    path = folder / state[_FILE]
    if not here:
        return {_FILE: str(path.absolute())}
    from rollstream.background_save import read_state  # which takes more than the standard library

    return read_state(path)


_FILE: Final = "$file"


def load_actor_state(cell: ActorSlot, state: Any) -> None:
    """Give an actor its state."""
    if isinstance(state, Mapping) and _FILE in state:
        cell.instance.load_file(Path(state[_FILE]))
        return
    if not hasattr(cell.instance, "load_state_dict"):
        raise StateError(f"{cell.context.name} has a saved state, and no method load_state_dict to take it")
    cell.instance.load_state_dict(state)


def run_method(cell: ActorSlot, method: str, value: Any, about: tuple[str, Origin] | None) -> Any:
    """Call a method for a `via` node; the reply is its result and the time it took.

    `about` is what a context is made of, for a method that asks for one.
    """
    start = time.perf_counter()
    if about is None:
        result = getattr(cell.instance, method)(value)
    else:
        result = getattr(cell.instance, method)(value, context=Context(*about, cell.instance, {}))
    spent = time.perf_counter() - start
    if not isinstance(result, Deferred):
        return result, spent
    late: Deferred[Any] = Deferred()
    result.then(lambda v, error: late.resolve((v, spent)) if error is None else late.reject(error))
    return late
