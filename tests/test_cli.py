"""The command line, with tiny trainings; in a subprocess where the process matters."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
from contextlib import chdir, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import scripts

from rollstream import cli
from rollstream.algos import ALGORITHMS
from rollstream.cli import main
from rollstream.training import interrupts
from rollstream.training.config_file import saved_progress
from rollstream.training.display import LineDisplay
from rollstream.training.run_folder import lock_folder

ROOT = Path(__file__).parent.parent
TINY = ("--env", "CartPole-v1", "--seed", "1", "--config.epochs", "1")


def fails(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(args)
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in `runs/tiny`; `told` is what its training wrote."""
    home, output = tmp_path_factory.mktemp("home"), io.StringIO()
    with chdir(home), redirect_stdout(output):
        main(["train", "ppo", *TINY, "--steps", "300", "--checkpoint-every", "128", "--out", "runs/tiny"])
    (home / "told").write_text(output.getvalue())
    return home


@pytest.fixture
def my_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The algorithm that the documentation shows, in a file of its own."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    [code] = [block for block in blocks if "MyAlgorithm = Algorithm(" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 50
    (tmp_path / "my_file.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my_file.py"


# Help --------------------------------------------------------------------------------------------


def test_help_needs_no_jax(tmp_path: Path) -> None:
    code = """
import sys
from rollstream.cli import main
for args in ([], ["train", "--help"], ["list"], ["train", "pop"], ["evaluate", "--help"]):
    try:
        main(args)
    except SystemExit:
        pass
assert "jax" not in sys.modules
"""
    done = scripts.run_code(code, cwd=tmp_path)
    for part in ("evaluate", "--steps N", "Proximal policy optimization", "tuned for CartPole-v1"):
        assert part in done.stdout
    assert "did you mean 'ppo'" in done.stderr


def test_help_of_an_algorithm_shows_its_settings_as_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails("train", "ppo", "--env", "CartPole-v1", "--help") == 0
    tuned = " ".join(capsys.readouterr().out.split())
    assert fails("train", "ppo", "--help") == 0
    plain = " ".join(capsys.readouterr().out.split())
    pattern = r"--config.rollout-length INT.*?\(default: (\d+)\)"
    assert [re.findall(pattern, text) for text in (tuned, plain)] == [["32"], ["256"]]
    assert plain.startswith("usage: rollstream train [-h] [TRAIN OPTIONS] ALGO")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_hyperparameter_has_a_help_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails("train", name, "--help") == 0
    lines = capsys.readouterr().out.split("config options")[1].replace("│", " ").splitlines()
    options = " ".join(" ".join(lines).split()).split("--config.")[1:]
    bare = r"\S+( \S+)? \(default: [^)]*\)( ╰─+╯)?"
    assert len(options) >= len(dataclasses.fields(ALGORITHMS[name].config))
    assert [option for option in options if re.fullmatch(bare, option.strip())] == []


# Training ----------------------------------------------------------------------------------------


def test_a_training_leaves_a_folder(home: Path) -> None:
    folder = home / "runs" / "tiny"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "metrics.csv", "checkpoints", "curve.png"} <= names
    config = json.loads((folder / "config.json").read_text())["config"]
    assert config["epochs"] == 1
    assert config["rollout_length"] == 32  # tuned, and not overridden
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["time/total_timesteps"] for row in rows] == [256, 512]


def test_a_training_writes_lines_where_there_is_no_terminal(home: Path) -> None:
    told = (home / "told").read_text()
    first, *_, last = told.splitlines()
    assert first == "ppo on CartPole-v1 · inline · seed 1 · 512 steps"
    assert "512 steps 100%" in told
    assert "300 steps are rounded up to whole rollouts: 512" in told
    assert "the bottleneck was" in told
    assert "Saved in runs/tiny" in told
    assert last == "Evaluate it with: rollstream evaluate runs/tiny"
    assert "\x1b" not in told


def test_ctrl_c_stops_and_resume_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = ["-m", "rollstream", "train", "ppo", *TINY, "--steps", "9_000_000", "--out", str(out)]
    with scripts.started(*arguments) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert "256 steps" in lines[2]
        process.send_signal(signal.SIGINT)
        told, complaints = process.communicate()
    assert process.returncode == 130
    before = (out / "metrics.jsonl").read_text().splitlines()
    done = json.loads(before[-1])["time/total_timesteps"]
    command = f"rollstream train ppo --resume --out {out}"
    assert complaints == f"rollstream: stopped, and saved up to {done:,} steps; resume with: {command}\n"
    assert "stopping; press Ctrl-C again" in told
    assert "steps, saved in" in told
    main(["train", "ppo", "--resume", "--out", str(out), "--steps", str(done + 256), "--quiet"])
    after = (out / "metrics.jsonl").read_text().splitlines()
    assert after[:-1] == before
    assert json.loads(after[-1])["time/total_timesteps"] == done + 256
    assert capsys.readouterr().out == ""


def test_sigterm_stops_and_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LineDisplay, "report", lambda *_: signal.raise_signal(signal.SIGTERM))
    out = tmp_path / "run"
    assert fails("train", "ppo", *TINY, "--steps", "512", "--out", str(out)) == 143
    told, complaints = capsys.readouterr()
    command = f"rollstream train ppo --resume --out {out}"
    assert complaints == f"rollstream: stopped, and saved up to 256 steps; resume with: {command}\n"
    assert "SIGTERM: stopping\ninterrupted after 256 steps, saved in" in told


def test_a_terminal_that_is_closed_saves(tmp_path: Path) -> None:
    """Writing to it fails from then on, which must not keep the run from being saved."""
    out, (terminal, side) = tmp_path / "run", os.openpty()
    code = (
        "import fcntl, signal, termios; signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # `nohup` ignores it
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0); from rollstream.__main__ import entry_point; "
        "entry_point()"
    )
    command = ["-c", code, "train", "ppo", *TINY, "--steps", "9_000_000", "--out", str(out)]
    streams: dict[str, Any] = {"stdin": side, "stdout": side, "stderr": side, "start_new_session": True}
    with scripts.started(*command, **streams, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(side)
        reader = threading.Thread(target=_drain, args=(terminal, out / "metrics.jsonl"))
        reader.start()
        assert process.wait() == 128 + signal.SIGHUP
        reader.join()
    progress = saved_progress(out)
    assert progress is not None
    assert progress.step > 0
    assert progress.lost == 0


def _drain(terminal: int, metrics: Path) -> None:
    """Read what is shown until there are metrics, then close the terminal."""
    while not metrics.exists() or not metrics.stat().st_size:
        os.read(terminal, 4096)
    os.close(terminal)


def test_ctrl_c_twice_says_what_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(_: object, report: dict[str, float], __: object) -> None:
        if report["time/iterations"] == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(interrupts, "_TWICE_SECONDS", 0.0)
    monkeypatch.setattr(LineDisplay, "report", twice)
    monkeypatch.chdir(tmp_path)
    options = ("--steps", "9_000", "--checkpoint-every", "512", "--out", "my run")
    assert fails("train", "ppo", *TINY, *options) == 130
    saved = "the checkpoint at 512 steps is saved, and 256 steps after it are not"
    resume = "resume with: rollstream train ppo --resume --out 'my run'"
    assert capsys.readouterr().err == f"rollstream: stopped at once: {saved}; {resume}\n"


def test_a_signal_after_the_last_step_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LineDisplay, "report", lambda *_: signal.raise_signal(signal.SIGTERM))
    main(["train", "ppo", *TINY, "--steps", "200", "--out", str(tmp_path / "run")])
    assert capsys.readouterr().out.endswith(f"rollstream evaluate {tmp_path / 'run'}\n")


@pytest.mark.filterwarnings("default")
def test_a_damaged_checkpoint_is_a_plain_note(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(home / "runs" / "tiny", "run")
    Path("run", "checkpoints", "step_000000512", "state.json").unlink()
    main(["evaluate", "run", "--episodes", "1"])
    damaged = "run/checkpoints/step_000000512 is damaged: state.json is missing"
    assert capsys.readouterr().err == f"rollstream: checkpoint {damaged}; using step_000000256 instead\n"


def test_what_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl")

    assert fails("train", "ppo", *TINY, "--steps", "1", "--out", "/proc/nowhere") == 2
    assert "/proc/nowhere cannot be written: No such file or directory; choose" in capsys.readouterr().err
    monkeypatch.setattr("rollstream.training.train", full, raising=False)
    assert fails("train", "ppo", *TINY, "--steps", "1", "--out", str(tmp_path / "run")) == 1
    told = "No space left on device; free some space, then resume with --resume"
    assert capsys.readouterr().err == f"rollstream: run/metrics.jsonl: {told}\n"


def test_a_run_without_a_folder_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs", "a2c-CartPole-v1-0").mkdir(parents=True)
    main(["train", "a2c", "--env", "CartPole-v1", "--steps", "40", "--quiet"])
    assert list(Path("runs", "a2c-CartPole-v1-0").iterdir()) == []
    assert Path("runs", "a2c-CartPole-v1-0-2", "config.json").exists()


def test_quantiles_of_sac(tmp_path: Path) -> None:
    sizes = ("--config.hidden", "4", "--config.batch-size", "8", "--config.dropped-quantiles", "3")
    options = (*sizes, "--steps", "110", "--out", str(tmp_path / "run"), "--quiet")
    main(["train", "sac", "--env", "Pendulum-v1", "--config.num-quantiles", "25", *options])
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (config["num_quantiles"], config["dropped_quantiles"]) == (25, 3)


# Afterwards --------------------------------------------------------------------------------------


def test_evaluate_writes_one_object(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["evaluate", str(home / "runs" / "tiny"), "--episodes", "3", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"mean_return", "std_return", "episodes", "mean_length"}
    assert result["episodes"] == 3
    assert result["mean_return"] == result["mean_length"] > 0


def test_evaluate_in_words(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["evaluate", str(home / "runs" / "tiny"), "--episodes", "2"])
    assert re.fullmatch(
        r"mean return [\d.]+ ± [\d.]+ over 2 episodes, mean length [\d.]+ steps\n",
        capsys.readouterr().out,
    )


def test_video(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.chdir(tmp_path)
    main(["video", str(home / "runs" / "tiny"), "--out", "tiny.mp4"])
    told, complaints = capfd.readouterr()
    assert complaints == ""
    assert re.fullmatch(r"Saved tiny.mp4: 1 episode, return [\d.]+\n", told)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.mp4"]
    assert b"ftyp" in Path("tiny.mp4").read_bytes()[:16]


def test_video_without_the_extra(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert fails("video", str(home / "runs" / "tiny"), "--out", "film.mp4") == 2
    assert "pip install 'rollstream[video]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--out", "film.txt"], "film.txt is not a video file: use one of .mp4, .mkv"),
        (["--out", "nowhere/film.mp4"], "nowhere/film.mp4 cannot be written: there is no folder nowhere"),
        (["--out", "film.mp4", "--episodes", "0"], "--episodes 0: must be an integer >= 1"),
    ],
)
def test_what_cannot_be_filmed(
    home: Path,
    options: list[str],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fails("video", str(home / "runs" / "tiny"), *options) == 2
    assert capfd.readouterr().err.startswith(f"rollstream: {part}")
    assert not list(tmp_path.iterdir())


# Pictures of plans -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["a3c"], "ComputeGradients"),
        (["ppo", "--config.overlap"], "prefetch"),
        (["ppo", "--format", "mermaid", "--workers", "4"], "flowchart"),
        (["a2c", "--format", "svg"], "</svg>"),
        (["apex", "--config.hidden", "4"], "coupled by a rate limiter"),
        (["r2d2", "--config.hidden", "4"], "coupled by a rate limiter"),
        (["dqn", "--config.hidden", "4"], "UpdatePriorities"),
        *(
            ([name, "--env", "Pendulum-v1", "--config.hidden", "4"], "Replay")
            for name in ("sac", "td3", "ddpg")
        ),
    ],
)
def test_graph(options: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["graph", *options])
    assert part in capsys.readouterr().out


# One's own ---------------------------------------------------------------------------------------


MOVED = """
import gymnasium

class Mine(gymnasium.Wrapper):
    def __init__(self, pole=0.5):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.unwrapped.length = pole
"""


def test_a_file_that_has_moved_is_found_again_if_one_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.py").write_text(MOVED)
    sizes = ("--config.num_envs", "2", "--config.rollout-length", "8", "--config.minibatch-size", "16")
    options = (*sizes, "--config.hidden", "4", "--config.epochs", "1", "--steps", "16", "--quiet")
    main(["train", "ppo", "--env", "here.py:Mine", *options, "--out", "run"])
    Path("here.py").rename("there.py")
    assert fails("evaluate", "run", "--episodes", "1") == 2
    assert (
        "here.py, which this run was trained with, does not exist; if it has moved" in capsys.readouterr().err
    )
    main(["evaluate", "run", "--episodes", "1", "--env", "there.py:Mine"])
    main(["train", "ppo", "--resume", "--out", "run", "--steps", "32", "--env", "there.py:Mine", "--quiet"])
    main(["evaluate", "run", "--episodes", "1"])
    assert fails("train", "ppo", "--env", "there.py:Mine", "--steps", "9", "--env-kwargs", "plo=1") == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "Mine does not take these options ({'plo': 1}): " in told


def test_an_environment_that_cannot_be_made_says_why_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text(
        "import gymnasium\nclass Bad(gymnasium.Env):\n    def __init__(self):\n        self.x = 1 / 0\n"
        "class Worse(gymnasium.Env):\n    pass\n"
    )
    for name, part in (
        ("Bad", r"Bad cannot be created: ZeroDivisionError: division by zero, in __init__ at .*bad.py:4$"),
        ("Worse", r"Worse has no observation_space: set self.observation_space in its __init__$"),
    ):
        assert fails("train", "ppo", "--env", f"bad.py:{name}", "--steps", "9", "--quiet") == 2
        assert re.search(part, capsys.readouterr().err.strip()), name


def test_an_error_in_a_worker_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "late.py").write_text(
        "import gymnasium\nclass Late(gymnasium.Wrapper):\n    def __init__(self):\n"
        "        super().__init__(gymnasium.make('CartPole-v1'))\n"
        "    def step(self, action):\n        raise ValueError('physics exploded')\n"
    )
    env = f"{tmp_path / 'late.py'}:Late"
    assert fails("train", "ppo", "--env", env, "--steps", "9", "--workers", "1", "--out", str(tmp_path)) == 2
    complaint = capsys.readouterr().err.strip()
    assert "physics exploded, in step at " in complaint
    assert complaint.endswith("late.py:6")


def test_a_folder_that_nobody_named_is_another_if_somebody_was_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    taken = tmp_path / "taken"
    taken.mkdir()
    free = iter([taken, tmp_path / "free"])
    monkeypatch.setattr(cli, "new_folder", lambda *_: next(free))
    with lock_folder(taken):
        main(["train", "ppo", *TINY, "--steps", "256"])
        assert (tmp_path / "free" / "checkpoints").is_dir()
        assert not list(taken.iterdir())
        assert fails("train", "ppo", *TINY, "--steps", "256", "--out", str(taken), "--quiet") == 2
    assert "is in use by another training process" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"rollstream {version('rollstream')}\n"


def test_ones_own_algorithm(my_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "my_file.py:MyAlgorithm"
    options = ("--env", "CartPole-v1", "--steps", "256", "--config.bonus", "0.5", "--workers", "1")
    main(["train", name, *options, "--quiet", "--out", "own"])
    assert capsys.readouterr() == ("", "")
    assert json.loads(Path("own", "config.json").read_text())["config"]["bonus"] == 0.5
    main(["evaluate", "own", "--episodes", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 1
    main(["graph", name])
    assert "TrainOneStep" in capsys.readouterr().out
    assert fails("train", name, *options[:4], "--config.bonnus", "1") == 2
    assert "did you mean --config.bonus?" in capsys.readouterr().err
    assert fails("train", "my_file.py", *options[:4]) == 2
    assert "name the algorithm in it: it has my_file.py:MyAlgorithm" in capsys.readouterr().err


MINE = """
from gymnasium.envs.classic_control import CartPoleEnv

class MyEnv(CartPoleEnv):
    def __init__(self, pay, name):
        super().__init__()
        self.pay, self.name = pay, name

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, self.pay * reward, terminated, truncated, info
"""


@pytest.mark.slow
def test_ones_own_environment_with_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    options = ("--env", "mine.py:MyEnv", "--env-kwargs", "pay=3", "name=me", "--workers", "1")
    sizes = ("--steps", "1e1", "--config.num_envs=2", "--config.rollout_length", "5")
    more = ("--config.minibatch-size", "1_0", "--config.hidden", "8", "8", "--quiet")
    main(["train", "ppo", *options, *sizes, *more])
    main(["evaluate", "runs/ppo-MyEnv-0", "--episodes", "2", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["mean_return"] == 3 * result["mean_length"]


def test_an_error_in_ones_own_algorithm_is_told_with_its_line(
    my_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = my_file.read_text().replace('["advantage"]', '["advantages"]')
    my_file.write_text(code)
    line = 1 + next(number for number, text in enumerate(code.splitlines()) if '["advantages"]' in text)
    assert fails("train", f"{my_file}:MyAlgorithm", "--env", "CartPole-v1", "--steps", "1", "--quiet") == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("rollstream: TrainOneStep (my_file.py:")
    assert "failed: there is no column 'advantages'; there are action, advantage, " in complaint
    assert complaint.endswith(f", in loss at {my_file}:{line}\n")


# What is wrong is said in one sentence -----------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("trian ppo", "did you mean train?"),
        ("dance", "the commands are train, evaluate, graph, list, video"),
        ("train pppo --env CartPole-v1 --steps 1", "did you mean 'ppo'?"),
        ("train ppo --env CartPol-v1 --steps 1", "CartPole-v1"),
        ("train ppo --steps 1", "rollstream train ppo --env CartPole-v1"),
        ("train ppo --resume", "--out"),
        ("train ppo --resume --out nowhere", "nowhere is not a run folder"),
        ("train ppo --env CartPole-v1 --steps 0", "steps"),
        ("train ppo --env CartPole-v1 --steps 1 --config.minibatch-size 7", "divisor of 256"),
        (
            "train a2c --env CartPole-v1 --steps 3000 --config.learning-rate 1e30",
            "in update",
        ),
        ("train missing.py:Mine --env CartPole-v1 --steps 1", "there is no file missing.py"),
        ("evaluate nowhere", "nowhere is not a run folder: it does not exist; give the output folder"),
        ("graph pop", "did you mean 'ppo'?"),
        ("graph ppo --workers -1", "--workers -1: must be an integer >= 0"),
        ("graph ppo --config.num_envs 0", "--config.num-envs 0: must be an integer >= 1"),
        (
            "train ppo --env CartPole-v1 --steps 1 --config.num_envs 0",
            "--config.num-envs 0: must be an integer",
        ),
        (
            "train ppo --env CartPole-v1 --steps 1 --config.hidden -3",
            "--config.hidden -3: must be a tuple of integers >= 1",
        ),
    ],
)
def test_one_sentence(
    command: str,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fails(*command.split()) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("rollstream: ")
    assert part in complaint
    assert complaint.count("\n") == 1


def test_a_run_is_not_overwritten(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails("train", "ppo", *TINY, "--steps", "1", "--out", str(home / "runs" / "tiny")) == 2
    assert "resume it with --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (
            "train ppo --config.learning-rte 1",
            "--config.learning-rte (did you mean --config.learning-rate?); see",
        ),
        (
            "train ppo --config.lr 1",
            "(did you mean --config.learning-rate?); see rollstream train ppo --help",
        ),
        ("train ppo --learning_rate=1", "--learning_rate (did you mean --config.learning-rate?); see"),
        ("evaluate x --episode 3", "(did you mean --episodes?); see rollstream evaluate --help"),
        ("train ppo --qqqq", "unknown option --qqqq; see rollstream train ppo --help"),
        (
            "train dqn --config.memory lstm",
            "--config.memory, which a2c, a3c, appo, impala, ppo and r2d2 have; see rollstream train dqn",
        ),
        ("train ppo --env A-v0 --steps many", "--steps many: must be an integer >= 1"),
        ("train ppo --env A-v0 --steps=1.5", "--steps 1.5: must be an integer >= 1"),
        (
            "train ppo --env A-v0 --steps 1 --config.gamma much",
            "--config.gamma much: must be a number between 0 and 1",
        ),
        (
            "train ppo --env A-v0 --steps 1 --config.hidden 8 b",
            "--config.hidden 8 b: must be a tuple of integers >= 1",
        ),
        (
            "train ppo --env A-v0 --steps 1 --engine proceses",
            "--engine proceses: must be one of 'inline', 'threads', 'processes', 'ray'",
        ),
        (
            "train ppo --env A-v0 --steps 1 --env-kwargs fast",
            "--env-kwargs fast: must be KEY=VALUE",
        ),
        ("train ppo --steps 1 more", "unexpected argument 'more'; see rollstream train ppo --help"),
        ("train ppo --steps", "Missing value for argument '--steps'"),
        ("evaluate", "DIR"),
        ("evaluate x --episodes", "Missing value for argument '--episodes'"),
        ("video x", "--out"),
        ("--foo", "unknown command '--foo'"),
        ("graph ppo --format pdf", "--format pdf: must be one of 'text', 'mermaid', 'svg'"),
    ],
)
def test_options_that_are_wrong(command: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(*command.split()) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("rollstream: ")
    assert part in complaint
    assert complaint.count("\n") == 1


def test_ctrl_c_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rollstream.algos.summary", _interrupt)
    assert fails("list") == 130
    assert capsys.readouterr().err == "rollstream: stopped\n"


def _interrupt(_: str) -> str:
    raise KeyboardInterrupt


def test_a_crash_of_native_code_shows_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("import os\n\ndef crash():\n    os.abort()\n\ncrash()\n")
    done = scripts.run("-m", "rollstream", "graph", "crash.py:ALGORITHM", check=False, cwd=tmp_path)
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert 'crash.py", line 4 in crash' in done.stderr


def test_ctrl_c_during_a_compilation_does_not_crash() -> None:
    """XLA goes on compiling what Ctrl-C interrupted, and would crash when the interpreter ends."""
    code = """
import signal, threading, jax, jax.numpy as jnp
from rollstream import cli, exit_signals
from rollstream.__main__ import entry_point

signal.signal(signal.SIGINT, signal.default_int_handler)  # also under nohup

def slow(x):
    for i in range(300):
        x = jnp.sin(x @ x) + jnp.linalg.norm(x) * i
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()  # it compiles by then
    return x

def main():
    try:
        jax.jit(slow)(jnp.ones((64, 64)))
    except KeyboardInterrupt:
        cli.leave("stopped", 130)

exit_signals.exit_on_signals = lambda: None
cli.main = main
entry_point()
"""
    done = scripts.run("-c", code, check=False)
    assert (done.returncode, done.stderr) == (130, "rollstream: stopped\n")


def test_a_signal_before_the_training_starts_says_what_is_saved(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(
        "import os, signal, time\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n\n"
        "class Waiting(CartPoleEnv):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    options = ("--env", "waiting.py:Waiting", "--steps", "100", "--out", "run")
    done = scripts.run("-m", "rollstream", "train", "ppo", *options, check=False, cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == "rollstream: stopped before the first checkpoint: nothing is saved\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_an_import_is_no_traceback(number: int, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(f"import os\nos.kill(os.getpid(), {number:d})\n")
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also under nohup
    code += "from rollstream.__main__ import entry_point; entry_point()"
    done = scripts.run("-c", code, "graph", "early.py:ALGORITHM", check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (128 + number, "rollstream: stopped\n")


def test_a_signal_that_something_swallows_ends_the_process_anyway() -> None:
    code = """
import os, signal, threading
from rollstream import exit_signals

exit_signals._SOON_SECONDS = 0.1
exit_signals.exit_on_signals()
exit_signals.raise_on_signals()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except SystemExit:
    pass
threading.Event().wait()
"""
    done = scripts.run("-c", code, check=False)
    assert (done.returncode, done.stderr) == (143, "rollstream: stopped\n")
