"""Check that a PNG file is complete.

Pillow does not verify checksums of pixels, and leaves missing rows black, so that a truncated file
would be scored as if it were complete.
"""

import struct
import zlib
from typing import Any

SIGNATURE = 8  # bytes before the first chunk
# Bytes of a chunk without its data: length, type and checksum.
CHUNK_OVERHEAD = 12
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by the type of color
# Where an interlaced image's passes begin, and how far apart their pixels are, across and down.
PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
ONE_PASS = ((0, 0, 1, 1),)


def require_complete_png(content: bytes, image: Any) -> None:
    """Raise an OSError if a chunk other than metadata is damaged, or if rows are missing.

    Rows can be missing only if Pillow left the last row black. So other images are not decompressed
    a second time, unless they are interlaced or have 16 bits.

    Args:
        content: the file's bytes.
        image: the Pillow image of these bytes.
    """
    header, pixels = _read_chunks(content)
    wide, high, depth, color, _, _, is_interlaced = struct.unpack(">IIBBBBB", header)
    last_row = (0, image.height - 1, image.width, image.height)
    is_deep = image.mode.startswith("I")
    if not (is_interlaced or is_deep or image.crop(last_row).getbbox() is None):
        return
    expected = 0  # bytes of all rows, decompressed
    for x, y, across, down in PASSES if is_interlaced else ONE_PASS:
        columns = _ceil_div(wide - x, across)
        rows = _ceil_div(high - y, down)
        if columns > 0 and rows > 0:
            bits = columns * depth * CHANNELS[color]
            # A row starts with a byte for the type of its filter.
            expected += rows * (1 + _ceil_div(bits, 8))
    found = zlib.decompressobj().decompress(pixels, expected)
    if len(found) < expected:
        raise OSError("rows are missing")


def _read_chunks(content: bytes) -> tuple[bytes, bytes]:
    """Return the data of the chunk IHDR, and that of all chunks IDAT, the compressed pixels.

    Raises:
        OSError: if the checksum of a chunk other than metadata is wrong.
    """
    header = b""
    pixels = []
    at = SIGNATURE
    while at + CHUNK_OVERHEAD <= len(content):
        (length,) = struct.unpack_from(">I", content, at)
        kind = content[at + 4 : at + 8]
        end = at + 8 + length
        if kind[:1].isupper():  # chunks in lowercase are metadata
            found = int.from_bytes(content[end : end + 4])
            if zlib.crc32(memoryview(content)[at + 4 : end]) != found:
                raise OSError(f"the chunk {kind!r} is damaged")
            if kind == b"IHDR":
                header = content[at + 8 : end]
            elif kind == b"IDAT":
                pixels.append(content[at + 8 : end])
            elif kind == b"IEND":
                break
        at = end + 4
    return header, b"".join(pixels)


def _ceil_div(number: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-number // divisor)
