"""Pickles that hold nothing but arrays, numbers, text, lists and dictionaries.

A pickle is a program: Python's own reader runs any code in it. Here every name that
a pickle can import leads to an object of this file, which decodes the few forms in which arrays are
written and can do nothing else. No class, no function of numpy and nothing that
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
from qualms.errors import QualmsError, explain_failure

# The types of numbers that an array may have: no objects, no fields.
NUMBER = re.compile(r"[<>|=]?[biuf][1248]")


class _Refused(Exception):
    """Raised if a pickle has more in it than arrays, numbers and text."""


def read_pickle(path: Path) -> Any:
    """Read a pickle without running any code in it.

    Args:
        path: the path of a pickle by Python 3, or by Python 2 in binary.

    Returns:
        The object, with numpy arrays; text of Python 2 comes as bytes.

    Raises:
        QualmsError: if the pickle is damaged, or contains more than arrays, numbers and text.
    """
    content = read_file_bytes(path)

    def explain(error: Exception) -> QualmsError:
        """Create the error: refused if the pickle holds more than it may, else damaged."""
        if isinstance(error, _Refused):
            return QualmsError(
                f"{path} is refused: {error}, and a pickle with anything but arrays, numbers and "
                "text can run arbitrary code; download it again from its official source."
            )
        return QualmsError(
            f"{path} is truncated or not a pickle ({type(error).__name__}); download it again."
        )

    with warnings.catch_warnings(), explain_failure(explain):
        # About text of Python 2 with invalid escapes.
        warnings.simplefilter("ignore")
        _require_bounds(content)
        reader = _ArraysOnly(io.BytesIO(content), encoding="bytes")
        return _unwrap_arrays(reader.load())


def _require_bounds(content: bytes) -> None:
    """Raise if a length in a pickle goes beyond the file.

    Python's reader allocates memory for as many memoized objects, and as many bytes, as the pickle
    claims. `genops` walks over the operations without running them, and raises if bytes are
    missing. Positions of memoized objects are compared here.
    """
    for code, argument, _ in pickletools.genops(content):
        if code.name.endswith("PUT") and int(argument or 0) > len(content):
            raise _Refused(f"it memoizes object {argument}, in a file of {len(content)} bytes")


def _unwrap_arrays(content: Any) -> Any:
    """Replace the stand-ins among a dictionary's values by their arrays; return all else unchanged.

    Nested containers are left alone: in a malicious pickle, visiting them could take forever.
    """
    if not isinstance(content, dict):
        return content
    entries = {}
    for key, value in content.items():
        entries[key] = value.numbers if isinstance(value, _Array) else value
    return entries


class _ArraysOnly(pickle.Unpickler):
    """A reader of pickles that can import nothing but the objects of `STAND_INS`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name that the pickle imports; refuse any other name."""
        imported = f"{module}.{name}"
        if imported not in STAND_INS:
            raise _Refused(f"it imports {imported}")
        return STAND_INS[imported]


class _Type:
    """Stands in for a numpy.dtype of plain numbers.

    Args:
        code: the dtype in numpy's short form, such as "<f4".
    """

    __slots__ = ("code",)

    def __init__(self, code: str) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Take the byte order from a numpy.dtype's state.

        Args:
            state: as pickled: version, byte order, three entries for fields and subarrays, more.
        """
        order = _decode(state[1])
        if any(part is not None for part in state[2:5]):
            raise _Refused("it contains an array with named fields")
        self.code = _require_number(order + self.code.lstrip("<>|="))


class _Array:
    """Stands in for a numpy.ndarray.

    Args:
        numbers: the array; None until `__setstate__` is called.
    """

    __slots__ = ("numbers",)

    def __init__(self, numbers: Any = None) -> None:
        self.numbers = numbers

    def __setstate__(self, state: Any) -> None:
        """Build the array from a numpy.ndarray's state.

        Args:
            state: as pickled: version, shape, dtype, whether the first axis changes fastest, bytes.
        """
        _, shape, kind, by_column, content = state
        self.numbers = _parse_array(content, kind, shape, "F" if by_column else "C")


def _parse_array(content: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
    """Check the parts of an array in a pickle, each of which may be anything, and build the array.

    Args:
        content: the bytes of the numbers.
        kind: the stand-in for the dtype.
        shape: a tuple of lengths.
        order: "F", as text or bytes, if the first axis changes fastest.
    """
    if not isinstance(kind, _Type) or not isinstance(content, bytes | bytearray):
        raise _Refused("it contains an array of something other than numbers")
    if not isinstance(shape, tuple) or not all(map(_is_length, shape)):
        raise ValueError("not a shape")
    numbers = np.frombuffer(bytes(content), kind.code)
    if math.prod(shape) != len(numbers):
        raise ValueError("the length of the array does not match its shape")
    return numbers.reshape(shape, order="F" if _decode(order) == "F" else "C")


def _is_length(value: Any) -> bool:
    """Whether a value is a whole number, 0 or more; True and False are not."""
    return type(value) is int and value >= 0


def _decode(value: Any) -> str:
    """Convert a value to text; Python 2 wrote text as bytes."""
    if not isinstance(value, str | bytes):
        raise _Refused(f"it describes an array by a {type(value).__name__} instead of text")
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value


def _require_number(code: str) -> str:
    """Return the code of a dtype, or raise an error if it is not one of plain numbers."""
    if not NUMBER.fullmatch(code):
        raise _Refused(f"it contains an array of type {code!r}")
    return code


# What a pickle can call. These are objects without attributes, not functions or classes: a pickle
# can also set attributes of what it holds, and on a function or a class they would outlive it.


class _Named:
    """Stands in for a class that a pickle only passes to a call, as numpy.ndarray is."""

    __slots__ = ()


class _MakeType:
    """Stands in for numpy.dtype."""

    __slots__ = ()

    def __call__(self, code: Any, align: Any = False, copy: Any = False) -> _Type:
        """Return the stand-in for a dtype of this code; `align` and `copy` change nothing."""
        return _Type(_require_number(_decode(code)))


class _MakeArray:
    """Stands in for numpy's _reconstruct, which makes an array that `__setstate__` fills."""

    __slots__ = ()

    def __call__(self, kind: Any, shape: Any, code: Any) -> _Array:
        """Return an array without numbers; its shape and dtype come with `__setstate__`."""
        if kind is not ARRAY:
            raise _Refused("it contains an array of a custom class")
        return _Array()


class _MakeArrayFromBuffer:
    """Stands in for numpy's _frombuffer."""

    __slots__ = ()

    def __call__(self, content: Any, kind: Any, shape: Any, order: Any, axes: Any = None) -> _Array:
        """Build an array whose numbers are in one piece of bytes.

        Args:
            content: the bytes of the numbers.
            kind: the stand-in for the dtype.
            shape: a tuple of lengths.
            order: "F" if the first axis changes fastest.
            axes: the order in which the axes are transposed; None for no transposition.
        """
        numbers = _parse_array(content, kind, shape, order)
        return _Array(numbers if axes is None else numbers.transpose(axes))


class _MakeNumber:
    """Stands in for numpy's scalar, which makes one number from a dtype and bytes."""

    __slots__ = ()

    def __call__(self, kind: Any, content: Any) -> Any:
        """Return the number as a bool, int or float of Python."""
        return _parse_array(content, kind, (), "C").item()


class _Encode:
    """Stands in for `codecs.encode`: how Python 3 writes bytes for the reader of Python 2."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any) -> bytes:
        """Return the bytes of which `text` has one in each character."""
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise _Refused("it encodes something other than bytes")
        return text.encode("latin1")


class _NoBytes:
    """Stands in for `bytes`, called with nothing: how Python 3 writes empty bytes for Python 2."""

    __slots__ = ()

    def __call__(self) -> bytes:
        """Return empty bytes."""
        return b""


ARRAY = _Named()
STAND_INS: dict[str, Any] = {
    "numpy.ndarray": ARRAY,
    "numpy.dtype": _MakeType(),
    "_codecs.encode": _Encode(),
    "__builtin__.bytes": _NoBytes(),
    "builtins.bytes": _NoBytes(),
}
for _core in ("numpy.core", "numpy._core"):  # before and since numpy 2
    STAND_INS[f"{_core}.multiarray._reconstruct"] = _MakeArray()
    STAND_INS[f"{_core}.multiarray.scalar"] = _MakeNumber()
    STAND_INS[f"{_core}.numeric._frombuffer"] = _MakeArrayFromBuffer()
