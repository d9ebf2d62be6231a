"""A rate limiter between two streams: scheduler state that admits or withholds requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from rollstream.flow.chain import Chain
from rollstream.flow.checks import require_whole
from rollstream.flow.errors import PlanError, plan_line
from rollstream.flow.node import END, Node, Pulled
from rollstream.flow.stream import Iter, require_iter
from rollstream.rate_limiter import RateLimiter

T = TypeVar("T")
U = TypeVar("U")


class Limit(Node):
    """One side of a rate limiter. Behind a gather it gates requests, elsewhere its own pulls.

    Samples count when they are admitted, inserts when they have passed. So a `filter` between the gather and
    the inserts may drop some; but samples come right from a gather.
    """

    kind = "limit"
    saved = (*Node.saved, "over", "admitted")

    def __init__(self, name: str, location: str, upstream: Node, limiter: RateLimiter, *, inserts: bool):
        super().__init__(name, location, [upstream])
        self.limiter = limiter
        self.bound = f"{limiter.samples_per_insert:g} samples per insert, at least {limiter.min_size}"
        self.other: Limit | None = None
        self.inserts = inserts
        self.pending = 0
        """Inserts that were admitted and have not come yet."""
        self.over = False
        self.admitted = False
        self._gather = _gather_of(upstream, through_chain=inserts)
        if self._gather is not None:
            self._gather.gate = self

    def pull(self) -> Pulled:
        """The next item, if the counts allow it."""
        gather = self._gather
        if gather is None and not self.admitted:
            if not self.admit():
                return END if self._hopeless() else None
            self.admitted = True
        before = 0 if gather is None else gather.items
        packet = self.upstreams[0].pull()
        if self.inserts and gather is not None:
            self.pending -= gather.items - before
        if packet is END:
            if gather is None:
                self.cancel()
            self.over = True
            self.flow.progress += 1
        elif packet is not None:
            if self.admitted:
                self.admitted = False
                self.pending -= self.inserts
            self.items += 1
            self.limiter.inserts += self.inserts
            self.flow.progress += 1
        elif gather is not None and self._hopeless() and not gather.held():
            return END
        return packet

    def start(self, *, rows: bool = True) -> None:
        """A gather asks for admission itself; anything else starts if an item may pass."""
        if self._gather is not None or self.admitted or self._allowed():
            super().start(rows=rows)

    def admit(self) -> bool:
        """Count one more request, if it is allowed now."""
        allowed = self._allowed()
        if allowed:
            self._count(1)
        return allowed

    def cancel(self) -> None:
        """Uncount a request that no item will answer."""
        self._count(-1)

    def _count(self, change: int) -> None:
        if self.inserts:
            self.pending += change
        else:
            self.limiter.samples += change

    def _allowed(self) -> bool:
        if not self.inserts:
            return self.limiter.can_sample()
        return self.limiter.can_insert(self.pending + 1) or self._is_awaited()

    def _is_awaited(self) -> bool:
        """Whether every sample waits for an insert: the replay actors lost their items when they died."""
        samples = None if self.pending or self.other is None else self.other._gather
        return samples is not None and samples.requested > 0 and not samples.ready and self.flow.stalled()

    def _hopeless(self) -> bool:
        """Whether the other side has ended, so that nothing will ever be admitted here again."""
        other = self.other
        return other is not None and (other.over or other.stopped) and not self._allowed()

    def blocked(self) -> str | None:
        """Withheld by the counts."""
        if self._allowed():
            return None
        limiter, kind = self.limiter, "inserts" if self.inserts else "samples"
        return (
            f"{self.name} ({self.location}) withholds {kind}: {limiter.inserts} inserts and "
            f"{limiter.samples} samples so far, {self.bound}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The counts, less the requests whose replies are deferred: those will be made again.

        A `gather_sync` has its row admitted as a whole, and continues it.
        """
        limiter, gather = self.limiter, self._gather
        again = gather.requested if gather is not None and gather.asynchronous else 0
        if self.inserts:
            counts = {"inserts": limiter.inserts, "pending": self.pending - again}
        else:
            counts = {"samples": limiter.samples - again}
        return {**super().state_dict(), **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also the counts."""
        super().load_state_dict(state)
        if self.inserts:
            self.limiter.inserts, self.pending = state["inserts"], state["pending"]
        else:
            self.limiter.samples = state["samples"]


def _gather_of(upstream: Node, *, through_chain: bool) -> Node | None:
    """The gather whose requests a limiter can withhold, if each item of it becomes one at most, at once."""
    if through_chain and isinstance(upstream, Chain):
        if any(stage.kind not in ("for_each", "filter") for stage in upstream.stages):
            return None
        upstream = upstream.upstreams[0]
    return upstream if upstream.requests_items else None


def limit_ratio(
    inserts: Iter[T],
    samples: Iter[U],
    samples_per_insert: float,
    *,
    min_size: int = 1,
    error_buffer: float | None = None,
    name: str | None = None,
) -> tuple[Iter[T], Iter[U]]:
    """Couple two streams: `samples_per_insert` items of the second for each of the first.

    The ratio holds within `error_buffer` samples, by default one insert's worth. No sample is requested
    before `min_size` inserts have passed. Put it right behind the gathers, so that it admits or withholds
    their requests; between a gather and the inserts there may be `for_each` and `filter`. When one stream
    ends, the other ends where the ratio stops it.
    `rollstream.rate_limiter.RateLimiter` has the inequalities.
    """
    require_iter("limit_ratio", inserts)
    require_iter("limit_ratio", samples)
    require_whole("min_size", min_size, 1)
    least = max(1.0, samples_per_insert)
    error_buffer = least if error_buffer is None else error_buffer
    if samples_per_insert <= 0:
        raise PlanError(f"samples_per_insert={samples_per_insert}: give a positive number")
    if error_buffer < least:
        raise PlanError(
            f"error_buffer={error_buffer} is too small to admit anything; give at least {least:g}"
        )
    start = samples_per_insert * min_size
    limiter = RateLimiter(samples_per_insert, min_size, start - error_buffer, start + error_buffer)
    name = name or "limit_ratio"
    left = Limit(f"{name}.inserts", plan_line(), inserts._use("limit_ratio"), limiter, inserts=True)
    right = Limit(f"{name}.samples", plan_line(), samples._use("limit_ratio"), limiter, inserts=False)
    left.coupled, left.other, right.other = right, right, left
    return inserts._into(left), samples._into(right)
