"""What a person asks to be trained, checked and made into a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from rollstream.engine import RollstreamError
from rollstream.rl.algorithm import Algorithm, Task
from rollstream.rl.env_spec import EnvSpec, Source
from rollstream.rl.worker import PolicyMaker
from rollstream.training.run_folder import RunConfig, RunError, read_run_config, require_run
from rollstream.training.settings import configured
from rollstream.user_code import file_and_name

_EVALUATE_EVERY = 10_000
"""Steps from one evaluation to the next, where there is a return to stop at."""


def require_whole(least: int, **numbers: Any) -> None:
    """Raise, naming the argument, unless all that are given are whole numbers and large enough."""
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, Integral) or value < least):
            raise RollstreamError(f"{name}={value!r}: give a whole number, {least} or more")


@dataclass(frozen=True)
class Request:
    """The arguments of `train` that decide how a run goes; `None` where nothing was said."""

    algorithm: Algorithm[Any]
    config: Any
    env: Source | None
    steps: int | None
    seed: int | None
    workers: int | None
    options: Mapping[str, Any] | None
    frame_stack: int | None
    policy: PolicyMaker | None
    engine: str | None
    evaluation: Mapping[str, Any]
    saving: Mapping[str, Any]

    def __post_init__(self) -> None:
        every, episodes = self.evaluation["every"], self.evaluation["episodes"]
        require_whole(1, checkpoint_every=self.saving["every"], keep=self.saving["keep"])
        require_whole(0, seed=self.seed, workers=self.workers)
        require_whole(1, steps=self.steps, frame_stack=self.frame_stack)
        require_whole(1, evaluate_every=every, evaluate_episodes=episodes)

    def recipe(self) -> RunConfig:
        """What to train, anew."""
        if self.env is None or self.steps is None:
            raise RollstreamError(
                "say what to learn in and for how long: train('ppo', env='CartPole-v1', steps=100_000)"
            )
        environment = EnvSpec(self.env, self.options or {}, self.frame_stack or 1)
        task = Task(environment, self.steps, self.seed or 0, self.workers or 0, self.policy)
        engine = self.engine or ("processes" if self.workers else "inline")
        config = configured(self.algorithm, environment.name, self.config)
        evaluation = self._evaluation({"every": None, "episodes": 10, "stop_at": None})
        saving = {"every": None, "keep": 3} | _said(self.saving)
        return RunConfig(self.algorithm, config, task, engine, evaluation, saving)

    def resumed(self, folder: Path | None) -> RunConfig:
        """What the folder says; what was given as well has to be the same. Only steps may be more or less."""
        if folder is None:
            raise RunError("resume=True goes on with the run in a folder; say which: out='runs/...'")
        require_run(folder, "begin one there without resume")
        source = None if isinstance(self.env, str) and file_and_name(self.env) is None else self.env
        saved = read_run_config(folder, algorithm=self.algorithm, source=source, policy=self.policy)
        for what, given, there in self._compared(saved):
            if given != there:
                raise RunError(
                    f"the run in {folder} has {what} {there!r}, not {given!r}; a run goes on as it began: "
                    f"leave {what} out, or begin another run in another folder"
                )
        return replace(
            saved,
            task=replace(saved.task, steps=self.steps or saved.task.steps),
            engine=self.engine or saved.engine,
            evaluation=self._evaluation(saved.evaluation),
            saving={**saved.saving, **_said(self.saving)},
        )

    def _evaluation(self, before: Mapping[str, Any]) -> dict[str, Any]:
        evaluation = {**before, **_said(self.evaluation)}
        if evaluation["stop_at"] is not None and evaluation["every"] is None:
            evaluation["every"] = _EVALUATE_EVERY
        return evaluation

    def _compared(self, saved: RunConfig) -> list[tuple[str, Any, Any]]:
        """What both say, by the names of `train`."""
        task, environment = saved.task, saved.task.environment
        said: list[tuple[str, Any, Any]] = []
        if self.env is not None:
            said.append(("env", EnvSpec(self.env).name, environment.name))
        if self.seed is not None:
            said.append(("seed", self.seed, task.seed))
        if self.workers is not None:
            said.append(("workers", self.workers, task.workers))
        if self.frame_stack is not None:
            said.append(("frame_stack", self.frame_stack, environment.frame_stack))
        if self.options is not None:
            said.append(("env_options", dict(self.options), dict(environment.options)))
        if saved.evaluation["every"] is None:  # evaluating is part of the plan
            said.append(("evaluate_every", self._evaluation(saved.evaluation)["every"], None))
        if isinstance(self.config, Mapping):
            both = configured(self.algorithm, environment.name, self.config), saved.config
            given, there = ({name: getattr(config, name) for name in self.config} for config in both)
            said.append(("config", given, there))
        elif self.config is not None:
            said.append(("config", self.config, saved.config))
        return said


def _said(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
