"""User code: algorithms and environments in files, named as `my_file.py:Name`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from rollstream.engine import RollstreamError


def file_and_name(text: str) -> tuple[Path, str] | None:
    """Split `my_file.py:Name`; the name is empty if there is only a file, and other texts return `None`.

    >>> file_and_name("my_file.py:Mine"), file_and_name("my_file.py"), file_and_name("my_module:Mine-v0")
    ((PosixPath('my_file.py'), 'Mine'), (PosixPath('my_file.py'), ''), None)
    """
    file, name = (text, "") if text.endswith(".py") else text.rpartition(":")[::2]
    return (Path(file), name) if file.endswith(".py") else None


def load_from_file(
    file: Path, name: str, kind: str, matches: Callable[[Any], bool], error: type[RollstreamError]
) -> Any:
    """Import a file and return one of its attributes.

    Args:
        file: imported once; its contents are pickled by value when they are sent to workers.
        name: of the attribute.
        kind: what the attribute should be, for error messages.
        matches: whether a value is of that kind.
        error: raised if there is no such attribute.
    """
    if not file.is_file():
        raise error(f"{file}:{name or 'Name'} cannot be loaded: there is no file {file}")
    module = _import_file(file.resolve(), error)
    value = getattr(module, name, None) if name else None
    if matches(value):
        return value
    found = [
        f"{file}:{name}" for name, value in vars(module).items() if matches(value) and _defines(module, value)
    ]
    missing = f"has no {kind} {name!r}" if name else f"is a file; name the {kind} in it"
    raise error(f"{file} {missing}: " + (f"it has {', '.join(sorted(found))}" if found else "it has none"))


def _defines(module: ModuleType, value: Any) -> bool:
    """Whether a module defines a value, rather than importing it."""
    return not isinstance(value, (type, FunctionType)) or value.__module__ == module.__name__


def _import_file(file: Path, error: type[RollstreamError]) -> ModuleType:
    import cloudpickle

    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for imports of modules next to it
    try:
        spec.loader.exec_module(module)
    except BaseException as raised:
        del sys.modules[name]
        if not isinstance(raised, Exception):
            raise
        frames = [
            frame for frame in traceback.extract_tb(raised.__traceback__) if frame.filename == str(file)
        ]
        line = f" (line {frames[-1].lineno})" if frames else ""
        raise error(f"{file} cannot be imported: {type(raised).__name__}: {raised}{line}") from raised
    cloudpickle.register_pickle_by_value(module)
    return module
