"""What people write in files of their own, named as `my_file.py:Name`."""

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
    """The two parts of `my_file.py:Name`; the name is empty where there is only a file.

    >>> file_and_name("my_file.py:Mine"), file_and_name("my_file.py"), file_and_name("my_module:Mine-v0")
    ((PosixPath('my_file.py'), 'Mine'), (PosixPath('my_file.py'), ''), None)
    """
    file, name = (text, "") if text.endswith(".py") else text.rpartition(":")[::2]
    return (Path(file), name) if file.endswith(".py") else None


def load_from_file(
    file: Path, name: str, kind: str, fits: Callable[[Any], bool], error: type[RollstreamError]
) -> Any:
    """The value of a name in a file.

    Args:
        file: which is imported once; what is in it travels to workers by value.
        name: of the value.
        kind: what it should be, for people.
        fits: whether a value is of that kind.
        error: what to raise where there is none.
    """
    if not file.is_file():
        raise error(f"there is no file {file}, which {file}:{name or 'Name'} should be in")
    module = _imported(file.resolve(), error)
    value = getattr(module, name, None) if name else None
    if fits(value):
        return value
    own = [f"{file}:{name}" for name, value in vars(module).items() if fits(value) and _is_of(module, value)]
    missing = f"has no {kind} {name!r}" if name else f"is a file; say which {kind} in it is meant"
    raise error(f"{file} {missing}: " + (f"it has {', '.join(sorted(own))}" if own else "it has none"))


def _is_of(module: ModuleType, value: Any) -> bool:
    """Whether a module has a value of its own, and did not import it."""
    return not isinstance(value, (type, FunctionType)) or value.__module__ == module.__name__


def _imported(file: Path, error: type[RollstreamError]) -> ModuleType:
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
        sys.path.append(str(file.parent))  # so that it finds its neighbours
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
