"""A check that any operator on an `Iter` can be put through."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from rollstream.engine import Engine, engine
from rollstream.flow import Iter, from_actors, from_iterable, union_async
from rollstream.testing.chaos import chaos_engine
from rollstream.testing.scripted import ScriptedSource

Operator = Callable[[Iter[Any]], Iter[Any]]
_END = object()


def check_operator(
    operator: Operator, items: Sequence[Any], expected: Sequence[Any], *, seeds: int = 8, saved: bool = True
) -> None:
    """Check that an operator turns `items` into `expected`, however the items come.

    Built, it pulls nothing. Its outputs are the same over a local source, over an actor on each engine and
    under `seeds` orders of events. Closed early, it stops its source. With `saved`, a snapshot taken after
    any output, and after any input, sent through JSON and loaded into a fresh flow, gives the same remaining
    outputs. `operator` has to build everything anew on each call.
    """
    _check_lazy(operator, items)
    assert list(operator(from_iterable(items))) == list(expected), "over a local source"
    for make in _engines(seeds):
        _check_on(make, operator, items, expected, saved=saved)


def _engines(seeds: int) -> Iterator[Callable[[], Engine]]:
    yield lambda: engine("inline")
    yield lambda: engine("threads")
    for seed in range(seeds):
        yield lambda seed=seed: chaos_engine(seed)


def _check_lazy(operator: Operator, items: Sequence[Any]) -> None:
    pulled: list[Any] = []

    def source() -> Iterator[Any]:
        for item in items:
            pulled.append(item)
            yield item

    stream = operator(from_iterable(source()))
    assert not pulled, "building the operator pulled items"
    next(stream, _END)
    before = len(pulled)
    stream.close()
    assert next(stream, _END) is _END, "a closed stream gives no items"
    assert len(pulled) == before, "a closed stream pulled items"


def _check_on(
    make: Callable[[], Engine],
    operator: Operator,
    items: Sequence[Any],
    expected: Sequence[Any],
    *,
    saved: bool,
) -> None:
    def plain(engine: Engine) -> Iter[Any]:
        sources = engine.spawn(ScriptedSource, ([items],), count=1, name="source")
        return operator(from_actors(sources, "next").gather_async(2)).for_each(_given, name="given")

    def beside_its_inputs(engine: Engine) -> Iter[Any]:
        """Also gives something after each input, so that a snapshot finds the operator half-way."""
        sources = engine.spawn(ScriptedSource, ([items],), count=1, name="source")
        left, right = from_actors(sources, "next").gather_async(2).split(2, buffer=1)
        outputs = operator(left).for_each(_given, name="given")
        return union_async([outputs, right.for_each(lambda _: "input", name="input")])

    with make() as engine:
        where = f"on {engine!r}"
        outputs = _outputs(plain(engine))
        assert outputs == list(expected), f"{where}: {outputs}"
    for begin in (plain, beside_its_inputs) if saved else ():
        _check_resumes(make, begin, expected, where)


def _check_resumes(
    make: Callable[[], Engine], begin: Callable[[Engine], Iter[Any]], expected: Sequence[Any], where: str
) -> None:
    position, over = 0, False
    while not over:
        with make() as engine:
            stream = begin(engine)
            before = list(islice(stream, position))
            state = json.loads(json.dumps(stream.state_dict()))
            over = len(before) < position
            rest = _outputs(stream)
            assert _outputs(before) + rest == list(expected), f"{where}: a snapshot changed the outputs"
        with make() as engine:
            stream = begin(engine)
            stream.load_state_dict(state)
            resumed = _outputs(before) + _outputs(stream)
            assert resumed == list(expected), f"{where}: after a resume at item {position}: {resumed}"
        position += 1


def _given(output: Any) -> list[Any]:
    return ["output", output]


def _outputs(items: Iterable[Any]) -> list[Any]:
    return [item[1] for item in items if item != "input"]
