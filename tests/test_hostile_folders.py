"""Tampered, damaged, foreign and hostile run folders: none runs code, and none gives a wrong number."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollstream as rs
from rollstream.cli import main
from rollstream.training import loop
from rollstream.training.identity import digest, settings

SMALL = {"num_envs": 2, "rollout_length": 8, "minibatch_size": 16, "epochs": 1, "hidden": (4,)}
EVIL = "import pathlib\npathlib.Path({!r}).touch()\n"
"""A module that leaves a mark when it is imported."""
Tamper = Callable[[Path], object]


def trained(folder: Path, **more: Any) -> Path:
    options: dict[str, Any] = {"env": "CartPole-v1", "steps": 32, "config": SMALL, "quiet": True}
    rs.train("ppo", out=folder, **(options | more))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints and a best one, and another run of another seed."""
    home = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curve", lambda *_: None)
        every = {"evaluate_every": 16, "evaluate_episodes": 1, "checkpoint_every": 16}
        trained(home / "run", **every)
        trained(home / "other", seed=1, **every)
    return home


# Tampering ---------------------------------------------------------------------------------------


def config(**changes: Any) -> Tamper:
    """Change what `config.json` says, by dotted path; a class stands for removal."""

    def tamper(folder: Path) -> None:
        path = folder / "config.json"
        content = json.loads(path.read_text())
        for dotted, value in changes.items():
            *parents, last = dotted.split("__")
            part = content
            for name in parents:
                part = part[name]
            if value is KeyError:
                del part[last]
            else:
                part[last] = value
        path.write_text(json.dumps(content))

    return tamper


def text(name: str, content: str | bytes) -> Tamper:
    def tamper(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return tamper


def checkpoints(change: Callable[[Path], object]) -> Tamper:
    """Change every checkpoint."""
    return lambda folder: [change(path) for path in sorted((folder / "checkpoints").iterdir())]


def manifest(change: Callable[[dict[str, Any]], object]) -> Tamper:
    """Change the manifest of every checkpoint."""

    def tamper(path: Path) -> None:
        content = json.loads((path / "manifest.json").read_text())
        change(content)
        (path / "manifest.json").write_text(json.dumps(content))

    return checkpoints(tamper)


def resealed(name: str, change: Callable[[bytes], bytes]) -> Tamper:
    """Change a file of every checkpoint, and its checksum with it."""

    def tamper(path: Path) -> None:
        data = change((path / name).read_bytes())
        (path / name).write_bytes(data)
        content = json.loads((path / "manifest.json").read_text())
        content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (path / "manifest.json").write_text(json.dumps(content))

    return checkpoints(tamper)


def consistent(change: Tamper) -> Tamper:
    """Change `config.json`, and the settings that every checkpoint carries with it."""

    def tamper(folder: Path) -> None:
        change(folder)
        sha256 = digest(settings(json.loads((folder / "config.json").read_text())))
        manifest(lambda own: own["run"].update(sha256=sha256))(folder)

    return tamper


def from_other_run(part: str) -> Tamper:
    def tamper(folder: Path) -> None:
        shutil.rmtree(folder / part)
        shutil.copytree(folder.parent.parent / "runs-of-others" / "other" / part, folder / part)

    return tamper


def fifo(name: str) -> Tamper:
    def tamper(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return tamper


def call(module: str, name: str, **options: Any) -> Tamper:
    """Name a function as the environment, with keyword arguments."""
    return config(
        task__environment__source={"module": module, "name": name}, task__environment__options=options
    )


ENV, OPTIONS = "task__environment__source", "task__environment__options"
NAMES_CODE = "config.json of run names code, "
HOSTILE: dict[str, tuple[Tamper, str]] = {
    "a command by os.system": (call("os", "system", command="touch ran"), f"{NAMES_CODE}env os.system"),
    "subprocess.run": (call("subprocess", "run", args="touch ran", shell=True), NAMES_CODE),
    "builtins.exec": (call("builtins", "exec"), NAMES_CODE),
    "a module in the folder": (call("evil", "make"), f"{NAMES_CODE}env evil.make"),
    "a file in the folder": (config(**{ENV: "run/evil.py:Env"}), f"{NAMES_CODE}env run/evil.py:Env"),
    "a file without a name": (config(**{ENV: "run/evil.py"}), NAMES_CODE),
    "a file above": (config(**{ENV: "../evil.py:Env"}), NAMES_CODE),
    "a module that registers ids": (config(**{ENV: "evil:Env-v0"}), f"{NAMES_CODE}env evil:Env-v0"),
    "a module in a package": (config(**{ENV: "run.evil:Env-v0"}), NAMES_CODE),
    "two colons": (config(**{ENV: "envpool:evil:Env-v0"}), NAMES_CODE),
    "an id of old Gym": (
        config(**{ENV: "GymV21Environment-v0", OPTIONS: {"env_id": "evil:Env-v0"}}),
        NAMES_CODE,
    ),
    "a package that is missing": (
        consistent(config(**{ENV: "envpool:Pong-v5"})),
        "pip install 'rollstream[envpool]'",
    ),
    "an algorithm in a file": (
        config(algorithm="run/evil.py:Algo"),
        f"{NAMES_CODE}algorithm run/evil.py:Algo",
    ),
    "an algorithm that is a module": (config(algorithm="evil"), f"{NAMES_CODE}algorithm evil"),
    "an algorithm of nobody": (config(algorithm=None), "is neither in this package nor in a file"),
    "a policy": (config(task__policy={"module": "evil", "name": "make"}), f"{NAMES_CODE}policy evil.make"),
    "a policy as text": (config(task__policy="evil"), "is damaged or from another version: policy is"),
    "options that are no dict": (config(**{OPTIONS: [1]}), "options is [1]"),
    "options of a class": (
        config(**{OPTIONS: {"x": {"$instance": "evil.Env", "parts": {}}}}),
        "a saved state contains a evil.Env",
    ),
    "options with an array": (
        config(**{OPTIONS: {"x": {"$array": "a", "dtype": "O", "shape": [1]}}}),
        "is damaged or from another version",
    ),
    "options that the environment lacks": (config(**{OPTIONS: {"a": 1}}), "was trained with env_kwargs {}"),
}
TAMPERED: dict[str, tuple[Tamper, str]] = {
    "another network": (
        config(config__hidden=[8]),
        "was trained with config hidden [4], and",
    ),
    "another activation": (config(config__activation="relu"), "was trained with config activation 'tanh'"),
    "another learning rate": (config(config__learning_rate=1.0), "was trained with config learning_rate"),
    "another environment": (config(**{ENV: "Acrobot-v1"}), "was trained with env 'CartPole-v1'"),
    "other stacked frames": (
        config(task__environment__frame_stack=2),
        "was trained with frame_stack 1, and config.json says 2",
    ),
    "another seed": (config(task__seed=7), "was trained with seed 0, and config.json says 7"),
    "another id": (config(id="0" * 32), "belongs to another run"),
    "an id that is a number": (config(id=3), "id is 3"),
    "another algorithm": (config(algorithm="a2c"), "was trained with ppo, not a2c"),
    "another name": (config(algorithm="a2c", name="a2c", config={}), "was trained with algorithm 'ppo'"),
    "an unknown hyperparameter": (config(config__hiden=[4]), "did you mean 'hidden'?"),
    "a hyperparameter out of range": (config(config__gamma=7), "gamma=7: must be a number between 0 and 1"),
    "no evaluation": (config(evaluation=None), "is damaged or from another version"),
    "an evaluation without episodes": (
        config(evaluation__episodes=None),
        "episodes is None: must be",
    ),
    "negative steps": (config(task__steps=-1), "steps is -1"),
    "true workers": (config(task__workers=True), "workers is True"),
    "an unknown engine": (config(engine="evil"), "engine is 'evil': must be one of"),
    "an old format": (config(format=2), "has format 2, not 3"),
    "no task": (config(task=KeyError), "is damaged or from another version: KeyError('task')"),
    "a list as config": (text("config.json", "[]"), "is damaged or from another version"),
    "half a config": (text("config.json", '{"format": 3'), "is damaged or from another version"),
    "bytes as config": (text("config.json", b"\xff\xfe\x00"), "is damaged or from another version"),
    "a deep config": (text("config.json", "[" * 100_000), "is damaged or from another version"),
    "a fifo as config": (fifo("config.json"), "is not a run folder"),
    "checkpoints of another run": (from_other_run("checkpoints"), "belongs to another run"),
    "weights cut off": (
        checkpoints(lambda path: os.truncate(path / "weights.safetensors", 50)),
        "weights.safetensors has 50 bytes instead of",
    ),
    "weights of one bit more": (
        checkpoints(lambda path: flip(path / "weights.safetensors")),
        "weights.safetensors has a wrong checksum",
    ),
    "a fifo as weights": (
        checkpoints(lambda path: fifo("weights.safetensors")(path)),
        "weights.safetensors cannot be read",
    ),
    "weights that are none": (
        resealed("weights.safetensors", lambda _: b"\x08\0\0\0\0\0\0\0{}      "),
        "these weights are of another network",
    ),
    "garbage with a checksum": (resealed("arrays.safetensors", lambda _: b"evil" * 9), "is damaged: "),
    "a state of a class": (
        resealed("state.json", lambda _: b'{"$instance": "evil.Env", "parts": {}}'),
        "a saved state contains a evil.Env",
    ),
    "a state of an object array": (
        resealed("state.json", lambda _: b'{"$array": "x", "dtype": "O", "shape": [1]}'),
        "is damaged: ",
    ),
    "a manifest without an identity": (manifest(lambda own: own.pop("run")), "manifest.json cannot be read"),
    "an empty identity": (manifest(lambda own: own["run"].clear()), "belongs to another run"),
    "other settings": (manifest(lambda own: own["run"].update(sha256="")), "was trained with other settings"),
    "other spaces": (
        manifest(lambda own: own["run"].update(spaces=["Box((4,), float32)", "Discrete(3)"])),
        "has the action space Discrete(2), and this run was trained on Discrete(3)",
    ),
    "a manifest of another step": (manifest(lambda own: own.update(step=9)), "its manifest is of step 9"),
    "a file outside of the checkpoint": (
        manifest(lambda own: own["files"].update({"../../x": own["files"]["state.json"]})),
        "manifest.json cannot be read",
    ),
    "a manifest of an old format": (manifest(lambda own: own.update(format=2)), "has format 2, not 4"),
    "no checkpoint": (checkpoints(shutil.rmtree), "has no checkpoint yet"),
}
HARMLESS: dict[str, Tamper] = {
    "garbage among the metrics": lambda folder: append(folder / "metrics.jsonl", "garbage\n"),
    "a row without steps": lambda folder: append(folder / "metrics.jsonl", '{"a": 1}\n'),
    "bytes among the metrics": lambda folder: append(folder / "metrics.jsonl", "\udcff\n"),
    "a deep row": lambda folder: append(folder / "metrics.jsonl", "[" * 50_000 + "\n"),
    "no metrics": lambda folder: (folder / "metrics.jsonl").unlink(),
    "a fifo as metrics": fifo("metrics.jsonl"),
    "a newer checkpoint that is damaged": lambda folder: flip(
        folder / "checkpoints" / "step_000000048" / "weights.safetensors", folder
    ),
}


def append(path: Path, line: str) -> None:
    with path.open("a", errors="surrogateescape") as file:
        file.write(line)


def flip(path: Path, folder: Path | None = None) -> None:
    if folder is not None:
        shutil.copytree(folder / "checkpoints" / "step_000000032", path.parent)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# Commands ----------------------------------------------------------------------------------------


@pytest.fixture
def place(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a copy of the run, and code of a stranger in and beside it."""
    place = tmp_path / "place"
    shutil.copytree(runs / "run", place / "run")
    shutil.copytree(runs / "other", tmp_path / "runs-of-others" / "other")
    for name in ("evil", "envpool"):
        code = EVIL.format(str(place / "ran"))
        for folder in (place, place / "run", tmp_path):
            (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(place))])
    return place


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one sentence of a command that fails."""
    with pytest.raises(SystemExit) as exit_info:
        main(args)
    assert exit_info.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("rollstream: ")
    return lines[0]


@pytest.mark.parametrize("name", [*HOSTILE, *TAMPERED])
def test_it_is_refused_in_one_sentence(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tamper, part = {**HOSTILE, **TAMPERED}[name]
    tamper(place / "run")
    assert part in told(capsys, "evaluate", "run", "--episodes", "1")
    if name in HOSTILE:
        told(capsys, "evaluate", "run", "--best", "--episodes", "1")
        told(capsys, "video", "run", "--out", "x.mp4")
    if "algorithm" not in name and name not in ("another name", "no checkpoint", "weights that are none"):
        told(capsys, "train", "ppo", "--resume", "--out", "run", "--steps", "64", "--quiet")
    assert not (place / "ran").exists()


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.filterwarnings("default")
def test_whole_checkpoints_are_used_whatever_else_is_damaged(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = rs.load("run").evaluate(episodes=2, seed=3)
    HARMLESS[name](place / "run")
    main(["evaluate", "run", "--episodes", "2", "--seed", "3", "--json"])
    assert json.loads(capsys.readouterr().out)["mean_return"] == expected.mean_return
    main(["train", "ppo", "--resume", "--out", "run", "--steps", "48", "--quiet"])
    warnings = capsys.readouterr().err
    assert "Traceback" not in warnings
    if name == "garbage among the metrics":
        assert "metrics.jsonl has line 3 that cannot be read; the other rows are used" in warnings
    assert not (place / "ran").exists()


# What may be imported ----------------------------------------------------------------------------

MINE = """
import gymnasium
from rollstream.algos import ppo
import dataclasses

def make(length=9):
    return gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1"), length)

Mine = dataclasses.replace(ppo.PPO, name="mine", plan=lambda workers, config: ppo.plan(workers, config))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one's own algorithm and environment, in files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "draw_curve", lambda *_: None)
    Path("mine.py").write_text(MINE)
    rs.train("mine.py:Mine", env="mine.py:make", steps=16, config=SMALL, quiet=True, out="run")
    return tmp_path


def test_code_of_a_run_that_this_user_trained_is_trusted(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = json.loads(Path("run", "config.json").read_text())
    assert saved["algorithm"] == f"{own / 'mine.py'}:Mine"
    main(["evaluate", "run", "--episodes", "1"])
    assert rs.load("run").evaluate(episodes=1).mean_length <= 9
    Path("run").rename("moved")
    main(["evaluate", "moved", "--episodes", "1"])
    config(**{OPTIONS: {"length": 3}})(Path("moved"))
    assert "names code" in told(capsys, "evaluate", "moved")
    config(**{OPTIONS: {}})(Path("moved"))
    monkeypatch.setenv("XDG_STATE_HOME", str(own / "another"))
    assert f"algorithm {own / 'mine.py'}:Mine" in told(capsys, "evaluate", "moved")


def test_code_is_named_again_or_trusted(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(own / "another"))
    sentence = told(capsys, "evaluate", "run", "--episodes", "1")
    assert sentence.endswith(
        f"name it again with --algorithm {own / 'mine.py'}:Mine, or trust the folder with --trust"
    )
    assert "--env" in told(capsys, "evaluate", "run", "--algorithm", "mine.py:Mine")
    with pytest.raises(rs.RollstreamError, match=r"with algorithm=.*mine.py:Mine, or .* with trust=True$"):
        rs.load("run")
    main(["evaluate", "run", "--episodes", "1", "--algorithm", "mine.py:Mine", "--env", "mine.py:make"])
    main(["evaluate", "run", "--episodes", "1", "--trust"])
    assert rs.load("run", trust=True).config.hidden == (4,)
    assert rs.load("run", algorithm="mine.py:Mine", env="mine.py:make").config.hidden == (4,)
    assert "--env" in told(capsys, "train", "mine.py:Mine", "--resume", "--out", "run")
    more = ("--steps", "32", "--quiet", "--trust")
    main(["train", "mine.py:Mine", "--resume", "--out", "run", *more])
    main(["evaluate", "run", "--episodes", "1"])  # trained by this user now


def test_a_file_in_the_folder_is_never_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "draw_curve", lambda *_: None)
    Path("run").mkdir()
    Path("run", "mine.py").write_text(MINE)
    trained(Path("run"), env="run/mine.py:make", steps=16)
    assert f"env {tmp_path}/run/mine.py:make" in told(capsys, "evaluate", "run")
    main(["evaluate", "run", "--episodes", "1", "--env", "run/mine.py:make"])


def test_what_is_remembered_is_private(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Path(os.environ["XDG_STATE_HOME"], "rollstream", "trained_runs")
    assert memory.stat().st_mode & 0o077 == 0
    memory.chmod(0o666)
    try:
        with pytest.raises(rs.RollstreamError, match="names code"):
            rs.load("run")
    finally:
        memory.chmod(0o600)


def test_settings_change_on_purpose(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume = ("train", "ppo", "--resume", "--out", "run", "--steps", "48", "--quiet")
    sentence = told(capsys, *resume, "--config.learning-rate", "0.5")
    assert "leave config out, or allow it with --allow-changes" in sentence
    main([*resume, "--config.learning-rate", "0.5", "--allow-changes"])
    assert rs.load("run").config.learning_rate == 0.5
    more = (*resume[:-3], "--steps", "64", "--quiet", "--allow-changes", "--config.hidden", "8")
    assert "these weights are of another network" in told(capsys, *more)


def test_an_environment_does_not_change_on_purpose(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit = json.loads((place / "run" / "config.json").read_text())
    edit["task"]["environment"]["source"] = "CartPole-v0"
    (place / "run" / "config.json").write_text(json.dumps(edit))
    resume = ("train", "ppo", "--resume", "--out", "run", "--steps", "48", "--quiet", "--allow-changes")
    sentence = told(capsys, *resume)
    assert "was trained with env 'CartPole-v1', and config.json says 'CartPole-v0' (restore it)" in sentence
