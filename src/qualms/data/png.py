"""Check that a PNG file is complete.

Pillow does not verify the checksums of pixels, and leaves missing rows black, so a truncated file
would be scored as if it were complete.
"""

import struct
import zlib
from typing import Any

# The length of the signature, with which a file starts.
SIGNATURE_BYTES = 8
# Bytes of a chunk without its data: length, type and checksum.
CHUNK_OVERHEAD = 12
# The number of channels by the color type in the header.
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# An interlaced image is stored in seven passes over a grid of its pixels. For each pass: the column
# and the row of the first pixel, then the step between columns and between rows.
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

    Rows can be missing only if Pillow left the last row black. So an image whose last row is not
    black is not decompressed a second time here, unless it is interlaced or has 16 bits.

    Args:
        content: the file's bytes.
        image: the Pillow image of these bytes.
    """
    header, compressed = _read_chunks(content)
    width, height, bit_depth, color_type, _, _, is_interlaced = struct.unpack(">IIBBBBB", header)
    last_row = (0, image.height - 1, image.width, image.height)
    has_16_bits = image.mode.startswith("I")
    # `getbbox` returns the box of the pixels that are not black.
    is_last_row_black = image.crop(last_row).getbbox() is None
    if not (is_interlaced or has_16_bits or is_last_row_black):
        return
    # The number of bytes of all rows, decompressed.
    expected_bytes = 0
    for x, y, x_step, y_step in PASSES if is_interlaced else ONE_PASS:
        columns = _ceil_div(width - x, x_step)
        rows = _ceil_div(height - y, y_step)
        if columns > 0 and rows > 0:
            row_bits = columns * bit_depth * CHANNELS[color_type]
            # One byte more for the type of filter, which precedes each row.
            expected_bytes += rows * (1 + _ceil_div(row_bits, 8))
    # `decompressobj` stops at `expected_bytes`, and does not raise if the data ends early.
    decompressed = zlib.decompressobj().decompress(compressed, expected_bytes)
    if len(decompressed) < expected_bytes:
        raise OSError("rows are missing")


def _read_chunks(content: bytes) -> tuple[bytes, bytes]:
    """Return the header (the data of chunk IHDR), and the compressed pixels (of all chunks IDAT).

    Args:
        content: the bytes of a PNG file: a signature, then chunks, each of which consists of its
            length, its type, its data and a checksum.

    Raises:
        OSError: if the checksum of a chunk other than metadata is wrong.
    """
    header = b""
    pixels = []
    position = SIGNATURE_BYTES
    while position + CHUNK_OVERHEAD <= len(content):
        (length,) = struct.unpack_from(">I", content, position)
        kind = content[position + 4 : position + 8]
        data_start = position + 8
        data_end = data_start + length
        # A type that starts in lowercase is metadata.
        if kind[:1].isupper():
            checksum = int.from_bytes(content[data_end : data_end + 4])
            # The checksum covers the type and the data; a memoryview avoids copying them.
            if zlib.crc32(memoryview(content)[position + 4 : data_end]) != checksum:
                raise OSError(f"the chunk {kind!r} is damaged")
            if kind == b"IHDR":
                header = content[data_start:data_end]
            elif kind == b"IDAT":
                pixels.append(content[data_start:data_end])
            elif kind == b"IEND":
                break
        position = data_end + 4
    return header, b"".join(pixels)


def _ceil_div(number: int, divisor: int) -> int:
    """Divide two integers, and round up."""
    return -(-number // divisor)
