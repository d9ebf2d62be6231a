"""How values cross between processes: pickled, with large buffers and references kept out of band.

Functions and classes of `__main__`, of notebooks and of other functions are pickled by value (cloudpickle).
Arrays arrive read-only whatever their size, so that no program comes to depend on how they travelled.
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
from rollstream.engine.class_pickler import ClassPickler, class_bytes
from rollstream.engine.errors import EngineError, RemoteError, RemoteTraceback
from rollstream.engine.future import Future, Ref
from rollstream.engine.not_serializable import NotSerializable, not_serializable

OUT_OF_BAND = 4096
"""Bytes from which on a buffer is kept out of band: below, copying costs less than the bookkeeping."""
Store: TypeAlias = Callable[[list[memoryview]], Any]
"""Puts large buffers where the receiver can read them; what it returns has `views()`."""
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types that plain pickle serializes fastest."""
_OWN = __name__.encode()
"""Occurs in pickles that only an engine can open."""
_CALL, _ARRAY = b"call ", b"array"
"""First bytes of method calls with plain arguments, and of single arrays: serialized without cloudpickle."""
_SMALL = 256
"""Bytes of a stored value's pickle from which on it lies in the store, too: a reference takes about 100."""
_BESIDE = b"beside"
"""All the bytes of a payload whose pickle is the last of its buffers."""


class Site(Protocol):
    """Where payloads are opened: an engine, or the host of an actor."""

    @property
    def name(self) -> str:
        """The engine's name."""
        ...

    def find_actor(self, name: str, index: int, cls: type) -> Actor[Any]:
        """A handle of an actor, to be used here."""
        ...


class Payload:
    """A serialized value: pickled bytes, the memory of its large buffers, and the references in it.

    `memory` keeps the buffers alive and shows them (`views()`). `parts` are the references and futures met
    while pickling; where the payload arrives, each is a payload of its own.
    """

    __slots__ = ("data", "memory", "parts")

    def __init__(self, data: bytes, memory: Any = None, parts: Sequence[Any] = ()):
        self.data = data
        self.memory = memory
        self.parts = parts

    def fetch(self) -> Payload:
        """The payload with its bytes here, if they lie elsewhere."""
        return self

    def futures(self) -> list[Future[Any]]:
        """The futures it depends on."""
        found: list[Future[Any]] = []
        for part in self.parts:
            found += [part] if isinstance(part, Future) else payload_of(part).futures()
        return found


class PayloadRef(Ref[Any]):
    """A value stored once, as a payload; opened where and when it is asked for."""

    __slots__ = ("_opened", "codec", "payload")

    def __init__(self, codec: Codec, payload: Payload):
        self.codec = codec
        self.payload = payload
        self._opened = False

    def get(self) -> Any:
        """The value. Arrays in it are read-only: every reader shares their memory."""
        if not self._opened:
            self._value = self.codec.unpack(self.payload)
            self._opened = True
        return self._value

    def __repr__(self) -> str:
        return f"<Ref of the {self.codec.site.name} engine>"


class _Opened:
    """A reply and its value, so that it is opened once and can still be forwarded unopened."""

    __slots__ = ("payload", "value")

    def __init__(self, payload: Payload, value: Any):
        self.payload = payload
        self.value = value


def payload_of(part: Any) -> Payload:
    """The payload behind a reference, a done future or a payload."""
    if isinstance(part, Future):
        part = part.reply
    return part if isinstance(part, Payload) else part.payload


class Codec:
    """Serializes for one engine, on the driver's side or in an actor's process.

    Args:
        site: where payloads are opened.
        store: puts large buffers where the receiver can read them.
        where: names this process in the traceback of an error.
        place: what to do with a finished payload, for example put it into an object store.
    """

    def __init__(
        self, site: Site, store: Store, where: str, place: Callable[[Payload], Payload] | None = None
    ):
        self.site = site
        self._store = store
        self._where = where
        self._place = place or (lambda payload: payload)

    # Serializing -------------------------------------------------------------------------------

    def pack(self, value: Any) -> Payload:
        """Serialize a value."""
        return self._place(self.pack_in_place(value))

    def pack_in_place(self, value: Any, *, beside: bool = False) -> Payload:
        """Serialize a value, wherever the store has put its buffers, and its pickle `beside` them if so."""
        kind = type(value)
        if kind in _PLAIN:
            return Payload(pickle.dumps(value, 5))
        if kind is np.ndarray and _is_simple(value):
            small = value.nbytes < OUT_OF_BAND
            header = (value.dtype.str, value.shape, value.tobytes() if small else None)
            memory = None if small else self._store([value.reshape(-1).view(np.uint8).data])
            return Payload(_ARRAY + pickle.dumps(header, 5), memory)
        file, buffers = io.BytesIO(), []
        pickler = _Pickler(file, self, buffers)
        pickler.dump(value)
        data = file.getvalue()
        if beside and (buffers or len(data) >= _SMALL):
            buffers.append(memoryview(data))
            data = _BESIDE
        return Payload(data, self._store(buffers) if buffers else None, pickler.parts)

    def pack_message(self, message: Message) -> Payload:
        """Serialize a message's operation and arguments; an argument that cannot be pickled is named."""
        try:
            payload = self._pack_call(message)
            return self.pack((message.operation, message.args)) if payload is None else payload
        except Exception as problem:
            for index, argument in enumerate(message.args):
                try:
                    _Pickler(io.BytesIO(), self, []).dump(argument)
                except Exception:
                    what = f"argument {index + 1} of {message.label}"
                    raise not_serializable(argument, what, problem) from problem
            raise

    def _pack_call(self, message: Message) -> Payload | None:
        """A payload for a method with plain arguments and references, the usual case."""
        if type(message.operation) is not str:
            return None
        args, holes, parts = list(message.args), [], []
        for index, argument in enumerate(args):
            if type(argument) in _PLAIN:
                continue
            if not self.is_own(argument):
                return None
            holes.append(index)
            parts.append(argument)
            args[index] = None
        return Payload(_CALL + pickle.dumps((message.operation, args, holes), 5), None, parts)

    def pack_constructor(self, actor: Actor[Any]) -> Payload:
        """Serialize what an actor is built from; replies among its arguments are waited for."""
        cls, args, kwargs = actor.constructor
        arguments = (*args, *kwargs.values())
        self.pack_message(Message("", arguments, None, f"{actor.name}.__init__"))  # names what cannot be sent
        payload = self.pack((cls, args, kwargs))
        for future in payload.futures():
            future.result()
        return payload

    def pack_result(self, value: Any) -> Payload:
        """Serialize the result of a method, wherever the store has put its buffers."""
        try:
            return self.pack_in_place(value)
        except (EngineError, OSError):
            raise
        except Exception as problem:
            raise not_serializable(value, "the result", problem) from problem

    def pack_error(self, error: BaseException) -> Payload:
        """Serialize an error with its traceback; if it cannot be pickled, its description."""
        trace = f"on {self._where}:\n{''.join(traceback.format_exception(error)).rstrip()}"
        try:
            payload = self.pack((error, trace))
            pickle.loads(cloudpickle.dumps(error))  # some errors can be pickled and not unpickled
        except Exception:
            text = "".join(traceback.format_exception_only(error)).strip()
            payload = self.pack((RemoteError(text), trace))
        return payload

    def put(self, value: Any) -> PayloadRef:
        """Serialize a value once; the reference can be sent to many, at the same cost whatever the value."""
        return PayloadRef(self, self._place(self.pack_in_place(value, beside=True)))

    def is_own(self, value: Any) -> bool:
        """Whether a value is a reference or a future of this engine."""
        if isinstance(value, PayloadRef):
            return value.codec is self
        return isinstance(value, Future) and value.engine is self.site

    # Deserializing -----------------------------------------------------------------------------

    def unpack(self, payload: Payload) -> Any:
        """The value in a payload."""
        payload = payload.fetch()
        data, memory = payload.data, payload.memory
        if data.startswith(_CALL):
            operation, args, holes = pickle.loads(memoryview(data)[len(_CALL) :])
            for hole, part in zip(holes, payload.parts, strict=True):
                args[hole] = self.part(part)
            return operation, tuple(args)
        if data.startswith(_ARRAY):
            dtype, shape, content = pickle.loads(memoryview(data)[len(_ARRAY) :])
            return _array(memory.views()[0] if content is None else content, dtype, shape, "C")
        if memory is None and _OWN not in data:
            return pickle.loads(data)
        views = memory.views() if memory is not None else []
        if data == _BESIDE:
            *views, data = views
        return _Unpickler(data, payload, self, views).load()

    def unpack_error(self, payload: Payload) -> BaseException:
        """The error, whose cause shows where it was raised."""
        try:
            error, trace = self.unpack(payload)
        except Exception as problem:  # it could be unpickled where it was raised, and cannot here
            return RemoteError(f"an error was raised that cannot be unpickled here: {problem!r}")
        if not getattr(error, "includes_traceback", False):
            error.__cause__ = RemoteTraceback(trace)
        return error

    def open_reply(self, future: Future[Any]) -> Any:
        """The value of a reply; deserialized once."""
        if isinstance(future.reply, Payload):
            future.reply = _Opened(future.reply, self.unpack(future.reply))
        return future.reply.value if isinstance(future.reply, _Opened) else future.reply

    def part(self, part: Any) -> Any:
        """What stands here for a reference or future of the sender."""
        return part if isinstance(part, (PayloadRef, Future)) else PayloadRef(self, part)


class _Pickler(ClassPickler):
    def __init__(self, file: io.BytesIO, codec: Codec, buffers: list[memoryview]):
        super().__init__(file, protocol=5, buffer_callback=functools.partial(_keep_out_of_band, buffers))
        self._codec = codec
        self.parts: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray:
            return _reduce_array(obj)
        if issubclass(kind, Actor):
            if obj.engine is not self._codec.site:
                raise NotSerializable(
                    f"{obj.name} is an actor of another engine: only that one can send its handle"
                )
            return _handle, (obj.name, obj.index, _pickled_class(obj.cls))
        if issubclass(kind, (Ref, Future)):
            if not self._codec.is_own(obj):
                raise NotSerializable(f"{obj!r} belongs to another engine; send the value itself")
            self.parts.append(obj)
            return _part, (len(self.parts) - 1,)
        if hasattr(kind, "mailbox_size"):  # an engine, or the host of an actor
            raise NotSerializable(
                f"an engine ({obj!r}) cannot be sent; open one where it is needed: with rs.engine(...)"
            )
        if kind is FunctionType and obj.__module__ == __name__:
            return NotImplemented  # by name, without cloudpickle's inspection
        return super().reducer_override(obj)


def _keep_out_of_band(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Whether a buffer stays in band. Not a method: the pickler would be garbage in a cycle with views."""
    view = buffer.raw()
    if view.nbytes < OUT_OF_BAND:
        return True
    buffers.append(view)
    return False


class _Unpickler(pickle.Unpickler):
    """Restores arrays, references and handles.

    It remembers what it looks up, so nothing of that may refer to itself: it would be garbage in a cycle with
    views, and their memory would be held until the garbage collector runs.
    """

    def __init__(self, data: Any, payload: Payload, codec: Codec, views: Sequence[memoryview]):
        super().__init__(io.BytesIO(data), buffers=views)
        self._payload = payload
        self._codec = codec

    def find_class(self, module: str, name: str, /) -> Any:
        if module == __name__:
            if name == "_array":
                return _array
            if name == "_part":
                return functools.partial(_open_part, self._payload, self._codec)
            if name == "_handle":
                return functools.partial(_open_handle, self._codec)
        return super().find_class(module, name)


def _open_part(payload: Payload, codec: Codec, index: int) -> Any:
    return codec.part(payload.parts[index])


def _open_handle(codec: Codec, name: str, index: int, cls: bytes) -> Actor[Any]:
    return codec.site.find_actor(name, index, _load_class(cls))


def _part(_: int) -> Any:
    """Stands in a pickle for a reference; only an engine can resolve it."""
    raise EngineError("a reference can only be sent in messages of its own engine")


def _handle(name: str, *_: Any) -> Any:
    """Stands in a pickle for a handle; only an engine can resolve it."""
    raise EngineError(f"the handle {name} can only be sent in messages of its own engine")


_pickled_class = functools.lru_cache(maxsize=256)(class_bytes)


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
