"""The run folder: its lock, and `config.json`, from which the run can be built again."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from rollstream.algos import ALGORITHMS
from rollstream.algos import algorithm as algorithm_of
from rollstream.atomic_files import write_atomically
from rollstream.engine import RollstreamError
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.env_spec import EnvSpec, Source
from rollstream.rl.worker import PolicyMaker
from rollstream.state_codec import StateEncodingError, decode_state, encode_state
from rollstream.training.config import config_from_dict
from rollstream.training.metrics import read_metrics
from rollstream.user_code import file_and_name

_FORMAT = 2
_PACKAGES = ("rollstream", "jax", "equinox", "optax", "numpy", "gymnasium")
_THREADS = (
    "NPROC",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "XLA_FLAGS",
    "JAX_PLATFORMS",
)
"""Environment variables that set the number of threads, and with it the rounding of sums."""


class RunError(RollstreamError):
    """A run folder is missing, damaged, in use, or not what was expected."""


@dataclass(frozen=True)
class EvaluationConfig:
    """When and how to evaluate."""

    every: int | None = None
    """Environment steps between evaluations; `None` for no evaluation."""
    episodes: int = 10
    """Episodes per evaluation."""
    stop_at: float | None = None
    """Mean return of an evaluation at which training stops."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints."""

    every: int | None = None
    """Environment steps between checkpoints; `None` for a tenth of the run, at most 50,000."""
    keep: int = 3
    """How many of the newest checkpoints to keep."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides how a run goes."""

    algorithm: Algorithm[Any]
    config: Any
    task: Task
    engine: str
    evaluation: EvaluationConfig
    checkpoints: CheckpointConfig

    def is_finished(self, steps: float, mean_return: float | None) -> bool:
        """Whether training ends after these steps and an evaluation with this mean return."""
        stop_at = self.evaluation.stop_at
        solved = mean_return is not None and stop_at is not None and mean_return >= stop_at
        return solved or steps >= self.task.steps


def require_new(folder: Path) -> None:
    """Raise if a folder holds a run with metrics or checkpoints, or is a file."""
    started = read_metrics(folder) or any((folder / "checkpoints").glob("*"))
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


def write_run_config(folder: Path, run_config: RunConfig, threads: Mapping[str, str]) -> None:
    """Write `config.json`."""
    task, environment = run_config.task, run_config.task.environment
    content = {
        "format": _FORMAT,
        "algorithm": _algorithm_source(run_config.algorithm),
        "name": run_config.algorithm.name,
        "config": asdict(run_config.config),
        "task": {
            "environment": {
                "source": _source(environment.source),
                "options": _encode_env_kwargs(environment.options),
                "frame_stack": environment.frame_stack,
                "vectorization": environment.vectorization,
            },
            "steps": task.steps,
            "seed": task.seed,
            "workers": task.workers,
            "policy": None if task.policy is None else _source(task.policy),
        },
        "engine": run_config.engine,
        "evaluation": asdict(run_config.evaluation),
        "checkpoints": asdict(run_config.checkpoints),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "threads": {name: os.environ[name] for name in _THREADS if name in os.environ} | dict(threads),
    }
    try:
        text = json.dumps(content, indent=2, default=_to_python)
    except TypeError as error:
        raise RunError(f"config or env_kwargs cannot be written to config.json: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.json", text.encode())


def read_run_config(
    folder: Path,
    *,
    algorithm: Algorithm[Any] | None = None,
    source: Source | None = None,
    policy: PolicyMaker | None = None,
) -> RunConfig:
    """Build the run config from `config.json`.

    What cannot be imported by name, such as a function of a notebook, has to be passed.
    """
    require_run(folder)
    try:
        content = json.loads((folder / "config.json").read_bytes())
        task, environment = content["task"], content["task"]["environment"]
        if algorithm is None and content["algorithm"] is None:
            raise RunError(
                f"the algorithm {content['name']} of the run in {folder} is neither in this package nor in a "
                f"file; pass it again: algorithm=..."
            )
        algorithm = algorithm or algorithm_of(content["algorithm"])
        if algorithm.name != content["name"]:
            raise RunError(f"the run in {folder} was trained with {content['name']}, not {algorithm.name}")
        run_config = RunConfig(
            algorithm,
            config_from_dict(algorithm, content["config"]),
            Task(
                EnvSpec(
                    source or _import_source(environment["source"], "env"),
                    decode_state(environment["options"], {}),
                    environment["frame_stack"],
                    environment["vectorization"],
                ),
                task["steps"],
                task["seed"],
                task["workers"],
            ),
            content["engine"],
            EvaluationConfig(**content["evaluation"]),
            CheckpointConfig(**content["checkpoints"]),
        )
        if policy is None and task["policy"] is not None:
            policy = _import_source(task["policy"], "policy")
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / 'config.json'} is damaged or from another version: {error!r}") from None
    return replace(run_config, task=replace(run_config.task, policy=policy))


def _encode_env_kwargs(env_kwargs: Mapping[str, Any]) -> Any:
    try:
        structure, arrays = encode_state(dict(env_kwargs))
    except StateEncodingError as error:
        raise RunError(f"env_kwargs cannot be written to config.json: {error}") from None
    if arrays:
        raise RunError(
            f"env_kwargs cannot be written to config.json: {', '.join(arrays)} is an array; use a list"
        )
    return structure


def _to_python(value: Any) -> Any:
    """Convert numpy scalars for JSON."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is of type {type(value).__name__}")


def _algorithm_source(algorithm: Algorithm[Any]) -> str | None:
    """How to import an algorithm again: its name, or `file:name`; `None` if neither is known."""
    if algorithm.name in ALGORITHMS and ALGORITHMS[algorithm.name] is algorithm:
        return algorithm.name
    module = sys.modules.get(algorithm.config.__module__)
    file = getattr(module, "__file__", None)
    for name, value in vars(module).items() if module is not None and file is not None else ():
        if value is algorithm:
            return f"{Path(str(file)).resolve()}:{name}"
    return None


def _source(source: Any) -> Any:
    """How to import an environment or policy again: its id, `file:name`, or module and name."""
    if isinstance(source, str):
        parts = file_and_name(source)
        return source if parts is None else f"{parts[0].resolve()}:{parts[1]}"
    module, name = getattr(source, "__module__", None), getattr(source, "__qualname__", None)
    return {"module": module, "name": name}


def _import_source(source: Any, argument: str) -> Any:
    if isinstance(source, str):
        if (parts := file_and_name(source)) is not None and not parts[0].is_file():
            raise RunError(
                f"the file {parts[0]}, which this run was trained with, does not exist; if it has moved, "
                f"pass {argument}=my_file.py:{parts[1]}"
            )
        return source
    try:
        value: Any = importlib.import_module(source["module"])
        for part in source["name"].split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        raise RunError(
            f"{source['name']}, which this run was trained with, cannot be imported; pass it again: "
            f"{argument}=..."
        ) from None
    return value
