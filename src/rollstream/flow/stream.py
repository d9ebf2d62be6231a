"""The two kinds of stream and their operators. Building them runs nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeGuard, TypeVar, overload

from rollstream.engine import Actor
from rollstream.flow import snapshot, stages
from rollstream.flow.chain import Chain
from rollstream.flow.checks import checked_actors, name_of, require_operator, require_whole
from rollstream.flow.errors import PlanError, plan_line
from rollstream.flow.gather import GatherAsync, GatherSync
from rollstream.flow.node import Node, ancestors
from rollstream.flow.prefetch import Prefetch
from rollstream.flow.provenance import Provenance
from rollstream.flow.references import PutStage, Stored
from rollstream.flow.runtime import Flow, engine_of, flow_of, require_one_engine
from rollstream.flow.shard import ShardPlan
from rollstream.flow.split import Split
from rollstream.flow.stages import Context, Stage
from rollstream.flow.statistics import Statistics
from rollstream.flow.trace import Tracer
from rollstream.flow.via import Via

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)
U = TypeVar("U")
U_co = TypeVar("U_co", covariant=True)
V = TypeVar("V")
F = TypeVar("F")


class WithContext(Protocol[T_contra, U_co]):
    """A function of an item that also asks for a context."""

    def __call__(self, item: T_contra, /, *, context: Context) -> U_co:
        """Handle one item."""
        ...


ItemFunction: TypeAlias = Callable[[T], U] | WithContext[T, U]


class _Stream:
    """What both kinds share: a stream has one consumer."""

    splitting = "a, b = stream.split(2)"

    def __init__(self) -> None:
        self._consumer: str | None = None

    def _consume(self, consumer: str) -> None:
        if self._consumer is not None:
            raise PlanError(
                f"{consumer} at {plan_line()} would consume a stream that {self._consumer} consumes already; "
                f"a stream has one consumer, so split it first: {self.splitting}"
            )
        self._consumer = f"{consumer} at {plan_line()}"


class ParIter(_Stream, Generic[T_co]):
    """A stream sharded over source actors; its operators run on those actors.

    Gather it to get at its items: `gather_sync()` in rows, `gather_async()` as they come.
    """

    splitting = "a, b = stream.gather_async().split(2)"

    def __init__(self, actors: Sequence[Actor[Any]], plan: ShardPlan):
        super().__init__()
        self._actors = actors
        self._plan = plan

    def for_each(self, function: ItemFunction[T_co, U], *, name: str | None = None) -> ParIter[U]:
        """Apply a function to every item, on the item's own actor.

        A callable object may keep state: each shard has its own copy of it. A function with a second
        parameter, called `context`, also gets the actor's instance, the provenance and its own name.
        """
        return self._with(_stage(stages.ForEachStage, function, name))

    @overload
    def filter(self, function: Callable[[T_co], TypeGuard[U]], *, name: str | None = None) -> ParIter[U]: ...

    @overload
    def filter(self, function: ItemFunction[T_co, object], *, name: str | None = None) -> ParIter[T_co]: ...

    def filter(self, function: Any, *, name: str | None = None) -> ParIter[Any]:
        """Keep the items for which the function is true."""
        return self._with(_stage(stages.FilterStage, function, name))

    def batch(self, size: int, *, name: str | None = None) -> ParIter[list[T_co]]:
        """Lists of `size` items of one shard."""
        return self._with(_batch(size, name))

    def flatten(self: ParIter[Iterable[U]], *, name: str | None = None) -> ParIter[U]:
        """The elements of each item, one by one."""
        return self._with(stages.FlattenStage(name or "flatten", plan_line()))

    def combine(self, function: ItemFunction[T_co, Iterable[U]], *, name: str | None = None) -> ParIter[U]:
        """Each item to a list, flattened. One that collects items returns `[]` until it has enough."""
        return self._with(_stage(stages.CombineStage, function, name))

    def put(
        self,
        value: Callable[[T_co], V] | None = None,
        *,
        metadata: Callable[[T_co], F] | None = None,
        name: str | None = None,
    ) -> ParIter[Stored[V, F]]:
        """Leave every item on its actor, and pass on a reference: the driver moves no data.

        Args:
            value: What to store of an item; the item itself by default.
            metadata: Something small about an item that travels beside the reference, so that the driver can
                report on it without opening it.
            name: The operator's name.
        """
        return self._with(PutStage(name or "put", plan_line(), value, metadata))

    def gather_sync(self, *, name: str | None = None) -> Iter[list[T_co]]:
        """Rows of one item per shard. Between two rows no shard runs: a barrier."""
        self._consume("gather_sync")
        return Iter(GatherSync(name or "gather_sync", plan_line(), self._actors, self._plan))

    def gather_async(self, num_async: int = 1, *, name: str | None = None) -> Iter[T_co]:
        """Items as they come, at most `num_async` of each shard requested and not yet handled."""
        require_whole("num_async", num_async, 1)
        self._consume("gather_async")
        return Iter(GatherAsync(name or "gather_async", plan_line(), self._actors, self._plan, num_async))

    def _with(self, stage: Stage) -> ParIter[Any]:
        self._consume(stage.kind)
        self._plan.stages.append(stage)
        return ParIter(self._actors, self._plan)

    def __iter__(self) -> Iterator[T_co]:
        raise PlanError(
            "a ParIter lives on its actors and cannot be iterated here; gather it first: "
            ".gather_sync() for rows, .gather_async() for items as they come"
        )

    __next__ = __iter__

    def __repr__(self) -> str:
        return f"<ParIter {self._plan.source.name} on {len(self._actors)} actors>"


class Iter(_Stream, Generic[T_co]):
    """One sequence of items; its operators run where `next` is called. A plain Python iterator.

    Nothing runs before the first `next`; closing it, or leaving its `with` block, stops the flow.
    """

    def __init__(self, node: Node):
        super().__init__()
        self._node = node
        self._flow: Flow | None = None
        """Set once this stream itself is iterated."""

    # Operators ---------------------------------------------------------------------------------

    def for_each(self, function: ItemFunction[T_co, U], *, name: str | None = None) -> Iter[U]:
        """Apply a function to every item.

        A function with a second parameter, called `context`, also gets the provenance, the actors the
        item comes from, and its own name.
        """
        return self._with(_stage(stages.ForEachStage, function, name))

    @overload
    def filter(self, function: Callable[[T_co], TypeGuard[U]], *, name: str | None = None) -> Iter[U]: ...

    @overload
    def filter(self, function: ItemFunction[T_co, object], *, name: str | None = None) -> Iter[T_co]: ...

    def filter(self, function: Any, *, name: str | None = None) -> Iter[Any]:
        """Keep the items for which the function is true."""
        return self._with(_stage(stages.FilterStage, function, name))

    def batch(self, size: int, *, name: str | None = None) -> Iter[list[T_co]]:
        """Lists of `size` items; the last one of a stream that ends may be shorter."""
        return self._with(_batch(size, name))

    def flatten(self: Iter[Iterable[U]], *, name: str | None = None) -> Iter[U]:
        """The elements of each item, one by one."""
        return self._with(stages.FlattenStage(name or "flatten", plan_line()))

    def combine(self, function: ItemFunction[T_co, Iterable[U]], *, name: str | None = None) -> Iter[U]:
        """Each item to a list, flattened. One that collects items returns `[]` until it has enough."""
        return self._with(_stage(stages.CombineStage, function, name))

    def take(self, count: int, *, name: str | None = None) -> Iter[T_co]:
        """The first `count` items, then the end; not one item more is requested."""
        require_whole("take", count, 0)
        return self._with(stages.TakeStage(name or "take", plan_line(), count))

    def zip_with_source(self, *, name: str | None = None) -> Iter[tuple[T_co, Provenance]]:
        """Each item with its provenance."""

        def pair(item: T_co, context: Context) -> tuple[T_co, Provenance]:
            return item, context.provenance

        return self.for_each(pair, name=name or "zip_with_source")

    def max_staleness(
        self, limit: int, newest: Callable[[], float], *, note: str = "version", name: str | None = None
    ) -> Iter[T_co]:
        """Drop, and count as dropped, items made more than `limit` versions before `newest()`.

        A source notes the version it used: `context.note(version=...)`. Items without one pass.
        """
        require_whole("max_staleness", limit, 0)

        def fresh(_: T_co, context: Context) -> bool:
            version = context.least(note)
            return version is None or newest() - version <= limit

        return self.filter(fresh, name=name or "max_staleness")

    def via(
        self,
        actors: Actor[Any] | Sequence[Actor[Any]],
        method: str,
        in_flight: int = 1,
        *,
        name: str | None = None,
    ) -> Iter[Any]:
        """Run a stage on one or several actors, `in_flight` items at a time, results in input order.

        A method with a second parameter, called `context`, gets the provenance of its item. Items that `put`
        has stored arrive as their values, also in a list.
        """
        actors = checked_actors(actors, method)
        require_whole("in_flight", in_flight, 1)
        name = name or f"{actors[0].cls.__name__}.{method}"
        return self._into(Via(name, plan_line(), self._use("via"), actors, method, in_flight))

    def prefetch(self, count: int = 1, *, name: str | None = None) -> Iter[T_co]:
        """Pull up to `count` items ahead without waiting for them, so that upstream nodes keep working."""
        require_whole("prefetch", count, 1)
        return self._into(Prefetch(name or "prefetch", plan_line(), self._use("prefetch"), count))

    def split(self, n: int = 2, buffer: int = 16, *, name: str | None = None) -> tuple[Iter[T_co], ...]:
        """`n` streams that each get every item, at most `buffer` items apart. Join them by `union_async`."""
        require_whole("split", n, 2)
        require_whole("buffer", buffer, 1)
        split = Split(name or "split", plan_line(), self._use("split"), n, buffer)
        return tuple(self._into(branch) for branch in split.branches)

    def _with(self, stage: Stage) -> Iter[Any]:
        node = self._use(stage.kind)
        if node.stages is None:
            return self._into(Chain(node, [stage]))
        node.stages.append(stage)
        return self._into(node)

    def _use(self, consumer: str) -> Node:
        if self._node.opened:
            raise PlanError(f"{consumer} at {plan_line()} comes too late: this stream is being iterated")
        self._consume(consumer)
        return self._node

    def _into(self, node: Node) -> Iter[Any]:
        require_one_engine(node)
        return Iter(node)

    # Running -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __next__(self) -> T_co:
        flow = self._flow
        if flow is None:
            if self._node.stopped and not self._node.opened:
                raise StopIteration
            flow = self._begin()
        return flow.advance(self._node)

    def close(self) -> None:
        """Stop the flow. Items in flight are dropped; nothing more is requested."""
        if (flow := flow_of(self._node)) is None:
            self._node.stopped = True
        else:
            flow.close()

    def __enter__(self) -> Iter[T_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> Statistics:
        """A frozen snapshot of every node's counters; from any thread, while the flow runs."""
        flow = flow_of(self._node)
        return Statistics(0.0, ()) if flow is None else flow.statistics()

    def trace(self, path: str | os.PathLike[str]) -> Iter[T_co]:
        """Record the run from its start; the file is complete when the flow ends. Opens in Perfetto."""
        if self._node.opened:
            raise PlanError("call trace before the first item is requested")
        if not Path(path).parent.is_dir():
            raise PlanError(f"trace({str(path)!r}): there is no such folder; create it first")
        self._node.tracer = Tracer(path)
        return self

    def state_dict(self, folder: Path | None = None) -> dict[str, Any]:
        """The state of the whole flow, between two items.

        Operators, items in flight, and every actor that has a `state_dict`. Plain data, as far as the
        items and those states are.

        Args:
            folder: Where actors with large states, in local processes of their own, write them in the
                background while the flow continues; `wait_saved` waits for them.
        """
        return self._begin().state_dict(folder)

    def wait_saved(self) -> list[str]:
        """Wait until actors have written the files of the last `state_dict`; what went wrong there."""
        return snapshot.wait_saved(self._begin().engine)

    def load_state_dict(
        self, state: dict[str, Any], folder: Path | None = None, renewed: Iterable[Actor[Any]] = ()
    ) -> None:
        """Restore a saved state in a freshly built flow; `folder` has the files that actors wrote.

        Sources on `renewed` actors, of which there may be another number now, begin anew: items that were
        ready to be gathered from them are dropped.
        """
        self._begin().load_state_dict(state, folder, renewed)

    def _begin(self) -> Flow:
        if self._flow is None:
            self._consume("iteration")
            nodes = ancestors(self._node)
            begun = filter(None, map(flow_of, nodes))  # by another branch of a split
            tracers = [node.tracer for node in nodes if node.tracer is not None]
            flow = next(begun, None) or Flow(engine_of(self._node), tracers[-1] if tracers else None)
            try:
                flow.add(self._node)
            except BaseException:
                flow.close()
                raise
            self._flow = flow
        return self._flow

    def __repr__(self) -> str:
        return f"<Iter {self._node.last_operator().name}>"


def require_iter(what: str, stream: Any) -> None:
    """Refuse anything but an `Iter`."""
    if not isinstance(stream, Iter):
        fix = "gather it first" if isinstance(stream, ParIter) else "make one with flow.from_iterable"
        raise PlanError(f"{what} takes Iter streams, but {stream!r} is not one; {fix}")


def _batch(size: int, name: str | None) -> Stage:
    require_whole("batch", size, 1)
    return stages.BatchStage(name or "batch", plan_line(), size)


def _stage(kind: type[Stage], function: Any, name: str | None) -> Stage:
    require_operator(function, kind.kind)
    return kind(name_of(function, name, kind.kind), plan_line(), function)
