"""The errors of replay."""

from __future__ import annotations

from rollstream.engine.errors import RollstreamError


class ReplayError(RollstreamError):
    """Replay was asked for something it cannot do."""


class SignatureError(ReplayError):
    """Columns that are not those a table was made for."""


class InsertRefused(ReplayError):
    """The rate limiter does not allow so many inserts now; nothing has changed."""


class SampleRefused(ReplayError):
    """The rate limiter does not allow so many samples now; nothing has changed."""
