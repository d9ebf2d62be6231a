"""Actors: the handle by which one talks to an instance, and the messages that go there."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from rollstream.engine.errors import ActorDied, EngineError
from rollstream.engine.future import Future, Waiter
from rollstream.engine.options import SpawnOptions
from rollstream.engine.slot import run_beside

A = TypeVar("A")
R = TypeVar("R")
DRIVER = "driver"
"""The name of the sender that is no actor: the thread that runs a flow, usually."""
Operation: TypeAlias = str | Callable[..., Any]
"""A method's name, or a function of the actor's slot."""


class Message:
    """A method to call, or a function of the slot to run, and the future of its reply."""

    __slots__ = ("actor", "args", "future", "label", "operation", "payload", "posted", "sticky")

    def __init__(self, operation: Operation, args: tuple[Any, ...], future: Future[Any] | None, label: str):
        self.operation = operation
        self.args = args
        self.future = future
        self.label = label
        self.actor: Actor[Any] | None = None
        """Whom it was sent to, while it is in flight."""
        self.sticky: str | None = None
        """Its kind, if it is kept as the last of its kind for a restarted instance."""
        self.posted: tuple[str, float] | None = None
        """Sender and time, when messages are traced."""
        self.payload: Any = None
        """Operation and arguments, serialized for another process."""

    def repeated(self) -> Message:
        """The same message again, without a reply."""
        message = Message(self.operation, self.args, None, self.label)
        message.payload, message.sticky = self.payload, self.sticky
        return message


class Home(Waiter, Protocol):
    """What a handle needs of where it is used: an engine, or the host of another actor."""

    mailbox_size: ClassVar[int]

    def sender(self) -> str:
        """The name of the actor whose method is running in this thread, or `driver`."""
        ...

    def post(self, actor: Actor[Any], message: Message, sticky: str | None = None) -> None:
        """Send a message."""
        ...

    def post_later(self, actor: Actor[Any], message: Message, seconds: float) -> None:
        """Send a message after so many seconds."""
        ...

    def make_room(self, actor: Actor[Any]) -> None:
        """Wait until an actor is less far behind."""
        ...


class Actor(Generic[A]):
    """A handle to one instance somewhere: every use of it is visibly a message."""

    def __init__(self, engine: Home, name: str, index: int, cls: type[A]):
        self.engine: Any = engine
        self.name = name
        self.index = index
        self.count = 1
        self.cls = cls
        # The engine's bookkeeping; unused in handles that travelled to another actor.
        self.options = SpawnOptions()
        self.constructor: Any = None
        """Class and arguments its instance is built from."""
        self.connection: Any = None
        """The transport's own state."""
        self.outstanding = 0
        """Messages sent to it and not yet handled."""
        self.sticky: dict[str, Message] = {}
        self.gone: ActorDied | None = None
        """Its death, if it was not restarted."""
        self.messages = self.failures = self.restarts = self.lost = 0
        self.busy = self.longest = 0.0
        """Seconds it took for all messages, and for the longest."""
        self.lock = threading.Lock()
        """Held while a message is handed to the transport, and while `up` or `held` change."""
        self.up = False
        """Whether the transport takes messages for it now."""
        self.held: deque[Message] = deque()
        """Messages that wait for replies they carry or for a restart, and those behind them."""
        self.started: SimpleQueue[BaseException | None] | None = None
        """Receives `None` or an error when the first instance is built."""
        self.rebuilding: Message | None = None
        """Counts as in flight while a dead actor is built again."""
        self.verdict: str | None = None
        """Why the engine killed it, if it did."""
        self.stopping = False
        self.ended = threading.Event()

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

    def send_later(self, seconds: float, method: str, *args: Any) -> None:
        """Call a method without a reply, after so many seconds at least: a timer that an actor sets itself.

        The message counts as in flight meanwhile. On engines of one thread, time passes when the driver waits
        and nothing else can happen.
        """
        self.require(method)
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not (is_number and 0 <= seconds < math.inf):
            raise EngineError(
                f"seconds={seconds!r}: send_later takes a number of seconds, 0 or more, then the method"
            )
        label = f"{self.name}.{method}"
        self.engine.post_later(self, Message(method, args, None, label), seconds)

    def apply(self, function: Callable[..., R], *args: Any, sticky: bool | str = False) -> Future[R]:
        """Run `function(instance, *args)` where the instance lives.

        A function with a parameter called `context` is given the actor's `ActorContext`, where it can keep
        things beside the instance.
        """
        name = getattr(function, "__name__", type(function).__name__)
        return self.ask(run_beside, function, *args, sticky=sticky, name=name)

    def ask(
        self, operation: Operation, *args: Any, sticky: bool | str = False, name: str | None = None
    ) -> Future[Any]:
        """Call a method, or run `operation(slot, *args)`. For flows; others use `call` and `apply`."""
        name = name or (operation if isinstance(operation, str) else operation.__name__)
        label = f"{self.name}.{name}"
        if (sender := self.engine.sender()) != DRIVER:
            raise EngineError(
                f"{sender} cannot wait for {label}: an actor handles one message at a time. Use send, let "
                f"{self.name} send its answer back, and return a Deferred() that completes then"
            )
        future: Future[Any] = Future(self.engine, label, self.name)
        self.engine.post(self, Message(operation, args, future, label), _kind(name, sticky))
        return future

    def tell(self, operation: Callable[..., Any], *args: Any, label: str) -> None:
        """Run `operation(slot, *args)` without a reply. For flows; others use `send`."""
        self.engine.post(self, Message(operation, args, None, f"{self.name}.{label}"))

    def require(self, method: str) -> None:
        """Raise, naming the methods there are, if the class has no such method."""
        if not callable(getattr(self.cls, method, None)):
            public = [name for name in dir(self.cls) if not name.startswith("_")]
            known = ", ".join(name for name in public if callable(getattr(self.cls, name)))
            raise EngineError(
                f"{self.name}, of class {self.cls.__name__}, has no method {method!r}; "
                f"it has: {known or 'none'}"
            )

    def __repr__(self) -> str:
        return f"<Actor {self.name}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"the handle {self.name} can only be sent in messages of its own engine")

    def __copy__(self) -> Actor[A]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Actor[A]:
        return self


def _kind(name: str, sticky: bool | str) -> str | None:
    return sticky if isinstance(sticky, str) else name if sticky else None


class ActorNames:
    """Hands out names that no other actor of an engine has."""

    def __init__(self) -> None:
        self._taken = {DRIVER}
        self._lock = threading.Lock()

    def take(self, name: str, count: int) -> list[str]:
        """`name`, or `name[0]`, `name[1]`, ... for several; with a number if the name is taken."""
        with self._lock:
            taken = {*self._taken, *(own.partition("[")[0] for own in self._taken)}
            base, number = name, 1
            while base in taken:
                number += 1
                base = f"{name}-{number}"
            names = [base] if count == 1 else [f"{base}[{index}]" for index in range(count)]
            self._taken.update(names)
        return names
