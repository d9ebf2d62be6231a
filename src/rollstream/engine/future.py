"""What crosses between actors: replies to come, replies held back, and values stored once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from rollstream.engine.errors import EngineError

if TYPE_CHECKING:
    from rollstream.engine.base import Engine

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Inbox(Protocol):
    """Where an engine puts finished futures."""

    def put(self, future: Future[Any], /) -> None:
        """Add a finished future; may be called from any thread."""
        ...


class Sink(Inbox, Protocol):
    """An inbox on which one thread waits."""

    def wake(self) -> None:
        """Make `wait` return: the engine went idle, or a message nobody awaits failed."""
        ...

    def poll(self) -> Future[Any] | None:
        """Take a future if there is one; never waits."""
        ...

    def wait(self, timeout: float | None = None) -> Future[Any] | None:
        """Block until there is a future and take it; `None` when woken or after the timeout."""
        ...


class Future(Generic[T_co]):
    """The reply to a message: it arrives later, once, as a value or an error."""

    __slots__ = ("done", "engine", "error", "label", "read", "receiver", "reply", "sink", "token", "waiters")

    def __init__(
        self, engine: Engine, label: str, receiver: str = "", sink: Sink | None = None, token: Any = None
    ):
        self.engine = engine
        self.label = label
        self.receiver = receiver
        self.sink = sink
        """Told when the reply is there; a flow has one for all its requests."""
        self.token = token
        """Whatever the one who asked wants to find again beside the reply."""
        self.waiters: tuple[Inbox, ...] = ()
        self.done = False
        self.read = False
        """Whether somebody has seen the error, if it came to one."""
        self.reply: Any = None
        """What came, as it travelled."""
        self.error: BaseException | None = None
        """The error, if it came to one; `result` raises it."""

    @property
    def value(self) -> Any:
        """What came, once `done`."""
        return self.engine.opened(self) if self.engine.remote else self.reply

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the reply; raise what the actor raised, or `TimeoutError`."""
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

    The caller waits; the actor does not, and goes on with its next message.

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

    __slots__ = ("_outcome", "_then")

    def __init__(self) -> None:
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
        """The value itself. Treat it as read-only: every reader shares it."""
        return self._value

    def __deepcopy__(self, memo: dict[int, Any]) -> Ref[T_co]:
        return self
