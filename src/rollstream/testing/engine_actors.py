"""The actors that the checks of an engine talk to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollstream.engine import Actor, ActorContext, Deferred


class StrangeError(Exception):
    """An error no engine knows."""


class Recorder:
    """Keeps what it is told, in order."""

    def __init__(self, *items: Any, label: str = "", context: ActorContext):
        self.items = list(items)
        self.label = label
        self.context = context

    def note(self, item: Any) -> Any:
        self.items.append(item)
        return item

    def seen(self) -> list[Any]:
        return list(self.items)

    def who(self) -> tuple[Any, ...]:
        return self.context.name, self.context.index, self.context.count, self.context.restarts, self.label

    def fail(self, text: str) -> None:
        raise StrangeError(text)


class Relay:
    """Talks to another actor."""

    def __init__(self, other: Actor[Recorder] | None = None):
        self.other = other

    def send(self, *items: Any) -> None:
        assert self.other is not None
        for item in items:
            self.other.send("note", item)

    def send_to(self, other: Actor[Recorder], item: Any) -> None:
        other.send("note", item)

    def ask(self, other: Actor[Recorder], item: Any) -> Any:
        return other.call("note", item)


class Caller:
    """Needs another actor's answer for its own: it sends a question and defers its reply."""

    def __init__(self, answerer: Actor[Answerer]):
        self.answerer = answerer
        self.waiting: list[Deferred[Any]] = []

    def ask(self, me: Actor[Caller], question: int) -> Deferred[Any]:
        self.waiting.append(Deferred())
        self.answerer.send("answer", me, question)
        return self.waiting[-1]

    def take(self, answer: int) -> None:
        self.waiting.pop(0).resolve(answer)


class Answerer:
    """Sends its answers back."""

    def answer(self, caller: Actor[Caller], question: int) -> None:
        caller.send("take", 2 * question)


class Door:
    """Lets its callers wait until it is told to answer them."""

    def __init__(self) -> None:
        self.guests: list[Deferred[str]] = []

    def enter(self) -> Deferred[str]:
        self.guests.append(Deferred())
        return self.guests[-1]

    def count(self) -> int:
        return len(self.guests)

    def admit(self, guest: int, value: str) -> None:
        self.guests[guest].resolve(value)

    def refuse(self, guest: int, text: str) -> None:
        self.guests[guest].reject(StrangeError(text))


class Timer:
    """Sends itself messages for later."""

    def __init__(self, *, context: ActorContext):
        self.actor = context.actor
        self.noted: list[Any] = []
        self.expected = 0
        self.reply: Deferred[list[Any]] = Deferred()

    def start(self, *delays: float) -> Deferred[list[Any]]:
        """Replies with the delays, in the order in which their messages came, when all have come."""
        self.noted, self.expected, self.reply = [], len(delays), Deferred()
        for delay in delays:
            self.actor.send_later(delay, "note", delay)
        return self.reply

    def start_for(self, other: Actor[Journal], line: str) -> None:
        other.send_later(0.001, "write", line)

    def note(self, item: Any) -> None:
        self.noted.append(item)
        if len(self.noted) == self.expected:
            self.reply.resolve(self.noted[:])

    def fail(self, text: str) -> None:
        self.actor.send_later(0.001, "raise_error", text)

    def raise_error(self, text: str) -> None:
        raise StrangeError(text)


class Journal:
    """Writes a file, so that what it did can be read after its end."""

    def __init__(self, folder: str, *, context: ActorContext):
        self.path = Path(folder, str(context.index))

    def write(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def close(self) -> None:
        self.write("closed")


class Unbuildable(Journal):
    """One of several cannot be built."""

    def __init__(self, folder: str, *, context: ActorContext):
        super().__init__(folder, context=context)
        if context.index == 1:
            raise StrangeError("cannot be built")


def note(recorder: Recorder, item: Any) -> Any:
    """For `apply`: works on the instance."""
    return recorder.note(item)


def tally(recorder: Recorder, amount: int, context: ActorContext) -> tuple[str, int]:
    """For `apply`: keeps a number beside the instance."""
    context.local["tally"] = context.local.get("tally", 0) + amount
    return recorder.label, context.local["tally"]
