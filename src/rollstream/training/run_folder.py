"""The run folder, its lock, and the config of a run."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

from rollstream.engine import RollstreamError
from rollstream.limits import Limits
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.training.metrics import iterate_metrics

EngineName = Literal["inline", "threads", "processes", "ray"]


class RunError(RollstreamError):
    """A run folder is missing, damaged, in use, or not what was expected."""


@dataclass(frozen=True)
class EvaluationConfig:
    """When and how to evaluate."""

    every: Annotated[int | None, Limits(1)] = None
    """Environment steps between evaluations; `None` for no evaluation."""
    episodes: Annotated[int, Limits(1)] = 10
    """Episodes per evaluation."""
    stop_at: float | None = None
    """Mean return of an evaluation at which training stops."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints."""

    every: Annotated[int | None, Limits(1)] = None
    """Environment steps between checkpoints; `None` for a tenth of the run, at most 50,000, and at least 30
    seconds."""
    keep: Annotated[int, Limits(1)] = 3
    """How many of the newest checkpoints to keep."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides how a run goes."""

    algorithm: Algorithm[Any]
    config: Any
    task: Task
    engine: EngineName
    evaluation: EvaluationConfig
    checkpoints: CheckpointConfig
    algorithm_source: str | None = None
    """The name or `file.py:Name` that the user gave for the algorithm; `None` for an object."""
    id: str = field(default_factory=lambda: secrets.token_hex(16), compare=False)
    """Random identity of the run, which its checkpoints carry."""

    def is_finished(self, steps: float, mean_return: float | None) -> bool:
        """Whether training ends after these steps and an evaluation with this mean return."""
        return is_finished(self.task.steps, self.evaluation.stop_at, steps, mean_return)


def is_finished(
    total_steps: int, stop_at: float | None, steps: float, mean_return: float | str | None
) -> bool:
    """Whether a run of so many steps, or up to a return to stop at, ends here."""
    solved = isinstance(mean_return, int | float) and stop_at is not None and mean_return >= stop_at
    return solved or steps >= total_steps


def require_new(folder: Path) -> None:
    """Raise if a folder holds a run with metrics or checkpoints, or is a file."""
    started = any(iterate_metrics(folder)) or any((folder / "checkpoints").glob("*"))
    if (folder / "config.json").exists() and started:
        raise RunError(f"{folder} already holds a run; resume it with resume=True, or choose another folder")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file, and a run needs a folder; choose another name")


class FolderInUse(RunError):
    """Another process trains in the run folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a run folder; raise if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(
                f"{folder} is in use by another training process; wait for it, or choose another folder"
            ) from None
        except OSError:  # not every file system has locks
            pass
        yield
    finally:
        os.close(descriptor)


def require_run(folder: Path, fix: str = "give the output folder of `rollstream train`") -> None:
    """Raise if a folder holds no run."""
    if not (folder / "config.json").is_file():
        reason = (
            "has no config.json" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        )
        raise RunError(f"{folder} is not a run folder: it {reason}; {fix}")


def require_writable(folder: Path) -> None:
    """Raise if a folder cannot be created or written; leave no trace of the attempt."""
    created: list[Path] = []
    try:
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}; choose another folder") from None
    finally:
        for path in created:
            with suppress(OSError):
                path.rmdir()
