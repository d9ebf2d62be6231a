"""Where an item comes from: it travels with the item, and merges when items do.

Inside a flow the *origin* of an item straight from a source is the plain tuple `(source, sequence, notes)`,
because one is made for every item; anything merged is a `Provenance`. `provenance_of` turns the one into the
other when an operator asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class Span:
    """Items `first` to `last` of one source, `count` of them."""

    source: str
    first: int
    last: int
    count: int


class Tally(NamedTuple):
    """A number noted by sources, over all the items that were merged."""

    total: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Provenance:
    """The source items that went into an item, compact: one span a source, one tally a note."""

    spans: tuple[Span, ...]
    notes: Mapping[str, Tally] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the actors (or local sources) that contributed."""
        return tuple(span.source for span in self.spans)

    @property
    def sequence(self) -> int:
        """The sequence number of the newest source item (of the first source, if there are several)."""
        return self.spans[0].last

    def total(self, note: str) -> float:
        """The sum of a number over the source items, 0 if none noted it: environment steps, say."""
        return self.notes[note].total if note in self.notes else 0

    def least(self, note: str) -> float | None:
        """The smallest of a number over the source items: the oldest policy version, say."""
        return self.notes[note].least if note in self.notes else None

    def most(self, note: str) -> float | None:
        """The largest of a number over the source items."""
        return self.notes[note].most if note in self.notes else None


@dataclass(frozen=True, slots=True)
class Row:
    """The origins of a `gather_sync` row, kept apart so that `flatten` gives each item its own."""

    parts: tuple[Origin, ...]


Origin: TypeAlias = "tuple[str, int, Mapping[str, float] | None] | Provenance | Row"


def provenance_of(origin: Origin) -> Provenance:
    """The public form of an origin."""
    if isinstance(origin, Provenance):
        return origin
    if isinstance(origin, Row):
        return merged(origin.parts)
    source, sequence, notes = origin
    tallies = {key: Tally(value, value, value) for key, value in notes.items()} if notes else {}
    return Provenance((Span(source, sequence, sequence, 1),), tallies)


def merged(origins: Iterable[Origin]) -> Provenance:
    """One provenance for several items."""
    merger = Merger()
    for origin in origins:
        merger.add(origin)
    return merger.take()


class Merger:
    """Collects the origins of the inputs since the last output.

    A source's items arrive in order, so one that lies within what is collected already is another copy
    of the same (`flatten` and `split` make them) and counts once.
    """

    __slots__ = ("_notes", "_spans")

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}
        self._notes: dict[str, Tally] = {}

    def add(self, origin: Origin) -> None:
        """Take one more input into account."""
        if isinstance(origin, Row):
            for part in origin.parts:
                self.add(part)
            return
        provenance = provenance_of(origin)
        fresh = False
        for span in provenance.spans:
            known = self._spans.get(span.source)
            if known is None:
                self._spans[span.source] = span
            elif known.first <= span.first and span.last <= known.last:
                continue
            else:
                first, last = min(known.first, span.first), max(known.last, span.last)
                self._spans[span.source] = Span(span.source, first, last, known.count + span.count)
            fresh = True
        if fresh:
            for key, tally in provenance.notes.items():
                have = self._notes.get(key)
                self._notes[key] = tally if have is None else _add(have, tally)

    def take(self) -> Provenance:
        """The merged provenance; the merger starts anew."""
        provenance = Provenance(tuple(self._spans.values()), self._notes)
        self._spans, self._notes = {}, {}
        return provenance

    def state_dict(self) -> Any:
        """What is collected so far, as plain data."""
        return encode(Provenance(tuple(self._spans.values()), self._notes))

    def load_state_dict(self, state: Any) -> None:
        """Go on from a saved state."""
        provenance = decode(state)
        assert isinstance(provenance, Provenance)
        self._spans = {span.source: span for span in provenance.spans}
        self._notes = dict(provenance.notes)


def _add(left: Tally, right: Tally) -> Tally:
    return Tally(left.total + right.total, min(left.least, right.least), max(left.most, right.most))


def encode(origin: Origin) -> Any:
    """An origin as JSON."""
    if isinstance(origin, Provenance):
        spans = [[span.source, span.first, span.last, span.count] for span in origin.spans]
        return {"spans": spans, "notes": {key: list(tally) for key, tally in origin.notes.items()}}
    if isinstance(origin, Row):
        return {"parts": [encode(part) for part in origin.parts]}
    return list(origin)


def decode(state: Any) -> Origin:
    """An origin from JSON."""
    if isinstance(state, Mapping):
        if "parts" in state:
            return Row(tuple(decode(part) for part in state["parts"]))
        notes = {key: Tally(*tally) for key, tally in state["notes"].items()}
        return Provenance(tuple(Span(*span) for span in state["spans"]), notes)
    source, sequence, notes = state
    return (source, sequence, notes)
