"""Actors: the handle a sender holds, and the cell an instance lives in."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rollstream.engine.errors import ActorDied, EngineError
from rollstream.engine.future import Future, Ref
from rollstream.engine.supervision import SpawnOptions

if TYPE_CHECKING:
    from rollstream.engine.base import Engine

A = TypeVar("A")
R = TypeVar("R")


@dataclass(slots=True)
class ActorContext:
    """What an instance may know of its own actor: ask for it with a parameter called `context`."""

    name: str
    index: int
    count: int
    restarts: int = 0
    local: dict[str, Any] = field(default_factory=dict)
    """Things that functions sent with `apply` keep beside the instance; gone after a restart."""


def wants_context(function: Callable[..., Any]) -> bool:
    """Whether a function asks for a context, by naming a parameter `context`."""
    try:
        return "context" in inspect.signature(function).parameters
    except (ValueError, TypeError):  # a builtin without a signature
        return False


class Message:
    """One message on its way: a method to call or a function of the cell to run, and who waits."""

    __slots__ = ("actor", "args", "counted", "future", "label", "operation", "parcel", "posted")

    def __init__(
        self,
        operation: str | Callable[..., Any],
        args: tuple[Any, ...],
        future: Future[Any] | None,
        label: str,
    ):
        self.actor: Actor[Any] | None = None  # whom it was posted to
        self.counted = False  # whether it is in the books
        self.posted: tuple[str, float] | None = None  # sender and time, when messages are traced
        self.parcel: Any = None  # operation and arguments, ready to travel to another process
        self.operation = operation
        self.args = args
        self.future = future
        self.label = label

    def repeated(self) -> Message:
        """The same message once more, without a reply."""
        message = Message(self.operation, self.args, None, self.label)
        message.parcel = self.parcel
        return message


class ActorSlot:
    """The place an instance lives in: built from a class and arguments, rebuilt by a restart."""

    __slots__ = ("afterwards", "args", "cls", "context", "instance", "kwargs")

    def __init__(self, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: ActorContext):
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.context = context
        self.afterwards: deque[Callable[[], None]] = deque()
        """What to do when the message in hand is handled."""
        self.instance: Any = _Nobody(context.name)

    def build(self) -> None:
        """Make the instance."""
        kwargs = dict(zip(self.kwargs, resolve(tuple(self.kwargs.values())), strict=True))
        if wants_context(self.cls) and "context" not in kwargs:
            kwargs["context"] = self.context
        try:
            self.instance = self.cls(*resolve(self.args), **kwargs)
        except Exception as error:
            error.add_note(f"raised while {self.context.name} was built")
            raise
        except SystemExit as error:
            raise cannot_exit(f"the constructor of {self.context.name}", error) from error

    def run(self, operation: str | Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Handle one message: call a method of the instance, or a function of the cell."""
        for argument in args:
            if isinstance(argument, _INDIRECT):
                args = resolve(args)
                break
        try:
            try:
                if isinstance(operation, str):
                    return getattr(self.instance, operation)(*args)
                return operation(self, *args)
            finally:
                while self.afterwards:
                    self.afterwards.popleft()()
        except SystemExit as error:
            what = operation if isinstance(operation, str) else "a function"
            raise cannot_exit(f"{self.context.name}.{what}", error) from error

    def rebuild(self, sticky: Iterable[tuple[str | Callable[..., Any], tuple[Any, ...]]]) -> None:
        """Replace the instance by a fresh one, then handle its sticky messages again."""
        try:
            self.end()
        finally:
            old = self.context
            self.context = ActorContext(old.name, old.index, old.count, old.restarts + 1)
            self.build()
            for operation, args in sticky:
                self.run(operation, args)

    def end(self) -> None:
        """Let the instance go; its `close` method is called if it has one."""
        instance, self.instance = self.instance, _Nobody(self.context.name)
        self.context.local.clear()
        if callable(close := getattr(instance, "close", None)):
            try:
                close()
            except SystemExit as error:
                raise cannot_exit(f"{self.context.name}.close", error) from error


class _Nobody:
    """Stands where an instance was or should be, and says so."""

    def __init__(self, name: str):
        self.close = None
        self.__name = name

    def __getattr__(self, attribute: str) -> Any:
        raise EngineError(f"{self.__name} has no instance: it could not be built again, or has ended")


_INDIRECT = (Ref, Future)


def resolve(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with references and futures replaced by what they stand for."""
    return tuple(a.get() if isinstance(a, Ref) else a.result() if isinstance(a, Future) else a for a in args)


class Actor(Generic[A]):
    """A handle to one instance somewhere: every use of it is visibly a message."""

    __slots__ = (
        "busy",
        "cell",
        "cls",
        "deaths",
        "engine",
        "failures",
        "gone",
        "index",
        "lost",
        "mailbox",
        "messages",
        "name",
        "outstanding",
        "restarts",
        "sticky",
        "terms",
    )

    def __init__(self, engine: Engine, cell: ActorSlot, mailbox: Any = None):
        self.engine = engine
        self.cell = cell
        self.mailbox = mailbox
        self.outstanding = 0
        """Messages sent to it and not yet handled."""
        self.sticky: dict[str, Message] = {}
        self.terms = SpawnOptions()
        self.gone: ActorDied | None = None
        """Why it is no longer there, if it died and does not come back."""
        self.messages = self.failures = self.restarts = self.deaths = self.lost = 0
        self.busy = 0.0
        self.cls: type[A] = cell.cls
        self.name = cell.context.name
        self.index = cell.context.index

    def call(self, method: str, *args: Any, sticky: bool | str = False) -> Future[Any]:
        """Call a method; the future holds its reply.

        A `sticky` message is kept as the last of its kind (the method's name, or the text given)
        and handled again by a restarted instance.
        """
        self.require(method)
        return self.ask(method, *args, sticky=sticky)

    def send(self, method: str, *args: Any, sticky: bool | str = False) -> None:
        """Call a method without a reply. A failure stops the flow, or is raised by the engine.

        The driver waits here while the actor is too far behind (`Engine.mailbox_size` messages).
        """
        self.require(method)
        if self.outstanding >= self.engine.mailbox_size:
            self.engine.make_room(self)
        label = f"{self.name}.{method}"
        self.engine.post(self, Message(method, args, None, label), _kind(method, sticky))

    def apply(self, function: Callable[..., R], *args: Any, sticky: bool | str = False) -> Future[R]:
        """Run `function(instance, *args)` beside the instance.

        A function with a parameter called `context` is given the actor's `ActorContext`, where it can keep
        things beside the instance.
        """
        name = getattr(function, "__name__", type(function).__name__)
        return self.ask(_beside, function, *args, sticky=sticky, name=name)

    def restart(self) -> Future[None]:
        """Replace the instance by a fresh one: same arguments, then its sticky messages."""
        return self.engine.restart(self)

    def require(self, method: str) -> None:
        """Raise, naming the methods there are, if the class has no such method."""
        if not callable(getattr(self.cls, method, None)):
            known = ", ".join(
                n for n in dir(self.cls) if not n.startswith("_") and callable(getattr(self.cls, n))
            )
            raise EngineError(
                f"{self.name}, of class {self.cls.__name__}, has no method {method!r}; "
                f"it has: {known or 'none'}"
            )

    def ask(
        self,
        operation: str | Callable[..., Any],
        *args: Any,
        sticky: bool | str = False,
        name: str | None = None,
    ) -> Future[Any]:
        """Call a method, or run `operation(cell, *args)`. For flows; others use `call` and `apply`."""
        name = name or (operation if isinstance(operation, str) else operation.__name__)
        label = f"{self.name}.{name}"
        future: Future[Any] = Future(self.engine, label, self.name)
        self.engine.post(self, Message(operation, args, future, label), _kind(name, sticky))
        return future

    def tell(self, operation: Callable[..., Any], *args: Any, label: str) -> None:
        """Run `operation(slot, *args)` without a reply. For flows; others use `send`."""
        self.engine.post(self, Message(operation, args, None, f"{self.name}.{label}"))

    def __repr__(self) -> str:
        return f"<Actor {self.name}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"the handle {self.name} travels in messages of its own engine only")

    def __copy__(self) -> Actor[A]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Actor[A]:
        return self


def perform(
    cell: ActorSlot, operation: str | Callable[..., Any], args: tuple[Any, ...], catches: type[BaseException]
) -> tuple[Any, BaseException | None, float, float]:
    """Handle a message where the instance lives: the value or the error, and when it began and ended."""
    error = value = None
    start = time.perf_counter()
    try:
        value = cell.run(operation, args)
    except catches as caught:
        error = caught
    return value, error, start, time.perf_counter()


def run_task(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a stateless function."""
    try:
        return function(*resolve(args))
    except SystemExit as error:
        raise cannot_exit(getattr(function, "__name__", repr(function)), error) from error


def cannot_exit(what: str, error: SystemExit) -> EngineError:
    """An error in place of the end of the program, which is the driver's to decide."""
    code = "" if error.code is None else repr(error.code)
    return EngineError(
        f"{what} called sys.exit({code}), and what runs on an engine cannot end the program: raise an error, "
        f"or end the loop that drives it"
    )


def rebuild(cell: ActorSlot, sticky: list[Any]) -> None:
    """The message behind `Actor.restart`; what is sticky comes as it is, or as references."""
    cell.rebuild(message.get() if isinstance(message, Ref) else message for message in sticky)


def _kind(name: str, sticky: bool | str) -> str | None:
    return sticky if isinstance(sticky, str) else name if sticky else None


def _beside(cell: ActorSlot, function: Callable[..., Any], *args: Any) -> Any:
    if wants_context(function):
        return function(cell.instance, *args, context=cell.context)
    return function(cell.instance, *args)
