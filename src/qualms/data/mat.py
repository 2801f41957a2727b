"""Read the arrays of plain numbers in a MATLAB 5 file.

scipy reads such files too, but trusts the lengths and types in them: a damaged file can crash the
process. Here each length is compared with the available bytes before anything is read.

A file consists of a header of 128 bytes, and of elements. An element consists of its type and its
length, four bytes each; of its content; and of zeros up to a multiple of eight bytes. In a small
element, the length and the type share the first four bytes, and up to four bytes of content follow.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# The length of the file's header; the length of an element's type and length together.
HEADER_BYTES, TAG_BYTES = 128, 8
# Types of elements that contain elements.
MATRIX, COMPRESSED = 14, 15
# Types of the elements that contain the shape, the name and the flags of an array.
INT8, INT32, UINT32 = 1, 5, 6
COMPLEX, LOGICAL = 0x0800, 0x0200  # flags of an array

# The dtype of the stored values, by the type of their element; the dtype of an array, by its class;
# and the classes of variables that are no arrays of numbers.
STORED_DTYPES = {
    1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8",
}  # fmt: skip
ARRAY_DTYPES = {
    6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8",
}  # fmt: skip
OTHER_CLASSES = {
    1: "cell", 2: "struct", 3: "object", 4: "char", 5: "sparse", 16: "function", 17: "opaque",
}  # fmt: skip


@dataclass(frozen=True)
class Variable:
    """A variable of a file.

    Args:
        kind: the MATLAB class of the variable: "uint8", "logical", "complex", "struct", ….
        array: the values; None if the variable is not an array of real numbers.
    """

    kind: str
    array: np.ndarray | None


def read_mat(content: bytes) -> dict[str, Variable]:
    """Read all variables of a file by name.

    Args:
        content: the file's bytes.

    Raises:
        ValueError: if anything in the file is not as it should be.
        zlib.error: if a compressed element is damaged.
    """
    # The header ends with a version of two bytes, then MI, which little-endian files store as IM.
    byte_order = {b"IM": "<", b"MI": ">"}.get(content[HEADER_BYTES - 2 : HEADER_BYTES])
    if byte_order is None:
        raise ValueError("not a MATLAB 5 file")
    (version,) = struct.unpack(f"{byte_order}H", content[HEADER_BYTES - 4 : HEADER_BYTES - 2])
    if version != 0x0100:
        raise ValueError("not a MATLAB 5 file")
    variables: dict[str, Variable] = {}
    for element in _iter_elements(memoryview(content)[HEADER_BYTES:], byte_order):
        kind, inside = _decompress(element, byte_order)
        if kind == MATRIX and len(inside):
            name, variable = _read_variable(list(_iter_elements(inside, byte_order)), byte_order)
            if name in variables:
                raise ValueError(f"two variables are called {name}")
            variables[name] = variable
    return variables


def _decompress(element: tuple[int, memoryview], byte_order: str) -> tuple[int, memoryview]:
    """Return the one element inside a compressed element, or the element itself if not compressed.

    Args:
        element: the type and the bytes of the element.
        byte_order: the byte order, "<" or ">".
    """
    kind, content = element
    if kind != COMPRESSED:
        return element
    # Raises a ValueError unless there is exactly one element inside.
    (inside,) = _iter_elements(memoryview(zlib.decompress(content)), byte_order)
    return inside


def _iter_elements(content: memoryview, byte_order: str) -> Iterator[tuple[int, memoryview]]:
    """Yield the type and the bytes of each element, up to the end of the content.

    Args:
        content: the bytes of the elements.
        byte_order: the byte order, "<" or ">".
    """
    position = 0
    while position < len(content):
        if len(content) - position < TAG_BYTES:
            raise ValueError("an element is cut short")
        kind, length = struct.unpack_from(f"{byte_order}II", content, position)
        # A small element: a length and a type of two bytes each, then at most four bytes.
        if kind >> 16:
            length = kind >> 16
            kind = kind & 0xFFFF
            start = position + 4
            if length > 4:
                raise ValueError("a small element has more than four bytes")
            position += TAG_BYTES
        else:
            start = position + TAG_BYTES
            if length > len(content) - start:
                raise ValueError("an element is longer than the file")
            # Elements end at a multiple of eight bytes, except compressed ones.
            padding = 0 if kind == COMPRESSED else -length % 8
            # Some writers leave out the zeros after the last element.
            position = min(len(content), start + length + padding)
        yield kind, content[start : start + length]


def _read_variable(parts: list[tuple[int, memoryview]], byte_order: str) -> tuple[str, Variable]:
    """Read a variable of a MATLAB file, and its name.

    Args:
        parts: the type and the bytes of each element that the variable consists of: flags, shape,
            name and values, in this order.
        byte_order: the byte order, "<" or ">".

    Returns:
        The name; and the variable, whose `array` is None if it is no array of real numbers.
    """
    if not parts or parts[0][0] != UINT32 or len(parts[0][1]) != 8:
        raise ValueError("a variable has no flags")
    (flags,) = struct.unpack_from(f"{byte_order}I", parts[0][1])
    # The lowest byte is MATLAB's code for the class of the variable.
    class_code = flags & 0xFF
    if class_code in OTHER_CLASSES:
        name = ""
        if len(parts) > 2 and parts[2][0] == INT8:
            name = bytes(parts[2][1]).decode("latin1")
        return name, Variable(OTHER_CLASSES[class_code], array=None)
    dtype = ARRAY_DTYPES.get(class_code)
    is_complex = bool(flags & COMPLEX)
    # A complex array has a fifth element, its imaginary parts.
    if dtype is None or len(parts) != 4 + is_complex:
        raise ValueError("a variable has an unknown type, or lacks the parts of an array")
    (shape_type, shape), (name_type, name_bytes), (value_type, value_bytes) = parts[1:4]
    # The lengths of the axes are integers of four bytes.
    has_types = shape_type == INT32 and name_type == INT8 and value_type in STORED_DTYPES
    if not has_types or len(shape) % 4:
        raise ValueError("an array has no shape, name or numbers")
    lengths = struct.unpack(f"{byte_order}{len(shape) // 4}i", shape)
    stored_dtype = np.dtype(f"{byte_order}{STORED_DTYPES[value_type]}")
    n_bytes = math.prod(lengths) * stored_dtype.itemsize
    if len(lengths) < 2 or min(lengths) < 0 or n_bytes != len(value_bytes):
        raise ValueError("the length of an array does not match its shape")
    # MATLAB stores values in the narrowest dtype that holds them all; convert to the array's dtype.
    array = np.frombuffer(value_bytes, stored_dtype).astype(dtype, copy=False)
    name = bytes(name_bytes).decode("latin1")
    if is_complex:
        return name, Variable("complex", array=None)
    class_name = "logical" if flags & LOGICAL else np.dtype(dtype).name
    return name, Variable(class_name, array.reshape(lengths, order="F"))
