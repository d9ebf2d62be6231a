"""The errors every layer shares: each names its cause and the way out."""

from __future__ import annotations


class RollstreamError(Exception):
    """The base of every error Rollstream raises itself."""

    tells_all = False
    """Whether its text has the traceback already, so that none has to travel beside it."""


class EngineError(RollstreamError):
    """An engine was asked for something it cannot do."""

    def about(self, label: str) -> EngineError:
        """The same error, of one message."""
        return type(self)(f"{label}: {self}")


class EngineClosed(EngineError):
    """The engine's scope was left, so its actors are gone."""


class ReentryError(EngineError):
    """An actor was asked to handle a message while it handles another, and waits for itself."""


class ActorDied(EngineError):
    """An actor has ended by itself: its process was killed, crashed or hung."""

    def __init__(self, actor: str, text: str, outcome: str = "raised"):
        super().__init__(actor, text, outcome)
        self.actor = actor
        self.outcome = outcome
        """What became of it: `raised`, `restarted` or `dropped`."""

    def about(self, label: str) -> ActorDied:
        """The same death, as one message saw it."""
        return ActorDied(self.actor, f"{label} was lost: {self}", self.outcome)

    def __str__(self) -> str:
        return str(self.args[1])


class RemoteError(RollstreamError):
    """Stands for an error of another process that could not travel itself."""


class RemoteTraceback(Exception):
    """Where an error was raised in another process: the cause of what is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Deadlock(RollstreamError):
    """Nothing runs and nothing can: whoever waits would wait forever."""
