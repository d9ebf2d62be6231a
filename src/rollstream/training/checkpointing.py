"""When checkpoints are saved during training, and how the files of actors become part of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollstream.flow import Iter
from rollstream.flow.provenance import Merger
from rollstream.flow.snapshot import actor_files
from rollstream.rl.operators import Report
from rollstream.rl.policy import Weights
from rollstream.training.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    oldest_step,
    remove_after,
    remove_before,
    save_checkpoint,
)
from rollstream.training.identity import Identity
from rollstream.training.metrics import STEPS, MetricsLogger, Stopwatch
from rollstream.training.run_folder import RunConfig, RunError

_MAX_EVERY = 50_000
"""Default number of steps between checkpoints, at most."""
_SECONDS = 30.0
"""Default number of seconds between checkpoints, at least: some trainings take 50,000 steps within one."""


class Checkpointing:
    """Saves checkpoints of a plan, and the weights of the best evaluation.

    Actors may write their part in the background: a checkpoint is pending until they have.

    Args:
        folder: the run folder.
        run_config: how often to save, and how many checkpoints to keep.
        plan: its state is saved.
        weights: returns the policy's current weights.
        notify: shows the user a message.
        run: the identity of the run, which checkpoints carry.
        start_step: checkpoints after it, left by an interrupted part of the run, are removed.
    """

    def __init__(
        self,
        folder: Path,
        run_config: RunConfig,
        plan: Iter[Report],
        weights: Callable[[], Weights],
        notify: Callable[[str], None],
        run: Identity,
        start_step: int,
    ):
        self._folder, self._checkpoints, self._best = folder, folder / "checkpoints", folder / "best"
        self._run = run
        self._plan = plan
        self._weights = weights
        every = run_config.checkpoints.every
        self._every = every or max(1, min(run_config.task.steps // 10, _MAX_EVERY))
        self._seconds = _SECONDS if every is None else 0.0
        self._saved_at = 0.0
        self._keep = run_config.checkpoints.keep
        self._notify = notify
        self._warned = False
        remove_after(self._checkpoints, start_step)
        remove_after(self._best, start_step)
        self._due = self._next_multiple(start_step)
        self.pending: CheckpointWriter | None = None
        """A checkpoint that actors are still writing to."""

    def save_if_due(self, report: Report, watch: Stopwatch, logger: MetricsLogger) -> None:
        """Save a checkpoint if the steps have reached the next multiple, and none is pending.

        By default, some time must have passed as well.
        """
        waited = watch.elapsed - self._saved_at >= self._seconds
        if waited and report[STEPS] >= self._due and self.pending is None:
            self._save(report, watch, logger)
            self._saved_at = watch.elapsed
            self._due = self._next_multiple(int(report[STEPS]))

    def _next_multiple(self, step: int) -> int:
        return (step // self._every + 1) * self._every

    def commit_if_complete(self) -> None:
        """Commit the pending checkpoint if actors have written their part."""
        if self.pending is not None and self.pending.is_complete:
            self.commit()

    def save_if_best(self, report: Report) -> None:
        """Save the weights if the evaluation in the report is the best one.

        Earlier best weights stay, for runs that are resumed from an earlier checkpoint.
        """
        if "eval/mean_reward" in report and report["eval/mean_reward"] >= report["eval/best_mean_reward"]:
            state = {"evaluation": report["eval/mean_reward"]}
            self._require_folder()
            save_checkpoint(
                self._best, int(report[STEPS]), state, weights=self._weights(), keep=None, run=self._run
            )

    def save_last(self, report: Report, watch: Stopwatch, logger: MetricsLogger) -> None:
        """Save and commit; retry once, as an actor that died while writing has been restarted by then."""
        self._save(report, watch, logger)
        if self.commit() is not None:
            self._save(report, watch, logger)
            if (error := self.commit()) is not None:
                raise CheckpointError(error)

    def _save(self, report: Report, watch: Stopwatch, logger: MetricsLogger) -> None:
        """Write a checkpoint; commit it at once unless actors are still writing."""
        self._require_folder()
        self.commit()
        logger.sync()
        progress = {"elapsed": watch.elapsed, "evaluation": report.get("eval/mean_reward")}
        with CheckpointWriter(self._checkpoints, int(report[STEPS]), self._run) as writer:
            state = self._plan.state_dict(folder=writer.partial)
            self._warn_of_unsaved_environments(state["actors"])
            writer.write({"plan": state} | progress, self._weights(), actor_files(state))
        self.pending = writer
        self.commit_if_complete()

    def _require_folder(self) -> None:
        """Raise if the run folder is gone: a new one would hold checkpoints of a run without a config."""
        if not (self._folder / "config.json").is_file():
            raise RunError(f"{self._folder} was deleted or moved during training: nothing can be saved in it")

    def commit(self) -> str | None:
        """Wait for the pending checkpoint and commit it; return what went wrong, if anything."""
        writer, self.pending = self.pending, None
        if writer is None:
            return None
        with writer:
            problems = self._plan.wait_saved()
            if writer.is_complete:
                writer.commit(self._keep)
                remove_before(self._best, oldest_step(self._checkpoints))
                return None
        writer.discard()
        reason = problems[0] if problems else "an actor died while writing"
        error = f"the checkpoint at {writer.step:,} steps could not be written: {reason}"
        self._notify(error)
        return error

    def _warn_of_unsaved_environments(self, actors: dict[str, Any]) -> None:
        reasons = [own["reason"] for own in actors.values() if isinstance(own, dict) and own.get("reason")]
        if reasons and not self._warned:
            self._warned = True
            self._notify(
                f"the state of these environments cannot be saved ({reasons[0]}): a resumed run starts with "
                f"new episodes"
            )


def is_worker(actor: str) -> bool:
    """Whether an actor of that name is a rollout worker."""
    return actor.partition("[")[0] == "worker"


def without_workers(state: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    """The state of a plan without that of its rollout workers, of which there are `ratio` times as many now.

    Rate limiters count rollouts, which are that much shorter. Batches that are not full are dropped: their
    rollouts have another number of environments.
    """
    actors = {name: own for name, own in state["actors"].items() if not is_worker(name)}
    nodes = {name: _for_other_workers(own, ratio) for name, own in state["nodes"].items()}
    return {**state, "actors": actors, "nodes": nodes}


def _for_other_workers(node: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    own = dict(node)
    if "pending" in own:
        own |= {"inserts": round(own["inserts"] * ratio), "pending": 0, "admitted": False}
    if "stages" in own:
        own["stages"] = {
            name: stage | {"partial": [], "merger": Merger().state_dict()} if "partial" in stage else stage
            for name, stage in own["stages"].items()
        }
    return own
