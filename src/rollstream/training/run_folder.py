"""What a run's folder says of the run: `config.json`, enough to build it again."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from rollstream.algos import ALGORITHMS
from rollstream.algos import algorithm as algorithm_of
from rollstream.atomic_files import write_file
from rollstream.engine import RollstreamError
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.env_spec import EnvSpec, Source
from rollstream.rl.worker import PolicyMaker
from rollstream.state_codec import NotPlain, packed, unpacked
from rollstream.training.metrics import read_metrics
from rollstream.training.settings import as_json, settings
from rollstream.user_code import file_and_name

_FORMAT = 1
_PACKAGES = ("rollstream", "jax", "equinox", "optax", "numpy", "gymnasium")
_THREADS = (
    "NPROC",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "XLA_FLAGS",
    "JAX_PLATFORMS",
)
"""Environment variables that decide how many threads compute, and so how sums are rounded."""


class RunError(RollstreamError):
    """A folder that is not what a run needs it to be."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides how a run goes."""

    algorithm: Algorithm[Any]
    config: Any
    task: Task
    engine: str
    evaluation: Mapping[str, Any]
    """`every`, `episodes` and `stop_at`."""
    saving: Mapping[str, Any]
    """Of checkpoints: `every`, `None` for a tenth of the training, and how many to `keep`."""

    def is_over(self, steps: float, evaluated: float | None) -> bool:
        """Whether so many steps, or what the newest evaluation reached, are what was asked for."""
        stop_at = self.evaluation["stop_at"]
        enough = evaluated is not None and stop_at is not None and evaluated >= stop_at
        return enough or steps >= self.task.steps


def require_new(folder: Path) -> None:
    """Raise if there is a run in a folder already that got somewhere, or something else in its place."""
    begun = read_metrics(folder) or any((folder / "checkpoints").glob("*"))
    if (folder / "config.json").exists() and begun:
        raise RunError(
            f"{folder} holds a run already; go on with it by resume=True, or choose another folder"
        )
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file, and a run needs a folder; choose another name")


class InUse(RunError):
    """A folder that somebody else trains in."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Have a folder for oneself, as long as this process lives; raise if somebody else has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(
                f"another process trains in {folder} right now; wait for it, or choose another folder"
            ) from None
        except OSError:  # not every file system knows locks
            pass
        yield
    finally:
        os.close(descriptor)


def require_run(folder: Path, fix: str = "give the folder that a training was written to") -> None:
    """Raise if there is no run in a folder."""
    if not (folder / "config.json").is_file():
        reason = (
            "has no config.json" if folder.is_dir() else "is a file" if folder.exists() else "is not there"
        )
        raise RunError(f"{folder} is not the folder of a run: it {reason}; {fix}")


def require_writable(folder: Path) -> None:
    """Raise if nothing can be written to a folder. It is left as it was: if it was not there, it is not."""
    made: list[Path] = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}; choose another folder") from None
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def write_run_config(folder: Path, recipe: RunConfig, threads: Mapping[str, str]) -> None:
    """Write `config.json`."""
    environment = recipe.task.environment
    about = {
        "format": _FORMAT,
        "algorithm": _home(recipe.algorithm),
        "name": recipe.algorithm.name,
        "config": as_json(recipe.config),
        "task": {
            "environment": {
                "source": _source(environment.source),
                "options": _plain(environment.options),
                "frame_stack": environment.frame_stack,
                "vectorization": environment.vectorization,
            },
            "steps": recipe.task.steps,
            "seed": recipe.task.seed,
            "workers": recipe.task.workers,
            "policy": None if recipe.task.policy is None else _source(recipe.task.policy),
        },
        "engine": recipe.engine,
        "evaluation": dict(recipe.evaluation),
        "saving": dict(recipe.saving),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "threads": {name: os.environ[name] for name in _THREADS if name in os.environ} | dict(threads),
    }
    try:
        text = json.dumps(about, indent=2, default=_number)
    except TypeError as error:
        raise RunError(f"settings or environment options cannot be written to config.json: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "config.json", text.encode())


def read_run_config(
    folder: Path,
    *,
    algorithm: Algorithm[Any] | None = None,
    source: Source | None = None,
    policy: PolicyMaker | None = None,
) -> RunConfig:
    """Build what `config.json` says. What it cannot say, as a function of a notebook, is to be given."""
    require_run(folder)
    try:
        about = json.loads((folder / "config.json").read_bytes())
        task, environment = about["task"], about["task"]["environment"]
        if algorithm is None and about["algorithm"] is None:
            raise RunError(
                f"{about['name']}, which the run in {folder} was made with, is not that of this package, "
                f"nor is it in a file; give it again: algorithm=..."
            )
        algorithm = algorithm or algorithm_of(about["algorithm"])
        if algorithm.name != about["name"]:
            raise RunError(f"the run in {folder} is one of {about['name']}, not of {algorithm.name}")
        recipe = RunConfig(
            algorithm,
            settings(algorithm, about["config"]),
            Task(
                EnvSpec(
                    source or _found(environment["source"], "env"),
                    unpacked(environment["options"], {}),
                    environment["frame_stack"],
                    environment["vectorization"],
                ),
                task["steps"],
                task["seed"],
                task["workers"],
            ),
            about["engine"],
            about["evaluation"],
            about["saving"],
        )
        if policy is None and task["policy"] is not None:
            policy = _found(task["policy"], "policy")
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / 'config.json'} is damaged or of another version: {error!r}") from None
    return replace(recipe, task=replace(recipe.task, policy=policy))


def _plain(options: Mapping[str, Any]) -> Any:
    """Options of an environment for JSON, which has no tuples."""
    try:
        structure, arrays = packed(dict(options))
    except NotPlain as error:
        raise RunError(f"env_options cannot be written to config.json: {error}") from None
    if arrays:
        raise RunError(
            f"env_options cannot be written to config.json: {', '.join(arrays)} is an array; give a list"
        )
    return structure


def _number(value: Any) -> Any:
    """Numbers of numpy as JSON has them."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is of type {type(value).__name__}")


def _home(algorithm: Algorithm[Any]) -> str | None:
    """Where to find an algorithm again: a name, or a file and a name in it; `None` if it is nowhere."""
    if algorithm.name in ALGORITHMS and ALGORITHMS[algorithm.name] is algorithm:
        return algorithm.name
    module = sys.modules.get(algorithm.config.__module__)
    file = getattr(module, "__file__", None)
    for name, value in vars(module).items() if module is not None and file is not None else ():
        if value is algorithm:
            return f"{Path(str(file)).resolve()}:{name}"
    return None


def _source(source: Any) -> Any:
    """A name, a file and a name in it, or where a function is to be found."""
    if isinstance(source, str):
        parts = file_and_name(source)
        return source if parts is None else f"{parts[0].resolve()}:{parts[1]}"
    module, name = getattr(source, "__module__", None), getattr(source, "__qualname__", None)
    return {"module": module, "name": name}


def _found(source: Any, argument: str) -> Any:
    if isinstance(source, str):
        if (parts := file_and_name(source)) is not None and not parts[0].is_file():
            raise RunError(
                f"the file {parts[0]}, which this run was made with, is not there; say where it is now: "
                f"{argument}=my_file.py:{parts[1]}"
            )
        return source
    try:
        value: Any = importlib.import_module(source["module"])
        for part in source["name"].split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        raise RunError(
            f"{source['name']}, which this run was made with, is not in a module that can be imported; "
            f"give it again: {argument}=..."
        ) from None
    return value
