"""What a person has typed, checked before it is parsed: what is wrong with it is said in one sentence."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from rollstream.engine import RollstreamError
from rollstream.training.validation import named_type


def options_of(kind: type, prefix: str = "--") -> dict[str, Any]:
    """The options that are made from a dataclass, with the types of their values."""
    options: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, hint = field.name.replace("_", "-"), hints[field.name]
        if dataclasses.is_dataclass(hint):
            options |= options_of(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            options[prefix + name] = hint
        if hint is bool:
            options[f"{prefix}no-{name}"] = hint
    return options


def checked(args: Sequence[str], options: Mapping[str, Any], see: str) -> list[str]:
    """The arguments, with whole numbers as `int` reads them. Raises for options and values there are not.

    >>> checked(["--steps", "1e5", "--seed=7"], {"--steps": int | None, "--seed": int}, "--help")
    ['--steps', '100000', '--seed=7']
    """
    new: list[str] = []
    option, hint = "", None
    for given in args:
        text, equals, value = given.partition("=")
        if not given.startswith("--"):
            new.append(given if hint is None else _value(option, hint, given))
        elif (option := text.replace("_", "-")) in options:
            hint = options[option]
            new.append(f"{text}={_value(option, hint, value)}" if equals else given)
        else:
            raise RollstreamError(f"unknown option {text}{_nearest(option, options)}; see {see}")
        is_whole = equals or not given.startswith("--") or hint is bool
        if is_whole and typing.get_origin(hint) is not tuple:
            hint = None  # it has its value: what follows is not for it
    return new


def _value(option: str, hint: Any, text: str) -> str:
    """A value as its type reads it."""
    kind = _kind(hint)
    if kind is int:
        new = _whole(text)
    elif kind is float:
        new = None if _number(text) is None else text
    elif typing.get_origin(kind) is Literal:
        new = text if text in typing.get_args(kind) else None
    else:
        new = text
    if new is None:
        raise RollstreamError(f"{option} {text}: give {named_type(kind)}")
    return new


def _kind(hint: Any) -> Any:
    """The type that every single value has, or something else where there are several."""
    parts = [part for part in typing.get_args(hint) if part not in (type(None), ...)]
    several = typing.get_origin(hint) in (typing.Union, types.UnionType, tuple)
    return parts[0] if several and len(set(parts)) == 1 else hint


def _whole(text: str) -> str | None:
    with suppress(ValueError):
        return str(int(text))
    number = _number(text)
    return str(int(number)) if number is not None and number.is_integer() else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _nearest(option: str, known: Iterable[str]) -> str:
    """A question in brackets whether another was meant: by its name, its initials, or nearly its name."""
    name, names = _own(option), {_own(one): one for one in known}
    initials = {"".join(word[0] for word in one.split("-")): one for one in names if "-" in one}
    near = [name] if name in names else [initials[name]] if name in initials else []
    near += difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def _own(option: str) -> str:
    return option.rpartition(".")[2].removeprefix("--")
