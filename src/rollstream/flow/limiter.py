"""The rate limiter between two streams: scheduler state that admits or withholds requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollstream.flow.gather import Gather
from rollstream.flow.node import OVER, Node, Pulled


@dataclass
class RatioLimiter:
    """How many samples there may be for so many inserts: counts and two inequalities, nothing else.

    With I inserts, S samples and r samples an insert: a sample is admitted if `I >= min_size` and
    `I*r - (S + 1) >= min_size*r - error_buffer`, an insert if `I + 1 <= min_size` or
    `(I + 1)*r - S <= min_size*r + error_buffer` (as in Reverb, Cassirer et al. 2021).
    """

    samples_per_insert: float
    min_size: int
    error_buffer: float
    inserts: int = 0
    samples: int = 0
    asked: int = 0
    """Inserts asked for that have not come yet."""

    def may_insert(self) -> bool:
        """Whether one more insert may be asked for."""
        inserts = self.inserts + self.asked + 1
        surplus = (inserts - self.min_size) * self.samples_per_insert - self.samples
        return inserts <= self.min_size or surplus <= self.error_buffer

    def may_sample(self) -> bool:
        """Whether one more sample may be asked for."""
        surplus = (self.inserts - self.min_size) * self.samples_per_insert - self.samples - 1
        return self.inserts >= self.min_size and surplus >= -self.error_buffer


class Limit(Node):
    """One side of a rate limiter. Right behind a gather it withholds requests, elsewhere its own pulls."""

    kind = "limit"
    saved = (*Node.saved, "over", "admitted")

    def __init__(self, name: str, location: str, upstream: Node, limiter: RatioLimiter, *, inserts: bool):
        super().__init__(name, location, [upstream])
        self.limiter = limiter
        self.partner: Limit | None = None
        self.inserts = inserts
        self.over = False
        self.admitted = False
        self._gathers = isinstance(upstream, Gather)
        if isinstance(upstream, Gather):
            upstream.gate = self

    def pull(self) -> Pulled:
        """The next item, if the counts allow it."""
        if not self._gathers and not self.admitted:
            if not self.admit():
                return OVER if self._hopeless() else None
            self.admitted = True
        packet = self.upstreams[0].pull()
        if packet is OVER:
            if not self._gathers:
                self.cancel()
            self.over = True
            assert self.flow is not None
            self.flow.progress += 1
        elif packet is not None:
            self.admitted = False
            self.items += 1
            self._passed()
        elif self._gathers and self._hopeless() and not self.upstreams[0].held():
            return OVER
        return packet

    def start(self, *, rows: bool = True) -> None:
        """A gather asks for admission itself; anything else begins if an item may pass."""
        if self._gathers or self.admitted or self._may():
            super().start(rows=rows)

    def admit(self) -> bool:
        """Count one more item asked for, if it may be."""
        if not self._may():
            return False
        if self.inserts:
            self.limiter.asked += 1
        else:
            self.limiter.samples += 1
        return True

    def cancel(self) -> None:
        """An item asked for will not come."""
        if self.inserts:
            self.limiter.asked -= 1
        else:
            self.limiter.samples -= 1

    def _passed(self) -> None:
        if self.inserts:
            self.limiter.asked -= 1
            self.limiter.inserts += 1
        assert self.flow is not None
        self.flow.progress += 1

    def _may(self) -> bool:
        return self.limiter.may_insert() if self.inserts else self.limiter.may_sample()

    def _hopeless(self) -> bool:
        """Whether the other side has ended, so that nothing will ever be admitted here again."""
        return not self._may() and self.partner is not None and (self.partner.over or self.partner.stopped)

    def bound(self) -> str:
        """The ratio."""
        limiter = self.limiter
        return f"{limiter.samples_per_insert:g} samples an insert, at least {limiter.min_size}"

    def blocked(self) -> str | None:
        """Withheld by the counts."""
        if self._may():
            return None
        limiter, kind = self.limiter, "inserts" if self.inserts else "samples"
        return (
            f"{self.name} ({self.location}) withholds {kind}: {limiter.inserts} inserts and "
            f"{limiter.samples} samples so far, {self.bound()}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The counts, less the requests whose replies are deferred: those will be asked for again."""
        upstream = self.upstreams[0]
        again = upstream.unanswered() if isinstance(upstream, Gather) else 0
        if self.inserts:
            counts = {"inserts": self.limiter.inserts, "asked": self.limiter.asked - again}
        else:
            counts = {"samples": self.limiter.samples - again}
        return {**super().state_dict(), **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        if self.inserts:
            self.limiter.inserts, self.limiter.asked = state["inserts"], state["asked"]
        else:
            self.limiter.samples = state["samples"]
