"""The arguments of `train`, validated and combined into a run config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rollstream.engine import RollstreamError
from rollstream.limits import Limits
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.env_spec import EnvSpec, Source
from rollstream.rl.worker import PolicyMaker
from rollstream.training.config import resolve_config
from rollstream.training.run_folder import (
    CheckpointConfig,
    EvaluationConfig,
    RunConfig,
    RunError,
    read_run_config,
    require_run,
)
from rollstream.training.validation import validate
from rollstream.user_code import file_and_name

_EVALUATE_EVERY = 10_000
"""Default of `evaluate_every` if there is a return to stop at."""

Positive = Annotated[int | None, Limits(1)]
NonNegative = Annotated[int | None, Limits(0)]


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Arguments of `train` that decide how a run goes; `None` stands for the default."""

    algorithm: Algorithm[Any]
    config: Any = None
    env: Source | None = None
    steps: Positive = None
    seed: NonNegative = None
    workers: NonNegative = None
    env_kwargs: Mapping[str, Any] | None = None
    frame_stack: Positive = None
    policy: PolicyMaker | None = None
    engine: Literal["inline", "threads", "processes", "ray"] | None = None
    evaluate_every: Positive = None
    evaluate_episodes: Positive = None
    stop_at: float | None = None
    checkpoint_every: Positive = None
    keep: Positive = None

    def __post_init__(self) -> None:
        checked = ("steps", "seed", "workers", "frame_stack", "evaluate_every", "evaluate_episodes")
        checked += ("engine", "stop_at", "checkpoint_every", "keep")
        validate(TrainingArguments, {name: getattr(self, name) for name in checked})

    def new_run(self) -> RunConfig:
        """The config of a new run."""
        if self.env is None or self.steps is None:
            raise RollstreamError("env and steps are missing: train('ppo', env='CartPole-v1', steps=100_000)")
        environment = EnvSpec(self.env, self.env_kwargs or {}, self.frame_stack or 1)
        return RunConfig(
            self.algorithm,
            resolve_config(self.algorithm, environment.name, self.config),
            Task(environment, self.steps, self.seed or 0, self.workers or 0, self.policy),
            self.engine or ("processes" if self.workers else "inline"),
            self._evaluation(EvaluationConfig()),
            self._checkpoints(CheckpointConfig()),
        )

    def resumed_run(self, folder: Path | None) -> RunConfig:
        """The config of the run in a folder, with changed steps, engine, evaluation and checkpoints.

        Everything else has to be as it was.
        """
        if folder is None:
            raise RunError("resume=True needs the folder of the run: out='runs/...'")
        require_run(folder, "start a new run without resume")
        source = None if isinstance(self.env, str) and file_and_name(self.env) is None else self.env
        saved = read_run_config(folder, algorithm=self.algorithm, source=source, policy=self.policy)
        for name, given, expected in self._comparisons(saved):
            if given != expected:
                raise RunError(
                    f"the run in {folder} has {name} {expected!r}, not {given!r}, which cannot change on "
                    f"resume: leave {name} out, or start a new run in another folder"
                )
        return replace(
            saved,
            task=replace(saved.task, steps=self.steps or saved.task.steps),
            engine=self.engine or saved.engine,
            evaluation=self._evaluation(saved.evaluation),
            checkpoints=self._checkpoints(saved.checkpoints),
        )

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
        if self.workers is not None:
            pairs.append(("workers", self.workers, task.workers))
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
