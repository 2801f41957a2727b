"""Pickles that hold nothing but arrays, numbers, text, lists and dictionaries.

A pickle is a program: Python's own reader runs any code in it. Here every name that a pickle can
import leads to a stand-in, an object of this file, which decodes the few forms in which arrays are
written and can do nothing else. A pickle reaches no class, no function of NumPy and nothing that it
could change.
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

# The dtypes that an array may have: plain numbers, but no objects and no fields.
PLAIN_DTYPE = re.compile(r"[<>|=]?[biuf][1248]")


class _Refused(Exception):
    """Raised if a pickle contains more than arrays, numbers and text."""


def read_pickle(path: Path) -> Any:
    """Read a pickle without running any code in it.

    Args:
        path: the path of a pickle that Python 3 wrote, or Python 2 in a binary protocol.

    Returns:
        The pickled object, with NumPy arrays; text that Python 2 wrote is returned as bytes.

    Raises:
        QualmsError: if the pickle is damaged, or contains more than arrays, numbers and text.
    """
    content = read_file_bytes(path)

    def explain(error: Exception) -> QualmsError:
        """Create the error that the pickle is refused, or else that it is damaged."""
        if isinstance(error, _Refused):
            return QualmsError(
                f"{path} is refused: {error}, and a pickle with anything but arrays, numbers and "
                "text can run arbitrary code; download it again from its official source."
            )
        return QualmsError(
            f"{path} is truncated or not a pickle ({type(error).__name__}); download it again."
        )

    with warnings.catch_warnings(), explain_failure(explain):
        # Python warns about invalid escapes in text that Python 2 wrote.
        warnings.simplefilter("ignore")
        _require_plausible_claims(content)
        # Text of Python 2 stays bytes, since its encoding is not known.
        reader = _ArraysOnly(io.BytesIO(content), encoding="bytes")
        return _unwrap_arrays(reader.load())


def _require_plausible_claims(content: bytes) -> None:
    """Raise if a pickle claims more bytes, or more memoized objects, than fit into its length.

    Python's reader would allocate memory for all of them. `genops` goes through the operations
    without running them, and raises by itself if bytes are missing.
    """
    for opcode, argument, _ in pickletools.genops(content):
        # PUT stores an object at the position `argument` of the memo, a list in memory.
        if opcode.name.endswith("PUT") and int(argument or 0) > len(content):
            raise _Refused(f"it memoizes object {argument}, in a file of {len(content)} bytes")


def _unwrap_arrays(content: Any) -> Any:
    """Replace each stand-in among a dictionary's values by its array; leave all else unchanged.

    Nested containers are not visited: in a malicious pickle, that could take forever.
    """
    if not isinstance(content, dict):
        return content
    entries = {}
    for key, value in content.items():
        entries[key] = value.array if isinstance(value, _Array) else value
    return entries


class _ArraysOnly(pickle.Unpickler):
    """A reader of pickles that can import nothing but the objects of `STAND_INS`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name that the pickle imports; refuse any other name."""
        imported = f"{module}.{name}"
        if imported not in STAND_INS:
            raise _Refused(f"it imports {imported}")
        return STAND_INS[imported]


class _Dtype:
    """Stands in for a numpy.dtype of plain numbers.

    Args:
        code: the dtype in NumPy's short form, such as "<f4".
    """

    __slots__ = ("code",)

    def __init__(self, code: str) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Set the byte order from the pickled state of a numpy.dtype.

        Args:
            state: a tuple: version, byte order, three entries that are None unless the dtype has
                fields or subarrays, and more.
        """
        byte_order = _decode_text(state[1])
        if any(entry is not None for entry in state[2:5]):
            raise _Refused("it contains an array with named fields")
        self.code = _require_plain_dtype(byte_order + self.code.lstrip("<>|="))


class _Array:
    """Stands in for a numpy.ndarray.

    Args:
        array: the array; None until `__setstate__` is called.
    """

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray | None = None) -> None:
        self.array = array

    def __setstate__(self, state: Any) -> None:
        """Build the array from the pickled state of a numpy.ndarray.

        Args:
            state: a tuple: version, shape, dtype, whether the first axis changes fastest, bytes.
        """
        _, shape, dtype, is_fortran_order, content = state
        self.array = _parse_array(content, dtype, shape, "F" if is_fortran_order else "C")


def _parse_array(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """Build an array from its parts in a pickle, after checking the type of each part.

    Args:
        content: the bytes of the values.
        dtype: a `_Dtype`.
        shape: a tuple of lengths.
        order: "F", as text or bytes, if the first axis changes fastest; otherwise "C".
    """
    if not isinstance(dtype, _Dtype) or not isinstance(content, bytes | bytearray):
        raise _Refused("it contains an array of something other than numbers")
    if not isinstance(shape, tuple) or not all(map(_is_length, shape)):
        raise ValueError("not a shape")
    values = np.frombuffer(bytes(content), dtype.code)
    if math.prod(shape) != len(values):
        raise ValueError("the length of the array does not match its shape")
    return values.reshape(shape, order="F" if _decode_text(order) == "F" else "C")


def _is_length(value: Any) -> bool:
    """Whether a value is an integer of 0 or more; True and False are not."""
    return type(value) is int and value >= 0


def _decode_text(value: Any) -> str:
    """Return text that describes an array, such as a dtype's code; Python 2 pickled it as bytes."""
    if not isinstance(value, str | bytes):
        raise _Refused(f"it describes an array by a {type(value).__name__} instead of text")
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value


def _require_plain_dtype(code: str) -> str:
    """Return the code of a dtype unchanged, or raise `_Refused` if it is not of plain numbers."""
    if not PLAIN_DTYPE.fullmatch(code):
        raise _Refused(f"it contains an array of type {code!r}")
    return code


# The objects that a pickle can call. They have no attributes, and are neither functions nor
# classes: a pickle can set attributes of any object that it reaches, and those of a function or a
# class would persist after the pickle is read.


class _ArrayClass:
    """Stands in for the class numpy.ndarray, which a pickle passes to a call but does not call."""

    __slots__ = ()


class _MakeDtype:
    """Stands in for numpy.dtype."""

    __slots__ = ()

    def __call__(self, code: Any, align: Any = False, copy: Any = False) -> _Dtype:
        """Create the stand-in for a dtype from its code, such as "f4".

        `align` and `copy`, which pickles pass too, have no effect on dtypes of plain numbers.
        """
        return _Dtype(_require_plain_dtype(_decode_text(code)))


class _MakeArray:
    """Stands in for NumPy's _reconstruct, which makes an array that `__setstate__` fills."""

    __slots__ = ()

    def __call__(self, array_class: Any, shape: Any, code: Any) -> _Array:
        """Return an `_Array` without values.

        The pickle passes the array's shape, dtype and values to `__setstate__` afterwards, so the
        `shape` and the `code` of a dtype that are passed here are ignored.
        """
        if array_class is not ARRAY_CLASS:
            raise _Refused("it contains an array of a custom class")
        return _Array()


class _MakeArrayFromBuffer:
    """Stands in for NumPy's _frombuffer, which makes an array from contiguous bytes."""

    __slots__ = ()

    def __call__(
        self,
        content: Any,
        dtype: Any,
        shape: Any,
        order: Any,
        axes: Any = None,
    ) -> _Array:
        """Build an array from the bytes of all its values.

        Args:
            content: the bytes of the values.
            dtype: a `_Dtype`.
            shape: a tuple of lengths.
            order: "F" if the first axis changes fastest; otherwise "C".
            axes: the order in which the axes are transposed; None for no transposition.
        """
        array = _parse_array(content, dtype, shape, order)
        return _Array(array if axes is None else array.transpose(axes))


class _MakeNumber:
    """Stands in for NumPy's scalar, which makes one number from a dtype and bytes."""

    __slots__ = ()

    def __call__(self, dtype: Any, content: Any) -> Any:
        """Convert the number's bytes to a bool, int or float of Python."""
        # An array of shape () holds one number.
        return _parse_array(content, dtype, shape=(), order="C").item()


class _Encode:
    """Stands in for `codecs.encode`, which Python 3 pickles for bytes that Python 2 can read."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any) -> bytes:
        """Return the bytes that a pickle wrote as text, with one byte in each character."""
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise _Refused("it encodes something other than bytes")
        return text.encode("latin1")


class _NoBytes:
    """Stands in for `bytes`, whose call without arguments Python 3 pickles for empty bytes."""

    __slots__ = ()

    def __call__(self) -> bytes:
        """Return empty bytes, as `bytes()` does."""
        return b""


ARRAY_CLASS = _ArrayClass()
STAND_INS: dict[str, Any] = {
    "numpy.ndarray": ARRAY_CLASS,
    "numpy.dtype": _MakeDtype(),
    "_codecs.encode": _Encode(),
    "__builtin__.bytes": _NoBytes(),
    "builtins.bytes": _NoBytes(),
}
# The names before and since NumPy 2.
for _core in ("numpy.core", "numpy._core"):
    STAND_INS[f"{_core}.multiarray._reconstruct"] = _MakeArray()
    STAND_INS[f"{_core}.multiarray.scalar"] = _MakeNumber()
    STAND_INS[f"{_core}.numeric._frombuffer"] = _MakeArrayFromBuffer()
