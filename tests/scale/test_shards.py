"""Shards: the scores of any number of images, in files that a later run goes on with."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

import qualms
from qualms.data import Images
from qualms.disk import locked
from qualms.scale.shards import LOCK, Done, ScoreImages, score_shards
from qualms.scale.source import PART, open_source
from qualms.tasks.network import Network
from tests.scale.conftest import COUNT, FORMATS, METHODS, as_folder, as_parquet


def shards(folder: Path) -> pyarrow.Table:
    return pyarrow.concat_tables([parquet.read_table(path) for path in sorted(folder.glob("shard-*.parquet"))])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [30, 4096])
def test_every_format_and_shard_size_gives_the_scores_of_one_call(
    kind: str, size: int, digits: Images, network: Network, score: ScoreImages, tmp_path: Path
) -> None:
    source = open_source(FORMATS[kind](digits, tmp_path / "data"), None, network.fit)
    done = score_shards(score, source, tmp_path / "out", {"seed": 0}, size)
    assert done == Done(COUNT, 0, None)
    table, want = shards(tmp_path / "out"), score(digits, 0)
    assert len(list((tmp_path / "out").glob("shard-*"))) == (3 if size == 30 else 1)
    for name in METHODS:
        np.testing.assert_allclose(table[f"score_{name}"].to_numpy(), want.scores[name].numpy(), rtol=1e-4)
    assert table["prediction"].to_pylist() == want.prediction.tolist()
    ids = table["id"].to_pylist()
    assert len(set(ids)) == COUNT
    assert ids[40] == {"folder": "040.png", "npz": 40, "parquet": "1.parquet row 13", "tar": "1.tar 040"}[kind]


def test_a_run_that_goes_on_leaves_what_is_there_and_ends_as_one_that_was_not_stopped(
    digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    source = open_source(as_parquet(digits, tmp_path / "data"), None, None)
    score_shards(score, source, tmp_path / "whole", {}, 20)
    asked: list[int] = []

    def stopped(images: Images, place: int) -> qualms.Scored:
        if place >= 40:
            raise KeyboardInterrupt
        return score(images, place)

    def watched(images: Images, place: int) -> qualms.Scored:
        asked.append(place)
        return score(images, place)

    with pytest.raises(KeyboardInterrupt):
        score_shards(stopped, source, tmp_path / "out", {}, 20)
    assert {"shard-00000.parquet", "shard-00001.parquet"} == {p.name for p in (tmp_path / "out").glob("shard*")}
    (tmp_path / "out" / "shard-00000.parquet").unlink()
    score_shards(watched, source, tmp_path / "out", {}, 20)
    assert asked == [0, 40, 60]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    asked.clear()
    score_shards(watched, source, tmp_path / "out", {}, 20)
    assert asked == []


def test_what_cannot_be_read_is_listed_and_changes_no_other_score(
    digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    source = open_source(as_folder(digits, tmp_path / "data"), None, None)
    score_shards(score, source, tmp_path / "all", {}, 20)
    for number in (*range(20, 40), 45):
        (tmp_path / "data" / f"{number:03d}.png").write_bytes(b"no image")
    source = open_source(str(tmp_path / "data"), None, None)
    assert score_shards(score, source, tmp_path / "out", {}, 20) == Done(COUNT - 21, 21, None)
    assert parquet.read_metadata(tmp_path / "out" / "shard-00001.parquet").num_rows == 0
    rejected = parquet.read_table(tmp_path / "out" / "rejected.parquet").to_pylist()
    assert [one["id"] for one in rejected] == [f"{number:03d}.png" for number in (*range(20, 40), 45)]
    assert "not an image" in rejected[0]["reason"]
    found, every = (
        {row["id"]: row[f"score_{METHODS[0]}"] for row in shards(tmp_path / run).to_pylist()} for run in ("out", "all")
    )
    assert len(found) == COUNT - 21
    assert found == pytest.approx({one: every[one] for one in found}, rel=1e-4)
    said = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert said["done"] == {"scored": COUNT - 21, "rejected": 21, "accepted": None}


def test_a_source_of_which_nothing_can_be_read_is_an_error(tmp_path: Path, score: ScoreImages) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(b"no image")
    source = open_source(str(tmp_path / "data"), None, None)
    with pytest.raises(qualms.QualmsError, match=r"none of the first 1 images of .* can be read: a.png is cut or not"):
        score_shards(score, source, tmp_path / "out", {}, 20)


@pytest.mark.parametrize(
    ("about", "size", "told"),
    [({"seed": 1}, 20, "seed 0, not 1"), ({"seed": 0}, 10, "shard_size 20, not 10"), ({}, 20, "seed 0, not None")],
)
def test_a_folder_of_another_run_is_refused(
    about: dict[str, Any], size: int, told: str, digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    source = open_source(as_folder(digits, tmp_path / "data"), None, None)
    score_shards(score, source, tmp_path / "out", {"seed": 0}, 20)
    before = contents(tmp_path / "out")
    with pytest.raises(qualms.QualmsError, match=f"made otherwise: {told}; score as they were"):
        score_shards(score, source, tmp_path / "out", about, size)
    assert contents(tmp_path / "out") == before


def test_other_images_are_refused(digits: Images, score: ScoreImages, tmp_path: Path) -> None:
    data = as_folder(digits, tmp_path / "data")
    score_shards(score, open_source(data, None, None), tmp_path / "out", {}, 20)
    (tmp_path / "data" / "new.png").write_bytes((tmp_path / "data" / "000.png").read_bytes())
    with pytest.raises(qualms.QualmsError, match="made otherwise: inputs "):
        score_shards(score, open_source(data, None, None), tmp_path / "out", {}, 20)


def test_a_folder_that_holds_something_else_is_refused(digits: Images, score: ScoreImages, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    source = open_source(as_folder(digits, tmp_path / "data"), None, None)
    with pytest.raises(
        qualms.QualmsError, match=r"out holds mine.txt and no manifest.json; choose a folder of its own"
    ):
        score_shards(score, source, tmp_path / "out", {}, 20)


def test_two_runs_do_not_meet_in_one_folder(digits: Images, score: ScoreImages, tmp_path: Path) -> None:
    source = open_source(as_folder(digits, tmp_path / "data"), None, None)
    with (
        locked(tmp_path / "out" / LOCK),
        pytest.raises(qualms.QualmsError, match="is in use by another run; wait for it"),
    ):
        score_shards(score, source, tmp_path / "out", {}, 20)


def test_a_disk_without_room_is_told_and_leaves_no_half_of_a_file(
    digits: Images, score: ScoreImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(table: object, where: Path) -> None:
        Path(where).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    source = open_source(as_folder(digits, tmp_path / "data"), None, None)
    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(qualms.QualmsError, match=r"shard-00000.parquet cannot be written .No space left on device"):
        score_shards(score, source, tmp_path / "out", {}, 20)
    assert sorted(os.listdir(tmp_path / "out")) == [LOCK, "manifest.json"]


# Sources.


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("start", [0, 5, 27, 61, COUNT])
def test_a_source_goes_on_from_any_place_and_no_part_crosses_a_shard(
    kind: str, start: int, digits: Images, tmp_path: Path
) -> None:
    source = open_source(FORMATS[kind](digits, tmp_path / "data"), None, None)
    assert source.count == (None if kind == "tar" else COUNT)
    parts = list(source.parts(start, 50))
    found = torch.cat([part.images.pixels[:, :1] for part in parts]) if parts else digits.pixels[COUNT:]
    assert torch.equal(found, digits.pixels[start:])
    sizes = [part.count for part in parts]
    assert sizes[:2] == [min(PART, COUNT - start), min(50 - PART, COUNT - start - PART)][: len(sizes)]


def test_memory_holds_a_few_parts_and_not_all(digits: Images, tmp_path: Path) -> None:
    """What was read and not asked for yet, whatever the number of images."""
    from qualms.scale import source as module

    read: list[int] = []
    original = module._read

    def counted(files: Any, *rest: Any) -> Any:
        read.append(len(files))
        return original(files, *rest)

    data = as_folder(digits, tmp_path / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_read", counted)
        patch.setattr(module, "PART", 4)
        parts = open_source(data, None, None).parts(0, 4096)
        next(parts)
        assert sum(read) <= 4 * (module.THREADS + 1)
        parts.close()


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda p: (p / "a.tar").write_bytes(b"nothing" * 200), "a.tar is cut, not a .tar file"),
        (lambda p: (p / "a.parquet").write_bytes(b"PAR1 no"), "a.parquet is cut or not a parquet file"),
        (lambda p: (p / "a.npz").write_bytes(b"no"), "a.npz is cut or not a .npz file"),
        (lambda p: parquet.write_table(pyarrow.table({"y": [1]}), p / "a.parquet"), "the columns y and no images"),
        (lambda p: [(p / "a.tar").touch(), (p / "a.parquet").touch()], "a pattern names .parquet or .tar files alone"),
    ],
)
def test_broken_files_are_told(write: Any, told: str, tmp_path: Path) -> None:
    write(tmp_path)
    name = "a.*"
    with pytest.raises(qualms.QualmsError, match=told):
        list(open_source(str(tmp_path / name), None, None).parts(0, 10))


def test_a_sample_without_an_image_is_rejected(digits: Images, tmp_path: Path) -> None:
    import io
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as file:
        entry = tarfile.TarInfo("one.txt")
        file.addfile(entry, io.BytesIO())
    (part,) = open_source(str(tmp_path / "a.tar"), None, None).parts(0, 10)
    assert [(one.id, one.reason) for one in part.rejected] == [("one", "a sample without an image that Pillow reads")]
