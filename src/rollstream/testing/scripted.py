"""A source that does what a script says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.engine import ActorContext, Deferred


@dataclass(frozen=True)
class Fail:
    """A line of a script: raise this error."""

    error: Exception


@dataclass(frozen=True)
class Pause:
    """A line of a script: hold the next reply back until the source is told to `resume`."""


class ScriptedSource:
    """An actor whose items, failures and pauses are written down; the end of the script ends its shard.

    >>> import rollstream as rs
    >>> from rollstream import flow
    >>> with rs.engine("inline") as engine:
    ...     sources = engine.spawn(ScriptedSource, ([["a", "b"], ["c"]],), count=2)
    ...     list(flow.from_actors(sources, "next").gather_sync())
    [['a', 'c'], ['b']]
    """

    def __init__(self, scripts: Sequence[Sequence[Any]], *, context: ActorContext):
        self._script = scripts[context.index]
        self._position = 0
        self._held: Deferred[Any] | None = None
        self._resumed = 0
        self.told: list[Any] = []

    def next(self) -> Any:
        """Play the next line."""
        if self._position == len(self._script):
            raise StopIteration
        line = self._script[self._position]
        self._position += 1
        if isinstance(line, Fail):
            raise line.error
        if isinstance(line, Pause):
            if self._resumed:
                self._resumed -= 1
                return self.next()
            self._held = Deferred()
            return self._held
        return line

    def resume(self) -> None:
        """End a pause, or the next one there will be: the reply held back is the next line."""
        held, self._held = self._held, None
        if held is None:
            self._resumed += 1
            return
        try:
            held.resolve(self.next())
        except Exception as error:
            held.reject(error)

    def tell(self, message: Any) -> None:
        """Write down a message."""
        self.told.append(message)

    def heard(self) -> list[Any]:
        """The messages written down so far."""
        return self.told

    def state_dict(self) -> dict[str, Any]:
        """The line it stands at."""
        return {"position": self._position - (self._held is not None), "told": list(self.told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved line."""
        self._position, self.told = state["position"], list(state["told"])
