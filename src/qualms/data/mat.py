"""The arrays of plain numbers in a MATLAB 5 file.

scipy reads these too, but takes lengths and types in the file at their word: a damaged one can end
the process. Here each length is compared with the bytes that are there before anything is read by
it.

A file is 128 bytes of header, and then elements: the type of what follows and its length in four
bytes each, the bytes, and zeros up to a multiple of eight. Four bytes or fewer may stand in the
place of the length, which shares the type's.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

HEADER, LEAST = 128, 8  # bytes
MATRIX, COMPRESSED = 14, 15  # types of elements that hold others
STORED = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}
NUMBERS = {
    6: "f8",
    7: "f4",
    8: "i1",
    9: "u1",
    10: "i2",
    11: "u2",
    12: "i4",
    13: "u4",
    14: "i8",
    15: "u8",
}
OTHERS = {
    1: "cell",
    2: "struct",
    3: "object",
    4: "char",
    5: "sparse",
    16: "function",
    17: "opaque",
}  # of no use here
COMPLEX, LOGICAL = 0x0800, 0x0200
INT8, INT32, UINT32 = 1, 5, 6


@dataclass(frozen=True)
class Variable:
    """What a file says that a variable is, and its numbers, if it is an array of real ones."""

    kind: str
    numbers: np.ndarray | None


def read_mat(content: bytes) -> dict[str, Variable]:
    """All variables by name; a ValueError or zlib.error if something in the file is not as it
    should be.
    """
    order = {b"IM": "<", b"MI": ">"}.get(content[HEADER - 2 : HEADER])
    if order is None or struct.unpack(f"{order}H", content[HEADER - 4 : HEADER - 2]) != (0x0100,):
        raise ValueError("no MATLAB 5 file")
    found: dict[str, Variable] = {}
    for kind, inside in _elements(memoryview(content)[HEADER:], order):
        if kind == COMPRESSED:
            ((kind, inside),) = _elements(memoryview(zlib.decompress(inside)), order)
        if kind == MATRIX and len(inside):
            name, variable = _variable(list(_elements(inside, order)), order)
            if name in found:
                raise ValueError(f"two variables {name}")
            found[name] = variable
    return found


def _elements(content: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and bytes of one element after the other, up to the very end."""
    at = 0
    while at < len(content):
        if len(content) - at < LEAST:
            raise ValueError("an element that is cut short")
        kind, length = struct.unpack_from(f"{order}II", content, at)
        start = at + LEAST
        if kind >> 16:
            kind, length, start = kind & 0xFFFF, kind >> 16, at + 4
            if length > 4:
                raise ValueError("more than four bytes in the place of a length")
            at += LEAST
        else:
            if length > len(content) - start:
                raise ValueError("an element that is longer than the file")
            # What is compressed is not filled up, and the last element of a file is not by all that
            # write them.
            at = min(len(content), start + length + (0 if kind == COMPRESSED else -length % LEAST))
        yield kind, content[start : start + length]


def _variable(parts: list[tuple[int, memoryview]], order: str) -> tuple[str, Variable]:
    if not parts or parts[0][0] != UINT32 or len(parts[0][1]) != 8:
        raise ValueError("a variable without its flags")
    (flags,) = struct.unpack_from(f"{order}I", parts[0][1])
    kind = flags & 0xFF
    if kind in OTHERS:
        named = len(parts) > 2 and parts[2][0] == INT8
        return (bytes(parts[2][1]).decode("latin1") if named else ""), Variable(OTHERS[kind], None)
    code = NUMBERS.get(kind)
    if code is None or len(parts) != (5 if flags & COMPLEX else 4):
        raise ValueError("a variable of no known type, or not in the parts of an array")
    (_, (sizes, shape), (letters, name), (stored, numbers), *_) = parts
    if sizes != INT32 or len(shape) % 4 or letters != INT8 or stored not in STORED:
        raise ValueError("an array without shape, name or numbers")
    lengths = struct.unpack(f"{order}{len(shape) // 4}i", shape)
    width = np.dtype(STORED[stored]).itemsize
    if len(lengths) < 2 or min(lengths) < 0 or math.prod(lengths) * width != len(numbers):
        raise ValueError("an array that is not as long as its shape says")
    told = "complex" if flags & COMPLEX else "logical" if flags & LOGICAL else np.dtype(code).name
    # MATLAB stores numbers in the narrowest type that holds them all.
    array = np.frombuffer(numbers, f"{order}{STORED[stored]}").astype(code, copy=False)
    return bytes(name).decode("latin1"), Variable(
        told, None if flags & COMPLEX else array.reshape(lengths, order="F")
    )
