"""Where streams begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rollstream.engine import Actor, Engine
from rollstream.flow import nested
from rollstream.flow.checks import checked_actors, name_of, require_iterable
from rollstream.flow.errors import PlanError, plan_line
from rollstream.flow.node import Polled, Source
from rollstream.flow.shard import ShardPlan
from rollstream.flow.stream import Iter, ParIter

T = TypeVar("T")


def from_actors(
    actors: Actor[Any] | Sequence[Actor[Any]], method: str, *, name: str | None = None
) -> ParIter[Any]:
    """A stream with one shard an actor; each item is a call of the method, StopIteration ends the shard.

    A method with a parameter called `context` can add numbers to the provenance of its item:
    `context.note(version=3, steps=64)`.
    """
    actors = checked_actors(actors, method)
    name = name or f"{actors[0].cls.__name__}.{method}"
    return ParIter(actors, ShardPlan(name, plan_line(), method, [], base=name))


def from_items(items: Sequence[T], *, name: str | None = None) -> Iter[T]:
    """A stream of the items of a sequence."""
    require_iterable("from_items", items)
    return Iter(Source(name or "from_items", plan_line(), items))


def from_iterable(iterable: Iterable[T], *, name: str | None = None) -> Iter[T]:
    """A stream of whatever can be iterated. To resume, elements given before are skipped."""
    require_iterable("from_iterable", iterable)
    return Iter(Source(name or "from_iterable", plan_line(), iterable))


def from_poll(function: Callable[[], T | None], *, name: str | None = None) -> Iter[T]:
    """A stream of what a function gives; `None` is nothing yet, and StopIteration the end.

    The function is asked whenever something else in the flow has moved. Nothing of it is saved: whatever it
    takes from belongs to an operator that is.

    >>> found = []
    >>> def one():
    ...     return found.pop() if found else None
    >>> given = from_items([1, 2]).for_each(found.append)
    >>> from rollstream import flow
    >>> list(flow.union([given, from_poll(one).take(2)], output=[1]))
    [1, 2]
    """
    return Iter(Polled(name or name_of(function, None, "from_poll"), plan_line(), function))


def from_factories(
    engine: Engine, factories: Sequence[Callable[[], Iterable[T]]], *, name: str | None = None
) -> ParIter[T]:
    """One actor a factory, each consuming its own independent stream: flows nest into trees.

    A factory is called on its actor and returns something to iterate: a list, a local `Iter`, or, for a
    flow with actors of its own, a generator that opens an engine and yields from the plan:

    >>> import rollstream as rs
    >>> from rollstream.testing import ScriptedSource
    >>> def inner():
    ...     with rs.engine("inline") as engine:
    ...         sources = engine.spawn(ScriptedSource, ([[1, 2], [10, 20]],), count=2)
    ...         yield from from_actors(sources, "next").gather_sync().for_each(sum)
    >>> with rs.engine("threads") as engine:
    ...     list(from_factories(engine, [inner, inner]).gather_sync())
    [[11, 11], [22, 22]]
    """
    if not factories:
        raise PlanError("from_factories needs at least one factory")
    base = name or name_of(factories[0], None, "from_factories")
    actors = engine.spawn(nested.Consumer, (factories,), count=len(factories), name=base)
    return from_actors(actors, "next", name=base)
