"""An actor that consumes a stream of its own, so that flows nest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollstream.engine import ActorContext


class Consumer:
    """Builds its stream when it is first asked, and gives its items one by one."""

    def __init__(self, factories: Sequence[Callable[[], Iterable[Any]]], *, context: ActorContext):
        self._factory = factories[context.index]
        self._stream: Any = None
        self._iterator: Iterator[Any] | None = None
        self._given = 0

    def next(self) -> Any:
        """The stream's next item; StopIteration at its end."""
        item = next(self._begin())
        self._given += 1
        return item

    def _begin(self) -> Iterator[Any]:
        if self._iterator is None:
            self._stream = self._factory()
            self._iterator = iter(self._stream)
        return self._iterator

    def state_dict(self) -> dict[str, Any]:
        """The inner flow's own state if it has one, else how many items it gave."""
        self._begin()
        inner = self._stream.state_dict() if hasattr(self._stream, "state_dict") else None
        return {"given": self._given, "inner": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; items of a stream without one are skipped."""
        iterator, self._given = self._begin(), state["given"]
        if state["inner"] is not None:
            self._stream.load_state_dict(state["inner"])
        else:
            for _ in range(self._given):
                next(iterator)

    def close(self) -> None:
        """End the inner flow."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
