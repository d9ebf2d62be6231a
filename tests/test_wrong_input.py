"""Wrong input, from the command line and from Python: each is one sentence, and nothing is a traceback."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest

import rollstream as rs
from rollstream import flow
from rollstream.algos import ppo, sac
from rollstream.algos.ppo import PPO
from rollstream.cli import main
from rollstream.rl.learner import Learner
from rollstream.rl.policy import ActorCriticPolicy
from rollstream.training import loop

SMALL = {"num_envs": 2, "rollout_length": 8, "minibatch_size": 16, "epochs": 1, "hidden": (4,)}
FILE = """
import gymnasium

class Bad(gymnasium.Env):
    def __init__(self):
        raise ValueError("no display")

class NoSpaces(gymnasium.Env):
    pass

def nothing():
    pass
"""

CARTPOLE = "--env CartPole-v1 --steps 16"
COMMANDS: dict[str, str] = {
    "trian ppo": "did you mean train?",
    "dance": "the commands are train, evaluate, graph, list, video",
    "train": "ALGO",
    "train pop": "did you mean 'ppo'?",
    "train ppo": "--env and --steps are required",
    "train ppo --env CartPole-v1": "--env and --steps are required",
    "train ppo --steps 16": "--env and --steps are required",
    f"train PPO {CARTPOLE}": "did you mean 'ppo'?",
    "train ppo --env CartPol-v1 --steps 16": "did you mean CartPole-v1",
    "train ppo --env CartPole-v9 --steps 16": "there is no environment 'CartPole-v9'",
    "train ppo --env nomodule:Env-v0 --steps 16": "nomodule:Env-v0 needs a package that is not installed",
    "train ppo --env json:Env-v0 --steps 16": "json registers none of that name",
    "train ppo --env nofile.py:Env --steps 16": "there is no file nofile.py",
    "train ppo --env bad.py --steps 16": "name the environment in it",
    "train ppo --env bad.py:Missing --steps 16": "has no environment 'Missing'",
    "train ppo --env bad.py:Bad --steps 16": "Bad cannot be created: ValueError: no display",
    "train ppo --env bad.py:NoSpaces --steps 16": "NoSpaces has no observation_space",
    "train ppo --env bad.py:nothing --steps 16": "nothing returned NoneType None",
    "train ppo --env broken.py:Env --steps 16": "cannot be imported: SyntaxError",
    "train nofile.py:Mine --env CartPole-v1 --steps 16": "there is no file nofile.py",
    "train bad.py:Mine --env CartPole-v1 --steps 16": "has no algorithm 'Mine'",
    "train ppo --env CartPole-v1 --steps many": "--steps many: must be an integer >= 1",
    "train ppo --env CartPole-v1 --steps 0": "--steps 0: must be an integer >= 1",
    "train ppo --env CartPole-v1 --steps 1.5": "--steps 1.5: must be an integer >= 1",
    f"train ppo {CARTPOLE} --seed -1": "--seed -1: must be an integer >= 0",
    f"train ppo {CARTPOLE} --workers -1": "--workers -1: must be an integer >= 0",
    f"train ppo {CARTPOLE} --engine gpu": "--engine gpu: must be one of 'inline', 'threads'",
    f"train ppo {CARTPOLE} --evaluate-every 0": "--evaluate-every 0: must be an integer >= 1",
    f"train ppo {CARTPOLE} --stop-at high": "--stop-at high: must be a number",
    f"train ppo {CARTPOLE} --workers 1 --deadline soon": "--deadline soon: must be a number >= 0",
    "train ppo --env FrozenLake-v1 --steps 16 --env-kwargs map_name=abc": "created: KeyError: 'abc'",
    f"train ppo {CARTPOLE} --keep 0": "--keep 0: must be an integer >= 1",
    f"train ppo {CARTPOLE} --frame-stack 0": "--frame-stack 0: must be an integer >= 1",
    f"train ppo {CARTPOLE} --env-kwargs fast": "--env-kwargs fast: must be KEY=VALUE",
    f"train ppo {CARTPOLE} --env-kwargs fast=1": "CartPole-v1 does not take these options ({'fast': 1})",
    f"train ppo {CARTPOLE} --config.gamma 2": "--config.gamma 2.0: must be a number between 0 and 1",
    f"train ppo {CARTPOLE} --config.gamma nan": "--config.gamma nan: must be a number between 0 and 1",
    f"train ppo {CARTPOLE} --config.hidden 0": "--config.hidden 0: must be a tuple of integers >= 1",
    f"train ppo {CARTPOLE} --config.activation elu": "--config.activation elu: must be one of 'tanh'",
    f"train ppo {CARTPOLE} --config.minibatch-size 7": "set minibatch_size to a divisor of 256",
    f"train a2c {CARTPOLE} --config.memory rnn": "--config.memory rnn: must be one of 'none', 'lstm', 'gru'",
    f"train ppo {CARTPOLE} --config.memory lstm --config.minibatch-size 16": "set minibatch_size to 32 or 64",
    f"train ppo {CARTPOLE} --config.n-steps 8": "did you mean --config.rollout-length?",
    f"train ppo {CARTPOLE} --config.batch-size 8": "did you mean --config.minibatch-size?",
    f"train ppo {CARTPOLE} --config.lr 1": "did you mean --config.learning-rate?",
    f"train ppo {CARTPOLE} --learning_rate 1": "did you mean --config.learning-rate?",
    f"train ppo {CARTPOLE} --qqq": "unknown option --qqq",
    f"train ppo {CARTPOLE} more": "unexpected argument 'more'",
    "train ppo --steps": "Missing value for argument '--steps'",
    f"train ppo {CARTPOLE} --out bad.py": "bad.py is a file, and a run needs a folder",
    f"train ppo {CARTPOLE} --out /proc/x": "/proc/x cannot be written",
    "train ppo --resume": "--resume needs the folder of the run: add --out DIR",
    "train ppo --resume --out nowhere": "nowhere is not a run folder: it does not exist",
    "train ppo --resume --out .": "is not a run folder: it has no config.json",
    f"train sac {CARTPOLE} --config.n-quantiles 25": "did you mean --config.num-quantiles?",
    f"train sac {CARTPOLE} --config.top-quantiles-to-drop-per-net 2": "mean --config.dropped-quantiles?",
    f"train sac {CARTPOLE} --config.num-quantiles 0": "num-quantiles 0: must be an integer >= 1",
    f"train sac {CARTPOLE} --config.num-quantiles 2": "num_quantiles=2; set dropped_quantiles to 1 or less",
    f"train sac {CARTPOLE} --config.num-quantiles 25": "Discrete(2); set num_quantiles to 1",
    f"train td3 {CARTPOLE}": "algorithms that can: a2c, a3c, apex",
    "train dqn --env CartPole-v1 --steps 16": "lower --config.learning-starts",
    "evaluate": "DIR",
    "evaluate nowhere": "nowhere is not a run folder: it does not exist",
    "evaluate bad.py": "bad.py is not a run folder: it is a file",
    "evaluate . --episode 1": "did you mean --episodes?",
    "evaluate run --best": "has no best checkpoint yet; train with --evaluate-every",
    "evaluate run --episodes 0": "--episodes 0: must be an integer >= 1",
    "evaluate run --episodes x": "--episodes x: must be an integer >= 1",
    "evaluate run --seed -1": "--seed -1: must be an integer >= 0",
    "evaluate run --env Pendulum-v1": "Pendulum-v1 has the observation space Box((3,), float32)",
    "evaluate run --env MountainCar-v0": "MountainCar-v0 has the observation space Box((2,), float32)",
    "evaluate run --algorithm a2c": "was trained with ppo, not a2c",
    "evaluate run --algorithm pop": "did you mean 'ppo'?",
    "video run": "--out",
    "video run --out film.txt": "film.txt is not a video file: use one of .mp4",
    "video run --out nowhere/film.mp4": "there is no folder nowhere",
    "graph pop": "did you mean 'ppo'?",
    "graph ppo --workers -1": "--workers -1: must be an integer >= 0",
    "graph ppo --format pdf": "--format pdf: must be one of 'text', 'mermaid', 'svg'",
    "graph dqn --env Pendulum-v1": "supports action spaces of type Discrete",
    "train ppo --resume --out run --seed 3": "has seed 0, not 3, which cannot change on resume",
    "train a2c --resume --out run": "was trained with ppo, not a2c",
    f"train ppo {CARTPOLE} --out run": "already holds a run; resume it with --resume",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run and files."""
    home = tmp_path_factory.mktemp("home")
    (home / "bad.py").write_text(FILE)
    (home / "broken.py").write_text("def :\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curve", lambda *_: None)
        rs.train("ppo", env="CartPole-v1", steps=16, config=SMALL, quiet=True, out=home / "run")
    return home


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_told_in_one_sentence(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(SystemExit) as exit_info:
        main(command.split())
    assert exit_info.value.code == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("rollstream: ")
    assert sentence.count("\n") == 1
    assert COMMANDS[command] in sentence
    assert not re.search(r"\b(env|steps|workers|episodes|out|trust|resume)=", sentence)  # of Python


# Python ------------------------------------------------------------------------------------------


class Odd(gymnasium.Env[Any, Any]):
    """An environment with a fault of one kind."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reset: Any = None, step: Any = None):
        self._reset = (np.zeros(2, np.float32), {}) if reset is None else reset
        self._step = (np.zeros(2, np.float32), 0.0, False, False, {}) if step is None else step

    def reset(self, **_: Any) -> Any:
        return self._reset

    def step(self, action: Any) -> Any:
        return self._step


class FailingReset(Odd):
    def reset(self, **_: Any) -> Any:
        raise OSError("no display")


def misspelt(weights: Any, state: Any, batch: Any, *_: Any) -> Any:
    return weights, state, {"loss": batch["rewrad"].mean()}


def with_update(update: Callable[..., Any]) -> Any:
    """PPO with an update of one's own."""

    def learner(config: Any, task: Any, policy: Any) -> Learner:
        import optax

        return Learner(policy, update, optax.sgd(1.0))

    return dataclasses.replace(PPO, learner=learner)


def with_plan(plan: Any) -> Any:
    return dataclasses.replace(PPO, plan=plan)


def train(algorithm: Any = "ppo", **more: Any) -> Callable[[], object]:
    options: dict[str, Any] = {"env": "CartPole-v1", "steps": 16, "config": SMALL, "quiet": True}
    return lambda: rs.train(algorithm, **(options | more))


CALLS: Mapping[str, tuple[Callable[[], object], str]] = {
    "an algorithm of a wrong type": (train(3), "3 is not an algorithm"),
    "a policy by name": (train(policy="MlpPolicy"), "policy='MlpPolicy': must be a function of observation"),
    "keyword arguments in a list": (train(env_kwargs=[1]), r"env_kwargs=\[1\]: must be a dict"),
    "a config of another algorithm": (train("a2c", config=ppo.Config()), "a2c takes a rollstream.algos.a2c"),
    "a vector environment": (
        train(env=lambda: gymnasium.make_vec("CartPole-v1", 2)),
        "it must return one new gymnasium.Env",
    ),
    "an environment itself": (train(env=Odd()), "env is of type Odd; give a Gymnasium id, or a function"),
    "a reset without info": (
        train(env=lambda: Odd(reset=np.zeros(2))),
        r"reset\(seed=...\) of Odd must return an observation of its space and a dict",
    ),
    "an observation of another shape": (
        train(env=lambda: Odd(reset=(np.zeros(3), {}))),
        r"the observation has shape \(3,\) instead of \(2,\)",
    ),
    "a step of four": (
        train(env=lambda: Odd(step=(np.zeros(2), 0.0, False, {}))),
        r"step\(action\) of Odd must return an observation of its space, a reward",
    ),
    "a plan that returns nothing": (
        train(with_plan(lambda *_: None)),
        "the plan of ppo returns NoneType; end it with return ReportMetrics",
    ),
    "a plan without reports": (
        train(with_plan(lambda workers, _: flow.from_actors(workers.actors, "sample").gather_sync())),
        "the plan of ppo yields list without time/total_timesteps; end it with ReportMetrics",
    ),
    "a misspelt column": (
        train(with_update(misspelt)),
        "there is no column 'rewrad'; there are action, advantage, ",
    ),
    "an update of two results": (
        train(with_update(lambda weights, state, *_: (weights, state))),
        "update must return weights, state and metrics, and returned 2 results",
    ),
    "an update of one result": (
        train(with_update(lambda weights, *_: weights)),
        "update must return weights, state and metrics, and returned dict",
    ),
    "an update without metrics": (
        train(with_update(lambda weights, state, *_: (weights, state, 1.0))),
        "and its metrics are a .* instead of a dict",
    ),
    "steps that are no integer": (train(steps=1.5), r"steps=1\.5: must be an integer >= 1"),
    "a folder that does not exist": (lambda: rs.load("3"), "3 is not a run folder: it does not exist"),
    "a folder that is a number": (lambda: rs.load(cast(Any, 3)), "path=3: must be the path of a run folder"),
    "a folder to write that is a number": (train(out=3), "out=3: must be the path of a run folder"),
    "a deadline in words": (train(deadline="soon"), "deadline='soon': must be a number >= 0"),
    "a deadline in the past": (train(deadline=-1.0), "deadline=-1.0: must be a number >= 0"),
    "a number to report to": (train(on_report=3), "on_report=3: must be a function of a report"),
    "a display by name": (train(display="bar"), "display='bar': must be a Display"),
    "a hyperparameter that is a number": (train(config={3: 4}), "ppo has no hyperparameter '3'"),
    "a policy without arguments": (
        train(policy=lambda: None),
        r"policy failed: TypeError: .*takes 0 positional arguments",
    ),
    "a policy that is nothing": (
        train(policy=lambda *_: None),
        "the policy is of type NoneType, and a policy has init, initial_state, noise, step, jit",
    ),
    "a policy of dqn that is a dict": (
        train("dqn", policy=lambda *_: {}, config={}),
        "the policy is of type dict, and a policy has init",
    ),
    "a plan that fails": (train(with_plan(lambda *_: 1 / 0)), "plan of ppo failed: ZeroDivisionError"),
    "a plan of one argument": (train(with_plan(lambda _: None)), "plan of ppo failed: TypeError"),
    "a worker that is nothing": (
        train(dataclasses.replace(PPO, worker=lambda *_: None)),
        "worker of ppo returns NoneType, not a WorkerSpec",
    ),
    "a learner that is nothing": (
        train(dataclasses.replace(PPO, learner=lambda *_: None)),
        "the learner is of type NoneType, and a learner has train, get_weights",
    ),
    "a learner that fails": (
        train(dataclasses.replace(PPO, learner=lambda config, *_: config.lr)),
        "learner of ppo failed: AttributeError: .*'lr'",
    ),
    "a policy of another algorithm": (
        train("dqn", policy=ActorCriticPolicy, config={}),
        "dqn needs a policy of class QPolicy, not ActorCriticPolicy",
    ),
    "a reset that fails": (train(env=FailingReset), "reset of FailingReset failed: OSError: no display"),
    "a name of Stable-Baselines3": (train(config={"n_steps": 8}), "did you mean 'rollout_length'?"),
    "a name of TQC": (
        train("sac", config={"top_quantiles_to_drop_per_net": 3}),
        "did you mean 'dropped_quantiles'?",
    ),
    "discrete actions with quantiles": (
        train("sac", steps=1000, config={"num_quantiles": 25}),
        r"^sac cannot be trained on CartPole-v1: num_quantiles=25 needs a Box action space, and this "
        r"environment's action space is Discrete\(2\); set num_quantiles to 1$",
    ),
    "a policy with discrete actions and quantiles": (
        train("sac", steps=1000, config={"num_quantiles": 25}, policy=partial(sac.make_policy, sac.Config())),
        r"needs a Box action space, and this environment's action space is Discrete\(2\); set num_q",
    ),
    "more quantiles dropped than there are": (
        train("sac", config={"num_quantiles": 5, "dropped_quantiles": 7}),
        "^dropped_quantiles=7 leaves none of num_quantiles=5; set dropped_quantiles to 4 or less$",
    ),
    "a mask of a wrong length": (
        train(env=lambda: Odd(reset=(np.zeros(2, np.float32), {"action_mask": np.ones(3)}))),
        r"Odd reports an action mask of shape \(3,\), and its action space is Discrete\(2\)",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_told_in_one_sentence(name: str) -> None:
    call, text = CALLS[name]
    with pytest.raises(rs.RollstreamError, match=text) as raised:
        call()
    original = getattr(raised.value, "original", None)
    sentence = str(raised.value if original is None else original)
    assert "\n" not in sentence


def test_there_are_enough_of_them() -> None:
    assert len(COMMANDS) + len(CALLS) >= 60


# Also --------------------------------------------------------------------------------------------


class Lucky(Odd):
    """Every other episode is a success, after one step."""

    episodes = 0

    def step(self, action: Any) -> Any:
        self.episodes += 1
        return np.zeros(2, np.float32), 1.0, True, False, {"is_success": self.episodes % 2 == 0}


def test_the_success_rate_is_reported() -> None:
    run = rs.train("ppo", env=Lucky, steps=64, config=SMALL, quiet=True)
    assert run.metrics[-1]["rollout/success_rate"] == pytest.approx(0.5)


def test_evaluate_samples_actions_if_asked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = rs.load(home / "run")
    modes, samples = (run.evaluate(20, deterministic=choice) for choice in (True, False))
    assert modes != samples
    assert samples == run.evaluate(20, deterministic=False)
    main(["evaluate", str(home / "run"), "--episodes", "20", "--stochastic"])
    assert capsys.readouterr().out == f"{samples}\n"


@pytest.mark.parametrize("name", ["td3", "ddpg", "sac", "ppo"])
def test_a_graph_needs_no_environment(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["graph", name, "--workers", "3"])
    assert "ParallelRollouts" in capsys.readouterr().out
