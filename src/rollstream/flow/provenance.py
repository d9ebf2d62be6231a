"""Where an item comes from: it travels with the item, and merges when items do.

Inside a flow the *origin* of an item straight from a source is the plain tuple `(source, stream, sequence)`,
with its notes as a fourth element if it has some, because one is made for every item; anything more is a
`Provenance`. `provenance_of` turns the one into the other when an operator asks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

_SPANS = 64
"""Spans kept per stream of a source; beyond that, the oldest two become one."""
_WAITING = 64
"""Origins that are collected before they are merged, at once: one by one would take more time per item."""


class Span(NamedTuple):
    """Items `first` to `last` of one stream of one source, `items` of them."""

    source: str
    stream: str
    first: int
    last: int
    items: int


class Tally(NamedTuple):
    """A note's sum, minimum and maximum over the source items."""

    total: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Provenance:
    """The source items that went into an item: spans of each source, one tally per note."""

    spans: tuple[Span, ...]
    notes: Mapping[str, Tally] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the actors (or local sources) that contributed."""
        return tuple(dict.fromkeys(span.source for span in self.spans))

    @property
    def sequence(self) -> int:
        """The index of the newest item of the first source, from 0 for each stream of a source."""
        return max(span.last for span in self.spans if span.source == self.spans[0].source)

    @property
    def count(self) -> int:
        """The number of source items."""
        return sum(span.items for span in self.spans)

    def total(self, note: str) -> float:
        """The sum of a note over the source items (environment steps, say); 0 if none has it."""
        return self.notes[note].total if note in self.notes else 0

    def least(self, note: str) -> float | None:
        """The minimum of a note over the source items: the oldest policy version, say."""
        return self.notes[note].least if note in self.notes else None

    def most(self, note: str) -> float | None:
        """The maximum of a note over the source items."""
        return self.notes[note].most if note in self.notes else None


SourceOrigin: TypeAlias = tuple[str, str, int] | tuple[str, str, int, dict[str, float]]


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """The origins of a `gather_sync` row, one per element, so that `flatten` can restore them."""

    parts: tuple[Origin, ...]


Origin: TypeAlias = "SourceOrigin | Provenance | RowOrigin"


def provenance_of(origin: Origin) -> Provenance:
    """The public form of an origin."""
    if isinstance(origin, Provenance):
        return origin
    if isinstance(origin, RowOrigin):
        return provenance_of(merged(origin))
    spans = (Span(origin[0], origin[1], origin[2], origin[2], 1),)
    return Provenance(spans) if len(origin) == 3 else Provenance(spans, _tallies(origin[3]))


def total(origin: Origin, note: str) -> float:
    """The sum of a note over the source items, as `Provenance.total`."""
    if isinstance(origin, RowOrigin):
        return total(merged(origin), note)
    if isinstance(origin, tuple):
        return origin[3].get(note, 0) if len(origin) == 4 else 0
    return provenance_of(origin).total(note)


def least(origin: Origin, note: str) -> float | None:
    """The minimum of a note over the source items, as `Provenance.least`."""
    if isinstance(origin, tuple):
        return origin[3].get(note) if len(origin) == 4 else None
    return provenance_of(origin).least(note)


def noted(origin: Origin, numbers: dict[str, float]) -> Origin:
    """An origin with more notes."""
    if isinstance(origin, tuple):
        return (*origin[:3], origin[3] | numbers if len(origin) == 4 else numbers)
    provenance = provenance_of(origin)
    return Provenance(provenance.spans, {**provenance.notes, **_tallies(numbers)})


def _tallies(numbers: Mapping[str, float]) -> dict[str, Tally]:
    return {key: Tally(value, value, value) for key, value in numbers.items()}


def merged(row: RowOrigin) -> Origin:
    """One origin for a row."""
    if len(row.parts) == 1:
        return row.parts[0]
    merger = Merger()
    merger.add(row)
    return merger.take()


class Merger:
    """Collects the origins of the inputs since the last output.

    Copies of an item (`flatten` and `split` make them) count once. If a merged provenance overlaps what was
    collected before, its notes count in proportion to its new items.
    """

    __slots__ = ("_notes", "_spans", "_waiting")

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], list[Span]] = {}
        self._notes: dict[str, Tally] = {}
        self._waiting: list[Origin] = []

    def add(self, origin: Origin) -> None:
        """Collect one more origin."""
        self._waiting.append(origin)
        if len(self._waiting) == _WAITING:
            self._merge_waiting()

    def _merge_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for origin in waiting:
            self._merge(origin)

    def _merge(self, origin: Origin) -> None:
        if isinstance(origin, RowOrigin):
            for part in origin.parts:
                self._merge(part)
            return
        if isinstance(origin, tuple) and self._extend(origin):
            return
        provenance = provenance_of(origin)
        fresh = sum(
            _insert(self._spans.setdefault((span.source, span.stream), []), span) for span in provenance.spans
        )
        for key, tally in provenance.notes.items() if fresh else ():
            part = 1 if fresh == provenance.count else fresh / provenance.count
            have = self._notes.get(key, Tally(0, tally.least, tally.most))
            self._notes[key] = Tally(
                have.total + part * tally.total, min(have.least, tally.least), max(have.most, tally.most)
            )

    def _extend(self, origin: SourceOrigin) -> bool:
        """Collect the origin of the next item of a stream, which most are; false if it is another."""
        source, stream, sequence, *rest = origin
        spans = self._spans.get((source, stream))
        if spans is None or spans[-1].last != sequence - 1:
            return False
        first, count = spans[-1].first, spans[-1].items
        spans[-1] = Span(source, stream, first, sequence, count + 1)
        for key, value in rest[0].items() if rest else ():
            have = self._notes.get(key)
            self._notes[key] = (
                Tally(value, value, value)
                if have is None
                else Tally(have.total + value, min(have.least, value), max(have.most, value))
            )
        return True

    def take(self) -> Provenance:
        """The merged provenance; the merger is empty afterwards."""
        provenance = self._provenance()
        self._spans, self._notes = {}, {}
        return provenance

    def _provenance(self) -> Provenance:
        self._merge_waiting()
        return Provenance(tuple(span for spans in self._spans.values() for span in spans), self._notes)

    def state_dict(self) -> Any:
        """The origins collected so far, as plain data."""
        return encode(self._provenance())

    def load_state_dict(self, state: Any) -> None:
        """Restore a saved state."""
        provenance = provenance_of(decode(state))
        self._spans, self._waiting = {}, []
        for span in provenance.spans:
            self._spans.setdefault((span.source, span.stream), []).append(span)
        self._notes = dict(provenance.notes)


def _insert(spans: list[Span], new: Span) -> int:
    """Add a span to sorted, disjoint ones; returns the number of its items that are new."""
    if not spans:
        spans.append(new)
        return new.items
    if (last := spans[-1]).last == new.first - 1:  # the common case
        spans[-1] = Span(new.source, new.stream, last.first, new.last, last.items + new.items)
        return new.items
    position = bisect_right(spans, new.first, key=lambda span: span.first)
    start = position - 1 if position and spans[position - 1].last >= new.first - 1 else position
    end, known = start, 0
    while end < len(spans) and spans[end].first <= new.last + 1:
        overlap = min(spans[end].last, new.last) - max(spans[end].first, new.first) + 1
        known += max(0, min(overlap, new.items))
        end += 1
    touched = spans[start:end]
    fresh = max(0, new.items - known)
    first = min([new.first, *(span.first for span in touched)])
    last = max([new.last, *(span.last for span in touched)])
    count = fresh + sum(span.items for span in touched)
    spans[start:end] = [Span(new.source, new.stream, first, last, count)]
    if len(spans) > _SPANS:
        old, next_ = spans[0], spans[1]
        spans[:2] = [Span(old.source, old.stream, old.first, next_.last, old.items + next_.items)]
    return fresh


def encode(origin: Origin) -> Any:
    """An origin as JSON."""
    if isinstance(origin, Provenance):
        notes = {key: list(tally) for key, tally in origin.notes.items()}
        return {"spans": [list(span) for span in origin.spans], "notes": notes}
    if isinstance(origin, RowOrigin):
        return {"parts": [encode(part) for part in origin.parts]}
    return list(origin)


def decode(state: Any) -> Origin:
    """An origin from JSON."""
    if isinstance(state, Mapping):
        if "parts" in state:
            return RowOrigin(tuple(decode(part) for part in state["parts"]))
        notes = {key: Tally(*tally) for key, tally in state["notes"].items()}
        return Provenance(tuple(Span(*span) for span in state["spans"]), notes)
    source, stream, sequence, *notes = state
    return (source, stream, sequence, dict(notes[0])) if notes else (source, stream, sequence)
