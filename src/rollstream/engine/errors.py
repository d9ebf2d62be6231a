"""The errors every layer shares: each names its cause and the way out."""

from __future__ import annotations


class RollstreamError(Exception):
    """The base of every error Rollstream raises itself."""

    includes_traceback = False
    """Whether the text contains the original traceback, so that none has to be attached."""


class SignalExit(SystemExit):
    """Raised by a handler of a signal: the program ends, in whatever actor of its thread it is raised."""


class EngineError(RollstreamError):
    """An engine was asked for something it cannot do."""

    def about(self, label: str) -> EngineError:
        """The same error, for one message."""
        return type(self)(f"{label}: {self}")


class EngineClosed(EngineError):
    """The engine's scope was left, so its actors have ended."""


class ActorDied(EngineError):
    """An actor's process was killed, crashed or hung."""

    def __init__(self, actor: str, text: str, outcome: str = "raised"):
        super().__init__(actor, text, outcome)
        self.actor = actor
        self.outcome = outcome
        """What happened next: `raised`, `restarted` or `dropped`."""

    def about(self, label: str) -> ActorDied:
        """The same death, for one message."""
        return ActorDied(self.actor, f"{label} was lost: {self}", self.outcome)

    def __str__(self) -> str:
        return str(self.args[1])


class ValueLost(EngineError):
    """A stored value is gone with the actor or the machine that held it."""


class RemoteError(RollstreamError):
    """Stands for an error of another process that could not be pickled."""


class RemoteTraceback(Exception):
    """Where an error was raised in another process: the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Deadlock(RollstreamError):
    """Nothing is running and nothing can run: the wait would never end."""
