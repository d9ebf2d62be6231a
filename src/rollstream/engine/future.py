"""Replies to come (`Future`), replies held back (`Deferred`), and values stored once (`Ref`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from rollstream.engine.errors import EngineError
from rollstream.engine.sinks import Sink

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Waiter(Protocol):
    """What a future needs of its engine."""

    def wait(self, futures: Sequence[Any], count: int = 1, timeout: float | None = None) -> Any:
        """Block until `count` of the futures are done."""
        ...

    def open_reply(self, future: Any) -> Any:
        """The value of a reply, deserialized if it came from another process."""
        ...


class Future(Generic[T_co]):
    """The reply to a message: a value or an error that arrives later."""

    __slots__ = (
        *("dependents", "done", "engine", "error", "label", "read"),
        *("receiver", "reply", "sink", "token", "waiters"),
    )

    def __init__(
        self, engine: Waiter, label: str, receiver: str = "", sink: Sink | None = None, token: Any = None
    ):
        self.engine = engine
        self.label = label
        self.receiver = receiver
        self.sink = sink
        """Where the finished future goes; a flow has one sink for all its requests."""
        self.token = token
        """Whatever the requester wants back with the reply."""
        self.waiters: tuple[Sink, ...] = ()
        self.dependents: tuple[Any, ...] = ()
        """Actors with messages held back until this reply is there."""
        self.done = False
        self.read = False
        """Whether somebody has seen the error, if there is one."""
        self.reply: Any = None
        """The reply as it arrived: still serialized if it came from another process."""
        self.error: BaseException | None = None

    @property
    def value(self) -> Any:
        """The value, once `done`."""
        return self.engine.open_reply(self)

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the reply; raise the actor's error, or `TimeoutError`."""
        if not self.done:
            ready, _ = self.engine.wait([self], timeout=timeout)
            if not ready:
                raise TimeoutError(f"no reply to {self.label} within {timeout} s")
        if self.error is not None:
            self.read = True
            raise self.error
        return cast(T_co, self.value)

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else "pending"
        return f"<Future {self.label} {state}>"


class Deferred(Generic[T]):
    """A reply held back: return it from a method, complete it from a later one.

    The caller waits for its reply; the actor handles its next message.

    >>> class Door:
    ...     def __init__(self):
    ...         self.waiting = []
    ...     def enter(self):
    ...         self.waiting.append(Deferred())
    ...         return self.waiting[-1]
    ...     def open(self):
    ...         while self.waiting:
    ...             self.waiting.pop(0).resolve("come in")
    """

    __slots__ = ("_outcome", "_then", "busy")

    def __init__(self) -> None:
        self.busy = 0.0
        """Seconds of work on the reply after the call that returned it, for a flow's statistics."""
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._then: Callable[[Any, BaseException | None], None] | None = None

    def resolve(self, value: T) -> None:
        """Complete the reply with a value."""
        self._complete(value, None)

    def reject(self, error: BaseException) -> None:
        """Complete the reply with an error."""
        self._complete(None, error)

    def then(self, function: Callable[[Any, BaseException | None], None]) -> None:
        """Call `function(value, error)` once the reply is complete. For engines and flows."""
        if self._then is not None:
            raise EngineError("a deferred reply was returned twice; each call needs its own Deferred()")
        self._then = function
        if self._outcome is not None:
            function(*self._outcome)

    def _complete(self, value: Any, error: BaseException | None) -> None:
        if self._outcome is not None:
            raise EngineError("a deferred reply was completed twice")
        self._outcome = (value, error)
        if self._then is not None:
            self._then(value, error)


class Ref(Generic[T_co]):
    """A value stored once with `engine.put`; as an argument of a message it arrives as the value."""

    __slots__ = ("_value",)

    def __init__(self, value: T_co):
        self._value = value

    def get(self) -> T_co:
        """The value. Treat it as read-only: every reader shares it."""
        return self._value

    def __deepcopy__(self, memo: dict[int, Any]) -> Ref[T_co]:
        return self
