"""`rs.train`: the run folder, exact resume, interrupts, evaluation, and wrong input."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
import scripts
from gymnasium import spaces

import rollstream as rs
from rollstream.algos import ALGORITHMS, UnknownAlgorithm, algorithm, ppo
from rollstream.rl.env_spec import EnvSpec, UnknownEnvironment
from rollstream.rl.learner import Learner
from rollstream.rl.spaces import SpaceError
from rollstream.training import checkpoint, checkpointing, interrupts, loop, metrics
from rollstream.training.checkpoint import CheckpointError
from rollstream.training.config import resolve_config
from rollstream.training.evaluation import Evaluation, Evaluator
from rollstream.training.inference import TrainedPolicy
from rollstream.training.interrupts import Interrupts
from rollstream.training.progress import NoDisplay, RunInfo
from rollstream.training.run import Run
from rollstream.training.run_folder import FolderInUse, RunError, lock_folder
from rollstream.training.tuned import tuned, tuned_environments
from rollstream.training.validation import ConfigError

SMALL = {"num_envs": 4, "rollout_length": 16, "minibatch_size": 32, "epochs": 2, "hidden": (8,)}
"""PPO in batches of 64 steps."""


class Recorder(NoDisplay):
    """A display that keeps what it is shown, and does something after a report."""

    def __init__(self, after: Callable[[dict[str, float]], None] = lambda _: None):
        self.after = after
        self.info: RunInfo | None = None
        self.notes: list[str] = []
        self.reports: list[dict[str, float]] = []
        self.finished: list[bool] = []

    def start(self, info: RunInfo) -> None:
        self.info = info

    def report(self, report: dict[str, float], statistics: rs.flow.Statistics) -> None:
        self.reports.append(report)
        self.after(report)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self, completed: bool) -> None:
        self.finished.append(completed)


def small(out: Path | None, **more: Any) -> Run:
    """A short training; the same whenever it is called."""
    options: dict[str, Any] = {"env": "CartPole-v1", "steps": 300, "seed": 1, "config": SMALL, "quiet": True}
    options |= {"checkpoint_every": 64, "evaluate_every": 128, "evaluate_episodes": 3}
    return rs.train("ppo", out=out, **(options | more))


def learned(run: Run) -> dict[str, bytes]:
    return {name: np.asarray(value).tobytes() for name, value in run.policy.weights.items()}


def rows(run: Run) -> list[str]:
    """Metrics, without how long things took."""
    timed = ("time/fps", "time/time_elapsed", "flow/")
    return [repr({k: v for k, v in row.items() if not k.startswith(timed)}) for row in run.metrics]


@pytest.fixture(autouse=True)
def empty_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes as long as a short training; `test_display` and the first run of a module do it."""
    monkeypatch.setattr(loop, "draw_curve", lambda _, path, __: path.touch())


@pytest.fixture(scope="module")
def display() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, display: Recorder) -> Run:
    return small(tmp_path_factory.mktemp("runs") / "straight", display=display)


# What a run leaves -------------------------------------------------------------------------------


def test_steps_are_rounded_up_to_whole_batches_and_that_is_said(straight: Run, display: Recorder) -> None:
    assert straight.metrics[-1]["time/total_timesteps"] == 320
    assert display.notes == ["300 steps are rounded up to whole rollouts: 320"]
    assert display.info == RunInfo("ppo", "CartPole-v1", 320, 1, 0, "inline", straight.path, 0)
    assert [report["time/iterations"] for report in display.reports] == [1, 2, 3, 4, 5]
    assert display.finished == [True]


def test_a_folder_has_it_all(straight: Run) -> None:
    assert straight.path is not None
    content = json.loads((straight.path / "config.json").read_text())
    assert (content["algorithm"], content["config"]["hidden"], content["task"]["seed"]) == ("ppo", [8], 1)
    assert content["versions"]["rollstream"] == rs.__version__
    assert content["threads"]["NPROC"]
    assert sorted(path.name for path in (straight.path / "checkpoints").iterdir()) == [
        "step_000000192",
        "step_000000256",
        "step_000000320",
    ]
    best = sorted(path.name for path in (straight.path / "best").iterdir())
    assert best == ["step_000000128", "step_000000256"]  # the first for a run that is resumed from 192
    assert (straight.path / "curve.png").stat().st_size
    assert [path.stat().st_size > 1000 for path in straight.path.glob("events.out.tfevents.*")] == [True]
    lines = [json.loads(line) for line in (straight.path / "metrics.jsonl").read_text().splitlines()]
    assert lines == straight.metrics
    with (straight.path / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["train/loss"]) for row in table] == [row["train/loss"] for row in straight.metrics]
    assert [row["eval/mean_reward"] != "" for row in table] == [False, True, False, True, False]


def test_rows_have_the_names_people_know(straight: Run) -> None:
    names = {"rollout/ep_rew_mean", "time/fps", "time/time_elapsed", "train/loss", "eval/mean_ep_length"}
    names |= {"flow/TrainOneStep/busy", "flow/ParallelRollouts/items", "flow/bottleneck"}
    assert names <= straight.metrics[3].keys()


def test_a_loaded_run_is_the_same(straight: Run) -> None:
    assert straight.path is not None
    loaded = rs.load(straight.path)
    assert loaded.config == straight.config
    assert loaded.metrics == straight.metrics
    assert learned(loaded) == learned(straight)
    assert loaded.evaluate(5, seed=3) == straight.evaluate(5, seed=3)
    best = rs.load(straight.path, best=True)
    assert learned(best).keys() == learned(straight).keys()
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=0)
    assert environment.action_space.contains(loaded.policy.act(observation))
    assert {int(loaded.policy.act(observation, deterministic=False)) for _ in range(50)} == {0, 1}


def test_rows_are_in_the_folder_or_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long training would fill the memory."""
    monkeypatch.setattr(metrics, "MAX_ROWS", 2)
    for folder, expected in ((tmp_path, 0), (None, 2)):
        with closing(metrics.MetricsLogger(folder)) as logger:
            for step in range(5):
                logger.add({"time/total_timesteps": step, f"column {step // 3}": 1.0})
        assert len(logger.rows) == expected
    assert [row["time/total_timesteps"] for row in metrics.read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    table = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row["column 1"] for row in table] == ["", "", "", "1.0", "1.0"]


def test_without_a_folder_nothing_is_written(straight: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    run = small(None)
    assert run.path is None
    assert learned(run) == learned(straight)
    assert rows(run) == rows(straight)
    assert not list(tmp_path.iterdir())


def test_importing_rollstream_does_not_import_jax() -> None:
    code = "import rollstream, sys; rollstream.engine('processes').close(); assert 'jax' not in sys.modules"
    scripts.run_code(code)


def test_what_is_imported_late_is_listed() -> None:
    assert {"train", "load", "engine"} <= set(dir(rs))


# Resume ------------------------------------------------------------------------------------------

REPLAYED = {"num_envs": 4, "hidden": (8,), "batch_size": 8, "learning_starts": 64, "report_every": 64}
ON_ACTOR = {"num_envs": 4, "rollout_length": 16, "hidden": (8,), "report_every": 1}
ON_ACTOR |= {"num_async": 1, "batches_in_flight": 1}  # synchronous: what is sampled depends on nothing else
KILLED = """
    import os, signal, sys
    import rollstream as rs
    from rollstream.training.progress import NoDisplay

    class Kill(NoDisplay):
        def report(self, report, statistics):
            if report["time/iterations"] == 4:
                os.kill(os.getpid(), signal.SIGKILL)

    rs.train(sys.argv[1], out=sys.argv[2], display=Kill(), **eval(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ppo", SMALL | {"learning_rate_decay": True, "normalize_observations": True}),
        pytest.param(
            "a2c",
            {"num_envs": 4, "rollout_length": 16, "hidden": (8,), "report_every": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "dqn",
            REPLAYED
            | {"rollout_length": 4, "priority_exponent": 0.6, "n_step": 3, "target_update_interval": 7},
            marks=pytest.mark.slow,
        ),
        pytest.param("sac", REPLAYED, marks=pytest.mark.slow),
        *(
            pytest.param(name, ON_ACTOR, marks=pytest.mark.slow, id=f"{name}, learner on an actor")
            for name in ("impala", "appo")
        ),
    ],
)
def test_a_killed_run_is_resumed_exactly(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    options: dict[str, Any] = {"env": "CartPole-v1", "seed": 3, "steps": 448, "config": config}
    if config is ON_ACTOR:
        options |= {"workers": 1, "engine": "processes"}
    options |= {"checkpoint_every": 160, "evaluate_every": 200, "evaluate_episodes": 2}
    out = tmp_path / "killed"
    killed = scripts.run_code(KILLED, name, str(out), repr(options), check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(left[-1])["time/iterations"] == 4  # and the newest checkpoint is of iteration 3
    straight = rs.train(name, out=tmp_path / "straight", quiet=True, **options)
    resumed = rs.train(name, out=out, resume=True, quiet=True, **options)
    assert [row["time/iterations"] for row in resumed.metrics] == list(range(1, 8))
    assert rows(straight) == rows(resumed)
    assert learned(straight) == learned(resumed)
    with (out / "metrics.csv").open() as file:
        assert [int(row["time/iterations"]) for row in csv.DictReader(file)] == list(range(1, 8))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("a2c", 70),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("dqn", 4), ("dqn", 70), ("sac", 100))),
    ],
)
def test_a_signal_need_not_wait_for_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: int
) -> None:
    """Training stops after the current round; the resumed run equals an uninterrupted one."""
    monkeypatch.setattr(interrupts, "_HEARTBEAT_SECONDS", 0.0)
    heartbeats: list[int] = []

    class Stop(Recorder):
        def heartbeat(self, steps: int, statistics: rs.flow.Statistics) -> None:
            heartbeats.append(steps)
            if steps >= where:
                signal.raise_signal(signal.SIGINT)

    usual: Any = {"env": "CartPole-v1", "steps": 180, "seed": 2, "quiet": True, "checkpoint_every": 1000}
    replayed = REPLAYED | {"num_envs": 1, "rollout_length": 4, "report_every": 60}
    batches = {"num_envs": 1, "rollout_length": 4, "report_every": 15, "hidden": (8,)}
    usual |= {"config": batches if name == "a2c" else replayed}
    usual |= {"evaluate_every": 90, "evaluate_episodes": 1}
    straight = rs.train(name, out=tmp_path / "straight", **usual)
    with pytest.raises(KeyboardInterrupt):
        rs.train(name, out=tmp_path / "stopped", display=Stop(), **usual)
    assert where <= heartbeats[-1] < where + 8
    stopped = rs.load(tmp_path / "stopped")
    assert not stopped.is_finished
    assert len(stopped.metrics) == heartbeats[-1] // 60
    resumed = rs.train(name, out=tmp_path / "stopped", resume=True, quiet=True)
    assert rows(straight) == rows(resumed)
    assert learned(straight) == learned(resumed)


def test_a_report_may_end_the_training(tmp_path: Path, straight: Run) -> None:
    seen: list[dict[str, float]] = []

    def enough(report: dict[str, float]) -> bool:
        seen.append(report)
        return report["time/iterations"] == 2

    run = small(tmp_path / "run", on_report=enough)
    assert [report["time/total_timesteps"] for report in seen] == [64, 128]
    assert seen[-1].items() <= run.metrics[-1].items()
    assert not run.is_finished
    assert rows(small(tmp_path / "run", resume=True)) == rows(straight)


@pytest.mark.parametrize(
    ("stop_at", "told"), [(1.0, "after 128 steps: the evaluation reached 1"), (1e9, "was not")]
)
def test_why_a_training_with_a_return_to_stop_at_is_over_is_said(
    tmp_path: Path, stop_at: float, told: str
) -> None:
    display = Recorder()
    small(tmp_path / "run", steps=192, stop_at=stop_at, display=display)
    assert told in display.notes[-1]


def test_a_plan_without_reports_says_how_it_is_to_end() -> None:
    odd = replace(
        ppo.PPO, plan=lambda workers, config: ppo.plan(workers, config).for_each(lambda _: {"a": 1})
    )
    with pytest.raises(
        rs.RollstreamError, match="yields dict without time/total_timesteps; end it with Report"
    ):
        rs.train(odd, env="CartPole-v1", steps=64, config=SMALL, quiet=True)


def test_a_folder_has_one_training_at_a_time(tmp_path: Path) -> None:
    small(tmp_path / "run", steps=64)
    with (
        lock_folder(tmp_path / "run"),
        pytest.raises(FolderInUse, match=r"is in use by another training process"),
    ):
        small(tmp_path / "run", steps=128, resume=True)
    small(tmp_path / "run", steps=128, resume=True)


@pytest.fixture
def _hangups() -> Iterator[None]:
    """SIGHUP as a terminal has it: `nohup` ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hangups")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_ends_as_usual(straight: Run, tmp_path: Path, number: signal.Signals) -> None:
    def at_three(report: dict[str, float]) -> None:
        if report["time/iterations"] == 3:
            signal.raise_signal(number)

    before, display = signal.getsignal(number), Recorder(at_three)
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as raised:
        small(tmp_path / "run", display=display, checkpoint_every=10_000)
    if number != signal.SIGINT:
        assert raised.value.args == (128 + number,)
    assert signal.getsignal(number) is before
    _, stopping, where = display.notes
    assert "stopping" in stopping  # said at once
    assert where == f"interrupted after 192 steps, saved in {tmp_path / 'run'}"
    assert display.finished == [False]
    assert (tmp_path / "run" / "curve.png").exists()
    assert rs.load(tmp_path / "run").metrics[-1]["time/total_timesteps"] == 192
    display = Recorder()
    run = rs.train("ppo", out=tmp_path / "run", resume=True, display=display)
    assert display.info is not None
    assert (display.info.start_step, display.info.seed) == (192, 1)
    assert learned(run) == learned(straight)
    assert rows(run) == rows(straight)


def test_a_process_that_ignores_ctrl_c_still_stops_on_sigterm() -> None:
    """As one that was started by `nohup`, or in the background of a script."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit, match="143"), Interrupts(Recorder().note) as interrupts:  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            assert interrupts.received is None
            signal.raise_signal(signal.SIGTERM)
            assert interrupts.received == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_signal_after_the_last_look_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts(Recorder().note):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_after_the_last_step_ends_a_whole_run(tmp_path: Path) -> None:
    def at_the_end(report: dict[str, float]) -> None:
        if report["time/iterations"] == 5:
            signal.raise_signal(signal.SIGTERM)

    display = Recorder(at_the_end)
    with pytest.raises(SystemExit):
        small(tmp_path / "run", display=display)
    assert not any("interrupted" in note for note in display.notes)
    assert (tmp_path / "run" / "curve.png").exists()
    assert rs.load(tmp_path / "run").is_finished


TERMINATED = """
    import os, signal, sys
    import rollstream as rs
    from rollstream.training.progress import NoDisplay

    class Terminate(NoDisplay):
        def report(self, report, statistics):
            if report["time/iterations"] == 3:
                os.killpg(0, signal.SIGTERM)
                os.killpg(0, signal.SIGTERM)  # as `timeout` does
            assert not statistics.events

    if __name__ == "__main__":
        rs.train("ppo", env="CartPole-v1", seed=1, out="run", display=Terminate(), steps=300, workers=1,
                 checkpoint_every=64, evaluate_every=128, evaluate_episodes=3, config=eval(sys.argv[1]))
"""


@pytest.mark.slow
def test_sigterm_of_the_whole_group_leaves_workers_alone(straight: Run, tmp_path: Path) -> None:
    (tmp_path / "terminated.py").write_text(textwrap.dedent(TERMINATED))
    ended = scripts.run("terminated.py", repr(SMALL), cwd=tmp_path, start_new_session=True, check=False)
    assert (ended.returncode, ended.stderr) == (143, "")
    assert rs.load(tmp_path / "run").metrics[-1]["time/total_timesteps"] == 192
    run = rs.train("ppo", out=tmp_path / "run", resume=True, quiet=True, engine="threads")
    assert not any("events/deaths" in row for row in run.metrics)
    assert learned(rs.load(tmp_path / "run")) == learned(straight)


@pytest.mark.slow
def test_what_overlaps_is_saved_with_the_rest(tmp_path: Path) -> None:
    """A batch that was sampled ahead is in the checkpoint."""
    config = SMALL | {"overlap": True, "learning_rate_decay": False, "clip_range_decay": False}
    straight = small(tmp_path / "straight", config=config)
    small(tmp_path / "run", config=config, steps=128)
    run = small(tmp_path / "run", config=config, resume=True)
    assert learned(run) == learned(straight)
    assert rows(run) == rows(straight)


def test_a_second_ctrl_c_at_once_is_the_same_one() -> None:
    """`timeout -s INT` signals the process, and then its group."""
    times = iter([10.0, 10.9, 11.0])
    with Interrupts(Recorder().note, lambda: next(times)) as interrupts:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.received = None


def test_a_folder_that_is_deleted_is_not_called_saved(tmp_path: Path) -> None:
    def delete(_: dict[str, float]) -> None:
        shutil.rmtree(tmp_path / "run")
        signal.raise_signal(signal.SIGTERM)

    display = Recorder(delete)
    with pytest.raises(RunError, match="run was deleted or moved during training: nothing can be saved"):
        small(tmp_path / "run", display=display, evaluate_every=None)
    assert not any("saved" in note for note in display.notes)
    assert not (tmp_path / "run").exists()


def test_a_second_signal_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_TWICE_SECONDS", 0.0)

    def twice(_: dict[str, float]) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one should have raised")

    with pytest.raises(KeyboardInterrupt):
        small(tmp_path / "run", display=Recorder(twice))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(CheckpointError, match="has no checkpoint yet; continue training with resume=True"):
        rs.load(tmp_path / "run")


def test_a_run_without_a_checkpoint_begins_anew_and_that_is_said(straight: Run, tmp_path: Path) -> None:
    small(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    display = Recorder()
    run = rs.train("ppo", out=tmp_path / "run", resume=True, display=display)
    assert display.notes[1:] == [
        f"the run in {tmp_path / 'run'} has no checkpoint: it starts over, replacing 5 rows of metrics"
    ]
    assert learned(run) == learned(straight)


def test_a_run_that_is_over_stays_as_it_is(straight: Run) -> None:
    assert straight.path is not None
    display = Recorder()
    run = rs.train("ppo", env="CartPole-v1", steps=300, out=straight.path, resume=True, display=display)
    assert display.notes == [f"the run in {straight.path} is already finished, after 320 steps"]
    assert learned(run) == learned(straight)
    assert run.metrics == straight.metrics


def test_the_previous_checkpoint_is_used_if_the_newest_is_damaged(straight: Run, tmp_path: Path) -> None:
    small(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_000000320" / "arrays.safetensors"
    os.truncate(newest, 1000)
    with pytest.warns(UserWarning, match=r"step_000000320 is damaged: .*; using step_000000256"):
        run = rs.train("ppo", out=tmp_path / "run", resume=True, quiet=True)
    assert learned(run) == learned(straight)
    assert rows(run) == rows(straight)


class Stubborn(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with something in it that cannot be saved."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.engine = object()


def test_environments_that_cannot_be_saved_are_mentioned_once_and_begin_anew(tmp_path: Path) -> None:
    results = []
    for name in ("one", "other"):
        display = Recorder()
        small(tmp_path / name, env=Stubborn, evaluate_every=None, display=display, steps=128)
        [note] = display.notes  # of two checkpoints
        assert "the state of these environments cannot be saved (Stubborn.engine is of type builtins" in note
        run = rs.train("ppo", out=tmp_path / name, env=Stubborn, resume=True, steps=192, quiet=True)
        assert [row["time/total_timesteps"] for row in run.metrics] == [64, 128, 192]
        results.append(learned(run))
    assert results[0] == results[1]


# Evaluation --------------------------------------------------------------------------------------


class Lengths(gymnasium.Env[Any, Any]):
    """Episodes of a length that their seed decides; the reward says whether the action was 1."""

    observation_space = spaces.Box(-1, 1, (2,), np.float64)
    action_space = spaces.Discrete(2, start=5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = self.length = int(self.np_random.integers(1, 20))
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.left -= 1
        return np.full(2, self.left / 20), float(action == 6), self.left == 0, False, {}


class Constant:
    """A policy that always does the same, and remembers for how long."""

    jit = True

    def init(self, seed: int) -> dict[str, Any]:
        return {}

    def initial_state(self, size: int) -> Any:
        return np.zeros(size, np.int32)

    def noise(self, generator: np.random.Generator, *leading: int) -> Any:
        return np.zeros(leading)

    def step(self, weights: dict[str, Any], observation: Any, state: Any, noise: Any) -> Any:
        assert noise is None
        return weights["action"] + 0 * state, state + 1


def test_every_environment_has_its_share_of_episodes() -> None:
    with Evaluator(EnvSpec(Lengths), Constant(), seed=4) as evaluator:
        weights = {"action": np.int32(1)}
        result = evaluator(weights, 40)
        assert evaluator(weights, 40) == result
        assert evaluator(weights, 40, index=1) != result
        nothing = evaluator({"action": np.int32(0)}, 40)
    assert result.episodes == 40
    assert result.mean_return == result.mean_length  # every step of an episode, and no other
    assert nothing == Evaluation(0.0, 0.0, result.mean_length, 40)


def test_a_return_to_stop_at_ends_the_run_and_the_best_is_kept(tmp_path: Path) -> None:
    display = Recorder()
    run = small(tmp_path / "run", steps=10_000, stop_at=5.0, display=display)
    assert run.metrics[-1]["time/total_timesteps"] == 128
    assert float(run.metrics[-1]["eval/mean_reward"]) >= 5
    assert [path.name for path in (tmp_path / "run" / "best").iterdir()] == ["step_000000128"]
    again = rs.train("ppo", out=tmp_path / "run", resume=True, quiet=True)
    assert again.metrics == run.metrics
    more = rs.train("ppo", out=tmp_path / "run", resume=True, quiet=True, stop_at=1e9, steps=192)
    assert [row["time/total_timesteps"] for row in more.metrics] == [64, 128, 192]
    (tmp_path / "other").mkdir()
    small(tmp_path / "other", evaluate_every=None, steps=64)
    with pytest.raises(RunError, match="has evaluate_every None, not 128"):
        small(tmp_path / "other", resume=True)


class Sum:
    """Acts by the newest frame and the oldest."""

    jit = False

    def initial_state(self, size: int) -> Any:
        return ()

    def step(self, weights: Any, observation: Any, state: Any, noise: Any) -> Any:
        return observation[:, :1] * 100 + observation[:, -1:], state


def test_acting_stacks_frames_as_training_did() -> None:
    box = spaces.Box(-np.inf, np.inf, (6,))
    policy: Any = Sum()
    actor = TrainedPolicy(policy, {}, box, spaces.Box(-150, 1000, (1,)), frame_stack=3)
    seen = [float(actor.act(np.array([k, k + 0.5]))[0]) for k in (1, 2, 3, 4)]
    assert seen == [101.5, 102.5, 103.5, 204.5]
    actor.reset()
    assert float(actor.act(np.array([-2, 0]))[0]) == -150  # clipped to what the environment takes


@pytest.mark.slow
def test_a_run_with_frames_acts_as_its_evaluation_does() -> None:
    run = small(None, frame_stack=2, steps=64, evaluate_every=None)
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=0)
    assert run.policy.observation_space.shape == (8,)
    assert environment.action_space.contains(run.policy.act(observation))
    with pytest.raises(SpaceError, match=r"act takes one observation.* has shape \(3,\) instead of \(4,\)"):
        run.policy.act([0, 0, 0])
    assert run.evaluate(2).episodes == 2


@pytest.mark.parametrize(
    "observation", [[0.0] * 3, [[0.0] * 3] * 2, [[[0.0] * 4]] * 2, 0.5, "left", {"x": 1}]
)
def test_what_is_no_observation_is_told(straight: Run, observation: Any) -> None:
    with pytest.raises(
        SpaceError, match=r"act takes one observation, .* has shape \(.*\) instead of \(4,\)$"
    ):
        straight.policy.act(observation)


def test_a_batch_of_observations_gives_a_batch_of_actions(straight: Run) -> None:
    observations = np.random.default_rng(0).normal(size=(20, 4))
    actions = straight.policy.act(observations)
    assert actions.tolist() == [straight.policy.act(one) for one in observations]
    assert straight.policy.act(observations[:1]).shape == (1,)
    assert len(set(straight.policy.act(observations, deterministic=False).tolist())) == 2


def test_a_batch_stacks_the_frames_of_each_environment() -> None:
    policy: Any = Sum()
    box, actions = spaces.Box(-np.inf, np.inf, (6,)), spaces.Box(-1000, 1000, (1,))
    actor = TrainedPolicy(policy, {}, box, actions, frame_stack=3)
    frames = np.array([[1, 1.5], [5, 5.5]])
    assert actor.act(frames).tolist() == [[101.5], [505.5]]
    assert actor.act(frames + 1).tolist() == [[102.5], [506.5]]
    actor.reset([False, True])
    assert actor.act(frames + 2).tolist() == [[103.5], [707.5]]
    with pytest.raises(SpaceError, match=r"called with 1 observations after 2, .*; call reset\(\) first"):
        actor.act(frames[0])
    actor.reset()
    assert actor.act(frames[0]).tolist() == [101.5]


# Settings ----------------------------------------------------------------------------------------


def test_tuned_settings_are_used_and_overridden() -> None:
    ppo = ALGORITHMS["ppo"]
    assert resolve_config(ppo, "CartPole-v1").epochs == tuned("ppo", "CartPole-v1")["epochs"] == 20
    assert resolve_config(ppo, "CartPole-v1", {"epochs": 2}).epochs == 2
    assert resolve_config(ppo, "CartPole-v1", ppo.config()) == ppo.config()
    for name in ALGORITHMS:
        for environment in tuned_environments(name):
            resolve_config(ALGORITHMS[name], environment)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"num_envs": 0}, r"config num_envs=0: must be an integer >= 1"),
        ({"num_envs": -1}, r"num_envs=-1: must be an integer >= 1"),
        ({"rollout_length": 0}, r"rollout_length=0: must be an integer >= 1"),
        ({"minibatch_size": 0}, r"minibatch_size=0: must be an integer >= 1"),
        ({"epochs": 2.0}, r"epochs=2.0: must be an integer >= 1"),
        ({"epochs": True}, r"epochs=True: must be an integer >= 1"),
        ({"hidden": (-3,)}, r"hidden=\(-3,\): must be a tuple of integers >= 1"),
        ({"hidden": [8, 0]}, r"hidden=\(8, 0\): must be a tuple of integers >= 1"),
        ({"hidden": 256}, r"hidden=256: must be a tuple of integers >= 1"),
        ({"learning_rate": -1}, r"learning_rate=-1: must be a number >= 0"),
        ({"learning_rate": "x"}, r"learning_rate='x': must be a number >= 0"),
        ({"learning_rate": math.nan}, r"learning_rate=nan: must be a number >= 0"),
        ({"gamma": 2}, r"gamma=2: must be a number between 0 and 1"),
        ({"activation": "thanh"}, r"activation='thanh': must be one of 'tanh', 'relu', 'silu'"),
        ({"overlap": 1}, r"overlap=1: must be True or False"),
        (ppo.Config(learning_rate=-1), r"learning_rate=-1: must be a number >= 0"),
    ],
)
def test_values_that_a_setting_cannot_have(config: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{text}$"):
        resolve_config(ALGORITHMS["ppo"], "CartPole-v1", config)


@dataclass(frozen=True)
class OwnConfig(ppo.Config):
    gamma: float = 2.0
    goal: tuple[float, str] | None = None
    anything: Any = None


def test_settings_of_ones_own_have_types_and_no_ranges() -> None:
    own = replace(ALGORITHMS["ppo"], config=OwnConfig)
    for given in ({"gamma": -3}, {"goal": None}, {"anything": object()}):
        resolve_config(own, "", given)
    assert resolve_config(own, "", {"goal": [1, "x"]}).goal == (1, "x")  # as JSON has it
    with pytest.raises(ConfigError, match=r"goal=\(1, 2\): must be a tuple of a number, a string or None$"):
        resolve_config(own, "", {"goal": (1, 2)})
    with pytest.raises(ConfigError, match="num_envs=0"):
        resolve_config(own, "", {"num_envs": 0})


OWN = """
    from dataclasses import dataclass
    from rollstream.algos import ppo
    from rollstream.rl.algorithm import Algorithm

    @dataclass(frozen=True)
    class Config(ppo.Config):
        patience: int = 3

    def plan(workers, config):
        return ppo.plan(workers, config).take(config.patience)

    MINE = Algorithm("mine", Config, ppo.worker, ppo.learner, plan)
"""


class OwnLearner:
    """What a learner needs, as one of PyTorch would have it."""

    def __init__(self, inner: Learner):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name not in OWN_LEARNER:
            raise AttributeError(name)
        return getattr(self._inner, name)


OWN_LEARNER = ("train", "get_weights", "version", "state_dict", "load_state_dict")
OWN_LEARNER += ("policy", "weights", "steps", "total_steps")


@pytest.mark.parametrize("engine", ["inline", "threads"])
def test_a_learner_of_ones_own(engine: str) -> None:
    plain = replace(ALGORITHMS["ppo"], name="plain")
    own = replace(plain, learner=lambda *given: OwnLearner(ppo.learner(*given)))
    options: Any = {"env": "CartPole-v1", "steps": 64, "quiet": True, "engine": engine, "workers": 1}
    config = {"num_envs": 4, "rollout_length": 8, "minibatch_size": 32, "epochs": 1}
    found, expected = (rs.train(each, config=config, **options) for each in (own, plain))
    jax.tree.map(np.testing.assert_array_equal, found._weights, expected._weights)


ENVIRONMENT = """
    import gymnasium
    from gymnasium.envs.classic_control import CartPoleEnv

    class MyEnv(CartPoleEnv):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, 2 * reward, terminated, truncated, info

    def make_env(pay=3):
        return gymnasium.wrappers.TransformReward(CartPoleEnv(), lambda reward: pay * reward)

    gymnasium.register("Mine-v0", MyEnv, max_episode_steps=20)
"""


@pytest.fixture
def my_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with environments of one's own, which can be imported here; its name."""
    name = f"my_environment_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(ENVIRONMENT))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    gymnasium.registry.pop("Mine-v0", None)
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "source", ["{}:Mine-v0", "{}.py:MyEnv", pytest.param("{}.py:make_env", marks=pytest.mark.slow)]
)
def test_an_environment_of_ones_own_in_a_file(
    my_environment: str, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = source.format(my_environment)
    small(Path("run"), env=env, steps=64, evaluate_every=None)
    os.mkdir("elsewhere")
    monkeypatch.chdir("elsewhere")
    run = rs.load("../run")
    result = run.evaluate(2)
    assert result.mean_return == (3 if "make_env" in env else 2) * result.mean_length
    again = rs.train("ppo", out="../run", resume=True, steps=128, quiet=True)
    assert again.metrics[-1]["time/total_timesteps"] == 128


class Maker:
    """An actor that makes environments, as rollout workers do."""

    def make(self, env_spec: EnvSpec) -> float:
        vector = env_spec.make(1)
        try:
            vector.reset([0])
            return float(vector.step(np.ones(1, int)).reward[0])
        finally:
            vector.close()


def test_workers_in_other_processes_know_the_environments_of_the_driver(
    my_environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in modules and files, and those that were registered here."""
    monkeypatch.chdir(tmp_path)
    register: Any = gymnasium.register
    Path("in_file.py").write_text(textwrap.dedent(ENVIRONMENT.rpartition("gymnasium.register")[0]))
    rewards = {f"{my_environment}:Mine-v0": 2, "in_file.py:make_env": 3, "Called-v0": 1, "Local-v0": 1}
    register("Called-v0", Lengths)
    register("Local-v0", lambda: Lengths())
    try:
        with rs.engine("processes") as engine:
            [maker] = engine.spawn(Maker)
            made = {name: maker.call("make", EnvSpec(name)).result() for name in rewards}
    finally:
        del gymnasium.registry["Called-v0"], gymnasium.registry["Local-v0"]
    assert made == rewards


MAIN = """
    import gymnasium
    from gymnasium.envs.classic_control import CartPoleEnv
    import rollstream as rs
    from rollstream.rl.env_spec import EnvSpec

    class MyEnv(CartPoleEnv):
        pass

    class Maker:
        def make(self, env_spec):
            env_spec.make(1).close()

    if __name__ == "__main__":
        gymnasium.register("Main-v0", "__main__:MyEnv")
        with rs.engine("processes") as engine:
            engine.spawn(Maker)[0].call("make", EnvSpec("Main-v0")).result()
"""


def test_what_a_script_registers_is_known_to_its_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(MAIN))
    assert scripts.run("script.py", cwd=tmp_path).stderr == ""


def test_an_algorithm_of_ones_own_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(textwrap.dedent(OWN))
    config = SMALL | {"patience": 4}
    options: dict[str, Any] = {"env": "CartPole-v1", "steps": 640, "quiet": True, "out": tmp_path / "run"}
    rs.train(f"{file}:MINE", config=config, **options)
    run = rs.load(tmp_path / "run")
    assert run.metrics[-1]["time/total_timesteps"] == 256  # its plan has ended by itself, and is saved
    assert run.config.patience == 4
    assert run.run_config.engine == "inline"
    with pytest.raises(UnknownAlgorithm, match=r"own.py has no algorithm 'MIEN': it has .*own.py:MINE"):
        algorithm(f"{file}:MIEN")
    with pytest.raises(
        UnknownAlgorithm, match=r"nowhere.py:MINE cannot be loaded: there is no file nowhere.py"
    ):
        algorithm("nowhere.py:MINE")


class Mortal(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole whose first process ends in the middle of the training."""

    def __init__(self, marker: str):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.marker, self.steps = Path(marker), 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 20:
            try:
                self.marker.touch(exist_ok=False)  # by one only, however close the others are
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_a_worker_that_dies_is_in_the_metrics_and_the_training_goes_on(tmp_path: Path) -> None:
    display = Recorder()
    options = {"marker": str(tmp_path / "dead")}
    run = small(None, env=Mortal, env_kwargs=options, workers=1, evaluate_every=None, display=display)
    assert run.metrics[-1]["time/total_timesteps"] == 320
    [row] = [row for row in run.metrics if "events/deaths" in row]
    [name] = [name for name in row if name.startswith("events/worker")]
    assert str(row[name]).endswith(": restarted")
    assert any("SIGKILL" in note or "signal 9" in note for note in display.notes)


# Bad input ---------------------------------------------------------------------------------------


def tuples() -> Any:
    environment = gymnasium.make("CartPole-v1")
    environment.action_space = spaces.Tuple([spaces.Discrete(2)])
    return environment


@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        (
            "pop",
            {},
            UnknownAlgorithm,
            r"there is no algorithm 'pop' \(did you mean 'ppo'\?\); there are a2c, a3c",
        ),
        (
            "ppo",
            {"config": {"epoch": 3}},
            ConfigError,
            r"ppo has no hyperparameter 'epoch' \(did you mean 'epochs'\?\)",
        ),
        ("ppo", {"config": ALGORITHMS}, ConfigError, r"ppo has no hyperparameter 'a2c'"),
        (
            "ppo",
            {"config": 3},
            ConfigError,
            r"config is a builtins.int; ppo takes a rollstream.algos.ppo.Config",
        ),
        ("ppo", {"config": {"minibatch_size": 7}}, rs.RollstreamError, r"set minibatch_size to a divisor of"),
        (
            "ppo",
            {"env": "CartPoel-v1"},
            UnknownEnvironment,
            r"there is no environment 'CartPoel-v1' \(did you mean CartPole-v1, .*\?\); one of your own is",
        ),
        (
            "ppo",
            {"env": "CartPole-v9"},
            UnknownEnvironment,
            r"^there is no environment 'CartPole-v9' \(did you mean [^?]*CartPole-v1[^?]*\?\); one of your",
        ),
        (
            "ppo",
            {"env": "json:Mine-v0"},
            UnknownEnvironment,
            r"'Mine-v0'.*; json registers none of that name",
        ),
        ("ppo", {"env": "nomodule:Mine-v0"}, UnknownEnvironment, r"nomodule:Mine-v0 needs a package"),
        ("ppo", {"env": __file__}, UnknownEnvironment, r"name the environment in it: it has .*:Lengths,"),
        (
            "ppo",
            {"env": "nowhere.py:Mine"},
            UnknownEnvironment,
            r"nowhere.py:Mine cannot be loaded: there is no file nowhere.py",
        ),
        (
            "ppo",
            {"env": 3},
            UnknownEnvironment,
            r"env is of type int; give a Gymnasium id, or a function that returns",
        ),
        ("ppo", {"env": gymnasium}, UnknownEnvironment, r"env is of type module; give a Gymnasium id"),
        (
            "ppo",
            {"env": gymnasium.make("Acrobot-v1")},
            UnknownEnvironment,
            r"env is of type TimeLimit; .*: env=lambda: gymnasium.make\('Acrobot-v1'\)",
        ),
        (
            "ppo",
            {"env": lambda: 3},
            UnknownEnvironment,
            r"<lambda> returned int 3; it must return one new gymnasium.Env",
        ),
        (
            "ppo",
            {"env": lambda: gymnasium.make_vec("CartPole-v1", 2)},
            UnknownEnvironment,
            r"<lambda> returned .*Vector.*; it must return one new gymnasium.Env",
        ),
        ("ppo", {"env": "envpool:Pong-v5"}, UnknownEnvironment, r"pip install 'rollstream\[envpool\]'"),
        (
            "ppo",
            {"env": tuples},
            SpaceError,
            r"ppo cannot be trained on tuples: .* supports action spaces of type Discrete[^;]*$",
        ),
        (
            "td3",
            {"steps": 2000},
            SpaceError,
            r"td3 cannot be trained on CartPole-v1: .*Discrete\(2\); algorithms that can: a2c, a3c, apex",
        ),
        (
            "dqn",
            {"env": "Pendulum-v1", "steps": 2000},
            SpaceError,
            r"dqn cannot be trained on Pendulum-v1: .*; algorithms that can: a2c, a3c, appo, ddpg, "
            r"impala, ppo, sac, td3$",
        ),
        (
            "ppo",
            {"env": None},
            rs.RollstreamError,
            r"env and steps are missing: train\('ppo', env=",
        ),
        ("ppo", {"steps": 0}, rs.RollstreamError, r"steps=0: must be an integer >= 1"),
        (
            "ppo",
            {"policy": "MlpPolicy"},
            rs.RollstreamError,
            r"^policy='MlpPolicy': must be a function of obs",
        ),
        ("ppo", {"engine": "threds"}, ConfigError, r"engine='threds': must be one of 'inline', 'threads'"),
        (
            "ppo",
            {"resume": True},
            RunError,
            r"run is not a run folder: it does not exist; start a new run without resume",
        ),
        ("ppo", {"resume": True, "out": None}, RunError, r"needs the folder of the run: out='runs/...'"),
        (
            ppo,
            {},
            rs.RollstreamError,
            r"<module .*ppo.* is not an algorithm: use a name from `rollstream list`",
        ),
        (
            "dqn",
            {"config": {"num_atoms": 51, "value_range": (5.0, -5.0)}},
            rs.RollstreamError,
            r"value_range=\(5.0, -5.0\): give the smallest value, then",
        ),
    ],
)
def test_bad_input_is_one_clear_sentence_and_writes_nothing(
    tmp_path: Path, name: str, options: dict[str, Any], error: type[Exception], text: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    given = {"env": "CartPole-v1", "steps": 100, "out": tmp_path / "run", "quiet": True} | options
    with pytest.raises(error, match=text) as raised:
        rs.train(name, **given)
    assert isinstance(raised.value, rs.RollstreamError)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_a_run_is_not_overwritten(straight: Run) -> None:
    assert straight.path is not None
    before = {path: path.read_bytes() for path in straight.path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="already holds a run; resume it with resume=True, or choose another"):
        small(straight.path)
    assert {path: path.read_bytes() for path in straight.path.rglob("*") if path.is_file()} == before


def test_a_run_that_got_nowhere_is_overwritten(straight: Run, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert straight.path is not None
    shutil.copy(straight.path / "config.json", tmp_path)
    assert learned(small(tmp_path)) == learned(straight)


@pytest.mark.parametrize("out", ["/proc/nowhere/run", "/dev/null/run"])
def test_a_folder_that_cannot_be_written_is_told_before_anything_is_built(out: str) -> None:
    with pytest.raises(RunError, match=rf"{out} cannot be written: .*; choose another folder") as raised:
        small(Path(out), env=no_environment)
    assert "\n" not in str(raised.value)


def no_environment() -> Any:
    raise AssertionError("made too early")


@pytest.mark.parametrize(("seconds", "saved"), [(0.0, [64, 128, 192, 256, 320]), (1000.0, [320])])
def test_by_default_some_time_passes_between_checkpoints(
    seconds: float, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "_SECONDS", seconds)
    small(tmp_path / "run", checkpoint_every=None, keep=10)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [f"step_{step:09}" for step in saved]


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoints_before_it(
    straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        if "step_000000192" in str(path) and path.name == "state.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_and_sync(path, data)

    write_and_sync = checkpoint.write_and_sync
    monkeypatch.setattr(checkpoint, "write_and_sync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*step_000000192'"):
        small(tmp_path / "run")
    monkeypatch.undo()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step_000000064", "step_000000128"]
    assert learned(rs.train("ppo", out=tmp_path / "run", resume=True, quiet=True)) == learned(straight)


def test_no_episodes_are_no_evaluation(straight: Run) -> None:
    with pytest.raises(rs.RollstreamError, match="episodes=0: must be an integer >= 1"):
        straight.evaluate(0)


def test_a_folder_that_is_no_run_cannot_be_resumed_or_loaded(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"is not a run folder: it has no config.json; start a new run"):
        rs.train("ppo", out=tmp_path, resume=True)
    with pytest.raises(RunError, match=r"has no config.json; give the output folder of `rollstream train`"):
        rs.load(tmp_path)
    with pytest.raises(RunError, match=r"notes.txt is not a run folder: it is a file"):
        rs.load(tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config.json is damaged or from another version"):
        rs.load(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "notes.txt"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": 2}, r"has seed 1, not 2, which cannot change on resume: leave seed out"),
        ({"env": "Acrobot-v1"}, r"has env 'CartPole-v1', not 'Acrobot-v1'"),
        ({"config": {"epochs": 9}}, r"has config \{'epochs': 2\}, not \{'epochs': 9\}"),
        ({"keep": 0}, r"keep=0: must be an integer >= 1"),
        ({"name": "a2c"}, r"was trained with ppo, not a2c"),
    ],
)
def test_a_run_goes_on_as_it_began(straight: Run, options: dict[str, Any], text: str) -> None:
    assert straight.path is not None
    name = options.pop("name", "ppo")
    with pytest.raises(rs.RollstreamError, match=text):
        rs.train(name, out=straight.path, resume=True, **options)
