"""`train` and `load`, and the run they return."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from rollstream.algos import algorithm as algorithm_of
from rollstream.engine import ActorEvent, RollstreamError
from rollstream.rl.algorithm import Algorithm
from rollstream.rl.env_spec import Source
from rollstream.rl.operators import Report
from rollstream.rl.params import require_same_shapes
from rollstream.rl.policy import Weights
from rollstream.rl.worker import PolicyMaker
from rollstream.training.checkpoint import CheckpointError, latest_checkpoint, load_weights
from rollstream.training.config_file import read_content, read_run_config
from rollstream.training.evaluation import Evaluation, Evaluator
from rollstream.training.identity import other_run, require_same_spaces
from rollstream.training.inference import TrainedPolicy
from rollstream.training.loop import TrainingFailed, TrainingLoop
from rollstream.training.metrics import STEPS, MetricsRow, read_metrics
from rollstream.training.progress import Display, NoDisplay
from rollstream.training.run_folder import RunConfig, require_new
from rollstream.training.training_arguments import TrainingArguments
from rollstream.training.validation import as_path, require_integers


def train(
    algorithm: str | Algorithm[Any],
    *,
    env: Source | None = None,
    steps: int | None = None,
    seed: int | None = None,
    workers: int | None = None,
    engine: str | None = None,
    acting: str | None = None,
    inference_batch: int | None = None,
    inference_deadline: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    trust: bool = False,
    allow_changes: bool = False,
    config: Any = None,
    quiet: bool = False,
    display: Display | None = None,
    evaluate_every: int | None = None,
    evaluate_episodes: int | None = None,
    stop_at: float | None = None,
    checkpoint_every: int | None = None,
    keep: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    frame_stack: int | None = None,
    policy: PolicyMaker | None = None,
    on_report: Callable[[Report], object] | None = None,
    deadline: float | None = None,
    max_failures: int = 0,
) -> Run:
    """Train an algorithm on an environment.

    Ctrl-C and SIGTERM finish the iteration, save a checkpoint and exit; a second Ctrl-C exits at once.

    Args:
        algorithm: a name (`ppo`), a file and a name in it (`my_file.py:MyAlgorithm`), or an `Algorithm`.
        env: a Gymnasium id, a file and a name in it (`my_file.py:MyEnv`), or a function that returns an
            environment.
        steps: total number of environment steps, rounded up to whole rollouts.
        seed: random seed (default 0). Synchronous algorithms repeat a run exactly, given the same number of
            workers.
        workers: number of rollout workers; 0 (default) samples in the driver process.
        engine: `inline`, `threads`, `processes` or `ray`. Default: `processes` if there are workers, else
            `inline`.
        acting: where workers in the driver's process act: `host`, `device` (JAX's default), or `auto`
            (default), which is an accelerator if there is one and the network is large. With `central`, an
            inference actor acts for all workers, also for those in other processes.
        inference_batch: number of workers whose actions the inference actor chooses together (default: half
            of them).
        inference_deadline: milliseconds after which it does not wait for more of them (default 2).
        out: the run folder; without one nothing is written.
        resume: resume the run in `out` from its newest checkpoint. Arguments that are left out keep their
            values.
        trust: on resume, import the code that the folder's `config.json` names.
        allow_changes: resume with another seed, other hyperparameters or other `env_kwargs`.
        config: the algorithm's Config, or a dict of hyperparameters that override the tuned ones.
        quiet: show no progress.
        display: shows the progress instead of the default display.
        evaluate_every: environment steps between evaluations (default: no evaluation, or 10,000 if `stop_at`
            is given).
        evaluate_episodes: episodes per evaluation (default 10).
        stop_at: stop as soon as the mean return of an evaluation reaches this.
        checkpoint_every: environment steps between checkpoints (default: a tenth of `steps`, at most 50,000,
            but not within 30 seconds of the last).
        keep: number of checkpoints to keep (default 3), besides the best one.
        env_kwargs: keyword arguments of the environment.
        frame_stack: number of observations to stack (default 1).
        policy: makes the policy, instead of the algorithm's own.
        on_report: called with every report; if it returns `True`, training stops and saves.
        deadline: seconds a worker may take for one rollout, or with `acting="central"` for one step of its
            environments; one that takes longer is killed and restarted (default: no limit).
        max_failures: how often to resume from the newest checkpoint by itself if the learner's actor dies
            (default 0). Workers, replay shards and the inference actor are restarted anyway.
    """
    chosen = algorithm_of(algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(chosen, Algorithm):
        raise RollstreamError(
            f"{chosen!r} is not an algorithm: use a name from `rollstream list`, or an Algorithm"
        )
    folder = None if out is None else as_path("out", out)
    arguments = TrainingArguments(
        algorithm=chosen,
        algorithm_source=algorithm if isinstance(algorithm, str) else None,
        trust=trust,
        allow_changes=allow_changes,
        config=config,
        env=env,
        steps=steps,
        seed=seed,
        workers=workers,
        env_kwargs=env_kwargs,
        frame_stack=frame_stack,
        policy=policy,
        engine=cast(Any, engine),
        acting=cast(Any, acting),
        inference_batch=inference_batch,
        inference_deadline=inference_deadline,
        evaluate_every=evaluate_every,
        evaluate_episodes=evaluate_episodes,
        stop_at=stop_at,
        checkpoint_every=checkpoint_every,
        keep=keep,
        deadline=deadline,
        on_report=on_report,
        max_failures=max_failures,
    )
    if max_failures and folder is None:
        raise RollstreamError("max_failures needs a folder for checkpoints: add out='runs/...'")
    if folder is not None and not resume:
        require_new(folder)
    if display is not None and not hasattr(display, "heartbeat"):
        raise RollstreamError(f"display={display!r}: must be a Display; leave it out, or use quiet=True")
    run_config = arguments.resumed_run(folder) if resume else arguments.new_run()
    if max_failures and not run_config.algorithm.learner_on_actor:
        raise RollstreamError(
            f"max_failures={max_failures} is for learners on actors, and that of {run_config.algorithm.name} "
            f"is in the driver: leave it out"
        )
    display = display or _default_display(quiet)
    notes = [] if resume else arguments.notes(run_config)
    failures, events = 0, deque[ActorEvent]()
    while True:
        loop = TrainingLoop(
            run_config,
            folder,
            display,
            on_report,
            deadline=deadline,
            notes=notes,
            may_change=allow_changes,
            events=events,
        )
        try:
            loop.run(resume)
        except TrainingFailed as error:
            display.finish(completed=False)
            failures += 1
            if failures > max_failures:
                raise
            notes = [f"{error.__cause__}; resuming from the newest checkpoint ({failures} of {max_failures})"]
            resume, events = True, loop.new_events
        except BaseException:
            display.finish(completed=False)
            raise
        else:
            display.finish(completed=True)
            return Run(run_config, folder, loop.metrics, loop.weights)


class Run:
    """A training run: its config, metrics and trained policy."""

    def __init__(
        self,
        run_config: RunConfig,
        path: Path | None,
        metrics: Callable[[], list[MetricsRow]],
        weights: Weights,
        spaces: list[str] | None = None,
    ):
        self.run_config = run_config
        """What was trained, and how."""
        self.path = path
        """The run folder, if there is one."""
        self._read_metrics = metrics
        self._weights = weights
        self._spaces = spaces

    @property
    def config(self) -> Any:
        """The algorithm's Config."""
        return self.run_config.config

    @cached_property
    def metrics(self) -> list[MetricsRow]:
        """One dict per report: read from the folder when first used, else the newest 10,000."""
        return self._read_metrics()

    @property
    def is_finished(self) -> bool:
        """Whether training has reached its last step, or the return to stop at."""
        if not self.metrics:
            return False
        last = self.metrics[-1]
        mean_return = cast(float | None, last.get("eval/mean_reward"))
        return self.run_config.is_finished(float(last[STEPS]), mean_return)

    @cached_property
    def policy(self) -> TrainedPolicy:
        """The trained policy: `run.policy.act(observation)`."""
        task = self.run_config.task
        spaces = task.spaces()
        if self._spaces is not None:
            require_same_spaces(task.environment.name, spaces, self._spaces)
        policy = self.run_config.algorithm.worker(self.run_config.config, task).policy(*spaces)
        require_same_shapes(self._weights, policy.init(task.seed))
        frame_stack = task.environment.frame_stack
        return TrainedPolicy(policy, self._weights, *spaces, frame_stack=frame_stack, seed=task.seed)

    def evaluate(self, episodes: int = 100, seed: int = 0, *, deterministic: bool = True) -> Evaluation:
        """Run episodes; with `deterministic=False`, actions are sampled."""
        require_integers(0, seed=seed)
        require_integers(1, episodes=episodes)
        task, policy = self.run_config.task, self.policy
        options: Any = {"deterministic": deterministic, "acting": task.acting}
        with Evaluator(task.environment, policy.policy, seed, **options) as evaluator:
            return evaluator(policy.weights, episodes)

    def __repr__(self) -> str:
        task = self.run_config.task
        where = "" if self.path is None else f" in {self.path}"
        return f"<Run of {self.run_config.algorithm.name} on {task.environment.name}{where}>"


def load(
    path: str | Path,
    *,
    best: bool = False,
    algorithm: str | Algorithm[Any] | None = None,
    env: Source | None = None,
    policy: PolicyMaker | None = None,
    trust: bool = False,
) -> Run:
    """Load the run in a folder from its newest checkpoint, or from the one with the best evaluation.

    A folder is data: code of one's own that it names is not imported, unless this user trained the run.

    Args:
        path: the run folder.
        best: load the weights with the best evaluation.
        algorithm: the run's algorithm, if it is not in this package.
        env: the run's environment, if it is not a registered one.
        policy: the run's policy function, if it has one.
        trust: import what the folder's `config.json` names.
    """
    folder = as_path("path", path)
    chosen = algorithm_of(algorithm) if isinstance(algorithm, str) else algorithm
    run_config = read_run_config(folder, algorithm=chosen, source=env, policy=policy, trust=trust)
    check = partial(other_run, content=read_content(folder), may_change=False)
    checkpoint = latest_checkpoint(folder / ("best" if best else "checkpoints"), check)
    if checkpoint is None:
        fix = "train with evaluate_every=..." if best else "continue training with resume=True"
        raise CheckpointError(f"the run in {folder} has no {'best ' * best}checkpoint yet; {fix}")
    metrics = partial(read_metrics, folder, checkpoint.step)
    return Run(run_config, folder, metrics, load_weights(checkpoint.path), checkpoint.run["spaces"])


def _default_display(quiet: bool) -> Display:
    if quiet:
        return NoDisplay()
    from rollstream.training.display import display_for

    return display_for(sys.stdout)
