"""Files that claim what they do not hold are refused before room is made for it, or before it is
taken for data.
"""

import io
import json
import lzma
import pickle
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import qualms
from qualms.data import Normalization, load
from qualms.data.decode import Unreadable, decode_image
from qualms.data.texts import read_texts
from qualms.models import read_state
from qualms.scale.batch import rejected_in
from qualms.scale.cluster import filter_rejections, require_once
from qualms.scale.shard_folder import count_rows, finish, open_shard_folder
from qualms.stream.source import open_source
from qualms.tasks.journal import read
from tests.helpers import layouts
from tests.helpers.mutations import DEPTH

DEEP = "[" * DEPTH


def part(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png(rows: bytes, wide: int, high: int, interlaced: int = 0) -> bytes:
    """Gray, with these rows, each after the number of its filter."""
    header = struct.pack(">IIBBBBB", wide, high, 8, 0, 0, 0, interlaced)
    return (
        b"\x89PNG\r\n\x1a\n"
        + part(b"IHDR", header)
        + part(b"IDAT", zlib.compress(rows))
        + part(b"IEND", b"")
    )


def test_a_png_without_its_last_rows_is_not_read_as_black() -> None:
    row = b"\0" + bytes([200] * 8)
    assert decode_image(png(row * 6, 8, 6), "a.png")[0].getextrema() == ((200, 200),) * 3
    with pytest.raises(Unreadable, match="truncated or not an image"):
        decode_image(png(row * 4, 8, 6), "a.png")
    black = b"\0" + bytes(8)
    assert decode_image(png(row * 5 + black, 8, 6), "a.png")[0].getpixel((0, 5)) == (0, 0, 0), (
        "black rows that are there"
    )


def test_an_interlaced_png_has_all_its_passes() -> None:
    # Of 3 x 2 pixels, the passes that are not empty have rows of 1, 1, 1 and 3.
    whole = b"\0\x0a" + b"\0\x0b" + b"\0\x0c" + b"\0\x14\x15\x16"
    image, _ = decode_image(png(whole, 3, 2, interlaced=1), "a.png")
    assert np.asarray(image)[..., 0].tolist() == [[10, 12, 11], [20, 21, 22]]
    with pytest.raises(Unreadable):
        decode_image(png(whole[:-4], 3, 2, interlaced=1), "a.png")


def test_pixels_of_a_png_that_were_changed_on_the_way_are_not_read() -> None:
    content = bytearray(layouts.png(layouts.GRAY[1]))
    content[content.index(b"IDAT") + 200] ^= 1
    with pytest.raises(Unreadable):
        decode_image(bytes(content), "a.png")


def test_a_npz_file_cannot_claim_more_than_it_holds(tmp_path: Path) -> None:
    path = layouts.write_npz(tmp_path)
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    struct.pack_into("<I", content, entry + 20, 2**32 - 2)  # how long it is compressed
    path.write_bytes(content)
    for read_it in (
        lambda: load("things.npz", tmp_path),
        lambda: open_source(str(path), None, None).first(),
    ):
        with pytest.raises(
            qualms.QualmsError,
            match=r"truncated or not a \.npz file of plain numbers \(BadZipFile\)",
        ):
            read_it()


@pytest.mark.parametrize(("kind", "place"), [("BMP", 18), ("GIF", 6)])
def test_an_image_cannot_claim_more_pixels_than_its_bytes_can_hold(kind: str, place: int) -> None:
    content = bytearray(layouts.png(layouts.GRAY[1], kind))
    content[place : place + (8 if kind == "BMP" else 4)] = struct.pack(
        "<ii" if kind == "BMP" else "<HH", 12000, 12000
    )
    with pytest.raises(
        Unreadable,
        match="a is too large for its file size: its header claims 144,000,000 pixels in ",
    ):
        decode_image(bytes(content), "a")


def test_a_large_image_of_one_color_is_read() -> None:
    stream = io.BytesIO()
    Image.new("1", (5000, 5000)).save(stream, "PNG")
    assert decode_image(stream.getvalue(), "blank.png")[0].size == (5000, 5000)


def test_a_tar_file_that_is_compressed_by_xz_is_refused_and_by_gzip_read(tmp_path: Path) -> None:
    import gzip
    import tarfile

    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        entry = tarfile.TarInfo("a.png")
        image = layouts.png(layouts.GRAY[1])
        entry.size = len(image)
        file.addfile(entry, io.BytesIO(image))
    path = tmp_path / "a.tar"
    path.write_bytes(gzip.compress(stream.getvalue()))
    assert len(open_source(str(path), None, None).first()) == 1
    path.write_bytes(lzma.compress(stream.getvalue()))
    with pytest.raises(qualms.QualmsError, match=r"a\.tar"):
        open_source(str(path), None, None).first()


def test_strange_escapes_in_a_pickle_warn_nobody(tmp_path: Path) -> None:
    layouts.write_cifar10(tmp_path, b"S'\\E'\n.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(qualms.QualmsError, match="does not contain a dictionary"):
            load("cifar10", tmp_path)


def test_a_name_of_half_a_character_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "One.", "id": "\\ud800"}\n{"text": "Two."}\n')
    with pytest.raises(qualms.QualmsError, match="named in invalid Unicode"):
        read_texts(tmp_path / "a.jsonl")
    found = read_texts(tmp_path / "a.jsonl", strict=False)
    assert [one.text for one in found.documents] == ["Two."]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_checkpoint_cannot_claim_more_than_its_file_holds(
    compression: int, tmp_path: Path
) -> None:
    torch.save({"a": torch.arange(3.0)}, tmp_path / "saved.pt")
    with (
        zipfile.ZipFile(tmp_path / "saved.pt") as saved,
        zipfile.ZipFile(tmp_path / "a.pt", "w", compression) as packed,
    ):
        for entry in saved.infolist():
            packed.writestr(entry.filename, saved.read(entry))
    assert read_state(tmp_path / "a.pt")["a"].tolist() == [0, 1, 2]
    content = bytearray((tmp_path / "a.pt").read_bytes())
    at = content.rindex(b"PK\x01\x02") + 24  # the length of the last entry, in the list at the end
    content[at : at + 4] = struct.pack("<I", 2**31)
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(qualms.QualmsError, match=r"claims 2147483648 bytes, unpacked from \d+"):
        read_state(tmp_path / "a.pt")


def test_a_checkpoint_in_the_old_format_cannot_claim_more_than_its_file_holds(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.zeros(1000)}, path, _use_new_zipfile_serialization=False)
    assert read_state(path)["w"].shape == (1000,)
    content = path.read_bytes()
    assert (
        content.count(b"M\xe8\x03") >= 2
    )  # 1000 numbers: in the storage, and in the tensor's shape
    path.write_bytes(content.replace(b"M\xe8\x03", b"J\xff\xff\xff\x7f"))
    with pytest.raises(qualms.QualmsError, match=r"claims 2147483647 numbers in \d+ bytes"):
        read_state(path)
    path.write_bytes(pickle.dumps(1) + b"X\xff\xff\xff\x7f")
    with pytest.raises(qualms.QualmsError, match="damaged or not a torch checkpoint"):
        read_state(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("value", "NaN"),
        ("value", "Infinity"),
        ("value", '"0.5"'),
        ("value", "true"),
        ("value", DEEP),
        ("value", "1" + "0" * 400),
        ("samples", '"3"'),
        ("samples", "2.5"),
        ("rule", "[]"),
        ("rule", '" "'),
        ("reference", "[2, 1]"),
        ("reference", "[NaN]"),
        ("reference", '"123"'),
        ("provenance", '{"method": 1, "network": "a"}'),
        ("provenance", '{"method": "a", "network": "a", "seed": "0"}'),
        ("provenance", '{"method": "a", "network": "a", "tolerance": NaN}'),
    ],
)
def test_a_threshold_is_read_as_it_was_written_or_not_at_all(
    key: str, value: str, tmp_path: Path
) -> None:
    right = {
        "value": "0.5",
        "samples": "3",
        "rule": '"coverage 0.9"',
        "reference": "[0.1, 0.5]",
        "provenance": "null",
    }
    path = tmp_path / "t.json"
    for content, good in ((right, True), (right | {key: value}, False)):
        path.write_text(
            "{" + ", ".join(f'"{name}": {text}' for name, text in content.items()) + "}"
        )
        if good:
            assert qualms.Threshold.load(path).value == 0.5
        else:
            with pytest.raises(qualms.QualmsError, match="is not a threshold file"):
                qualms.Threshold.load(path)


@pytest.mark.parametrize(
    "done",
    [
        {"scored": "1", "rejected": 0, "accepted": None},
        {"scored": 1, "rejected": -1, "accepted": None},
        {"scored": 1, "rejected": 0, "accepted": 2},
        {"scored": 1, "rejected": 0, "accepted": False},
        {"scored": 1, "rejected": 0, "accepted": ""},
        "DEEP",
    ],
)
def test_a_manifest_counts_in_whole_numbers(done: Any, tmp_path: Path) -> None:
    _write(tmp_path / "shard-00000.parquet", {"id": ["a"]})
    finish(tmp_path, {"seed": 0}, [tmp_path / "shard-00000.parquet"], [])
    text = json.dumps({"seed": 0, "done": done}).replace('"DEEP"', DEEP)
    (tmp_path / "manifest.json").write_text(text)
    with (
        pytest.raises(qualms.QualmsError, match="cannot be read as a manifest"),
        open_shard_folder(tmp_path, {"seed": 0}),
    ):
        pass


def _write(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def test_shards_that_are_damaged_are_named(tmp_path: Path) -> None:
    shard = tmp_path / "shard-00000.parquet"
    shard.write_bytes(b"PAR1 no more PAR1")
    for read_it in (
        not_scored_in,
        require_once,
        lambda folder: count_rows([shard]),
        finished,
        rejected_in,
    ):
        with pytest.raises(
            qualms.QualmsError, match=r"shard-00000\.parquet is truncated or not a parquet file"
        ):
            read_it(tmp_path)
    _write(shard, {"id": ["a"], "accepted": ["yes"]})
    with pytest.raises(qualms.QualmsError, match=r"values other than true and false"):
        finished(tmp_path)
    shard.unlink()
    _write(tmp_path / "list.parquet", {"id": [1], "reason": [None]})
    with pytest.raises(qualms.QualmsError, match=r"not a valid list of rejected images"):
        rejected_in(tmp_path)


def not_scored_in(folder: Path) -> None:
    filter_rejections([], folder)


def finished(folder: Path) -> None:
    finish(folder, {}, [folder / "shard-00000.parquet"], [])


ROW = {"row": "accuracy", "data": "d", "n": 3, "images": "ab", "accuracy": 0.5}


@pytest.mark.parametrize(
    "change",
    [{"accuracy": "0.5"}, {"accuracy": True}, {"n": 3.5}, {"data": None}, {"row": 3}, {"row": [3]}],
)
def test_rows_have_values_of_their_kinds(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"row": "run"}\n' + json.dumps(ROW) + "\n")
    assert read(path)[1] == ROW
    path.write_text('{"row": "run"}\n' + json.dumps(ROW | change) + "\n")
    with pytest.raises(qualms.QualmsError, match=r"line 2 of .* is not a row of a run"):
        read(path)


@pytest.mark.parametrize(
    "line", [DEEP, json.dumps({k: v for k, v in ROW.items() if k != "images"})]
)
def test_rows_without_end_or_without_a_key_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"row": "run"}\n' + line + "\n")
    with pytest.raises(qualms.QualmsError, match=r"line 2 of .* is not a row of a run"):
        read(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("mean", "std"),
    [(float("nan"), 0.5), (float("inf"), 0.5), (0.5, float("inf")), (0.5, 1e-46), (1e30, 1e-30)],
)
def test_a_normalization_gives_finite_numbers(mean: float, std: float) -> None:
    with pytest.raises(qualms.QualmsError, match="not finite"):
        Normalization((mean,), (std,))
