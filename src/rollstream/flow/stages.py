"""Stages: what one operator does to one item. A `Chain` runs several of them in one loop.

A stage either has `plain`, a function of the value alone, or a `push` method that takes a value with its
origin and returns an output, or `None` if it has none yet. Further outputs wait in `out`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollstream.engine.actor import Actor
from rollstream.engine.future import Ref
from rollstream.engine.slot import wants_context
from rollstream.flow.errors import StateError
from rollstream.flow.operator import Operator, Packet
from rollstream.flow.provenance import (
    Merger,
    Origin,
    Provenance,
    RowOrigin,
    least,
    noted,
    provenance_of,
    total,
)


class Context:
    """What an operator may know beside its value; it asks with a parameter called `context`."""

    __slots__ = ("_actors", "instance", "node", "origin")

    def __init__(self, node: str, origin: Origin, instance: Any, actors: Mapping[str, Actor[Any]]):
        self.node = node
        """The operator's name."""
        self.instance = instance
        """On a `ParIter`, the source actor's own instance; else `None`."""
        self.origin = origin
        """The provenance in the compact form that flows use; read `provenance` instead."""
        self._actors = actors

    @property
    def provenance(self) -> Provenance:
        """Where the value comes from."""
        return provenance_of(self.origin)

    @property
    def actors(self) -> list[Actor[Any]]:
        """The actors the value comes from, to send them messages. Empty on a `ParIter`."""
        return [self._actors[name] for name in self.provenance.sources if name in self._actors]

    def note(self, **numbers: float) -> None:
        """Add numbers to the provenance: a policy version, environment steps."""
        for key, value in numbers.items():
            if not isinstance(value, (int, float)):
                raise TypeError(f"note({key}={value!r}): notes are numbers, so that they can be added up")
        self.origin = noted(self.origin, numbers)

    def total(self, note: str) -> float:
        """`provenance.total(note)`, without making a provenance of a single item's origin."""
        return total(self.origin, note)

    def least(self, note: str) -> float | None:
        """`provenance.least(note)`, likewise."""
        return least(self.origin, note)


class Stage(Operator):
    """One operator of a chain."""

    kind = "stage"
    saved = ("received", "items")
    queues = ("out",)
    plain: Callable[[Any], Any] | None = None
    left: int | None = None
    """The number of inputs this stage still wants, if it is limited."""

    def __init__(self, name: str, location: str, function: Any = None):
        super().__init__(name, location, function)
        self._wants_context = function is not None and wants_context(function)
        self.out: deque[Packet] = deque()
        self.instance: Any = None
        self.put: Callable[[Any], Ref[Any]] = Ref
        """Stores a value where this stage runs."""
        self.actors: Mapping[str, Actor[Any]] = {}

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """Take one item; return the first output, if there is one."""
        raise NotImplementedError

    def flush(self) -> Packet | None:
        """The last output, when the stream ends."""
        return None

    def held(self) -> int:
        """Outputs that wait here."""
        return len(self.out)

    def call(self, value: Any, origin: Origin) -> Packet:
        """Call the function, with a context if it asks for one; its notes become part of the origin."""
        if not self._wants_context:
            return self.function(value), origin
        context = Context(self.name, origin, self.instance, self.actors)
        return self.function(value, context=context), context.origin

    def state_dict(self) -> dict[str, Any]:
        """Also the function's own state, if it has one."""
        state = super().state_dict()
        if hasattr(self.function, "state_dict"):
            try:
                state["function"] = self.function.state_dict()
            except Exception as error:
                raise StateError(f"{self.name} ({self.location}) could not be saved: {error!r}") from error
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also the function's own state, if it has one."""
        super().load_state_dict(state)
        if "function" in state:
            try:
                self.function.load_state_dict(state["function"])
            except Exception as error:
                raise StateError(
                    f"{self.name} ({self.location}) could not be loaded: {str(error) or repr(error)}"
                ) from error


class ForEachStage(Stage):
    """One output per input."""

    kind = "for_each"
    push = Stage.call

    def __init__(self, name: str, location: str, function: Callable[..., Any]):
        super().__init__(name, location, function)
        self.plain = None if self._wants_context else function


class FilterStage(Stage):
    """Keeps the items for which the function is true."""

    kind = "filter"
    drops = True

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """The item itself, or nothing."""
        keep, origin = self.call(value, origin)
        return (value, origin) if keep else None


class FlattenStage(Stage):
    """The elements of each item, one by one."""

    kind = "flatten"

    def push(self, value: Iterable[Any], origin: Origin) -> Packet | None:
        """Each element has the item's provenance; those of a `gather_sync` row have their own."""
        elements = list(value)
        if isinstance(origin, RowOrigin) and len(origin.parts) == len(elements):
            self.out.extend(zip(elements, origin.parts, strict=True))
        else:
            self.out.extend((element, origin) for element in elements)
        return self.out.popleft() if self.out else None


class CombineStage(Stage):
    """Each item to a list, flattened; outputs carry the provenance of all inputs since the last one."""

    kind = "combine"
    parts = ("merger",)

    def __init__(self, name: str, location: str, function: Any):
        super().__init__(name, location, function)
        self.merger = Merger()

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """Call the function; it may keep the item and return an empty list."""
        outputs, origin = self.call(value, origin)
        self.merger.add(origin)
        outputs = list(outputs)
        if not outputs:
            return None
        provenance = self.merger.take()
        self.out.extend((output, provenance) for output in outputs)
        return self.out.popleft()


class BatchStage(Stage):
    """Lists of `size` items; the last may be shorter."""

    kind = "batch"
    saved = (*Stage.saved, "partial")
    parts = ("merger",)

    def __init__(self, name: str, location: str, size: int):
        super().__init__(name, location)
        self.size = size
        self.bound = f"batch of {size}"
        self.partial: list[Any] = []
        self.merger = Merger()

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """Collect the item; return the list when it is full."""
        self.partial.append(value)
        self.merger.add(origin)
        return self.flush() if len(self.partial) >= self.size else None

    def flush(self) -> Packet | None:
        """The list collected so far."""
        if not self.partial:
            return None
        batch, self.partial = self.partial, []
        return batch, self.merger.take()

    def forget(self, lost: Callable[[Any], bool]) -> None:
        """Also the list that is being filled, as a whole: provenance cannot be taken apart."""
        super().forget(lost)
        if any(map(lost, self.partial)):
            self.lost += len(self.partial)
            self.flush()

    def held(self) -> int:
        """Also the items of the list that is being filled."""
        return len(self.partial) + len(self.out)


class TakeStage(Stage):
    """The first `count` items, then the end."""

    kind = "take"
    saved = (*Stage.saved, "left")

    def __init__(self, name: str, location: str, count: int):
        super().__init__(name, location)
        self.count = self.left = count
        self.bound = f"first {count}"

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """The item itself."""
        self.left = self.count - self.received
        return value, origin
