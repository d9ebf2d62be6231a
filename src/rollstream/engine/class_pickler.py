"""Pickles classes of scripts and notebooks by value, also those that a metaclass turns into dataclasses."""

from __future__ import annotations

import dataclasses
import io
from abc import ABCMeta
from typing import Any

import cloudpickle

_PLAIN = (type(None), bool, int, float, str)


class ClassPickler(cloudpickle.Pickler):
    """Cloudpickle's pickler, for Equinox's modules as well."""

    def reducer_override(self, obj: Any) -> Any:
        """How to pickle an object, if not as usual."""
        if obj is dataclasses.MISSING:
            return "MISSING"  # by name: dataclasses know it by its identity
        reduced: Any = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and (body := _class_body(obj)):
            reduced[1][3].update(body)  # the namespace that cloudpickle calls the metaclass with
        return reduced


def class_bytes(cls: type) -> bytes:
    """A class, pickled."""
    file = io.BytesIO()
    ClassPickler(file, protocol=5).dump(cls)
    return file.getvalue()


def _class_body(cls: Any) -> dict[str, Any]:
    """What a metaclass that makes dataclasses reads in a class body; nothing for other classes.

    Cloudpickle calls the metaclass with an empty body, and adds the attributes afterwards. So fields need no
    defaults here, and `__init__` only has to be there if the class defines its own.
    """
    own = vars(cls)
    if "__dataclass_fields__" not in own or type(cls).__new__ in (type.__new__, ABCMeta.__new__):
        return {}
    body: dict[str, Any] = {"__annotations__": own.get("__annotations__", {})}
    for name in body["__annotations__"]:
        field = cls.__dataclass_fields__.get(name)
        if field is not None and field.kw_only is not dataclasses.MISSING:  # else it is a class variable
            metadata = {key: value for key, value in field.metadata.items() if isinstance(value, _PLAIN)}
            body[name] = dataclasses.field(init=field.init, kw_only=True, metadata=metadata)
    return body if cls.__dataclass_params__.init else body | {"__init__": _init}


def _init(_: Any) -> None:
    """Stands for the constructor until the attributes are added."""
