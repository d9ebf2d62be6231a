"""The errors of flows."""

from __future__ import annotations

import sys
import traceback
from bdb import BdbQuit
from pathlib import Path
from types import TracebackType
from typing import Any

from rollstream.engine import RollstreamError
from rollstream.engine.errors import SignalExit
from rollstream.engine.slot import cannot_exit

_LIBRARY = ("rollstream.flow", "rollstream.engine")


class PlanError(RollstreamError):
    """The plan cannot run; raised while it is built."""


class StateError(RollstreamError):
    """A state cannot be saved, or does not fit the flow it is loaded into."""


class OperatorError(RollstreamError):
    """An operator failed: which, where in the plan it was added, on which shard, and why."""

    includes_traceback = True

    def __init__(self, operator: str, location: str, shard: str | None, reason: str, details: str):
        super().__init__(operator, location, shard, reason, details)
        self.operator = operator
        self.location = location
        self.shard = shard
        self.original: BaseException | None = None
        """The exception itself, when it was raised in this process."""

    @classmethod
    def of(cls, error: BaseException, operator: str, location: str, shard: str | None) -> BaseException:
        """Wrap what an operator raised; the traceback continues into the operator's own frames.

        Quitting the debugger is not a failure, and the driver may exit: these stay what they are.
        """
        if isinstance(error, (BdbQuit, SignalExit)) or (isinstance(error, SystemExit) and shard is None):
            return error
        if isinstance(error, SystemExit):
            error = cannot_exit(operator, error)
        frames = _own_frames(error.__traceback__)
        details = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        reason = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[0]
        wrapped = cls(operator, location, shard, reason, details)
        wrapped.original = error
        wrapped.__suppress_context__ = True
        return wrapped.with_traceback(frames)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args  # the original exception may not be serializable

    def __str__(self) -> str:
        operator, location, shard, reason, details = self.args
        where = f" on {shard}" if shard else ""
        return f"{operator} ({location}){where} failed: {reason}\n\n{details}"


def plan_line() -> str:
    """`file:line` of the innermost caller outside the library: the line of the plan being built."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame outside the library on."""
    while trace is not None and _is_library(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace


def _is_library(module: Any) -> bool:
    return isinstance(module, str) and module.startswith(_LIBRARY)


def _short(filename: str) -> str:
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except ValueError:
        return filename
