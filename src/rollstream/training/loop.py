"""The loop over a plan's reports, and what is done after each: rows, checkpoints, an end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from rollstream.algos import fitting
from rollstream.engine import ActorEvent, Engine, RollstreamError
from rollstream.engine import engine as open_engine
from rollstream.flow import Iter
from rollstream.flow.snapshot import actor_files
from rollstream.rl.operators import Report, is_beat
from rollstream.rl.policy import Weights
from rollstream.rl.spaces import SpaceError
from rollstream.rl.worker_set import WorkerSet
from rollstream.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    Draft,
    latest,
    load_weights,
    oldest,
    remove_after,
    remove_before,
    save_checkpoint,
)
from rollstream.training.curve import draw_curve
from rollstream.training.evaluation import Evaluator, with_evaluation
from rollstream.training.interrupts import Beat, Interrupts
from rollstream.training.metrics import STEPS, MetricsLog, Row, Stopwatch, read_metrics, row_of
from rollstream.training.progress import Display, RunAbout
from rollstream.training.run_folder import RunConfig, claimed, require_new, require_writable, write_run_config

_OFTEN = 50_000
"""Steps from one checkpoint to the next, at most, unless said otherwise."""


class Loop:
    """Trains by a recipe, and keeps what is worth keeping.

    Args:
        recipe: what to train.
        folder: where to write; `None` writes nothing.
        display: who is shown it.
        on_report: is given every report, and may end the training by `True`.
    """

    def __init__(
        self,
        recipe: RunConfig,
        folder: Path | None,
        display: Display,
        on_report: Callable[[Report], object] | None = None,
    ):
        self._recipe = recipe
        self._on_report = on_report
        self._folder = folder
        self._display = display
        self._every = recipe.saving["every"] or max(1, min(recipe.task.steps // 10, _OFTEN))
        self._keep = recipe.saving["keep"]
        self._events: tuple[ActorEvent, ...] = ()
        self._told = False
        self._draft: Draft | None = None
        """A checkpoint that actors still write to."""
        self.rows: list[Row] = []
        """What is written of each iteration."""
        self.weights: Weights = {}
        """What has been learned, when it is over."""

    def run(self, resume: bool) -> None:
        """Train to the end, from the beginning or from the newest checkpoint."""
        with ExitStack() as scope:
            self._run(resume, scope)

    def _run(self, resume: bool, scope: ExitStack) -> None:
        recipe = self._recipe
        if self._folder is not None:
            require_writable(self._folder)
        if resume and self._folder is not None:
            scope.enter_context(claimed(self._folder))
        start = latest(self._folder / "checkpoints") if resume and self._folder is not None else None
        done = 0 if start is None else start.step
        recipe.task.spaces()  # there is such an environment
        self._display.start(about := self._about(done))
        if start is not None and recipe.is_over(done, start.state["evaluated"]):
            assert self._folder is not None
            self._display.note(f"the run in {self._folder} is over already, after {done:,} steps")
            self.rows, self.weights = read_metrics(self._folder, done), load_weights(start.path)
            return
        self._tell_of_the_beginning(about, start is None and resume)
        engine = scope.enter_context(open_engine(recipe.engine))
        interrupts = Interrupts(self._display.note)
        workers, plan = self._built(engine, scope, interrupts)
        if start is not None:
            plan.load_state_dict(start.state["plan"], folder=start.path)
        if self._folder is not None and not resume:
            self._folder.mkdir(parents=True, exist_ok=True)
            scope.enter_context(claimed(self._folder))
            require_new(self._folder)  # nobody was quicker
        log = scope.enter_context(closing(self._opened(engine, done)))
        self.rows = log.rows
        scope.enter_context(interrupts)
        workers.pulse.wanted = Beat(interrupts)
        self._train(plan, workers, log, start, interrupts)
        plan.close()
        self.weights = workers.learner.published()

    def _tell_of_the_beginning(self, about: RunAbout, anew: bool) -> None:
        if about.steps != self._recipe.task.steps:
            self._display.note(
                f"{self._recipe.task.steps:,} steps are rounded up to whole batches: {about.steps:,}"
            )
        if anew and self._folder is not None:
            rows = len(read_metrics(self._folder))
            self._display.note(
                f"the run in {self._folder} has no checkpoint: it begins anew"
                + (f", and replaces {rows:,} rows of metrics" if rows else "")
            )

    def _built(
        self, engine: Engine, scope: ExitStack, interrupts: Interrupts
    ) -> tuple[WorkerSet, Iter[Report]]:
        algorithm, config, task = self._recipe.algorithm, self._recipe.config, self._recipe.task
        try:
            workers = algorithm.workers(engine, config, task)
        except SpaceError as error:
            others = ", ".join(fitting(*task.spaces()))
            raise SpaceError(
                f"{algorithm.name} cannot learn in {task.environment.name}: {error}"
                + (f"; these can: {others}" if others else "")
            ) from None
        self._require_learning()
        plan, evaluation = algorithm.plan(workers, config), self._recipe.evaluation
        if evaluation["every"] is not None:
            evaluator = Evaluator(
                task.environment,
                workers.learner.policy,
                task.seed,
                say=self._display.note,
                stopped=lambda: interrupts.received is not None,
            )
            scope.enter_context(evaluator)
            plan = with_evaluation(plan, workers, evaluator, evaluation["every"], evaluation["episodes"])
        return workers, plan

    def _require_learning(self) -> None:
        """Raise if the training would be over before anything is learned."""
        before, task = getattr(self._recipe.config, "before_learning", None), self._recipe.task
        if before is not None and (first := before(task.workers)) >= task.steps:
            raise RollstreamError(
                f"nothing would be learned: the first update is after {first:,} steps, by learning_starts="
                f"{self._recipe.config.learning_starts}, and the training ends after {task.steps:,}; set it "
                f"lower, or train for longer"
            )

    def _opened(self, engine: Engine, done: int) -> MetricsLog:
        """The folder is made when all that can be wrong has been seen to be right."""
        if self._folder is not None:
            write_run_config(self._folder, self._recipe, engine.statistics().environment)
            remove_after(self._folder / "checkpoints", done)
            remove_after(self._folder / "best", done)
        return MetricsLog(self._folder, done)

    def _train(
        self,
        plan: Iter[Report],
        workers: WorkerSet,
        log: MetricsLog,
        start: Checkpoint | None,
        interrupts: Interrupts,
    ) -> None:
        done, elapsed = (0, 0.0) if start is None else (start.step, start.state["elapsed"])
        due = (done // self._every + 1) * self._every
        watch, report, over = Stopwatch(done, elapsed), None, False
        try:
            for given in plan:
                self._require_steps(given)
                if is_beat(given):
                    report = given
                    self._display.beat(int(given[STEPS]), plan.statistics())
                    if interrupts.received is not None:
                        break
                    continue
                report = watch.timed(given)
                self._record(report, plan, log)
                if self._draft is not None and self._draft.whole:
                    self._finish(plan)
                if _is_best(report):
                    self._keep_best(workers, report)
                over = self._recipe.is_over(int(report[STEPS]), report.get("eval/mean_reward"))
                ended = self._on_report is not None and self._on_report(dict(report)) is True
                if over or ended or interrupts.received is not None:
                    break
                if report[STEPS] >= due and self._draft is None:
                    self._save(plan, workers, report, watch, log)
                    due = (report[STEPS] // self._every + 1) * self._every
        except Exception:
            with suppress(Exception):  # the checkpoint before is worth the wait, and the error more
                self._finish(plan)
            raise
        if report is not None:  # the loop is left, or the plan has ended by itself
            self._save(plan, workers, report, watch, log)
            if self._finish(plan) is not None:  # as when an actor died: the one in its place can write
                self._save(plan, workers, report, watch, log)
                if (wrong := self._finish(plan)) is not None:
                    raise CheckpointError(wrong)
            self._draw()
            self._tell_of_the_end(report, over)
        if interrupts.received is not None and not over:
            self._say_where(done if report is None else int(report[STEPS]))
            interrupts.end()

    def _require_steps(self, report: Any) -> None:
        if not isinstance(report, Mapping) or STEPS not in report:
            raise RollstreamError(
                f"the plan of {self._recipe.algorithm.name} gives {type(report).__name__} without {STEPS}; "
                f"end it with ReportMetrics(stream, workers)"
            )

    def _tell_of_the_end(self, report: Report, over: bool) -> None:
        """Why it is over, if it was to end when a return is reached."""
        stop_at, best = self._recipe.evaluation["stop_at"], report.get("eval/mean_reward")
        if stop_at is not None and best is not None and best >= stop_at:
            self._display.note(f"stopped after {report[STEPS]:,} steps: the evaluation reached {stop_at:g}")
        elif stop_at is not None and over:
            found = [row["eval/best_mean_reward"] for row in self.rows if "eval/best_mean_reward" in row]
            told = f"the best evaluation was {found[-1]:.1f}" if found else "nothing was evaluated"
            self._display.note(f"{stop_at:g} was not reached: {told}")

    def _record(self, report: Report, plan: Iter[Report], log: MetricsLog) -> None:
        statistics = plan.statistics()
        new = statistics.events[len(self._events) :]
        self._events = statistics.events
        for event in new:
            self._display.note(str(event))
        log.add(row_of(report, statistics, new))
        self._display.report(report, statistics)

    def _save(
        self, plan: Iter[Report], workers: WorkerSet, report: Report, watch: Stopwatch, log: MetricsLog
    ) -> None:
        if self._folder is None:
            return
        self._finish(plan)
        log.sync()
        about = {"elapsed": watch.elapsed, "evaluated": report.get("eval/mean_reward")}
        with Draft(self._folder / "checkpoints", int(report[STEPS])) as draft:
            state = plan.state_dict(folder=draft.partial)
            self._tell_of_environments(state["actors"])
            weights = workers.learner.published()
            draft.write({"plan": state} | about, weights, apart=actor_files(state))
        self._draft = draft
        if draft.whole:
            self._finish(plan)

    def _finish(self, plan: Iter[Report]) -> str | None:
        """Have the checkpoint whole that was begun; why there is none, if something is wrong."""
        draft, self._draft = self._draft, None
        if draft is None or self._folder is None:
            return None
        with draft:
            problems = plan.wait_saved()
            if draft.whole:
                draft.finish(self._keep)
                remove_before(self._folder / "best", oldest(self._folder / "checkpoints"))
                return None
        draft.discard()
        reason = problems[0] if problems else "an actor ended while it wrote"
        wrong = f"the checkpoint at {draft.step:,} steps could not be written: {reason}"
        self._display.note(wrong)
        return wrong

    def _keep_best(self, workers: WorkerSet, report: Report) -> None:
        """Weights alone; the best before stays for runs that go on from a checkpoint before this one."""
        if self._folder is not None:
            about, weights = {"evaluated": report["eval/mean_reward"]}, workers.learner.published()
            save_checkpoint(self._folder / "best", int(report[STEPS]), about, weights=weights, keep=None)

    def _draw(self) -> None:
        if self._folder is not None:
            name = f"{self._recipe.algorithm.name} on {self._recipe.task.environment.name}"
            draw_curve([_numbers(row) for row in self.rows], self._folder / "curve.png", name)

    def _tell_of_environments(self, actors: dict[str, Any]) -> None:
        reasons = [own["reason"] for own in actors.values() if isinstance(own, dict) and own.get("reason")]
        if reasons and not self._told:
            self._told = True
            self._display.note(
                f"the state of these environments cannot be saved ({reasons[0]}): a resumed run begins with "
                f"new episodes"
            )

    def _say_where(self, steps: int) -> None:
        if self._folder is None:
            self._display.note(
                f"interrupted after {steps:,} steps; nothing is saved without an output folder"
            )
        else:
            self._display.note(f"interrupted after {steps:,} steps, all saved in {self._folder}")

    def _about(self, done: int) -> RunAbout:
        task, config = self._recipe.task, self._recipe.config
        at_once = getattr(config, "steps_at_once", None)
        batch = at_once(task.workers) if at_once is not None else getattr(config, "batch_size", 1)
        return RunAbout(
            algorithm=self._recipe.algorithm.name,
            environment=task.environment.name,
            steps=math.ceil(task.steps / batch) * batch,
            seed=task.seed,
            workers=task.workers,
            engine=self._recipe.engine,
            path=self._folder,
            done=done,
        )


def _is_best(report: Report) -> bool:
    return "eval/mean_reward" in report and report["eval/mean_reward"] >= report["eval/best_mean_reward"]


def _numbers(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if not isinstance(value, str)}
