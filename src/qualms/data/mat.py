"""Read the arrays of plain numbers in a MATLAB 5 file.

scipy reads these too, but trusts the lengths and types in the file: a damaged one can crash the
process. Here each length is compared with the available bytes before anything is read by it.

A file is 128 bytes of header, and then elements: the type of what follows and its length in four
bytes each, the bytes, and zeros up to a multiple of eight. Four bytes or fewer may take the place
of the length, which then shares the four bytes of the type.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Bytes of the file's header, and of an element's type and length.
HEADER, TAG = 128, 8
MATRIX, COMPRESSED = 14, 15  # types of elements that hold others
# Types of the elements that describe an array.
INT8, INT32, UINT32 = 1, 5, 6
COMPLEX, LOGICAL = 0x0800, 0x0200  # flags of an array

# The types of stored numbers, of an array's numbers, and of what is no array of numbers.
STORED = {
    1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8",
}  # fmt: skip
NUMBERS = {
    6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8",
}  # fmt: skip
OTHERS = {
    1: "cell", 2: "struct", 3: "object", 4: "char", 5: "sparse", 16: "function", 17: "opaque",
}  # fmt: skip


@dataclass(frozen=True)
class Variable:
    """A variable of a file.

    Args:
        kind: the type of the variable, such as "uint8", "logical", "complex" or "struct".
        numbers: the array; None if it is not one of real numbers.
    """

    kind: str
    numbers: np.ndarray | None


def read_mat(content: bytes) -> dict[str, Variable]:
    """Read all variables of a file by name.

    Args:
        content: the file's bytes.

    Raises:
        ValueError: if anything in the file is not as it should be.
        zlib.error: if what is compressed is damaged.
    """
    # The header ends with a version of two bytes, then the letters that tell the byte order.
    order = {b"IM": "<", b"MI": ">"}.get(content[HEADER - 2 : HEADER])
    if order is None:
        raise ValueError("not a MATLAB 5 file")
    (version,) = struct.unpack(f"{order}H", content[HEADER - 4 : HEADER - 2])
    if version != 0x0100:
        raise ValueError("not a MATLAB 5 file")
    variables: dict[str, Variable] = {}
    for element in _elements(memoryview(content)[HEADER:], order):
        kind, inside = _decompress(element, order)
        if kind == MATRIX and len(inside):
            parts = list(_elements(inside, order))
            name, variable = _read_variable(parts, order)
            if name in variables:
                raise ValueError(f"two variables are called {name}")
            variables[name] = variable
    return variables


def _decompress(element: tuple[int, memoryview], order: str) -> tuple[int, memoryview]:
    """Return the one element inside a compressed element, or the element itself if not compressed.

    Args:
        element: the type and the bytes of the element.
        order: the byte order, "<" or ">".
    """
    kind, content = element
    if kind != COMPRESSED:
        return element
    (inside,) = _elements(memoryview(zlib.decompress(content)), order)
    return inside


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yield the type and the bytes of each element, up to the end of the content.

    Args:
        content: the bytes of the elements.
        order: the byte order, "<" or ">".
    """
    at = 0
    while at < len(content):
        if len(content) - at < TAG:
            raise ValueError("an element is cut short")
        kind, length = struct.unpack_from(f"{order}II", content, at)
        # A small element: a length and a type of two bytes each, then at most four bytes.
        if kind >> 16:
            length = kind >> 16
            kind = kind & 0xFFFF
            start = at + 4
            if length > 4:
                raise ValueError("a small element has more than four bytes")
            at += TAG
        else:
            start = at + TAG
            if length > len(content) - start:
                raise ValueError("an element is longer than the file")
            # What is compressed is not filled up, and some writers do not fill up the last element.
            padding = -length % 8
            if kind == COMPRESSED:
                padding = 0
            at = min(len(content), start + length + padding)
        yield kind, content[start : start + length]


def _read_variable(parts: list[tuple[int, memoryview]], order: str) -> tuple[str, Variable]:
    """Read a variable and its name.

    Args:
        parts: the elements of the variable: flags, shape, name and numbers.
        order: the byte order, "<" or ">".

    Returns:
        The name, and the variable; what is no array of real numbers comes without its numbers.
    """
    if not parts or parts[0][0] != UINT32 or len(parts[0][1]) != 8:
        raise ValueError("a variable has no flags")
    (flags,) = struct.unpack_from(f"{order}I", parts[0][1])
    kind = flags & 0xFF
    if kind in OTHERS:
        name = ""
        if len(parts) > 2 and parts[2][0] == INT8:
            name = bytes(parts[2][1]).decode("latin1")
        return name, Variable(OTHERS[kind], None)
    code = NUMBERS.get(kind)
    is_complex = bool(flags & COMPLEX)
    # Complex arrays have a fifth part, the imaginary numbers.
    if code is None or len(parts) != 4 + is_complex:
        raise ValueError("a variable has an unknown type, or lacks the parts of an array")
    (shape_type, shape), (name_type, text), (stored, numbers) = parts[1:4]
    if shape_type != INT32 or len(shape) % 4 or name_type != INT8 or stored not in STORED:
        raise ValueError("an array has no shape, name or numbers")
    lengths = struct.unpack(f"{order}{len(shape) // 4}i", shape)
    width = np.dtype(STORED[stored]).itemsize
    if len(lengths) < 2 or min(lengths) < 0 or math.prod(lengths) * width != len(numbers):
        raise ValueError("the length of an array does not match its shape")
    # MATLAB stores numbers in the narrowest type that holds them all.
    array = np.frombuffer(numbers, f"{order}{STORED[stored]}")
    array = array.astype(code, copy=False)
    name = bytes(text).decode("latin1")
    if is_complex:
        return name, Variable("complex", None)
    described = np.dtype(code).name
    if flags & LOGICAL:
        described = "logical"
    return name, Variable(described, array.reshape(lengths, order="F"))
