"""How values travel between processes: pickled, with large buffers and references kept apart.

Functions and classes of `__main__`, of notebooks and of other functions travel by value (cloudpickle). Arrays
arrive read-only whatever their size, so that a program does not come to depend on how they travelled.
"""

from __future__ import annotations

import functools
import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Protocol, TypeAlias, cast

import cloudpickle
import numpy as np

from rollstream.engine.actor import Actor, Message
from rollstream.engine.base import Engine
from rollstream.engine.errors import EngineError, RemoteError, RemoteTraceback
from rollstream.engine.future import Future, Ref

LARGE = 4096
"""Bytes from which on a buffer is kept apart: below, copying costs less than the books."""


Store: TypeAlias = Callable[[list[memoryview]], Any]


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types that need nothing but pickle."""
_OWN = __name__.encode()
"""What is in pickled bytes that only an engine can open."""


_QUICK, _ARRAY = b"quick", b"array"
"""How the bytes of usual messages and of single arrays begin, which are packed without cloudpickle."""


class NotForOthers(pickle.PicklingError):
    """Something of an engine's own was to travel where it means nothing; the text says what to do."""


class Site(Protocol):
    """Where a parcel is opened: knows what the references and handles in it stand for there."""

    def part(self, part: Any) -> Any:
        """What stands here for a reference or future of the sender."""
        ...

    def handle(self, name: str, index: int, cls: type) -> Actor[Any]:
        """A handle of an actor, to be used here."""
        ...


class Parcel:
    """A value ready to travel: pickled bytes, the memory its large buffers are in, references in it.

    `memory` is whatever keeps the buffers alive and can show them (see `memory.py`); `parts` are the
    references and futures met while pickling; at the receiver each is a parcel of its own.
    """

    __slots__ = ("data", "memory", "parts")

    def __init__(self, data: bytes, memory: Any = None, parts: Sequence[Any] = ()):
        self.data = data
        self.memory = memory
        self.parts = parts

    def fetched(self) -> Parcel:
        """The parcel with its bytes here, for those that lie elsewhere."""
        return self


class ParcelRef(Ref[Any]):
    """A value stored once, as a parcel; opened where and when it is asked for."""

    __slots__ = ("_opened", "engine", "parcel")

    def __init__(self, engine: Any, parcel: Parcel):
        self.engine = engine
        self._opened = False
        self.parcel = parcel

    def get(self) -> Any:
        """The value. Arrays in it are read-only: every reader shares their memory."""
        if not self._opened:
            self._value = unpack(self.parcel, self.engine)
            self._opened = True
        return self._value

    def __repr__(self) -> str:
        return f"<Ref of the {self.engine.name} engine>"


def pack(value: Any, engine: Engine, store: Store) -> Parcel:
    """Make a parcel of a value; `store` puts its large buffers where the receiver can read them."""
    kind = type(value)
    if kind in _PLAIN:
        return Parcel(pickle.dumps(value, 5))
    if kind is np.ndarray and _is_simple(value):
        small = value.nbytes < LARGE
        about = (value.dtype.str, value.shape, value.tobytes() if small else None)
        memory = None if small else store([value.reshape(-1).view(np.uint8).data])
        return Parcel(_ARRAY + pickle.dumps(about, 5), memory)
    file, buffers = io.BytesIO(), []
    pickler = _Pickler(file, engine, buffers)
    pickler.dump(value)
    return Parcel(file.getvalue(), store(buffers) if buffers else None, pickler.parts)


def unpack(parcel: Parcel, site: Site) -> Any:
    """The value in a parcel."""
    parcel = parcel.fetched()
    data, memory = parcel.data, parcel.memory
    if data.startswith(_QUICK):
        return _quickly_unpacked(parcel, site)
    if data.startswith(_ARRAY):
        dtype, shape, content = pickle.loads(memoryview(data)[len(_ARRAY) :])
        return _array(memory.views()[0] if content is None else content, dtype, shape, "C")
    if memory is None and _OWN not in data:
        return pickle.loads(data)
    views = memory.views() if memory is not None else []
    return _Unpickler(parcel, site, views).load()


def parcel_of(part: Any) -> Parcel:
    """The parcel a reference, a done future or a parcel stands for."""
    if isinstance(part, Future):
        part = part.reply
    return part if isinstance(part, Parcel) else part.parcel


def futures_in(parcel: Parcel) -> list[Future[Any]]:
    """The futures a parcel depends on."""
    found: list[Future[Any]] = []
    for part in parcel.parts:
        if isinstance(part, Future):
            found.append(part)
        else:
            found += futures_in(parcel_of(part))
    return found


# Messages, replies and errors -------------------------------------------------------------------


def packed_message(engine: Engine, message: Message, store: Store) -> Parcel:
    """A message's operation and arguments; what cannot be pickled is named."""
    try:
        return _quickly_packed(message, engine) or pack((message.operation, message.args), engine, store)
    except Exception as problem:
        for index, argument in enumerate(message.args):
            try:
                pack(argument, engine, lambda _: None)
            except Exception:
                what = f"argument {index + 1} of {message.label}"
                raise cannot_travel(argument, what, problem) from problem
        raise


def _quickly_packed(message: Message, engine: Engine) -> Parcel | None:
    """A parcel for a method with plain arguments and references, the usual case, without cloudpickle."""
    if type(message.operation) is not str:
        return None
    args, holes, parts = list(message.args), [], []
    for index, argument in enumerate(args):
        if type(argument) in _PLAIN:
            continue
        if not isinstance(argument, (ParcelRef, Future)) or argument.engine is not engine:
            return None
        holes.append(index)
        parts.append(argument)
        args[index] = None
    return Parcel(_QUICK + pickle.dumps((message.operation, args, holes), 5), None, parts)


def _quickly_unpacked(parcel: Parcel, site: Site) -> tuple[str, tuple[Any, ...]]:
    operation, args, holes = pickle.loads(memoryview(parcel.data)[len(_QUICK) :])
    for hole, part in zip(holes, parcel.parts, strict=True):
        args[hole] = site.part(part)
    return operation, tuple(args)


def cannot_travel(value: Any, what: str, problem: Exception) -> EngineError:
    """An error that says which part of a value cannot be pickled."""
    if isinstance(problem, NotForOthers):
        return EngineError(f"{what}: {problem}")
    path, thing = culprit(value, what)
    return EngineError(
        f"{path} is {_a(type(thing).__name__)}, which cannot be sent to another process: {problem}; "
        f"make it where it is needed, or leave it out with __getstate__"
    )


def _a(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def opened_reply(site: Site, future: Future[Any]) -> Any:
    """The value of a reply; opened once."""
    if isinstance(future.reply, Parcel):
        future.reply = Opened(future.reply, unpack(future.reply, site))
    return future.reply.value if isinstance(future.reply, Opened) else future.reply


class Opened:
    """A parcel and what was in it."""

    __slots__ = ("parcel", "value")

    def __init__(self, parcel: Parcel, value: Any):
        self.parcel = parcel
        self.value = value


def packed_error(error: BaseException, engine: Engine, store: Store, where: str) -> Parcel:
    """An error with its traceback; one that cannot travel is replaced by its description."""
    trace = f"on {where}:\n{''.join(traceback.format_exception(error)).rstrip()}"
    try:
        parcel = pack((error, trace), engine, store)
        pickle.loads(cloudpickle.dumps(error))  # some errors can be pickled and not unpickled
    except Exception:
        text = "".join(traceback.format_exception_only(error)).strip()
        parcel = pack((RemoteError(text), trace), engine, store)
    return parcel


def opened_error(parcel: Parcel, site: Site) -> BaseException:
    """The error, whose cause shows where it was raised."""
    try:
        error, trace = unpack(parcel, site)
    except Exception as problem:  # it could be unpickled where it was raised, and cannot here
        return RemoteError(f"there was an error that cannot be shown here: {problem!r}")
    if not getattr(error, "tells_all", False):
        error.__cause__ = RemoteTraceback(trace)
    return error


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, engine: Engine, buffers: list[memoryview]):
        super().__init__(file, protocol=5, buffer_callback=functools.partial(_keep_apart, buffers))
        self._engine = engine
        self.parts: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray:
            return _reduce_array(obj)
        if issubclass(kind, Actor):
            if obj.engine is not self._engine:
                raise NotForOthers(
                    f"{obj.name} is an actor of another engine, and its handle travels in messages of that "
                    f"one only"
                )
            return _handle, (obj.name, obj.index, class_bytes(obj.cls))
        if issubclass(kind, (Ref, Future)):
            if getattr(obj, "engine", None) is not self._engine:
                raise NotForOthers(f"{obj!r} belongs to another engine; send the value itself")
            self.parts.append(obj)
            return _part, (len(self.parts) - 1,)
        if issubclass(kind, Engine):
            raise NotForOthers(
                f"an engine ({obj!r}) does not travel; open one where it is needed: with rs.engine(...)"
            )
        if kind is FunctionType and obj.__module__ == __name__:
            return NotImplemented  # by name, without cloudpickle's looking around
        return super().reducer_override(obj)


def _keep_apart(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Whether a buffer stays in place. Not a method: the pickler would be garbage in a cycle with views."""
    view = buffer.raw()
    if view.nbytes < LARGE:
        return True
    buffers.append(view)
    return False


class _Unpickler(pickle.Unpickler):
    """Knows what stands for arrays, references and handles.

    What it looks up it remembers, so nothing of that may refer to itself: it would be garbage in a cycle with
    views, and their memory would be held until the garbage collector runs.
    """

    def __init__(self, parcel: Parcel, site: Site, views: Sequence[memoryview]):
        super().__init__(io.BytesIO(parcel.data), buffers=views)
        self._parcel = parcel
        self._site = site

    def find_class(self, module: str, name: str, /) -> Any:
        if module == __name__:
            if name == "_array":
                return _array
            if name == "_part":
                return functools.partial(_open_part, self._parcel, self._site)
            if name == "_handle":
                return functools.partial(_open_handle, self._site)
        return super().find_class(module, name)


def _open_part(parcel: Parcel, site: Site, index: int) -> Any:
    return site.part(parcel.parts[index])


def _open_handle(site: Site, name: str, index: int, cls: bytes) -> Actor[Any]:
    return site.handle(name, index, _load_class(cls))


def _part(_: int) -> Any:
    """Stands in a pickle for a reference; only an engine knows which."""
    raise EngineError("a reference travels in messages of its own engine only")


def _handle(name: str, *_: Any) -> Any:
    """Stands in a pickle for a handle; only an engine knows whose."""
    raise EngineError(f"the handle {name} travels in messages of its own engine only")


@functools.lru_cache(maxsize=256)
def class_bytes(cls: type) -> bytes:
    """A class, pickled once."""
    return cloudpickle.dumps(cls)


@functools.lru_cache(maxsize=256)
def _load_class(data: bytes) -> type:
    return pickle.loads(data)


def _is_simple(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind in "biufc" and array.flags.c_contiguous


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    dtype, flags = array.dtype, array.flags
    if _is_simple(array):
        return _array, (pickle.PickleBuffer(cast(Any, array)), dtype.str, array.shape, "C")
    if dtype.hasobject:
        return NotImplemented
    if flags.f_contiguous and not flags.c_contiguous:
        order, flat = "F", array.T
    else:
        order, flat = "C", np.ascontiguousarray(array)
    plain = flat.reshape(-1).view(np.uint8) if flat.size else np.empty(0, np.uint8)
    known = dtype.str if dtype.isbuiltin == 1 else dtype
    return _array, (pickle.PickleBuffer(cast(Any, plain)), known, array.shape, order)


def _array(buffer: Any, dtype: Any, shape: tuple[int, ...], order: Any) -> np.ndarray[Any, Any]:
    array = np.ndarray(shape, dtype, buffer, order=order)
    array.flags.writeable = False
    return array


# What cannot travel ------------------------------------------------------------------------------


def culprit(value: Any, path: str, depth: int = 4) -> tuple[str, Any]:
    """The innermost thing that cannot be pickled, and how to get there from the value."""
    for step, part in _parts_of(value) if depth else ():
        try:
            cloudpickle.dumps(part)
        except Exception:
            if not isinstance(part, (Actor, Ref, Future)):
                return culprit(part, path + step, depth - 1)
    return path, value


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        used = {name: cell.cell_contents for name, cell in cells}
        used |= {n: value.__globals__[n] for n in value.__code__.co_names if n in value.__globals__}
        return [(f" (its variable {name!r})", part) for name, part in used.items()]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return [(f".{name}", part) for name, part in vars(value).items()]
    return []
