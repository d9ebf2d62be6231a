"""Parses the command line with tyro, and reports what is wrong with it in one sentence."""

from __future__ import annotations

import dataclasses
import difflib
import io
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from typing import Annotated, Any, Literal, TypeVar, Union

import tyro
from tyro.conf import OmitSubcommandPrefixes, subcommand
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from rollstream.algos import SB3_NAMES, having
from rollstream.engine import RollstreamError

C = TypeVar("C")
_registry = ConstructorRegistry()


@_registry.primitive_rule
def _lenient(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Numbers and choices; a value that does not fit stays a string, which validation reports by name."""
    if info.type in (int, float):
        metavar = "INT" if info.type is int else "FLOAT"
    elif typing.get_origin(info.type) is Literal:
        metavar = f"{{{','.join(typing.get_args(info.type))}}}"
    else:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: parse_value(info.type, texts[0]),
        is_instance=lambda value: not isinstance(value, tuple) and value is not None,
        str_from_instance=lambda value: [str(value)],
    )


def parse_value(kind: Any, text: str) -> Any:
    """Parse a number, also in scientific notation; return any other text as it is.

    >>> parse_value(int, "1e6"), parse_value(float, "3e-4"), parse_value(int, "1.5")
    (1000000, 0.0003, '1.5')
    """
    if text == "None":
        raise ValueError(text)  # tyro tries the next type of a union
    with suppress(ValueError):
        if kind is float:
            return float(text)
        if kind is int:
            return int(text) if text.lstrip("-").replace("_", "").isdigit() else _whole(float(text))
    return text


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError(number)
    return int(number)


def parse(args: Sequence[str], commands: Mapping[str, type], default: Any = None) -> Any:
    """Return the command that the arguments name, with its options.

    Args:
        args: of the command line.
        commands: dataclasses by name.
        default: an instance of the named command that holds the defaults.
    """
    name, kinds = args[0], []
    for each, command in commands.items():
        has_default = each == name and default is not None
        kinds.append(
            Annotated[command, subcommand(each, default=default) if has_default else subcommand(each)]
        )
    message = io.StringIO()
    try:
        with redirect_stderr(message):
            command, unknown = _cli(Union[tuple(kinds)], args)  # noqa: UP007
    except SystemExit as error:
        if not error.code:  # help
            raise
        words = re.findall(r"[^\s│╭╮╰╯─]+", message.getvalue().partition("\n")[2])  # without title and box
        raise RollstreamError(" ".join(words)) from None
    if unknown:
        option, algorithm = unknown[0].partition("=")[0], getattr(command, "algorithm", None)
        see = " ".join(filter(None, ["rollstream", name, algorithm, "--help"]))
        if not option.startswith("-"):
            raise RollstreamError(f"unexpected argument {option!r}; see {see}")
        owners = having(_last_part(option).replace("-", "_")) if option.startswith("--config.") else ""
        hint = _nearest(option, option_names(command)) or owners
        raise RollstreamError(f"unknown option {option}{hint}; see {see}")
    return command


def parse_known(args: Sequence[str], command: type[C]) -> C | None:
    """Return a command from the options it has, and ignore all others; `None` if that is impossible."""
    with suppress(SystemExit):
        return _cli(command, [arg for arg in args if arg not in ("-h", "--help")], console_outputs=False)[0]
    return None


def _cli(kind: Any, args: Sequence[str], **options: Any) -> tuple[Any, list[str]]:
    return tyro.cli(
        kind,
        prog="rollstream",
        description="Distributed reinforcement learning as dataflow.",
        args=args,
        config=(OmitSubcommandPrefixes,),
        registry=_registry,
        return_unknown_args=True,
        **options,
    )


def option_names(command: Any, prefix: str = "--") -> list[str]:
    """The options of a command, nested ones included."""
    names: list[str] = []
    positional = ("algorithm", "folder") if hasattr(command, "config") else ("folder",)
    for field in dataclasses.fields(command):
        if field.name in positional:
            continue
        name, value = prefix + field.name.replace("_", "-"), getattr(command, field.name)
        names += option_names(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
    return names


def _nearest(option: str, known: Iterable[str]) -> str:
    """Suggest the option with the same last part, initials (`--lr`), or a similar name."""
    name, names = (
        _last_part(option.replace("_", "-")),
        {_last_part(own): own for own in known},
    )
    initials = {"".join(word[0] for word in own.split("-")): own for own in names if "-" in own}
    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    usual = SB3_NAMES.get(name.replace("-", "_"), "").replace("_", "-")
    exact = next((own for own in (name, usual) if own in names), None)
    found = exact or initials.get(name) or next(iter(similar), None)
    return "" if found is None else f" (did you mean {names[found]}?)"


def _last_part(option: str) -> str:
    return option.rpartition(".")[2].removeprefix("--")
