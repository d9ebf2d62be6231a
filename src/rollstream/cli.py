"""The command line: train, evaluate, draw, list and film. An algorithm's options are its settings."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import errno
import importlib.util
import io
import json
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar, Union, cast

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

from rollstream import __version__
from rollstream.arguments import checked, options_of
from rollstream.engine import RollstreamError
from rollstream.flow import OperatorError

C = TypeVar("C")
Engine = Annotated[
    Literal["inline", "threads", "processes", "ray"] | None,
    arg(metavar="{inline,threads,processes,ray}", help_behavior_hint=""),
]
Flag = Annotated[FlagCreatePairsOff[bool], arg(help_behavior_hint="")]
Algo = Annotated[Positional[str], arg(metavar="ALGO")]
Folder = Annotated[Positional[Path], arg(metavar="DIR")]
EnvSpec = Annotated[str, arg(metavar="ID")]
Count = Annotated[int, arg(metavar="N")]
_EXCEPT = "(required, except with --resume)"
_TENTH = "(default: a tenth of the training, or 50_000)"
Every = Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: never)")]


@dataclass(frozen=True)
class NoSettings:
    """Stands for an algorithm's settings as long as no algorithm is named."""


# Commands ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Train(Generic[C]):
    """Train an algorithm; name one to see its own options too: `rollstream train ppo --help`."""

    algorithm: Algo
    """A name that `rollstream list` shows, or one's own as my_file.py:MyAlgorithm."""
    config: C
    """Settings of the algorithm. The defaults are those tuned for the environment, where there are some."""
    env: Annotated[str | None, arg(metavar="ID", help_behavior_hint=_EXCEPT)] = None
    """The environment: a Gymnasium id such as CartPole-v1, my_module:Mine-v0 for what a module of one's own
    registers, or my_file.py:MyEnv for a class or function in a file."""
    steps: Annotated[int | None, arg(metavar="N", help_behavior_hint=_EXCEPT)] = None
    """Environment steps, rounded up to whole batches."""
    seed: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 0)")] = None
    """Of everything that is random."""
    workers: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 0)")] = None
    """Workers that sample; with 0, it is done in the driver's own thread."""
    engine: Engine = None
    """Where workers run; processes if there are some."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/ALGO-ID-SEED)")] = None
    """The run's folder."""
    resume: Flag = False
    """Go on with the run in that folder."""
    quiet: Flag = False
    """Show nothing while it runs."""
    evaluate_every: Every = None
    """Environment steps from one evaluation to the next."""
    evaluate_episodes: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 10)")] = None
    """Episodes of such an evaluation."""
    stop_at: Annotated[float | None, arg(metavar="RETURN", help_behavior_hint="")] = None
    """Stop when the mean return of an evaluation gets there; there is one every 10_000 steps, if not said
    otherwise."""
    checkpoint_every: Annotated[int | None, arg(metavar="N", help_behavior_hint=_TENTH)] = None
    """Environment steps from one checkpoint to the next."""
    keep: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 3)")] = None
    """How many checkpoints are kept, the newest."""
    frame_stack: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 1)")] = None
    """Observations a policy sees at once."""
    env_kwargs: Annotated[tuple[str, ...], arg(metavar="KEY=VALUE", help_behavior_hint="")] = ()
    """What the environment is made with, as continuous=True."""

    def run(self, args: Sequence[str]) -> None:
        """Train, and say how to go on."""
        from rollstream.training import load, train
        from rollstream.training.run_folder import FolderInUse

        if self.resume and self.out is None:
            raise RollstreamError("say which run to go on with: add --out and its folder to --resume")
        if not self.resume and (self.env is None or self.steps is None):
            raise RollstreamError(
                f"say what to learn in and for how long: rollstream train {self.algorithm} --env CartPole-v1 "
                f"--steps 100_000"
            )
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        algorithm = options.pop("algorithm")
        options["out"] = self.out or _new_folder(algorithm, str(self.env), self.seed or 0)
        options["config"] = {name: getattr(self.config, name) for name in _given(self.config, args)} or None
        options["env_kwargs"] = dict(map(_pair, self.env_kwargs)) or None
        out = options["out"]
        try:
            while True:
                try:
                    train(algorithm, **options)
                    break
                except FolderInUse:
                    if self.out is not None:
                        raise
                    options["out"] = out = _new_folder(algorithm, str(self.env), self.seed or 0)
        except (KeyboardInterrupt, SystemExit) as stopped:  # Ctrl-C, or SIGTERM
            if not any((out / "checkpoints").glob("*")):
                _exit("stopped before anything was saved", _code(stopped))
            if not load(out).is_over:
                command = f"rollstream train {algorithm} --resume --out {out}"
                _exit(f"stopped; go on with: {command}", _code(stopped))
        if not self.quiet:
            print(f"See how good it is: rollstream evaluate {out}")


@dataclass(frozen=True)
class Evaluate:
    """Run a trained policy for some episodes, and tell what it achieves."""

    folder: Folder
    """The folder of a run."""
    episodes: Count = 100
    """How many to run."""
    best: Flag = False
    """With the weights of the best evaluation, instead of the newest checkpoint."""
    env: Annotated[str | None, arg(metavar="ID", help_behavior_hint="(default: the run's own)")] = None
    """The environment, where the file it was in has moved: my_file.py:MyEnv."""
    seed: int = 0
    """Of the episodes."""
    json: Flag = False
    """Write one JSON object and nothing else."""

    def run(self, _: Sequence[str]) -> None:
        """Write the result."""
        from rollstream.training import load

        run = load(self.folder, best=self.best, env=self.env)
        result = run.evaluate(episodes=self.episodes, seed=self.seed)
        if self.json:
            names = ("mean_return", "std_return", "episodes", "mean_length")
            print(json.dumps({name: getattr(result, name) for name in names}))
        else:
            print(result)


@dataclass(frozen=True)
class Graph(Generic[C]):
    """Draw an algorithm's plan: what runs where, and what is asynchronous. Nothing is trained."""

    algorithm: Algo
    """A name that `rollstream list` shows, or one's own as my_file.py:MyAlgorithm."""
    config: C
    """Settings of the algorithm."""
    format: Literal["text", "mermaid", "svg"] = "text"
    """For a terminal, for a Markdown page, or a picture."""
    env: EnvSpec = "CartPole-v1"
    """The environment that the plan is built for."""
    workers: Count = 2
    """Workers that sample."""

    def run(self, _: Sequence[str]) -> None:
        """Build the plan where nothing is started, and write its picture."""
        from rollstream import algos, flow
        from rollstream.engine import engine as new_engine
        from rollstream.rl.algorithm import Task
        from rollstream.rl.env_spec import EnvSpec as RunConfig
        from rollstream.training.request import require_whole
        from rollstream.training.settings import configured

        require_whole(0, workers=self.workers)
        algorithm = algos.algorithm(self.algorithm)
        configured(algorithm, self.env, self.config)  # raises for values that cannot be
        task, config = Task(RunConfig(self.env), steps=1, workers=self.workers), self.config
        if getattr(config, "environments", 0) == 1:  # each worker has one, in the picture
            config = dataclasses.replace(cast(Any, config), environments=max(1, self.workers))
        with new_engine("inline") as engine:
            plan = algorithm.plan(algorithm.workers(engine, config, task), config)
            print(getattr(flow.graph(plan), self.format)())


@dataclass(frozen=True)
class List:
    """List the algorithms, and the environments they have tuned settings for."""

    def run(self, _: Sequence[str]) -> None:
        """Write a paragraph for each algorithm; read, not imported, so that it is quick."""
        from rollstream.algos import ALGORITHMS, home
        from rollstream.training.tuned import tuned_environments

        width = max(map(len, ALGORITHMS))
        for name in ALGORITHMS:
            print(f"{name:<{width}}  {_first_line(home(name))}")
            if environments := tuned_environments(name):
                print(f"{'':<{width}}  tuned for {', '.join(environments)}")


@dataclass(frozen=True)
class Video:
    """Film a trained policy."""

    folder: Folder
    """The folder of a run."""
    out: Annotated[Path, arg(metavar="FILE")]
    """The film, such as film.mp4."""
    episodes: Count = 1
    """How many to film."""
    best: Flag = False
    """With the weights of the best evaluation, instead of the newest checkpoint."""
    env: Annotated[str | None, arg(metavar="ID", help_behavior_hint="(default: the run's own)")] = None
    """The environment, where the file it was in has moved: my_file.py:MyEnv."""
    seed: int = 0
    """Of the first episode."""

    def run(self, _: Sequence[str]) -> None:
        """Write the film, and say what is in it."""
        from rollstream.training import load
        from rollstream.training.video import record_video

        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures without a window
        run = load(self.folder, best=self.best, env=self.env)
        returns = record_video(run, self.out, episodes=self.episodes, seed=self.seed)
        told = ", ".join(f"{value:,.1f}" for value in returns)
        episodes = "episode" if len(returns) == 1 else "episodes"
        print(f"Saved {self.out}: {len(returns)} {episodes}, return {told}")


# What was asked for ------------------------------------------------------------------------------

_COMMANDS: dict[str, Any] = {
    "train": Train,
    "evaluate": Evaluate,
    "graph": Graph,
    "list": List,
    "video": Video,
}


def main(args: Sequence[str] | None = None) -> None:
    """Do what the arguments say, and exit.

    The code is 0 if it went well, 1 if a file cannot be read or written, 2 if what was asked for cannot be
    done, 130 after Ctrl-C and 143 after SIGTERM.
    """
    args = (sys.argv[1:] if args is None else list(args)) or ["--help"]
    if args == ["--version"]:
        print(f"rollstream {__version__}")
        return
    with warnings.catch_warnings():
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        try:
            if not {"", os.getcwd()} & set(sys.path):
                sys.path.append(os.getcwd())  # where modules of one's own are
            _parsed(args).run(args)
        except KeyboardInterrupt:
            _exit("stopped", 130)
        except RollstreamError as error:
            _exit(_sentence(error), 2)
        except BrokenPipeError:  # whoever read the output has seen enough
            sys.stderr.close()
            sys.exit(0)
        except OSError as error:
            where = "" if error.filename is None else f"{error.filename}: "
            fix = "; make room, and go on by --resume" if error.errno == errno.ENOSPC else ""
            _exit(f"{where}{error.strerror or error}{fix}", 1)


def _show_warning(usual: Any, message: Any, category: type[Warning], filename: str, *more: Any) -> None:
    """A warning of our own is a sentence for whoever reads it, and not for who wrote the code it names."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        print(f"rollstream: {message}", file=sys.stderr)
    else:
        usual(message, category, filename, *more)


def _code(stopped: BaseException) -> int:
    return stopped.code if isinstance(stopped, SystemExit) and isinstance(stopped.code, int) else 130


def _exit(text: str, code: int) -> NoReturn:
    print(f"rollstream: {text}", file=sys.stderr)
    sys.exit(code)


def _parsed(args: Sequence[str]) -> Any:
    """The command, with its options; leaves by itself where help was asked for or something is wrong."""
    if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
        near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(_COMMANDS)}"
        raise RollstreamError(f"there is no command {args[0]!r}; {meant}")
    name, config = args[0], _settings(args)
    if {"-h", "--help"} & set(args[1:]):
        args = [name, "--help"]
    elif name in _COMMANDS:
        named = [] if isinstance(config, NoSettings) else [args[1]]
        see = " ".join(["rollstream", name, *named, "--help"])
        args = [name, *checked(args[1:], _options(_COMMANDS[name], config), see)]
    kinds = [_kind(name, command, config) for name, command in _COMMANDS.items()]
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            return tyro.cli(
                Union[tuple(kinds)],  # type: ignore[arg-type]  # noqa: UP007
                prog="rollstream",
                description="Distributed reinforcement learning as dataflow.",
                args=args,
                config=(tyro.conf.OmitSubcommandPrefixes,),
            )
    except SystemExit as error:
        if error.code:
            see = f"rollstream {name} --help" if name in _COMMANDS else "rollstream --help"
            raise RollstreamError(f"{_unboxed(told.getvalue())}; see {see}") from None
        raise


def _unboxed(text: str) -> str:
    """The words in a box, up to its first rule."""
    lines = [line.strip("│| ") for line in text.splitlines()[1:]]
    words = takewhile(_has_words, dropwhile(lambda line: not _has_words(line), lines))
    return " ".join(words).rstrip(".")


def _has_words(line: str) -> bool:
    return any(map(str.isalnum, line))


def _settings(args: Sequence[str]) -> Any:
    """The settings of the algorithm that is named, as tuned for the environment that is named."""
    command = _COMMANDS.get(args[0])
    if not _has_settings(command) or len(args) == 1 or args[1].startswith("-"):
        return NoSettings()
    from rollstream.algos import algorithm

    named = algorithm(args[1])  # before the rest is imported: a wrong name is told at once
    from rollstream.training.settings import configured

    return configured(named, _environment(command, args))


def _has_settings(command: Any) -> bool:
    return command in (Train, Graph)


def _options(command: Any, config: Any) -> dict[str, Any]:
    """What may be given to a command, by name."""
    options = options_of(command) | options_of(type(config), "--config.")
    return {
        name: hint for name, hint in options.items() if name not in ("--algorithm", "--folder", "--config")
    }


def _kind(name: str, command: Any, config: Any) -> Any:
    """A command for the parser; the settings of the algorithm are among its options."""
    if not _has_settings(command):
        return Annotated[command, subcommand(name)]
    blank = {
        field.name: tyro.MISSING
        for field in dataclasses.fields(command)
        if field.default is dataclasses.MISSING
    }
    return Annotated[command[type(config)], subcommand(name, default=command(**{**blank, "config": config}))]


def _environment(command: Any, args: Sequence[str]) -> str:
    """The environment among the arguments, whose tuned settings are the defaults of the others."""
    for option, value in zip(args, [*args[1:], ""], strict=True):
        if option == "--env":
            return value
        if option.startswith("--env="):
            return option.partition("=")[2]
    return getattr(command, "env", None) or ""


def _pair(text: str) -> tuple[str, Any]:
    """A keyword and its value, which is Python's, or else text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise RollstreamError(f"--env-options {text}: give a keyword and its value, as continuous=True")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _given(config: Any, args: Sequence[str]) -> list[str]:
    """The settings that are among the arguments; only they are to be laid over what is tuned or was saved."""
    names = {field.name for field in dataclasses.fields(config)}
    given: dict[str, None] = {}
    for option in args:
        if option.startswith("--config."):
            name = option.removeprefix("--config.").partition("=")[0].partition(".")[0].replace("-", "_")
            given[name if name in names else name.removeprefix("no_")] = None
    return list(given)


def _new_folder(algorithm: str, environment: str, seed: int) -> Path:
    """A folder for a run that nobody named; never one that is there already."""
    own, environment = (text.rpartition(":")[2] for text in (algorithm, environment))
    name = f"{own}-{environment}-{seed}".replace("/", "-")
    folder, count = Path("runs", name), 1
    while folder.exists():
        count += 1
        folder = Path("runs", f"{name}-{count}")
    return folder


def _first_line(module: str) -> str:
    """The first line of a module's docstring, without running the module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    documentation = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
    return documentation.partition("\n")[0]


def _sentence(error: RollstreamError) -> str:
    """What went wrong, for a person who did not write the code that noticed it."""
    if not isinstance(error, OperatorError):
        text = str(error).replace("resume=True", "--resume")  # as it is said here
        if error.__cause__ is None or isinstance(error.__cause__, RollstreamError):
            return text
        return text + _own_line("".join(traceback.format_exception(error.__cause__)))
    if isinstance(error.original, RollstreamError):
        return _sentence(error.original)
    if (own := re.search(r" failed: rollstream\.[\w.]+: (.*)", str(error))) is not None:  # in another process
        return own[1]
    return str(error).partition("\n")[0] + _own_line(str(error))


def _own_line(trace: str) -> str:
    """The innermost line of code that is no library's: where to look first."""
    libraries = (str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "<")
    frames = re.findall(r'File "(.+)", line (\d+), in (.+)', trace)
    own = [frame for frame in frames if not frame[0].startswith(libraries)]
    return f", in {own[-1][2]} at {own[-1][0]}:{own[-1][1]}" if own else ""
