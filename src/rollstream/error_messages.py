"""What the command line says when something is wrong: one sentence, in terms of options."""

from __future__ import annotations

import dataclasses
import errno
import re
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rollstream.engine import RollstreamError
from rollstream.flow import OperatorError

_VALUE = r"\([^()]*\)|my_file\.py:\w+|\.\.\.|'[^']*'|\"[^\"]*\"|\{[^{}]*\}|[^\s,;:)]+"
"""A value as `repr` writes it, or a word."""


def in_options(text: str, names: Sequence[str], settings: Sequence[str] = ()) -> str:
    """Write arguments of Python as options of the command line.

    >>> in_options("pass env=my_file.py:Mine, or trust=True; steps='a': must be 1", ["env", "trust", "steps"])
    'pass --env my_file.py:Mine, or --trust; --steps a: must be 1'
    >>> in_options("config gamma='x'; env_kwargs={'limit': 9}", ["env_kwargs"], ["gamma"])
    '--config.gamma x; --env-kwargs limit=9'
    """

    def replace(match: re.Match[str]) -> str:
        return _option(match[1] if match[1] in names else f"config.{match[1]}", match[2])

    known = "|".join(map(re.escape, [*names, *settings]))
    return re.sub(rf"(?<![\w.'(])(?:config )?({known})=({_VALUE})", replace, text) if known else text


def reword_for(command: Any, options: Sequence[str]) -> Callable[[str], str]:
    """Rewrites arguments of Python as options: those of a command, and others by their names."""
    names = [field.name for field in dataclasses.fields(command)] if command is not None else []
    names = [name for name in (*names, *options) if name not in ("config", "folder")]
    config = getattr(command, "config", None)
    settings = [field.name for field in dataclasses.fields(config)] if config is not None else []
    return partial(in_options, names=names, settings=settings)


def _option(name: str, value: str) -> str:
    option = f"--{name.replace('_', '-')}"
    if value in ("True", "..."):
        return option if value == "True" else f"{option} ..."
    if value.startswith("{"):
        pairs = re.findall(r"'(\w+)': ('[^']*'|[^,}]+)", value)
        return " ".join([option, *(f"{key}={_plain(own)}" for key, own in pairs)])
    if value.startswith("("):
        return " ".join([option, *map(_plain, re.findall(r"'[^']*'|[^\s,()]+", value))])
    return f"{option} {_plain(value)}"


def _plain(value: str) -> str:
    return shlex.quote(value[1:-1]) if value[:1] in "'\"" else value


def show_warning(
    default: Any,
    reword: Callable[[str], str],
    text: Any,
    category: type[Warning],
    filename: str,
    *more: Any,
) -> None:
    """Print this package's warnings as one sentence, without a line of its code."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        print(f"rollstream: {reword(str(text))}", file=sys.stderr)
    else:
        default(text, category, filename, *more)


def exit_code(stopped: BaseException) -> int:
    """The exit code after Ctrl-C, or the one that a signal asks for."""
    return stopped.code if isinstance(stopped, SystemExit) and isinstance(stopped.code, int) else 130


def leave(text: str, code: int) -> NoReturn:
    """Print a sentence and exit."""
    print(f"rollstream: {text}", file=sys.stderr)
    sys.exit(code)


def message(error: RollstreamError) -> str:
    """One sentence, with the line of user code that failed."""
    if not isinstance(error, OperatorError):
        text = str(error)
        if error.__cause__ is None or isinstance(error.__cause__, RollstreamError):
            return text
        return text + _user_line("".join(traceback.format_exception(error.__cause__)))
    if isinstance(error.original, RollstreamError):
        return message(error.original)
    first = str(error).partition("\n")[0].replace("rollstream.rl.batch.MissingColumn: ", "")
    if (match := re.search(r" failed: rollstream\.[\w.]+: (.*)", first)) is not None:  # in a worker
        return match[1]
    return first + _user_line(str(error))


def os_message(error: OSError) -> str:
    """One sentence, with the file."""
    where = "" if error.filename is None else f"{error.filename}: "
    fix = "; free some space, then resume with --resume" if error.errno == errno.ENOSPC else ""
    return f"{where}{error.strerror or error}{fix}"


def _user_line(trace: str) -> str:
    """The innermost line of a traceback that is not in a library."""
    libraries = (str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "<")
    frames = re.findall(r'File "(.+)", line (\d+), in (.+)', trace)
    own = [frame for frame in frames if not frame[0].startswith(libraries)]
    return f", in {own[-1][2]} at {own[-1][0]}:{own[-1][1]}" if own else ""
