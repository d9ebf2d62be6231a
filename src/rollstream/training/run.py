"""A run: an algorithm trained on an environment, from one call to a folder that has everything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from rollstream.algos import algorithm as algorithm_of
from rollstream.engine import RollstreamError
from rollstream.rl.algorithm import Algorithm
from rollstream.rl.env_spec import Source
from rollstream.rl.operators import Report
from rollstream.rl.policy import Weights
from rollstream.rl.worker import PolicyMaker
from rollstream.training.checkpoint import CheckpointError, latest, load_weights
from rollstream.training.evaluation import Evaluation, Evaluator
from rollstream.training.inference import TrainedPolicy
from rollstream.training.loop import Loop
from rollstream.training.metrics import Row, read_metrics
from rollstream.training.progress import Display, Silent
from rollstream.training.request import Request, require_whole
from rollstream.training.run_folder import RunConfig, read_run_config, require_new


def train(
    algorithm: str | Algorithm[Any],
    *,
    env: Source | None = None,
    steps: int | None = None,
    seed: int | None = None,
    workers: int | None = None,
    engine: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    config: Any = None,
    quiet: bool = False,
    display: Display | None = None,
    evaluate_every: int | None = None,
    evaluate_episodes: int | None = None,
    stop_at: float | None = None,
    checkpoint_every: int | None = None,
    keep: int | None = None,
    env_options: Mapping[str, Any] | None = None,
    frame_stack: int | None = None,
    policy: PolicyMaker | None = None,
    on_report: Callable[[Report], object] | None = None,
) -> Run:
    """Train an algorithm on an environment.

    Ctrl-C and SIGTERM finish what is under way, write a checkpoint and end the program as usual; Ctrl-C once
    more does not wait.

    Args:
        algorithm: a name (`ppo`), a file and a name in it (`my_file.py:MyAlgorithm`), or the object itself.
        env: a Gymnasium id, or a function that makes an environment.
        steps: environment steps of the whole training; rounded up to whole batches.
        seed: the same seed gives the same run; 0 if left out.
        workers: how many sample beside the learner; with 0, as if left out, one does in the same thread.
        engine: `inline`, `threads`, `processes` or `ray`; inline without workers, else processes.
        out: a folder for everything; without one nothing is written.
        resume: go on with the run in `out`, from its newest checkpoint. What is not said again is as it was.
        config: the algorithm's Config, or a dict of options on top of those tuned for the environment.
        quiet: show nothing.
        display: show it there.
        evaluate_every: steps from one evaluation to the next.
        evaluate_episodes: episodes of an evaluation; 10 if left out.
        stop_at: end when an evaluation's mean return is as high as this.
        checkpoint_every: steps from one checkpoint to the next.
        keep: how many checkpoints are kept, 3 if left out; the best one is kept beside them.
        env_options: keyword arguments for making the environment.
        frame_stack: how many observations the policy sees at once.
        policy: makes a policy, instead of the algorithm's own.
        on_report: is given every report, as metrics have it; the training is saved and ends if it gives
            `True`.
    """
    chosen = algorithm_of(algorithm) if isinstance(algorithm, str) else algorithm
    if not isinstance(chosen, Algorithm):
        raise RollstreamError(
            f"{chosen!r} is no algorithm: give a name that `rollstream list` shows, or an Algorithm"
        )
    folder = None if out is None else Path(out)
    request = Request(
        chosen,
        config,
        env,
        steps,
        seed,
        workers,
        env_options,
        frame_stack,
        policy,
        engine,
        evaluation={"every": evaluate_every, "episodes": evaluate_episodes, "stop_at": stop_at},
        saving={"every": checkpoint_every, "keep": keep},
    )
    if folder is not None and not resume:
        require_new(folder)
    recipe = request.resumed(folder) if resume else request.recipe()
    show = display or _display(quiet)
    loop = Loop(recipe, folder, show, on_report)
    try:
        loop.run(resume)
    except BaseException:
        show.finish(None)
        raise
    run = Run(recipe, folder, loop.rows, loop.weights)
    show.finish(run)
    return run


class Run:
    """What a training has led to."""

    def __init__(self, recipe: RunConfig, path: Path | None, metrics: list[Row], weights: Weights):
        self.recipe = recipe
        """What was trained, and how."""
        self.path = path
        """The folder, if the run has one."""
        self.metrics = metrics
        """One dict an iteration."""
        self._weights = weights

    @property
    def config(self) -> Any:
        """The algorithm's settings."""
        return self.recipe.config

    @property
    def is_over(self) -> bool:
        """Whether it has got where it was to end."""
        if not self.metrics:
            return False
        last = self.metrics[-1]
        return self.recipe.is_over(_steps(last), cast(float | None, last.get("eval/mean_reward")))

    @cached_property
    def policy(self) -> TrainedPolicy:
        """The policy, to act with: `run.policy.act(observation)`."""
        task = self.recipe.task
        spaces = task.spaces()
        maker = self.recipe.algorithm.worker(self.recipe.config, task).policy
        frames = task.environment.frame_stack
        return TrainedPolicy(maker(*spaces), self._weights, *spaces, frames=frames, seed=task.seed)

    def evaluate(self, episodes: int = 100, seed: int = 0) -> Evaluation:
        """How good the policy is, over so many episodes with its likeliest actions."""
        require_whole(0, seed=seed)
        require_whole(1, episodes=episodes)
        with Evaluator(self.recipe.task.environment, self.policy.policy, seed) as evaluator:
            return evaluator(self.policy.weights, episodes)

    def __repr__(self) -> str:
        task = self.recipe.task
        where = "" if self.path is None else f" in {self.path}"
        return f"<Run of {self.recipe.algorithm.name} on {task.environment.name}{where}>"


def load(
    path: str | Path,
    *,
    best: bool = False,
    algorithm: Algorithm[Any] | None = None,
    env: Source | None = None,
    policy: PolicyMaker | None = None,
) -> Run:
    """The run in a folder, as of its newest checkpoint, or of its best evaluation.

    Args:
        path: the folder.
        best: the checkpoint with the best evaluation instead of the newest.
        algorithm: if the run's own cannot be found again by its name or file.
        env: if the run's own is a function that cannot be imported.
        policy: likewise.
    """
    folder = Path(path)
    recipe = read_run_config(folder, algorithm=algorithm, source=env, policy=policy)
    checkpoint = latest(folder / ("best" if best else "checkpoints"))
    if checkpoint is None:
        fix = "train with evaluate_every=..." if best else "go on with it by resume=True"
        raise CheckpointError(f"the run in {folder} has no {'best ' * best}checkpoint yet; {fix}")
    metrics = read_metrics(folder, checkpoint.step)
    return Run(recipe, folder, metrics, load_weights(checkpoint.path))


def _steps(row: Mapping[str, Any]) -> float:
    return float(row["time/total_timesteps"])


def _display(quiet: bool) -> Display:
    if quiet:
        return Silent()
    from rollstream.training.display import display_for

    return display_for(sys.stdout)
