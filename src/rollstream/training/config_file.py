"""`config.json`, from which a run can be built again."""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rollstream.algos import ALGORITHMS
from rollstream.algos import algorithm as algorithm_of
from rollstream.atomic_files import write_atomically
from rollstream.engine import RollstreamError
from rollstream.rl.acting import Acting
from rollstream.rl.algorithm import INFERENCE, Algorithm, Task
from rollstream.rl.env_spec import EnvSpec, Source
from rollstream.rl.worker import PolicyMaker
from rollstream.state_codec import StateEncodingError, decode_state, encode_state
from rollstream.training.checkpoint import newest_step
from rollstream.training.config import config_from_dict
from rollstream.training.metrics import STEPS, iterate_metrics
from rollstream.training.run_folder import (
    CheckpointConfig,
    EvaluationConfig,
    RunConfig,
    RunError,
    is_finished,
    require_run,
)
from rollstream.training.trust import is_remembered, names_code, require_trust
from rollstream.training.validation import ConfigError, validate
from rollstream.user_code import file_and_name

_FORMAT = 3
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
_IS = "{} is {!r}".format
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""Errors that a file of another structure causes."""


# Writing -----------------------------------------------------------------------------------------


def write_run_config(
    folder: Path, run_config: RunConfig, threads: Mapping[str, str], acts_on: str = "the host"
) -> dict[str, Any]:
    """Write `config.json`; return its content.

    Args:
        folder: The run folder.
        run_config: What is trained.
        threads: Environment variables of actors that set numbers of threads.
        acts_on: What the workers act on.
    """
    task, environment = run_config.task, run_config.task.environment
    content = {
        "format": _FORMAT,
        "id": run_config.id,
        "algorithm": _algorithm_source(run_config),
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
            "acting": task.acting,
            **{name: getattr(task, name) for name in INFERENCE},
        },
        "engine": run_config.engine,
        "acts_on": acts_on,
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
    return json.loads(text)


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


def _algorithm_source(run_config: RunConfig) -> str | None:
    """How to import an algorithm again: what the user gave, its name, or `file:name`; `None` if unknown."""
    algorithm, given = run_config.algorithm, run_config.algorithm_source
    if given is not None:
        return _source(given)
    if algorithm.name in ALGORITHMS and ALGORITHMS[algorithm.name] is algorithm:
        return algorithm.name
    parts = (algorithm.plan, algorithm.learner, algorithm.worker, algorithm.config)
    for module in dict.fromkeys(sys.modules.get(getattr(part, "__module__", "")) for part in parts):
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
    return {"module": module or "", "name": name or f"<{type(source).__name__}>"}


# Reading -----------------------------------------------------------------------------------------


def read_content(folder: Path) -> dict[str, Any]:
    """Read `config.json`, and check what a run config is built of, without importing anything."""
    require_run(folder)
    try:
        content = json.loads((folder / "config.json").read_bytes())
        if content["format"] != _FORMAT:
            raise RunError(
                f"{folder / 'config.json'} has format {content['format']!r}, not {_FORMAT}: the run was "
                f"trained with another version of Rollstream"
            )
        _check(content)
    except OSError as error:
        raise RunError(f"{folder / 'config.json'} cannot be read: {error.strerror}") from None
    except RunError:
        raise
    except (*_DAMAGE, RollstreamError) as error:
        reason = str(error) if isinstance(error, RollstreamError) else repr(error)
        raise RunError(f"{folder / 'config.json'} is damaged or from another version: {reason}") from None
    return content


def _check(content: Mapping[str, Any]) -> None:
    """Raise unless everything has the type it was written with."""
    task, environment = content["task"], content["task"]["environment"]
    for name, value in (("id", content["id"]), ("name", content["name"])):
        _require(isinstance(value, str), name, value)
    _require(isinstance(content["config"], dict), "config", content["config"])
    _require(isinstance(content["algorithm"], str | None), "algorithm", content["algorithm"])
    _require(isinstance(environment["options"], dict), "options", environment["options"])
    source, policy = environment["source"], task["policy"]
    _require(isinstance(source, str) or _names_function(source), "source", source)
    _require(policy is None or _names_function(policy), "policy", policy)
    validate(EvaluationConfig, {} | content["evaluation"], _IS)
    validate(CheckpointConfig, {} | content["checkpoints"], _IS)
    validate(RunConfig, {"engine": content["engine"]}, _IS)
    for name, value, low in (
        ("frame_stack", environment["frame_stack"], 1),
        ("steps", task["steps"], 1),
        ("seed", task["seed"], 0),
        ("workers", task["workers"], 0),
    ):
        _require(type(value) is int and value >= low, name, value)
    _require(task.get("acting", "auto") in get_args(Acting), "acting", task.get("acting"))
    validate(Task, {name: task.get(name) for name in INFERENCE}, _IS)
    _require(
        environment["vectorization"] in ("auto", "sync", "native"),
        "vectorization",
        environment["vectorization"],
    )


def _names_function(source: Any) -> bool:
    return isinstance(source, dict) and all(isinstance(source[key], str) for key in ("module", "name"))


def _require(holds: bool, name: str, value: Any) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value!r}")


def read_run_config(
    folder: Path,
    *,
    algorithm: Algorithm[Any] | None = None,
    source: Source | None = None,
    policy: PolicyMaker | None = None,
    trust: bool = False,
) -> RunConfig:
    """Build the run config from `config.json`.

    What is code, and not of this package, has to be passed, unless the folder is trusted: by the caller, or
    because this user trained it.
    """
    content = read_content(folder)
    trust = trust or is_remembered(folder, content)
    task, environment = content["task"], content["task"]["environment"]
    if algorithm is None and content["algorithm"] is None:
        raise RunError(
            f"the algorithm {content['name']} of the run in {folder} is neither in this package nor in a "
            f"file; pass it again: algorithm=..."
        )
    chosen = algorithm or algorithm_of(_trusted(folder, "algorithm", content["algorithm"], trust))
    if chosen.name != content["name"]:
        raise RunError(f"the run in {folder} was trained with {content['name']}, not {chosen.name}")
    env: Any = source
    if env is None:
        env = _import_source(_trusted(folder, "env", environment["source"], trust), "env")
    if policy is None and task["policy"] is not None:
        policy = _import_source(_trusted(folder, "policy", task["policy"], trust), "policy")
    try:
        options = decode_state(environment["options"], {})
        config = config_from_dict(chosen, content["config"])
    except (*_DAMAGE, RollstreamError) as error:
        reason = str(error) if isinstance(error, RollstreamError) else repr(error)
        raise RunError(f"{folder / 'config.json'} is damaged or from another version: {reason}") from None
    return RunConfig(
        chosen,
        config,
        Task(
            EnvSpec(env, options, environment["frame_stack"], environment["vectorization"]),
            task["steps"],
            task["seed"],
            task["workers"],
            policy,
            task.get("acting", "auto"),
            **{name: task.get(name) for name in INFERENCE},
        ),
        content["engine"],
        EvaluationConfig(**content["evaluation"]),
        CheckpointConfig(**content["checkpoints"]),
        algorithm_source=content["algorithm"],
        id=content["id"],
    )


@dataclass(frozen=True)
class SavedProgress:
    """How far a run is saved."""

    step: int
    """Steps of the newest checkpoint."""
    lost: int
    """Steps after it that the metrics have."""
    is_finished: bool


def saved_progress(folder: Path) -> SavedProgress | None:
    """How far the run in a folder is saved; `None` without a checkpoint. Imports nothing."""
    if not (folder / "config.json").is_file() or (step := newest_step(folder / "checkpoints")) is None:
        return None
    content, last, mean_return = read_content(folder), step, None
    for row in iterate_metrics(folder):
        last = max(last, int(float(row[STEPS])))
        if row[STEPS] == step:
            mean_return = row.get("eval/mean_reward")
    finished = is_finished(content["task"]["steps"], content["evaluation"]["stop_at"], step, mean_return)
    return SavedProgress(step, last - step, finished)


def may_import(folder: Path, trust: bool) -> bool:
    """Whether the code that a folder's `config.json` names may be imported."""
    return trust or is_remembered(folder, read_content(folder))


def _trusted(folder: Path, kind: str, source: Any, trust: bool) -> Any:
    """What `config.json` names, if it may be imported."""
    if not trust and names_code(kind, source):
        require_trust(folder, kind, source)
    return source


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
    except (ImportError, AttributeError, ValueError):
        again = "in Python, rs.load(..., policy)" if argument == "policy" else f"{argument}=..."
        raise RunError(
            f"{source['name']}, which this run was trained with, cannot be imported; pass it again: {again}"
        ) from None
    return value
