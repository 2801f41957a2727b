"""Whether a PNG file has all that it says: Pillow checks no sums over pixels, and leaves missing
rows black.
"""

import struct
import zlib
from typing import Any

SIGNATURE = 8  # bytes before the first part
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


def require_whole(content: bytes, image: Any) -> None:
    """An OSError if a part of the file that matters is damaged, or if rows are missing.

    `image` is what Pillow made of the content. Only if its last row is empty can rows be missing,
    so others are not unpacked a second time; where pixels are interlaced, or of 16 bits, all are.
    """
    header, pixels, at = b"", [], SIGNATURE
    while at + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, at)
        kind, end = content[at + 4 : at + 8], at + 8 + length
        if kind[:1].isupper():  # those in small letters are notes
            if zlib.crc32(memoryview(content)[at + 4 : end]) != int.from_bytes(
                content[end : end + 4]
            ):
                raise OSError(f"the part {kind!r} is damaged")
            if kind == b"IHDR":
                header = content[at + 8 : end]
            elif kind == b"IDAT":
                pixels.append(content[at + 8 : end])
            elif kind == b"IEND":
                break
        at = end + 4
    wide, high, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    last = (0, image.height - 1, image.width, image.height)
    if interlaced or image.mode.startswith("I") or image.crop(last).getbbox() is None:
        places = PASSES if interlaced else ((0, 0, 1, 1),)
        sizes = [(-((x - wide) // across), -((y - high) // down)) for x, y, across, down in places]
        due = sum(
            (1 + (w * depth * CHANNELS[color] + 7) // 8) * h for w, h in sizes if w > 0 and h > 0
        )
        if len(zlib.decompressobj().decompress(b"".join(pixels), due)) < due:
            raise OSError("rows are missing")
