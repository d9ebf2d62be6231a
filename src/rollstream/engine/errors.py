"""The errors every layer shares: each names its cause and the way out."""

from __future__ import annotations


class RollstreamError(Exception):
    """The base of every error Rollstream raises itself."""


class EngineError(RollstreamError):
    """An engine was asked for something it cannot do."""


class EngineClosed(EngineError):
    """The engine's scope was left, so its actors are gone."""


class ReentryError(EngineError):
    """An actor was asked to handle a message while it handles another, and waits for itself."""


class Deadlock(RollstreamError):
    """Nothing runs and nothing can: whoever waits would wait forever."""
