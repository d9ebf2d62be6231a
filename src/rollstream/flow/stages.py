"""Stages: what one operator does to one item. A `Chain` runs a row of them in a plain loop.

A stage either has `plain`, a function of the value alone, or a `push` method that takes a value with its
origin and returns an output, or `None` if it has none yet. Further outputs wait in `out`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollstream.engine.actor import Actor
from rollstream.engine.slot import wants_context
from rollstream.flow.errors import StateError
from rollstream.flow.provenance import Merger, Origin, Provenance, Row, Tally, provenance_of
from rollstream.flow.state import Packet, Stateful


class Context:
    """What an operator may know beside its value: ask for it with a parameter called `context`."""

    __slots__ = ("_directory", "_origin", "instance", "node")

    def __init__(self, node: str, origin: Origin, instance: Any, directory: Mapping[str, Actor[Any]]):
        self.node = node
        """The operator's name."""
        self.instance = instance
        """On a `ParIter`, the source actor's own instance; else `None`."""
        self._origin = origin
        self._directory = directory

    @property
    def provenance(self) -> Provenance:
        """Where the value comes from."""
        return provenance_of(self._origin)

    @property
    def actors(self) -> list[Actor[Any]]:
        """The actors the value comes from, to send them messages. Empty on a `ParIter`."""
        return [self._directory[name] for name in self.provenance.sources if name in self._directory]

    def note(self, **numbers: float) -> None:
        """Add numbers to the provenance: a policy version, environment steps."""
        for key, value in numbers.items():
            if not isinstance(value, (int, float)):
                raise TypeError(f"note({key}={value!r}): notes are numbers, so that they can be added up")
        provenance = self.provenance
        tallies = {key: Tally(value, value, value) for key, value in numbers.items()}
        self._origin = Provenance(provenance.spans, {**provenance.notes, **tallies})


class Stage(Stateful):
    """One operator of a chain: its name, its counters and what it does to an item."""

    kind = "stage"
    saved = ("received", "items")
    queues = ("out",)
    plain: Callable[[Any], Any] | None = None
    left: int | None = None
    """How many more inputs this stage wants, where it wants only so many."""

    def __init__(self, name: str, location: str, function: Any = None):
        self.name = self.base = name
        self.location = location
        self.function = function
        self._wants_context = function is not None and wants_context(function)
        self.out: deque[Packet] = deque()
        self.received = 0
        self.items = 0
        self.busy = 0.0
        self.instance: Any = None
        self.directory: Mapping[str, Actor[Any]] = {}

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """Take one item; give the first output, if there is one."""
        raise NotImplementedError

    def flush(self) -> Packet | None:
        """The last output, when the stream ends."""
        return None

    def held(self) -> int:
        """How many items wait here."""
        return len(self.out)

    def bound(self) -> str:
        """What limits the items held here, for the graph."""
        return ""

    def call(self, value: Any, origin: Origin) -> Packet:
        """Call the function, with a context if it asks for one; its notes become part of the origin."""
        if not self._wants_context:
            return self.function(value), origin
        context = Context(self.name, origin, self.instance, self.directory)
        return self.function(value, context=context), context._origin

    def state_dict(self) -> dict[str, Any]:
        """Also the function's own state, if it offers one."""
        state = super().state_dict()
        if hasattr(self.function, "state_dict"):
            try:
                state["function"] = self.function.state_dict()
            except Exception as error:
                raise StateError(f"{self.name} ({self.location}) could not be saved: {error!r}") from error
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        if "function" in state:
            try:
                self.function.load_state_dict(state["function"])
            except Exception as error:
                raise StateError(f"{self.name} ({self.location}) could not be loaded: {error!r}") from error


class ForEach(Stage):
    """One output an input."""

    kind = "for_each"

    def __init__(self, name: str, location: str, function: Callable[..., Any]):
        super().__init__(name, location, function)
        self.plain = None if wants_context(function) else function

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """Call the function with its context."""
        return self.call(value, origin)


class Filter(Stage):
    """Keeps the items for which the function is true."""

    kind = "filter"

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """The item itself, or nothing."""
        keep, origin = self.call(value, origin)
        return (value, origin) if keep else None


class Flatten(Stage):
    """The elements of each item, one by one."""

    kind = "flatten"

    def push(self, value: Iterable[Any], origin: Origin) -> Packet | None:
        """Each element has the item's provenance; those of a `gather_sync` row have their own."""
        elements = list(value)
        if isinstance(origin, Row) and len(origin.parts) == len(elements):
            self.out.extend(zip(elements, origin.parts, strict=True))
        else:
            self.out.extend((element, origin) for element in elements)
        return self.out.popleft() if self.out else None


class Merging(Stage):
    """A stage that makes one output of several inputs keeps their merged provenance until then."""

    def __init__(self, name: str, location: str, function: Any = None):
        super().__init__(name, location, function)
        self._merger = Merger()

    def state_dict(self) -> dict[str, Any]:
        """Also the provenance of the inputs since the last output."""
        return {**super().state_dict(), "merger": self._merger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        self._merger.load_state_dict(state["merger"])


class Combine(Merging):
    """Each item to a list, flattened; outputs carry the provenance of all inputs since the last one."""

    kind = "combine"

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """Call the function; it may keep the item and give nothing."""
        outputs, origin = self.call(value, origin)
        self._merger.add(origin)
        outputs = list(outputs)
        if not outputs:
            return None
        provenance = self._merger.take()
        self.out.extend((output, provenance) for output in outputs)
        return self.out.popleft()


class Batch(Merging):
    """Lists of `size` items; the last may be shorter."""

    kind = "batch"
    saved = (*Stage.saved, "partial")

    def __init__(self, name: str, location: str, size: int):
        super().__init__(name, location)
        self.size = size
        self.partial: list[Any] = []

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """Collect; a full list goes on."""
        self.partial.append(value)
        self._merger.add(origin)
        return self.flush() if len(self.partial) == self.size else None

    def flush(self) -> Packet | None:
        """What is collected."""
        if not self.partial:
            return None
        batch, self.partial = self.partial, []
        return batch, self._merger.take()

    def held(self) -> int:
        """Also the items of the list that is being filled."""
        return len(self.partial) + len(self.out)

    def bound(self) -> str:
        """The size of a list."""
        return f"batch of {self.size}"


class Take(Stage):
    """The first `count` items, then the end."""

    kind = "take"
    saved = (*Stage.saved, "left")

    def __init__(self, name: str, location: str, count: int):
        super().__init__(name, location)
        self.count = self.left = count

    def push(self, value: Any, origin: Origin) -> Packet | None:
        """The item itself."""
        self.left = self.count - self.received
        return value, origin

    def bound(self) -> str:
        """How many it takes."""
        return f"first {self.count}"
