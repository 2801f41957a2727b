"""Pickles that hold nothing but arrays, numbers, text, lists and dictionaries.

A pickle is a program: reading one with Python's own reader runs whatever it asks for. Here every
name that a pickle can ask for leads to an object of this file, which takes apart the few forms in
which arrays are written and can do nothing else. No class, no function of numpy and nothing that
could be changed is ever within its reach.
"""

import io
import math
import pickle
import pickletools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from qualms.data.places import read_file_bytes
from qualms.errors import QualmsError

NUMBER = re.compile(
    r"[<>|=]?[biuf][1248]"
)  # the types of numbers an array may have: no objects, no fields


class _Refused(Exception):
    """What the pickle asks for is not part of an array."""


def read_pickle(path: Path) -> Any:
    """What a pickle by Python 3, or by Python 2 in binary, holds; text of Python 2 comes as bytes."""
    content = read_file_bytes(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about text of Python 2 with strange escapes
            _bounded(content)
            return _plain(_ArraysOnly(io.BytesIO(content), encoding="bytes").load())
    except _Refused as refused:
        raise QualmsError(
            f"{path} is refused: {refused}, and a pickle with more than arrays, numbers and text in it can run any "
            "code; get it again from where it is published."
        ) from None
    except Exception as error:  # a broken pickle raises whatever comes up
        raise QualmsError(
            f"{path} is cut or not a pickle ({type(error).__name__}); get it again."
        ) from None


def _bounded(content: bytes) -> None:
    # The reader makes room for as many remembered objects, and as many bytes, as the pickle says
    # that there are. Walking over it first, which runs nothing, shows that each length is within
    # the file.
    for code, argument, _ in pickletools.genops(content):
        if code.name.endswith("PUT") and int(argument or 0) > len(content):
            raise _Refused(
                f"it remembers object number {argument} of a file of {len(content)} bytes"
            )


def _plain(found: Any) -> Any:
    # Only the arrays right in the dictionary: going further down could take for ever in a pickle
    # made for that.
    return (
        {k: v.numbers if isinstance(v, _Array) else v for k, v in found.items()}
        if isinstance(found, dict)
        else found
    )


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for what a pickle asks for by name."""
        asked = f"{module}.{name}"
        if asked not in STAND_INS:
            raise _Refused(f"it asks for {asked}")
        return STAND_INS[asked]


class _Type:
    """Stands in for a numpy.dtype of plain numbers."""

    __slots__ = ("code",)

    def __init__(self, code: str) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        order = _text(state[1])
        if any(part is not None for part in state[2:5]):
            raise _Refused("it has an array of a type with fields")
        self.code = _number(order + self.code.lstrip("<>|="))


class _Array:
    """Stands in for a numpy.ndarray; `numbers` is the array."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Any = None) -> None:
        self.numbers = numbers

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_column, content = state
        self.numbers = _array(content, kind, shape, "F" if by_column else "C")


def _array(content: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(kind, _Type) or not isinstance(content, bytes | bytearray):
        raise _Refused("it has an array of something other than numbers")
    if not isinstance(shape, tuple) or not all(
        type(length) is int and length >= 0 for length in shape
    ):
        raise ValueError("not a shape")
    numbers = np.frombuffer(bytes(content), kind.code)
    if math.prod(shape) != len(numbers):
        raise ValueError("the array's shape disagrees with its length")
    return numbers.reshape(shape, order="F" if _text(order) == "F" else "C")


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise _Refused(f"it has {type(value).__name__} where an array's description is text")
    return value.decode("latin1") if isinstance(value, bytes) else value


def _number(code: str) -> str:
    if not NUMBER.fullmatch(code):
        raise _Refused(f"it has an array of type {code!r}")
    return code


# What a pickle can call. They are objects without attributes: a pickle can also set attributes of
# what it holds, and of a function or a class those would stay.


class _Named:
    """Only ever compared with; calling it is an error."""

    __slots__ = ()


class _MakeType:
    __slots__ = ()

    def __call__(self, code: Any, align: Any = False, copy: Any = False) -> _Type:
        return _Type(_number(_text(code)))


class _MakeArray:
    """Stands in for numpy's _reconstruct: makes an empty array, which the pickle fills with
    `__setstate__`.
    """

    __slots__ = ()

    def __call__(self, kind: Any, shape: Any, code: Any) -> _Array:
        if kind is not ARRAY:
            raise _Refused("it has an array of a class of its own")
        return _Array()


class _MakeArrayFromBuffer:
    __slots__ = ()

    def __call__(self, content: Any, kind: Any, shape: Any, order: Any, axes: Any = None) -> _Array:
        numbers = _array(content, kind, shape, order)
        return _Array(numbers if axes is None else numbers.transpose(axes))


class _MakeNumber:
    __slots__ = ()

    def __call__(self, kind: Any, content: Any) -> Any:
        return _array(content, kind, (), "C").item()


class _Encode:
    """Python 3 writes bytes as text for the reader of Python 2."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise _Refused("it encodes something other than bytes")
        return text.encode("latin1")


class _NoBytes:
    """Stands in for `bytes`, called with nothing: how Python 3 writes empty bytes for Python 2."""

    __slots__ = ()

    def __call__(self) -> bytes:
        return b""


ARRAY = _Named()
STAND_INS = {
    "numpy.ndarray": ARRAY,
    "numpy.dtype": _MakeType(),
    "_codecs.encode": _Encode(),
    "__builtin__.bytes": _NoBytes(),
    "builtins.bytes": _NoBytes(),
} | {
    f"numpy.{core}.{name}": maker
    for core in ("core", "_core")
    for name, maker in (
        ("multiarray._reconstruct", _MakeArray()),
        ("multiarray.scalar", _MakeNumber()),
        ("numeric._frombuffer", _MakeArrayFromBuffer()),
    )
}
