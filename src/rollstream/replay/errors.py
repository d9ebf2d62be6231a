"""Errors raised by replay."""

from __future__ import annotations

from rollstream.engine.errors import RollstreamError


class ReplayError(RollstreamError):
    """An invalid argument to a replay table, writer or buffer."""


class SignatureError(ReplayError):
    """Columns that do not match the signature of a table."""


class InsertRefused(ReplayError):
    """The rate limiter does not allow these inserts now; the table is unchanged."""


class SampleRefused(ReplayError):
    """The rate limiter does not allow these samples now; the table is unchanged."""
