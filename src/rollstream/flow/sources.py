"""Where streams begin: actors, local iterables, functions that are polled, streams inside actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rollstream.engine import Actor, ActorContext
from rollstream.flow.checks import checked_actors, name_of
from rollstream.flow.errors import OperatorError, PlanError, plan_line
from rollstream.flow.node import END, Node, Pulled
from rollstream.flow.operator import Operator
from rollstream.flow.shard import ShardPlan
from rollstream.flow.stream import Iter, ParIter

T = TypeVar("T")


class Source(Node):
    """Items of a Python iterable; its iterator is made when the first item is pulled."""

    kind = "source"

    def __init__(self, name: str, location: str, iterable: Iterable[Any]):
        super().__init__(name, location)
        self._iterable = iterable
        self._iterator: Iterator[Any] | None = None

    def pull(self) -> Pulled:
        """The next element."""
        start = time.perf_counter()
        try:
            if self._iterator is None:
                self._iterator = self._begin()
            value = next(self._iterator)
        except StopIteration:
            return END
        except Exception as error:
            raise OperatorError.of(error, self.name, self.location, None) from None
        origin = (self.name, "", self.items)
        self.items += 1
        end = time.perf_counter()
        self.busy += end - start
        if self.flow.tracer is not None:
            self.flow.tracer.span((self.name, start, end))
        return value, origin

    def _begin(self) -> Iterator[Any]:
        """An iterator without the elements that came before a resume."""
        iterator = iter(self._iterable)
        for _ in range(self.items):
            next(iterator)
        return iterator


class PollSource(Source):
    """Results of a function; `None` means that there is none yet."""

    def __init__(self, name: str, location: str, function: Callable[[], Any]):
        super().__init__(name, location, iter(function, object()))

    def pull(self) -> Pulled:
        """The next result, if there is one now."""
        packet = super().pull()
        if packet is not None and packet is not END and packet[0] is None:
            self.items -= 1
            return None
        return packet

    def _begin(self) -> Iterator[Any]:
        return iter(self._iterable)

    def blocked(self) -> str | None:
        """Nothing to return."""
        return f"{self.name} ({self.location}) has no item yet"


class StreamActor:
    """An actor that iterates a stream of its own, so that flows nest into trees.

    The stream is made at the first request, on the actor, by the factory of its index: a list, a local
    `Iter`, or, for a flow with actors of its own, a generator that opens an engine and yields from the plan.

    >>> import rollstream as rs
    >>> with rs.engine("inline") as engine:
    ...     actors = engine.spawn(StreamActor, ([lambda: [1, 2], lambda: [3, 4]],), count=2)
    ...     list(from_actors(actors, "next").gather_sync())
    [[1, 3], [2, 4]]
    """

    def __init__(self, factories: Sequence[Callable[[], Iterable[Any]]], *, context: ActorContext):
        self._factory = factories[context.index]
        self._stream: Any = None
        self._iterator: Iterator[Any] | None = None
        self._items = 0

    def next(self) -> Any:
        """The stream's next item; StopIteration at its end."""
        item = next(self._begin())
        self._items += 1
        return item

    def _begin(self) -> Iterator[Any]:
        if self._iterator is None:
            self._stream = self._factory()
            self._iterator = iter(self._stream)
        return self._iterator

    def state_dict(self) -> dict[str, Any]:
        """The inner flow's own state if it has one, and the number of items so far."""
        self._begin()
        inner = self._stream.state_dict() if hasattr(self._stream, "state_dict") else None
        return {"items": self._items, "inner": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; items of a stream without one are skipped."""
        iterator, self._items = self._begin(), state["items"]
        if state["inner"] is not None:
            self._stream.load_state_dict(state["inner"])
        else:
            for _ in range(self._items):
                next(iterator)

    def close(self) -> None:
        """End the inner flow."""
        if (close := getattr(self._iterator, "close", None)) is not None:
            close()


def from_actors(
    actors: Actor[Any] | Sequence[Actor[Any]],
    method: str,
    *,
    name: str | None = None,
    receivers: Sequence[Actor[Any]] = (),
) -> ParIter[Any]:
    """A stream with one shard per actor; each item is a call of the method.

    StopIteration ends the shard. A method that has no item yet returns a `Deferred`, and completes it from
    a later call. A method with a parameter called `context` can add numbers to the provenance of its item:
    `context.note(version=3, steps=64)`. `receivers` are actors that the method sends messages to, and
    that answer it: the graph shows them.
    """
    actors = checked_actors(actors, method)
    name = name or f"{actors[0].cls.__name__}.{method}"
    source = Operator(name, plan_line())
    source.receivers = tuple(receivers)
    return ParIter(actors, ShardPlan(source, method))


def from_items(items: Sequence[T], *, name: str | None = None) -> Iter[T]:
    """A stream of the items of a sequence."""
    return from_iterable(items, name=name or "from_items")


def from_iterable(iterable: Iterable[T], *, name: str | None = None) -> Iter[T]:
    """A stream of the elements of an iterable. A resume skips those it had before."""
    name = name or "from_iterable"
    if not isinstance(iterable, Iterable):
        raise PlanError(f"{name}: {iterable!r} cannot be iterated")
    return Iter(Source(name, plan_line(), iterable))


def from_poll(function: Callable[[], T | None], *, name: str | None = None) -> Iter[T]:
    """A stream of a function's results; `None` means "not ready yet", and StopIteration ends it.

    The function is called again whenever something else in the flow has moved. A snapshot holds no state of
    it: the operator that fills what it reads from has that state.

    >>> queue = []
    >>> def one():
    ...     return queue.pop() if queue else None
    >>> filling = from_items([1, 2]).for_each(queue.append)
    >>> from rollstream import flow
    >>> list(flow.union([filling, from_poll(one).take(2)], output=[1]))
    [1, 2]
    """
    return Iter(PollSource(name or name_of(function, None, "from_poll"), plan_line(), function))
