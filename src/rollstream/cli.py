"""The command line: train, evaluate, graph, list and video."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import faulthandler
import json
import os
import re
import shlex
import sys
import warnings
from bdb import BdbQuit
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from rollstream import __version__, exit_signals
from rollstream.arguments import parse, parse_known
from rollstream.engine import RollstreamError
from rollstream.engine.errors import SignalExit
from rollstream.error_messages import exit_code, leave, message, os_message, reword_for, show_warning
from rollstream.limits import NonNegativeInt
from rollstream.run_commands import farewell, import_from_here, load_run, new_folder

C = TypeVar("C")


def _option(metavar: str, default: str = "") -> Any:
    """How the help shows an option's value and its default, if that is not a plain one."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


_REQUIRED = "(required, except with --resume)"
_ENGINES = "{inline,threads,processes,ray}"
_ACTING = "{auto,host,device,central}"
_CHECKPOINTS = "a tenth of --steps, at most 50,000, but not within 30 seconds of the last"

Flag = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]
AlgorithmName = Annotated[Positional[str], arg(metavar="ALGO")]
Folder = Annotated[Positional[Path], arg(metavar="DIR")]
RunEnv = Annotated[str | None, _option("ID", "that of the run")]
RunAlgorithm = Annotated[str | None, _option("ALGO", "that of the run")]
Count = Annotated[int, arg(metavar="N")]


@dataclass(frozen=True)
class NoConfig:
    """The hyperparameters, as long as no algorithm is named."""


# Commands ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Train(Generic[C]):
    """Train an algorithm on an environment. Name an algorithm to see its hyperparameters as well, for
    example `rollstream train ppo --help`.
    """  # noqa: D205

    algorithm: AlgorithmName
    """Algorithm: a name from `rollstream list`, or my_file.py:MyAlgorithm."""
    config: C
    """Hyperparameters. Defaults are those tuned for --env, if any."""
    env: Annotated[str | None, arg(metavar="ID", help_behavior_hint=_REQUIRED)] = None
    """Environment: a Gymnasium id such as CartPole-v1, my_module:MyEnv-v0 for an environment that a module
    registers, or my_file.py:MyEnv for a class or function in a file."""
    steps: Annotated[int | None, arg(metavar="N", help_behavior_hint=_REQUIRED)] = None
    """Total number of environment steps, rounded up to whole rollouts."""
    seed: Annotated[int | None, _option("N", "0")] = None
    """Random seed. Synchronous algorithms repeat a run exactly, given the same number of workers."""
    workers: Annotated[int | None, _option("N", "0")] = None
    """Number of rollout workers (0: sample in the driver process)."""
    engine: Annotated[Literal["inline", "threads", "processes", "ray"] | None, _option(_ENGINES)] = None
    """Where the workers run (default: processes if there are workers, else inline)."""
    acting: Annotated[Literal["auto", "host", "device", "central"] | None, _option(_ACTING, "auto")] = None
    """Where workers in the driver process act (auto: on an accelerator, if the network is large). With
    central, an inference actor acts for all workers."""
    inference_batch: Annotated[int | None, _option("N", "half of the workers")] = None
    """Number of workers whose actions the inference actor chooses together."""
    inference_deadline: Annotated[float | None, _option("MS", "2")] = None
    """Milliseconds after which the inference actor does not wait for more workers."""
    out: Annotated[Path | None, _option("DIR", "runs/ALGO-ID-SEED")] = None
    """Run folder: config, metrics, checkpoints and learning curve."""
    resume: Flag = False
    """Resume the run in --out from its newest checkpoint."""
    trust: Flag = False
    """On resume, import the code that config.json in --out names."""
    allow_changes: Flag = False
    """Resume with another seed, other hyperparameters or other --env-kwargs."""
    deadline: Annotated[float | None, _option("SECONDS", "none")] = None
    """Seconds a worker may take for one rollout, or with --acting central for one step; one that takes
    longer is killed and restarted."""
    max_failures: Annotated[int, arg(metavar="N")] = 0
    """How often to resume from the newest checkpoint by itself if the learner's actor dies."""
    quiet: Flag = False
    """Hide progress."""
    evaluate_every: Annotated[int | None, _option("N", "no evaluation")] = None
    """Number of environment steps between evaluations."""
    evaluate_episodes: Annotated[int | None, _option("N", "10")] = None
    """Number of episodes per evaluation."""
    stop_at: Annotated[float | None, _option("RETURN", "never")] = None
    """Stop as soon as the mean return of an evaluation reaches RETURN. Evaluates every 10,000 steps, unless
    --evaluate-every is given."""
    checkpoint_every: Annotated[int | None, _option("N", _CHECKPOINTS)] = None
    """Number of environment steps between checkpoints."""
    keep: Annotated[int | None, _option("N", "3")] = None
    """Number of checkpoints to keep, besides the best one."""
    frame_stack: Annotated[int | None, _option("N", "1")] = None
    """Number of observations to stack."""
    env_kwargs: Annotated[tuple[str, ...], _option("KEY=VALUE")] = ()
    """Keyword arguments of the environment, for example continuous=True."""

    def run(self, args: Sequence[str]) -> None:
        """Train, and print the next command."""
        from rollstream.training import train
        from rollstream.training.run_folder import FolderInUse

        if self.resume and self.out is None:
            raise RollstreamError("--resume needs the folder of the run: add --out DIR")
        if not self.resume and (self.env is None or self.steps is None):
            raise RollstreamError(
                f"--env and --steps are required: rollstream train {self.algorithm} --env CartPole-v1 "
                f"--steps 100_000"
            )
        options: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "out"
        }
        algorithm = options.pop("algorithm")
        options["config"] = _given(self.config, args) or None
        options["env_kwargs"] = dict(map(_keyword, self.env_kwargs)) or None
        options["display"] = _display(self)
        import_from_here(self.out if self.resume else None, self.env, self.trust)
        exit_signals.raise_on_signals()
        while True:
            out = self.out or new_folder(algorithm, str(self.env), self.seed or 0)
            try:
                train(algorithm, out=out, **options)
                break
            except FolderInUse:
                if self.out is not None:
                    raise
            except (KeyboardInterrupt, SystemExit) as stopped:  # Ctrl-C or SIGTERM
                if (text := farewell(out, algorithm)) is None:
                    break
                leave(text, exit_code(stopped))
        if not self.quiet:
            print(f"Evaluate it with: {shlex.join(['rollstream', 'evaluate', str(out)])}")


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a trained policy, with deterministic actions unless --stochastic is given."""

    folder: Folder
    """Run folder."""
    episodes: Count = 100
    """Number of episodes."""
    best: Flag = False
    """Use the weights with the best evaluation instead of the newest checkpoint."""
    env: RunEnv = None
    """Environment, if it is not a Gymnasium id or has moved: my_file.py:MyEnv."""
    algorithm: RunAlgorithm = None
    """Algorithm, if it is not in `rollstream list`: my_file.py:MyAlgorithm."""
    trust: Flag = False
    """Import the code that config.json in the folder names."""
    stochastic: Flag = False
    """Sample actions instead of taking the most likely ones."""
    seed: Count = 0
    """Random seed of the episodes."""
    json: Flag = False
    """Print one JSON object."""

    def run(self, _: Sequence[str]) -> None:
        """Print the result."""
        run = load_run(self)
        result = run.evaluate(episodes=self.episodes, seed=self.seed, deterministic=not self.stochastic)
        print(json.dumps(dataclasses.asdict(result)) if self.json else result)


@dataclass(frozen=True)
class Graph(Generic[C]):
    """Draw the dataflow graph of an algorithm: which operators run where, and what is asynchronous."""

    algorithm: AlgorithmName
    """Algorithm: a name from `rollstream list`, or my_file.py:MyAlgorithm."""
    config: C
    """Hyperparameters."""
    format: Literal["text", "mermaid", "svg"] = "text"
    """Output format."""
    env: Annotated[str | None, _option("ID", "CartPole-v1, or Pendulum-v1 for continuous actions")] = None
    """Environment."""
    workers: Annotated[NonNegativeInt, arg(metavar="N")] = 2
    """Number of rollout workers."""
    acting: Annotated[Literal["auto", "host", "device", "central"], _option(_ACTING)] = "auto"
    """Where workers act; with central, an inference actor acts for them."""

    def run(self, _: Sequence[str]) -> None:
        """Build the plan without running it, and print its graph."""
        from rollstream import algos, flow
        from rollstream.engine import engine as new_engine
        from rollstream.rl.algorithm import Task
        from rollstream.rl.env_spec import EnvSpec
        from rollstream.training.config import resolve_config
        from rollstream.training.validation import validate

        validate(Graph, {"workers": self.workers, "format": self.format, "acting": self.acting})
        algorithm = algos.algorithm(self.algorithm)
        env = self.env or _graph_environment(algorithm)
        import_from_here(None, env, trust=False)
        config: Any = resolve_config(algorithm, env, self.config).for_workers(self.workers)
        task = Task(EnvSpec(env), steps=1, workers=self.workers, acting=self.acting)
        with new_engine("inline") as engine:
            plan = algorithm.build(algorithm.workers(engine, config, task), config)
            print(getattr(flow.graph(plan), self.format)())


@dataclass(frozen=True)
class List:
    """List the algorithms, and the environments they have tuned hyperparameters for."""

    def run(self, _: Sequence[str]) -> None:
        """Print a line per algorithm."""
        from rollstream.algos import ALGORITHMS, summary
        from rollstream.training.tuned import tuned_environments

        width = max(map(len, ALGORITHMS))
        for name in ALGORITHMS:
            print(f"{name:<{width}}  {summary(name)}")
            if environments := tuned_environments(name):
                print(f"{'':<{width}}  tuned for {', '.join(environments)}")


@dataclass(frozen=True)
class Video:
    """Record a video of a trained policy with deterministic actions."""

    folder: Folder
    """Run folder."""
    out: Annotated[Path, arg(metavar="FILE")]
    """Video file, for example video.mp4."""
    episodes: Count = 1
    """Number of episodes."""
    best: Flag = False
    """Use the weights with the best evaluation instead of the newest checkpoint."""
    env: RunEnv = None
    """Environment, if it is not a Gymnasium id or has moved: my_file.py:MyEnv."""
    algorithm: RunAlgorithm = None
    """Algorithm, if it is not in `rollstream list`: my_file.py:MyAlgorithm."""
    trust: Flag = False
    """Import the code that config.json in the folder names."""
    seed: Count = 0
    """Random seed of the first episode."""

    def run(self, _: Sequence[str]) -> None:
        """Write the video, and print the returns."""
        from rollstream.training.progress_tracker import significant
        from rollstream.training.video import record_video

        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # render without a window
        run = load_run(self)
        returns = record_video(run, self.out, episodes=self.episodes, seed=self.seed)
        episodes = "episode" if len(returns) == 1 else "episodes"
        values = ", ".join(map(significant, returns))
        print(f"Saved {self.out}: {len(returns)} {episodes}, return {values}")


def _reword(command: Any) -> Any:
    return reword_for(command, [field.name for field in dataclasses.fields(Train)])


def _display(command: Train[Any]) -> Any:
    from rollstream.training.display import display_for
    from rollstream.training.progress import NoDisplay, Reworded

    return NoDisplay() if command.quiet else Reworded(display_for(sys.stdout), _reword(command))


# Parsing -----------------------------------------------------------------------------------------

_COMMANDS: dict[str, Any] = {
    "train": Train,
    "evaluate": Evaluate,
    "graph": Graph,
    "list": List,
    "video": Video,
}


def _parse(args: Sequence[str]) -> Any:
    """Return the command; its hyperparameters are those of the algorithm it names."""
    name = args[0]
    if name not in _COMMANDS and name not in ("-h", "--help"):
        near = difflib.get_close_matches(name, _COMMANDS, n=1)
        fix = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(_COMMANDS)}"
        raise RollstreamError(f"unknown command {name!r}; {fix}; see rollstream --help")
    commands = {name: Train[NoConfig] if command is Train else command for name, command in _COMMANDS.items()}
    commands["graph"] = Graph[NoConfig]
    if name not in ("train", "graph"):
        return parse(args, commands)
    known: Any = parse_known(args[1:], commands[name])
    config = NoConfig() if known is None else _default_config(known.algorithm, known.env)
    if {"-h", "--help"} & set(args):
        args = [name, "--help"]  # tyro leaves options that it has read out of the help
    command = _COMMANDS[name]
    commands[name] = command[type(config)]
    return parse(args, commands, command(algorithm=tyro.MISSING, config=config))


def _graph_environment(algorithm: Any) -> str:
    """An environment that an algorithm supports."""
    from rollstream.rl.algorithm import Task
    from rollstream.rl.env_spec import EnvSpec
    from rollstream.rl.spaces import SpaceError

    if algorithm.environment is not None:
        return algorithm.environment
    task = Task(EnvSpec("CartPole-v1"), steps=1)
    try:
        algorithm.worker(algorithm.config(), task).policy(*task.spaces())
    except SpaceError:
        return "Pendulum-v1"
    return "CartPole-v1"


def _default_config(algorithm: str, env: str | None) -> Any:
    from rollstream.algos import algorithm as algorithm_of

    chosen = algorithm_of(algorithm)  # before JAX is imported: an unknown name is reported at once
    from rollstream.training.config import resolve_config

    return resolve_config(chosen, env or "")


def _given(config: Any, args: Sequence[str]) -> dict[str, Any]:
    """The hyperparameters on the command line; all others are tuned, or those of the resumed run."""
    options = {re.split(r"[.=]", arg)[1].replace("-", "_") for arg in args if arg.startswith("--config.")}
    names = [field.name for field in dataclasses.fields(config)]
    return {name: getattr(config, name) for name in names if {name, f"no_{name}"} & options}


def _keyword(text: str) -> tuple[str, Any]:
    """Split KEY=VALUE; the value is a Python literal, or else a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise RollstreamError(f"--env-kwargs {text}: must be KEY=VALUE, for example continuous=True")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


# Errors ------------------------------------------------------------------------------------------


def main(args: Sequence[str] | None = None) -> None:
    """Run a command.

    Exit codes: 0 on success, 1 if a file cannot be read or written, 2 for wrong input and failed training,
    130 after Ctrl-C, 143 after SIGTERM.
    """
    args = (sys.argv[1:] if args is None else list(args)) or ["--help"]
    if args == ["--version"]:
        print(f"rollstream {__version__}")
        return
    command: Any = None
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a crash of native code shows where it was
    with warnings.catch_warnings():
        default = warnings.showwarning
        warnings.showwarning = partial(show_warning, default, _reword(None))
        try:
            command = _parse(args)
            warnings.showwarning = partial(show_warning, default, _reword(command))
            command.run(args)
        except (KeyboardInterrupt, SignalExit) as stopped:
            leave("stopped", exit_code(stopped))
        except BdbQuit:
            leave("stopped in the debugger", 130)
        except RollstreamError as error:
            leave(_reword(command)(message(error)), 2)
        except BrokenPipeError:  # the reader of the output has closed it
            sys.stderr.close()
            sys.exit(0)
        except OSError as error:
            leave(os_message(error), 1)
