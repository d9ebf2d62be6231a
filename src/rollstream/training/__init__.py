"""Training from one call: runs with a folder, checkpoints, evaluation and a display."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.training.run import Run, load, train

__all__ = ["Run", "load", "train"]


def __getattr__(name: str) -> Any:
    """JAX is imported when somebody trains, not before."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollstream.training import run

    return getattr(run, name)
