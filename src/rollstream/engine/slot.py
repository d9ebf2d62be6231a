"""The slot an instance lives in: it builds the instance and runs messages on it."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstream.engine.errors import EngineError, SignalExit
from rollstream.engine.future import Future, Ref


@dataclass(slots=True)
class ActorContext:
    """What an instance may know of its own actor: ask for it with a parameter called `context`."""

    name: str
    index: int
    count: int
    restarts: int = 0
    local: dict[str, Any] = field(default_factory=dict)
    """Things that functions sent with `apply` keep beside the instance; gone after a restart."""
    actor: Any = None
    """The actor's own handle, so that it can be sent to others, or send to itself: `actor.send_later`."""
    put: Callable[[Any], Ref[Any]] = Ref
    """Stores a value once, in this process: the reference can be returned or sent, and stands for it."""


def wants_context(function: Callable[..., Any]) -> bool:
    """Whether a function asks for a context, by naming a parameter `context`."""
    try:
        return "context" in inspect.signature(function).parameters
    except (ValueError, TypeError):  # a builtin without a signature
        return False


class ActorSlot:
    """An instance and what is kept beside it."""

    __slots__ = ("afterwards", "context", "instance")

    def __init__(self, context: ActorContext):
        self.context = context
        self.afterwards: deque[Callable[[], None]] = deque()
        """Functions to call when the current message has been handled."""
        self.instance: Any = None

    def build(self, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make the instance."""
        kwargs = dict(zip(kwargs, resolve(tuple(kwargs.values())), strict=True))
        if wants_context(cls) and "context" not in kwargs:
            kwargs["context"] = self.context
        try:
            self.instance = cls(*resolve(args), **kwargs)
        except Exception as error:
            error.add_note(f"raised while {self.context.name} was built")
            raise
        except SystemExit as error:
            raise cannot_exit(f"the constructor of {self.context.name}", error) from error

    def run(self, operation: str | Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Handle one message: call a method of the instance, or a function of the slot."""
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
        except SignalExit:
            raise
        except SystemExit as error:
            what = operation if isinstance(operation, str) else "a function"
            raise cannot_exit(f"{self.context.name}.{what}", error) from error

    def timed_run(
        self, operation: str | Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[Any, BaseException | None, float, float]:
        """Handle one message: its value or error, and when it began and ended."""
        value = error = None
        start = time.perf_counter()
        try:
            value = self.run(operation, args)
        except BaseException as caught:
            error = caught
        return value, error, start, time.perf_counter()

    def end(self) -> None:
        """Drop the instance; its `close` method is called if it has one."""
        instance, self.instance = self.instance, None
        self.context.local.clear()
        self.context.actor = None
        if callable(close := getattr(instance, "close", None)):
            try:
                close()
            except Exception as error:
                error.add_note(f"raised by {self.context.name}.close")
                raise
            except SystemExit as error:
                raise cannot_exit(f"{self.context.name}.close", error) from error


_INDIRECT = (Ref, Future)


def resolve(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with references and futures replaced by their values."""
    return tuple(a.get() if isinstance(a, Ref) else a.result() if isinstance(a, Future) else a for a in args)


def run_beside(slot: ActorSlot, function: Callable[..., Any], *args: Any) -> Any:
    """The message behind `Actor.apply`."""
    if wants_context(function):
        return function(slot.instance, *args, context=slot.context)
    return function(slot.instance, *args)


def cannot_exit(what: str, error: SystemExit) -> EngineError:
    """An error in place of the program's end, which is the driver's to decide."""
    code = "" if error.code is None else repr(error.code)
    return EngineError(
        f"{what} called sys.exit({code}), but an actor cannot end the program: raise an error, or end the "
        f"loop that drives it"
    )
