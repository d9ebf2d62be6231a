"""Where streams meet: the unions, and the rate limiter between two streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from rollstream.flow.branches import Split, Union, UnionAsync
from rollstream.flow.checks import require_whole
from rollstream.flow.errors import PlanError, plan_line
from rollstream.flow.limiter import Limit, RatioLimiter
from rollstream.flow.node import Node, ancestors
from rollstream.flow.stream import Iter, ParIter

T = TypeVar("T")
U = TypeVar("U")


def union(
    iters: Sequence[Iter[T]],
    weights: Sequence[int] | None = None,
    output: Sequence[int] | None = None,
    *,
    name: str | None = None,
) -> Iter[T]:
    """Take `weights[i]` items from stream i, then the next stream's turn: exact and deterministic.

    `output` lists the streams whose items are given; the others run and their items end here. A stream
    that has ended is skipped, one that cannot run yet forfeits its turn. Ends with its outputs.
    """
    weights = [1] * len(iters) if weights is None else list(weights)
    if len(weights) != len(iters):
        raise PlanError(f"{len(weights)} weights for {len(iters)} streams; give one weight a stream")
    for weight in weights:
        require_whole("weights", weight, 1)
    nodes = _meet("union", iters, output)
    _refuse_shared_splits(nodes)
    _refuse_limiters(nodes)
    node = Union(name or "union", plan_line(), nodes, weights, _outputs(iters, output))
    return _joined(iters, node)


def union_async(
    iters: Sequence[Iter[T]], output: Sequence[int] | None = None, *, name: str | None = None
) -> Iter[T]:
    """Take whatever is ready, in turn; of a split's branches, the one with the larger backlog first.

    `output` lists the streams whose items are given; the others run and their items end here.
    """
    nodes = _meet("union_async", iters, output)
    return _joined(iters, UnionAsync(name or "union_async", plan_line(), nodes, _outputs(iters, output)))


def limit_ratio(
    inserts: Iter[T],
    samples: Iter[U],
    samples_per_insert: float,
    *,
    min_size: int = 1,
    error_buffer: float | None = None,
    name: str | None = None,
) -> tuple[Iter[T], Iter[U]]:
    """Couple two streams: so many items of the second for each of the first, within `error_buffer` items.

    No sample is asked for before `min_size` inserts have passed. Put it right behind the gathers, so that
    it is their requests that are admitted or withheld. When one stream ends, the other ends where the
    ratio stops it. See `RatioLimiter` for the inequalities.
    """
    _require_iter("limit_ratio", inserts)
    _require_iter("limit_ratio", samples)
    require_whole("min_size", min_size, 1)
    least = max(1.0, samples_per_insert)
    error_buffer = least if error_buffer is None else error_buffer
    if samples_per_insert <= 0:
        raise PlanError(f"samples_per_insert={samples_per_insert}: it has to be positive")
    if error_buffer < least:
        raise PlanError(
            f"error_buffer={error_buffer} is too small to admit anything; give at least {least:g}"
        )
    limiter = RatioLimiter(samples_per_insert, min_size, error_buffer)
    name = name or "limit_ratio"
    left = Limit(f"{name}.inserts", plan_line(), inserts._use("limit_ratio"), limiter, inserts=True)
    right = Limit(f"{name}.samples", plan_line(), samples._use("limit_ratio"), limiter, inserts=False)
    left.partner, right.partner = right, left
    return inserts._into(left), samples._into(right)


def _meet(kind: str, iters: Sequence[Iter[Any]], output: Sequence[int] | None) -> list[Node]:
    if not iters:
        raise PlanError(f"{kind} needs at least one stream")
    if output is not None and (not output or not all(0 <= index < len(iters) for index in output)):
        raise PlanError(
            f"output={list(output)}: give indices of streams, 0 to {len(iters) - 1}, at least one"
        )
    for stream in iters:
        _require_iter(kind, stream)
    return [stream._use(kind) for stream in iters]


def _joined(iters: Sequence[Iter[Any]], node: Node) -> Iter[Any]:
    stream = iters[0]._into(node)
    stream._tracer = next((part._tracer for part in iters if part._tracer is not None), None)
    return stream


def _outputs(iters: Sequence[Iter[Any]], output: Sequence[int] | None) -> Sequence[int]:
    return range(len(iters)) if output is None else output


def _refuse_shared_splits(nodes: Sequence[Node]) -> None:
    seen: set[int] = set()
    for node in nodes:
        splits = {id(n): n for n in ancestors(node) if isinstance(n, Split)}
        if shared := seen & set(splits):
            split = splits[shared.pop()]
            raise PlanError(
                f"a union with weights over branches of one split ({split.name} at {split.location}) could "
                f"block itself; join them by union_async"
            )
        seen |= set(splits)


def _refuse_limiters(nodes: Sequence[Node]) -> None:
    seen: set[int] = set()
    for node in nodes:
        limiters = {id(n.limiter) for n in ancestors(node) if isinstance(n, Limit)}
        if seen & limiters:
            raise PlanError(
                "these streams are coupled by a rate limiter and by the union's weights; "
                "keep one of them: join them by union_async, or leave out limit_ratio"
            )
        seen |= limiters


def _require_iter(what: str, stream: Any) -> None:
    if not isinstance(stream, Iter):
        fix = "gather it first" if isinstance(stream, ParIter) else "make one with flow.from_iterable"
        raise PlanError(f"{what} takes Iter streams, and {stream!r} is none; {fix}")
