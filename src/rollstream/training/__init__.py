"""Training runs: run folder, checkpoints, evaluation and display."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.training.run import Run, load, train

__all__ = ["Run", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import JAX only when training is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollstream.training import run

    return getattr(run, name)
