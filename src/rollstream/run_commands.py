"""What commands do with run folders: load them, and say how far an interrupted run is saved."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any


def load_run(command: Any) -> Any:
    """The run in the folder of a command."""
    from rollstream.training import load

    import_from_here(command.folder, command.env, command.trust)
    return load(
        command.folder,
        best=command.best,
        env=command.env,
        algorithm=command.algorithm,
        trust=command.trust,
    )


def import_from_here(folder: Path | None, env: str | None, trust: bool) -> None:
    """Let modules in the working directory be imported if the user, or a trusted folder, names one.

    Otherwise a module that is not installed, such as envpool, would be taken from a stranger's folder.
    """
    from rollstream.training.config_file import may_import
    from rollstream.training.trust import names_code

    if {"", os.getcwd()} & set(sys.path):
        return
    if (env is not None and names_code("env", env)) or (folder is not None and may_import(folder, trust)):
        sys.path.append(os.getcwd())


def new_folder(algorithm: str, environment: str, seed: int) -> Path:
    """A run folder that does not exist yet."""
    names = [text.rpartition(":")[2] for text in (algorithm, environment)]
    name = f"{names[0]}-{names[1]}-{seed}".replace("/", "-")
    folder, count = Path("runs", name), 1
    while folder.exists():
        count += 1
        folder = Path("runs", f"{name}-{count}")
    return folder


def farewell(out: Path, algorithm: str) -> str | None:
    """What is saved of an interrupted run, and how to resume it; `None` if it is finished."""
    from rollstream.training.config_file import saved_progress

    resume = shlex.join(["rollstream", "train", algorithm, "--resume", "--out", str(out)])
    progress = saved_progress(out)
    if progress is None:
        return "stopped before the first checkpoint: nothing is saved"
    if progress.is_finished:
        return None
    if progress.lost:
        return (
            f"stopped at once: the checkpoint at {progress.step:,} steps is saved, and {progress.lost:,} "
            f"steps after it are not; resume with: {resume}"
        )
    return f"stopped, and saved up to {progress.step:,} steps; resume with: {resume}"
