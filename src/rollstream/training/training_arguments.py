"""The arguments of `train`, validated and combined into a run config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rollstream.engine import RollstreamError
from rollstream.limits import Limits, OptionalMilliseconds
from rollstream.rl.acting import Acting
from rollstream.rl.algorithm import INFERENCE, Algorithm, Task
from rollstream.rl.env_spec import EnvSpec, Source
from rollstream.rl.worker import PolicyMaker
from rollstream.training.config import config_from_dict, resolve_config
from rollstream.training.config_file import read_run_config
from rollstream.training.run_folder import (
    CheckpointConfig,
    EvaluationConfig,
    RunConfig,
    RunError,
    require_run,
)
from rollstream.training.trust import names_code
from rollstream.training.validation import validate

_EVALUATE_EVERY = 10_000
"""Default of `evaluate_every` if there is a return to stop at."""

_CHANGEABLE = ("seed", "config", "env_kwargs")
"""Arguments that may change on resume, with `allow_changes`."""

Positive = Annotated[int | None, Limits(1)]
NonNegative = Annotated[int | None, Limits(0)]


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Arguments of `train` that decide how a run goes; `None` stands for the default."""

    algorithm: Algorithm[Any]
    algorithm_source: str | None = None
    trust: bool = False
    allow_changes: bool = False
    config: Any = None
    env: Source | None = None
    steps: Positive = None
    seed: NonNegative = None
    workers: NonNegative = None
    env_kwargs: Mapping[str, Any] | None = None
    frame_stack: Positive = None
    policy: PolicyMaker | None = None
    engine: Literal["inline", "threads", "processes", "ray"] | None = None
    acting: Acting | None = None
    inference_batch: Positive = None
    inference_deadline: OptionalMilliseconds = None
    evaluate_every: Positive = None
    evaluate_episodes: Positive = None
    stop_at: float | None = None
    checkpoint_every: Positive = None
    keep: Positive = None
    deadline: Annotated[float | None, Limits(0)] = None
    on_report: Callable[..., object] | None = None
    max_failures: Annotated[int, Limits(0)] = 0

    def __post_init__(self) -> None:
        checked = ("steps", "seed", "workers", "frame_stack", "evaluate_every", "evaluate_episodes")
        checked += (
            "engine",
            "acting",
            "inference_batch",
            "inference_deadline",
            "stop_at",
            "checkpoint_every",
            "keep",
            "deadline",
            "max_failures",
        )
        validate(TrainingArguments, {name: getattr(self, name) for name in checked})
        if self.policy is not None and not callable(self.policy):
            raise RollstreamError(
                f"policy={self.policy!r}: must be a function of observation space and action space that "
                f"returns a policy; leave it out to use the one of {self.algorithm.name}, whose network is "
                f"set by config={{'hidden': (64, 64)}}"
            )
        if self.on_report is not None and not callable(self.on_report):
            raise RollstreamError(f"on_report={self.on_report!r}: must be a function of a report")
        if self.env_kwargs is not None and not isinstance(self.env_kwargs, Mapping):
            raise RollstreamError(f"env_kwargs={self.env_kwargs!r}: must be a dict of keyword arguments")

    def new_run(self) -> RunConfig:
        """The config of a new run."""
        if self.env is None or self.steps is None:
            raise RollstreamError("env and steps are missing: train('ppo', env='CartPole-v1', steps=100_000)")
        environment = EnvSpec(self.env, self.env_kwargs or {}, self.frame_stack or 1)
        return RunConfig(
            self.algorithm,
            resolve_config(self.algorithm, environment.name, self.config).for_workers(self.workers or 0),
            Task(
                environment,
                self.steps,
                self.seed or 0,
                self.workers or 0,
                self.policy,
                **self._acting(),
            ),
            self.engine or ("processes" if self.workers else "inline"),
            self._evaluation(EvaluationConfig()),
            self._checkpoints(CheckpointConfig()),
            self.algorithm_source,
        )

    def _acting(self, saved: Task | None = None) -> dict[str, Any]:
        """Where workers act; what configures an inference actor is kept as long as there is one."""
        given = {"acting": self.acting, **{name: getattr(self, name) for name in INFERENCE}}
        if saved is not None and self.acting not in (None, saved.acting):
            return given
        return _without_none(given)

    def _engine(self, saved: RunConfig) -> str:
        """The engine of a resumed run: the default for its workers, if it was the default before."""
        if self.workers is None or saved.engine != ("processes" if saved.task.workers else "inline"):
            return saved.engine
        return "processes" if self.workers else "inline"

    def notes(self, run_config: RunConfig) -> list[str]:
        """What was changed to fit the number of workers."""
        if self.env is None or self.config is run_config.config:
            return []
        given = resolve_config(self.algorithm, EnvSpec(self.env).name, self.config)
        changes = [
            f"{field.name} is {new} instead of {old}"
            for field in fields(given)
            if (new := getattr(run_config.config, field.name)) != (old := getattr(given, field.name))
        ]
        reason = f"so that each of {run_config.task.workers} workers has as many environments"
        return [f"{' and '.join(changes)}, {reason}"] if changes else []

    def resumed_run(self, folder: Path | None) -> RunConfig:
        """The config of the run in a folder, with other steps, workers, engine, evaluation and checkpoints.

        Also where workers act may change. Everything else has to be as it was.
        """
        if folder is None:
            raise RunError("resume=True needs the folder of the run: out='runs/...'")
        require_run(folder, "start a new run without resume")
        is_code = self.env is not None and names_code("env", self.env)
        saved = read_run_config(
            folder,
            algorithm=self.algorithm,
            source=self.env if is_code else None,
            policy=self.policy,
            trust=self.trust,
        )
        if self.allow_changes:
            saved = self._changed(saved)
        for name, given, expected in self._comparisons(saved):
            if given != expected:
                fix = ", or allow it with allow_changes=True" if name in _CHANGEABLE else ""
                raise RunError(
                    f"the run in {folder} has {name} {expected!r}, not {given!r}, which cannot change on "
                    f"resume: leave {name} out{fix}, or start a new run in another folder"
                )
        task = saved.task
        steps = self.steps or task.steps
        workers = task.workers if self.workers is None else self.workers
        return replace(
            saved,
            task=replace(task, steps=steps, workers=workers, **self._acting(task)),
            engine=self.engine or self._engine(saved),
            evaluation=self._evaluation(saved.evaluation),
            checkpoints=self._checkpoints(saved.checkpoints),
            algorithm_source=self.algorithm_source,
        )

    def _changed(self, saved: RunConfig) -> RunConfig:
        """The saved config with the given seed, hyperparameters and keyword arguments of the environment."""
        task = saved.task
        options = task.environment.options if self.env_kwargs is None else self.env_kwargs
        seed = task.seed if self.seed is None else self.seed
        config = saved.config if self.config is None else self.config
        if isinstance(config, Mapping):
            config = config_from_dict(self.algorithm, asdict(saved.config) | dict(config))
        task = replace(task, environment=replace(task.environment, options=options), seed=seed)
        return replace(saved, config=resolve_config(self.algorithm, "", config), task=task)

    def _evaluation(self, base: EvaluationConfig) -> EvaluationConfig:
        given = {"every": self.evaluate_every, "episodes": self.evaluate_episodes, "stop_at": self.stop_at}
        evaluation = replace(base, **_without_none(given))
        if evaluation.stop_at is not None and evaluation.every is None:
            evaluation = replace(evaluation, every=_EVALUATE_EVERY)
        return evaluation

    def _checkpoints(self, base: CheckpointConfig) -> CheckpointConfig:
        return replace(base, **_without_none({"every": self.checkpoint_every, "keep": self.keep}))

    def _comparisons(self, saved: RunConfig) -> list[tuple[str, Any, Any]]:
        """Given and saved values of the arguments that cannot change, by name."""
        task, environment = saved.task, saved.task.environment
        pairs: list[tuple[str, Any, Any]] = []
        if self.env is not None:
            pairs.append(("env", EnvSpec(self.env).name, environment.name))
        if self.seed is not None:
            pairs.append(("seed", self.seed, task.seed))
        if self.frame_stack is not None:
            pairs.append(("frame_stack", self.frame_stack, environment.frame_stack))
        if self.env_kwargs is not None:
            pairs.append(("env_kwargs", dict(self.env_kwargs), dict(environment.options)))
        if saved.evaluation.every is None:  # the evaluation is part of the plan
            pairs.append(("evaluate_every", self._evaluation(saved.evaluation).every, None))
        if isinstance(self.config, Mapping):
            configs = resolve_config(self.algorithm, environment.name, self.config), saved.config
            given, expected = ({name: getattr(config, name) for name in self.config} for config in configs)
            pairs.append(("config", given, expected))
        elif self.config is not None:
            pairs.append(("config", self.config, saved.config))
        return pairs


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
