"""The training loop: iterates over a plan's reports, logs metrics, saves checkpoints, and stops."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rollstream.algos import supporting
from rollstream.engine import Actor, ActorDied, ActorEvent, Engine, RollstreamError
from rollstream.engine import engine as open_engine
from rollstream.flow import Iter
from rollstream.rl.acting import describe_acting, has_accelerator
from rollstream.rl.operators import Report, is_heartbeat
from rollstream.rl.policy import Weights
from rollstream.rl.spaces import SpaceError
from rollstream.rl.worker_set import WorkerSet
from rollstream.training.checkpoint import Checkpoint, CheckpointError, latest_checkpoint, load_weights
from rollstream.training.checkpointing import Checkpointing, is_worker, without_workers
from rollstream.training.config_file import read_content, write_run_config
from rollstream.training.curve import can_draw, draw_curve
from rollstream.training.evaluation import Evaluator, with_evaluation
from rollstream.training.identity import identity, other_run, require_same_spaces
from rollstream.training.interrupts import HeartbeatTimer, Interrupts
from rollstream.training.metrics import (
    STEPS,
    MetricsLogger,
    MetricsRow,
    Stopwatch,
    iterate_metrics,
    metrics_row,
    read_metrics,
)
from rollstream.training.progress import Display, RunInfo
from rollstream.training.progress_tracker import significant
from rollstream.training.run_folder import (
    RunConfig,
    lock_folder,
    require_new,
    require_writable,
)
from rollstream.training.trust import remember
from rollstream.training.watchdog import Watchdog


class TrainingFailed(RollstreamError):
    """An actor has died that is not restarted, such as the learner; the run can be resumed."""


class TrainingLoop:
    """Trains an algorithm and writes the run folder.

    Args:
        run_config: what to train.
        folder: the run folder; `None` writes nothing.
        display: shows the progress.
        on_report: called with every report; training stops if it returns `True`.
        deadline: seconds a worker may take for one message before it is restarted.
        notes: shown at the start.
        may_change: resume from a checkpoint that was trained with other settings.
        events: actors that died in an earlier attempt; they are in the first row of metrics.
    """

    def __init__(
        self,
        run_config: RunConfig,
        folder: Path | None,
        display: Display,
        on_report: Callable[[Report], object] | None = None,
        *,
        deadline: float | None = None,
        notes: Sequence[str] = (),
        may_change: bool = False,
        events: Sequence[ActorEvent] = (),
    ):
        self.new_events = deque(events)
        """Actors that died since the last row of metrics."""
        self._deadline = deadline
        self._notes = notes
        self._may_change = may_change
        self._run_config = run_config
        self._on_report = on_report
        self._folder = folder
        self._display = display
        self._started: tuple[WorkerSet, Iter[Report], int] | None = None
        """The workers, the plan, and the items that it had before this training."""
        self._deaths = 0
        self._checkpointing: Checkpointing | None = None
        self._step = 0
        self._best: float | None = None
        self._logger: MetricsLogger | None = None
        self.weights: Weights = {}
        """The trained weights, after `run`."""

    def metrics(self) -> list[MetricsRow]:
        """One row per report, read from the folder if there is one."""
        if self._folder is not None:
            return read_metrics(self._folder, self._step)
        return [] if self._logger is None else list(self._logger.rows)

    def run(self, resume: bool) -> None:
        """Train to the end, from the start or from the newest checkpoint."""
        with ExitStack() as scope:
            self._run(resume, scope)

    def _run(self, resume: bool, scope: ExitStack) -> None:
        run_config = self._run_config
        if self._folder is not None:
            require_writable(self._folder)
        if resume and self._folder is not None:
            scope.enter_context(lock_folder(self._folder))
        start = self._start() if resume else None
        start_step = 0 if start is None else start.step
        spaces = run_config.task.spaces()  # raises if the environment cannot be made
        if start is not None:
            require_same_spaces(run_config.task.environment.name, spaces, start.run["spaces"])
        self._display.start(info := self._info(start_step))
        if start is not None and run_config.is_finished(start_step, start.state["evaluation"]):
            assert self._folder is not None
            self._display.note(f"the run in {self._folder} is already finished, after {start_step:,} steps")
            self._step, self.weights = start_step, load_weights(start.path)
            return
        self._note_start(info, start is None and resume)
        engine = open_engine(run_config.engine, on_event=self._note_death)
        interrupts = Interrupts(self._display.note)
        scope.enter_context(Watchdog(engine, interrupts, self._display.note))
        scope.enter_context(engine)
        workers, plan = self._build(engine, scope, interrupts)
        acts_on = describe_acting(workers.spec.acting)
        if has_accelerator() or run_config.task.acting != "auto":  # else there was nothing to choose
            self._display.note(f"acting on {acts_on}")
        if start is not None:
            self._load_state(plan, start, workers)
        self._started = workers, plan, _items(plan)
        if self._folder is not None and not resume:
            self._folder.mkdir(parents=True, exist_ok=True)
            scope.enter_context(lock_folder(self._folder))
            require_new(self._folder)  # another process may have been faster
        if self._folder is not None:  # everything has been validated
            content = write_run_config(self._folder, run_config, engine.statistics().environment, acts_on)
            remember(self._folder, content)
            get_weights, note, own = (
                workers.learner.get_weights,
                self._display.note,
                identity(content, spaces),
            )
            self._checkpointing = Checkpointing(
                self._folder, run_config, plan, get_weights, note, own, start_step
            )
        logger = scope.enter_context(closing(MetricsLogger(self._folder, start_step)))
        self._logger = logger
        scope.enter_context(interrupts)
        workers.heartbeat.is_due = HeartbeatTimer(interrupts)
        self._train(plan, logger, start, interrupts)
        plan.close()
        self.weights = workers.learner.get_weights()

    # Start ---------------------------------------------------------------------------------------

    def _start(self) -> Checkpoint | None:
        """The newest checkpoint of the run that is resumed."""
        if self._folder is None:
            return None
        check = partial(other_run, content=read_content(self._folder), may_change=self._may_change)
        return latest_checkpoint(self._folder / "checkpoints", check)

    def _info(self, start_step: int) -> RunInfo:
        task, config = self._run_config.task, self._run_config.config
        batch = config.steps_per_round(task.workers)
        return RunInfo(
            algorithm=self._run_config.algorithm.name,
            environment=task.environment.name,
            steps=math.ceil(task.steps / batch) * batch,
            seed=task.seed,
            workers=task.workers,
            engine=self._run_config.engine,
            path=self._folder,
            start_step=start_step,
        )

    def _note_start(self, info: RunInfo, restarts: bool) -> None:
        for note in self._notes:
            self._display.note(note)
        steps = self._run_config.task.steps
        if info.steps != steps:
            self._display.note(f"{steps:,} steps are rounded up to whole rollouts: {info.steps:,}")
        if restarts and self._folder is not None:
            rows = sum(1 for _ in iterate_metrics(self._folder))
            replaced = f", replacing {rows:,} rows of metrics" if rows else ""
            self._display.note(f"the run in {self._folder} has no checkpoint: it starts over{replaced}")

    def _build(
        self, engine: Engine, scope: ExitStack, interrupts: Interrupts
    ) -> tuple[WorkerSet, Iter[Report]]:
        """Start the workers and build the plan, with its evaluation."""
        if self._deadline is not None and not engine.remote:
            raise RollstreamError(
                f"deadline={self._deadline:g} needs workers that can be killed; the engine {engine.name} has "
                f"none: use the engine processes"
            )
        algorithm, config, task = self._run_config.algorithm, self._run_config.config, self._run_config.task
        try:
            workers = algorithm.workers(engine, config, task, deadline=self._deadline)
        except SpaceError as error:
            able = supporting(task)
            others = (
                f"; algorithms that can: {', '.join(able)}" if able and algorithm.name not in able else ""
            )
            raise SpaceError(
                f"{algorithm.name} cannot be trained on {task.environment.name}: {error}{others}"
            ) from None
        self._require_updates()
        plan, evaluation = algorithm.build(workers, config), self._run_config.evaluation
        if evaluation.every is not None:
            evaluator = Evaluator(
                task.environment,
                workers.learner.policy,
                task.seed,
                notify=self._display.note,
                should_stop=lambda: interrupts.received is not None,
                acting=task.acting,
            )
            scope.enter_context(evaluator)
            plan = with_evaluation(plan, workers, evaluator, evaluation.every, evaluation.episodes)
        return workers, plan

    def _load_state(self, plan: Iter[Report], start: Checkpoint, workers: WorkerSet) -> None:
        """Load a checkpoint; with another number of workers, all of them start new episodes."""
        try:
            state, renewed = start.state["plan"], list[Actor[Any]]()
            saved = max(1, sum(map(is_worker, state["actors"])))
            if saved != len(workers.actors):
                state, renewed = without_workers(state, len(workers.actors) / saved), workers.actors
                self._display.note(f"{len(renewed)} instead of {saved} workers start with new episodes")
            plan.load_state_dict(state, start.path, renewed)
            for actor in renewed:
                actor.send("start_anew", start.step)
        except RollstreamError:
            raise
        except Exception as error:  # whatever a state of another structure causes
            raise CheckpointError(f"checkpoint {start.path} does not fit the plan: {error!r}") from error

    def _require_updates(self) -> None:
        """Raise if training would end before the first update."""
        config, task = self._run_config.config, self._run_config.task
        batch = config.steps_per_round(task.workers)
        if (first := config.steps_before_learning(task.workers)) > math.ceil(task.steps / batch) * batch:
            raise RollstreamError(
                f"training ends after {task.steps:,} steps, before the first update after {first:,} steps: "
                f"lower learning_starts={config.learning_starts}, or train for more steps"
            )

    # Iterations ----------------------------------------------------------------------------------

    def _train(
        self, plan: Iter[Report], logger: MetricsLogger, start: Checkpoint | None, interrupts: Interrupts
    ) -> None:
        start_step, elapsed = (0, 0.0) if start is None else (start.step, start.state["elapsed"])
        checkpointing = self._checkpointing
        watch, report, finished = Stopwatch(start_step, elapsed), None, False
        try:
            for item in plan:
                self._require_report(item)
                if is_heartbeat(item):
                    report = item
                    self._display.heartbeat(int(item[STEPS]), plan.statistics())
                    if interrupts.received is not None:
                        break
                    continue
                report = watch.add_times(item)
                self._record(report, plan, logger)
                if checkpointing is not None:
                    checkpointing.commit_if_complete()
                    checkpointing.save_if_best(report)
                finished = self._run_config.is_finished(int(report[STEPS]), report.get("eval/mean_reward"))
                stopped = self._on_report is not None and self._on_report(dict(report)) is True
                if finished or stopped or interrupts.received is not None:
                    break
                if checkpointing is not None:
                    checkpointing.save_if_due(report, watch, logger)
            if report is not None and checkpointing is not None:  # the loop was left, or the plan has ended
                checkpointing.save_last(report, watch, logger)
        except Exception as error:
            if checkpointing is not None:
                with suppress(
                    Exception
                ):  # keep the pending checkpoint if possible, but raise the first error
                    checkpointing.commit()
            if isinstance(error, ActorDied):
                raise self._failure(error, interrupts.received is not None) from error
            raise
        if report is not None:
            self._draw_curve()
            self._note_end(report, finished)
        if interrupts.received is not None and not finished:
            self._note_interrupt(start_step if report is None else int(report[STEPS]))
            interrupts.exit()

    def _failure(self, died: ActorDied, interrupted: bool) -> RollstreamError:
        """An actor died that is not restarted, such as the learner."""
        if self._folder is None:
            return RollstreamError(f"{died}; with an output folder, the run could be resumed")
        kind = RollstreamError if interrupted else TrainingFailed
        return kind(
            f"{died}; continue from the newest checkpoint in {self._folder} with --resume (resume=True)"
        )

    def _require_report(self, report: Any) -> None:
        if not isinstance(report, Mapping) or STEPS not in report:
            raise RollstreamError(
                f"the plan of {self._run_config.algorithm.name} yields {type(report).__name__} without "
                f"{STEPS}; end it with ReportMetrics(stream, workers)"
            )

    def _record(self, report: Report, plan: Iter[Report], logger: MetricsLogger) -> None:
        statistics = plan.statistics()
        new = [self.new_events.popleft() for _ in range(len(self.new_events))]  # other threads may add some
        logger.add(metrics_row(report, statistics, new))
        self._display.report(report, statistics)
        self._step = int(report[STEPS])
        self._best = report.get("eval/best_mean_reward", self._best)

    def _note_death(self, event: ActorEvent) -> None:
        """Say so at once, in whichever thread notices; give up if workers die and nothing was delivered."""
        self.new_events.append(event)
        self._deaths += 1
        workers, plan, items = self._started or (None, None, 0)
        stored = 0 if workers is None else workers.stored_items(event.actor)
        self._display.note(f"{event}" + (f"; about {stored:,} stored items are lost" if stored else ""))
        if event.outcome == "restarted" and self._deaths > 1 and (plan is None or _items(plan) == items):
            raise RollstreamError(
                f"{event.actor} {event.reason}: {self._deaths} deaths before any worker has delivered a "
                f"rollout. Find out why with the engine inline, which has the environment in this process"
            )

    # End -----------------------------------------------------------------------------------------

    def _draw_curve(self) -> None:
        if self._folder is None:
            return
        if not can_draw():
            self._display.note("no learning curve: matplotlib is missing; pip install 'rollstream[plots]'")
            return
        title = f"{self._run_config.algorithm.name} on {self._run_config.task.environment.name}"
        draw_curve(map(_scalars, iterate_metrics(self._folder)), self._folder / "curve.png", title)

    def _note_end(self, report: Report, finished: bool) -> None:
        """If there is a return to stop at, say whether it was reached."""
        stop_at, mean_return = self._run_config.evaluation.stop_at, report.get("eval/mean_reward")
        if stop_at is not None and mean_return is not None and mean_return >= stop_at:
            self._display.note(f"stopped after {report[STEPS]:,} steps: the evaluation reached {stop_at:g}")
        elif stop_at is not None and finished:
            best = None if self._best is None else f"the best evaluation was {significant(self._best)}"
            result = best or "there was no evaluation"
            self._display.note(f"{stop_at:g} was not reached: {result}")

    def _note_interrupt(self, steps: int) -> None:
        saved = "not saved (no output folder)" if self._folder is None else f"saved in {self._folder}"
        self._display.note(f"interrupted after {steps:,} steps, {saved}")


def _items(plan: Iter[Report]) -> int:
    """How many items have come by anywhere in a plan."""
    return sum(node.items for node in plan.statistics().nodes)


def _scalars(row: MetricsRow) -> dict[str, float]:
    return {name: value for name, value in row.items() if not isinstance(value, str)}
