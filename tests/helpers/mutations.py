"""Files made wrong on purpose: each mutation follows from the content and the state of a
`random.Random` alone.

`damaged` knows nothing of formats. The others take a format apart, damage something inside, and put
it together again with lengths and checksums that are right, so that what is behind these checks is
reached.
"""

import gzip
import io
import json
import math
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]

POWERS = [2**bits for bits in (0, 7, 8, 15, 16, 24, 31, 32, 62, 63, 64)]
WHOLE = (0, *POWERS, *(-power for power in POWERS), *(power - 1 for power in POWERS))
DEPTH = 100_000  # of lists in lists
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, 1e308, -1e308, math.nan, math.inf,
    -math.inf, "", "x", "1", "a" * 10_000, "\ud800", "\0", "../../x", [], {}, [[]], [None], {"": None}, [1, "a", None],
)  # fmt: skip
# What a pickle can ask for: to call something, to set what is not its own, to remember a great many
# objects.
PICKLED = (
    b"cos\nsystem\n(S'true'\ntR", b"cbuiltins\nexec\n(S'1'\ntR", b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R",
    b"cbuiltins\ngetattr\n(cbuiltins\nobject\nS'__subclasses__'\ntR", b"(lp0\n", b"}", b"]", b")", b"(", b"0", b"1",
    b"2", b"R", b"b", b"\x81", b"u", b"s", b"t", b"o", b"i__main__\nx\n", b"r\xff\xff\xff\x7f", b"p4294967296\n",
    b"j\x00\x00\x00\x00", b"h\x00", b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x8e\x00\x00\x00\x00\x01\x00\x00\x00",
    b"B\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"T\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"I99999999999999\n",
    b"L" + b"9" * 5000 + b"L\n", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x97", b"\x98", b"Pid\n", b"Q", b".", b"ctorch\nload\n", b"cnumpy\nload\n(S'/etc/passwd'\ntR", b"K\xff", b"N",
)  # fmt: skip


def damaged(content: bytes, random: Random) -> bytes:
    """One to four damages anywhere, most of them near the beginning or the end, where headers are."""
    found = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        random.choice(DAMAGES)(found, random)
    return bytes(found)


def either(*mutations: Mutation) -> Mutation:
    """One of several."""
    return lambda content, random: random.choice(mutations)(content, random)


def _place(found: bytearray, random: Random) -> int:
    reach = len(found) if random.random() < 0.4 else min(len(found), 2 ** random.randrange(3, 12))
    at = random.randrange(reach + 1)
    return at if random.random() < 0.6 else len(found) - at


def _flip_bits(found: bytearray, random: Random) -> None:
    for _ in range(random.choice((1, 1, 2, 8))):
        if found:
            found[_place(found, random) % len(found)] ^= 1 << random.randrange(8)


def _set_byte(found: bytearray, random: Random) -> None:
    if found:
        found[_place(found, random) % len(found)] = random.choice(
            (0, 1, 127, 128, 255, random.randrange(256))
        )


def _write_whole(found: bytearray, random: Random) -> None:
    size, at = random.choice((1, 2, 4, 8)), _place(found, random)
    at = min(at - at % random.choice((1, size)), max(0, len(found) - size))
    number = random.choice(WHOLE) % 2 ** (8 * size)
    found[at : at + size] = number.to_bytes(size, random.choice(("little", "big")))


def _change_whole(found: bytearray, random: Random) -> None:
    """A length that is a little wrong, or another by far."""
    size, order = random.choice((1, 2, 4, 8)), random.choice(("little", "big"))
    at = min(_place(found, random), max(0, len(found) - size))
    number = int.from_bytes(found[at : at + size], order)
    changed = random.choice(
        (number + 1, number - 1, number * 2, number // 2, number + 2 ** random.randrange(8 * size))
    )
    found[at : at + size] = (changed % 2 ** (8 * size)).to_bytes(size, order)


def _cut(found: bytearray, random: Random) -> None:
    del found[_place(found, random) :]


def _behead(found: bytearray, random: Random) -> None:
    del found[: _place(found, random)]


def _extend(found: bytearray, random: Random) -> None:
    count = 2 ** random.randrange(12)
    found += random.choice(
        (bytes(count), random.randbytes(count), bytes(found[:count]), b"\xff" * count)
    )


def _block(found: bytearray, random: Random) -> tuple[int, int]:
    start = _place(found, random)
    return start, min(len(found), start + 2 ** random.randrange(12))


def _remove(found: bytearray, random: Random) -> None:
    start, end = _block(found, random)
    del found[start:end]


def _repeat(found: bytearray, random: Random) -> None:
    start, end = _block(found, random)
    found[end:end] = found[start:end] * random.choice((1, 1, 2, 9))


def _swap(found: bytearray, random: Random) -> None:
    start, end = _block(found, random)
    middle = random.randint(start, end)
    found[start:end] = found[middle:end] + found[start:middle]


def _overwrite(found: bytearray, random: Random) -> None:
    start, end = _block(found, random)
    at = _place(found, random)
    found[at : at + end - start] = random.choice(
        (found[start:end], bytes(end - start), random.randbytes(end - start))
    )


DAMAGES = (
    _flip_bits, _flip_bits, _set_byte, _write_whole, _write_whole, _change_whole, _cut, _behead, _extend, _remove,
    _repeat, _swap, _overwrite,
)  # fmt: skip


def nothing(content: bytes, random: Random) -> bytes:
    """As it is: for formats that are damaged in what is around it."""
    return content


def damaged_pickle(content: bytes, random: Random) -> bytes:
    """Something that a pickle can ask for, put in or over what is there."""
    found = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 3))):
        at, asked = random.randrange(len(found) + 1), random.choice(PICKLED)
        found[at : at + random.choice((0, 0, len(asked)))] = asked
    return bytes(found)


def damaged_json(content: bytes, random: Random) -> bytes:
    """Values of other kinds, and keys that are gone, doubled or called otherwise; now and then
    lists without end.
    """
    value = [json.loads(content)]
    deep = False
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        deep |= _damage_value(value, random)
    text = json.dumps(value[0], ensure_ascii=random.random() < 0.9)
    if deep:
        opened, closed = random.choice((("[", "]"), ('{"a":', "}")))
        text = text.replace('"DEEP"', opened * DEPTH + "1" + closed * random.choice((DEPTH, 0)))
    return text.encode("utf-8", "surrogatepass")


def _damage_value(value: list[Any], random: Random) -> bool:
    """Whether there is a place for lists without end now."""
    places = [(value, 0)]
    for inside, key in places:  # grows while it is gone through
        child: Any = inside[key]
        if len(places) < 5000 and isinstance(child, (dict, list)):
            places += [
                (child, k)
                for k in (child if isinstance(child, dict) else range(min(len(child), 50)))
            ]
    inside, key = random.choice(places)
    chance = random.random()
    if chance < 0.03:
        inside[key] = "DEEP"
        return True
    if chance < 0.55 or inside is value:
        inside[key] = deepcopy(random.choice(VALUES))
    elif chance < 0.7:
        del inside[key]
    elif chance < 0.8:
        other, name = random.choice(places)
        inside[key] = json.loads(json.dumps(other[name]))
    elif isinstance(inside, dict):
        inside[random.choice(("", "x", f"{key}2", str(key).upper(), "\ud800", "a" * 300))] = (
            inside.pop(key)
        )
    else:
        inside[key:key] = [
            deepcopy(random.choice(VALUES)) for _ in range(random.choice((1, 3, 300)))
        ]
    return False


def damaged_lines(content: bytes, random: Random) -> bytes:
    """One line of JSON lines."""
    lines = content.split(b"\n")
    at = random.choice([i for i, line in enumerate(lines) if line.strip()])
    lines[at] = damaged_json(lines[at], random)
    return b"\n".join(lines)


def in_gzip(inner: Mutation) -> Mutation:
    """What was compressed."""
    return lambda content, random: gzip.compress(
        inner(gzip.decompress(content), random), 1, mtime=0
    )


def in_zip(inner: Mutation | dict[str, Mutation]) -> Mutation:
    """One of the files in it, by the ending of its name if there are several mutations; or its
    name, or its being.
    """

    def mutate(content: bytes, random: Random) -> bytes:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            entries = [(info, file.read(info)) for info in file.infolist()]
        chosen = random.randrange(len(entries))
        if isinstance(inner, dict):
            wanted = random.choice(list(inner))
            chosen = random.choice(
                [i for i, (e, _) in enumerate(entries) if e.filename.endswith(wanted)] or [chosen]
            )
            change = inner.get(wanted, damaged)
        else:
            change = inner
        info, inside = entries[chosen]
        what = random.random()
        if what < 0.85:
            entries[chosen] = (info, change(inside, random))
        elif what < 0.9:
            del entries[chosen]
        elif what < 0.95:
            info.filename = random.choice(
                ("x", "../x", "/x", info.filename.upper(), entries[0][0].filename)
            )
        else:
            entries.append((info, inside))
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a name that is there twice
            for info, inside in entries:
                with file.open(_entry(info, random), "w") as entry:
                    entry.write(inside)
        return stream.getvalue()

    return mutate


def _entry(info: zipfile.ZipInfo, random: Random) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(info.filename)
    entry.compress_type = zipfile.ZIP_DEFLATED if random.random() < 0.05 else info.compress_type
    return entry


def in_tar(inner: Mutation) -> Mutation:
    """A file in it; or a header, whose checksum is made right again."""

    def mutate(content: bytes, random: Random) -> bytes:
        with tarfile.open(fileobj=io.BytesIO(content)) as file:
            members = [(member, file.extractfile(member)) for member in file]
            entries = [
                (member, b"" if stream is None else stream.read()) for member, stream in members
            ]
        chosen, by_header = random.randrange(len(entries)), random.random() < 0.5
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as file:
            for i, (member, inside) in enumerate(entries):
                if i == chosen and not by_header:
                    inside = inner(inside, random)
                    member.size = len(inside)
                file.addfile(member, io.BytesIO(inside))
        found = bytearray(stream.getvalue())
        if by_header:
            at = random.choice([m.offset for m, _ in entries])
            header = bytearray(damaged(bytes(found[at : at + 512]), random)[:512].ljust(512, b"\0"))
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            found[at : at + 512] = header
        return bytes(found)

    return mutate


def in_png(content: bytes, random: Random) -> bytes:
    """A part, or the rows behind the compression, with the checksums of both."""
    if not content.startswith(b"\x89PNG"):
        return damaged(content, random)
    at, parts = 8, []
    while at < len(content):
        (length,) = struct.unpack_from(">I", content, at)
        parts.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    chosen = random.randrange(len(parts))
    kind, inside = parts[chosen]
    if kind == b"IDAT" and random.random() < 0.8:
        inside = zlib.compress(damaged(zlib.decompress(inside), random))
    else:
        inside = damaged(inside, random)
    changed = [(kind, inside)]
    what = random.random()
    if what < 0.1:
        changed = []
    elif what < 0.2:
        changed *= 2
    parts[chosen : chosen + 1] = changed
    return content[:8] + b"".join(
        struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
        for name, part in parts
    )


def in_mat(content: bytes, random: Random) -> bytes:
    """An element of a MATLAB 5 file behind its compression."""
    at, parts = 128, []
    while at < len(content):
        kind, length = struct.unpack_from("<II", content, at)
        parts.append((kind, content[at + 8 : at + 8 + length]))
        at += 8 + length
    chosen = random.randrange(len(parts))
    kind, inside = parts[chosen]
    parts[chosen] = (kind, zlib.compress(damaged(zlib.decompress(inside), random), 1))
    return content[:128] + b"".join(
        struct.pack("<II", kind, len(inside)) + inside for kind, inside in parts
    )


def in_safetensors(content: bytes, random: Random) -> bytes:
    """The description of the tensors, with its length."""
    length = int.from_bytes(content[:8], "little")
    header = damaged_json(content[8 : 8 + length], random)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]
