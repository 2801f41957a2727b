"""Shards: the scores of any number of images, in files that a later run goes on with."""

import io
import json
import os
import pickle
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

import qualms
from qualms.data import Images, load
from qualms.disk import lock_file
from qualms.scale.shard_folder import LOCK, Done
from qualms.scale.shards import ScoreImages, score_shards
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import Network
from qualms.stream.sizes import BATCH
from qualms.stream.source import ImageBatch, open_source
from tests.helpers.stores import COUNT, FORMATS, METHODS, as_folder, as_npz, as_parquet, png


def shards(folder: Path) -> pyarrow.Table:
    return pyarrow.concat_tables(
        [parquet.read_table(path) for path in sorted(folder.glob("shard-*.parquet"))]
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [30, 4096])
def test_every_format_and_shard_size_gives_the_scores_of_one_call(
    kind: str, size: int, digits: Images, network: Network, score: ScoreImages, tmp_path: Path
) -> None:
    source = open_source(FORMATS[kind](digits, tmp_path / "data"), None, network.transform)
    done = score_shards(score, source, tmp_path / "out", {"seed": 0}, size)
    assert done == Done(COUNT, 0, None)
    table, want = shards(tmp_path / "out"), score(digits, 0)
    assert len(list((tmp_path / "out").glob("shard-*"))) == (3 if size == 30 else 1)
    for name in METHODS:
        np.testing.assert_allclose(
            table[f"score_{name}"].to_numpy(), want.scores[name].numpy(), rtol=1e-4
        )
    assert table["prediction"].to_pylist() == want.prediction.tolist()
    ids = table["id"].to_pylist()
    assert len(set(ids)) == COUNT
    assert (
        ids[40]
        == {"folder": "040.png", "npz": 40, "parquet": "1.parquet row 13", "tar": "1.tar 040"}[kind]
    )


def test_with_a_threshold_the_accepted_images_of_all_shards_are_counted(
    digits: Images, network: Network, tmp_path: Path
) -> None:
    plain = ImageScorer(network, qualms.Scorer(network.model, "entropy")).score(digits)
    limit = qualms.Threshold.from_scores(plain.scores["entropy"], coverage=0.6)
    score = ImageScorer(network, qualms.Scorer(network.model, "entropy", threshold=limit)).score
    source = open_source(as_npz(digits, tmp_path / "data"), None, None)
    done = score_shards(score, source, tmp_path / "out", {}, 30)
    assert done == Done(COUNT, 0, sum(shards(tmp_path / "out")["accepted"].to_pylist()))
    assert done.accepted is not None
    assert abs(done.accepted - 0.6 * COUNT) <= 1


def test_a_shard_may_be_of_a_single_image(
    digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    source = open_source(as_npz(digits.take(slice(0, 3)), tmp_path / "data"), None, None)
    assert score_shards(score, source, tmp_path / "out", {}, 1) == Done(3, 0, None)
    assert len(list((tmp_path / "out").glob("shard-*"))) == 3


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_progress_counts_images_up_to_all_of_them_or_to_those_so_far(
    kind: str, digits: Images, network: Network, score: ScoreImages, tmp_path: Path
) -> None:
    source, told = (
        open_source(FORMATS[kind](digits, tmp_path / "data"), None, network.transform),
        list[tuple[int, int]](),
    )
    score_shards(
        score,
        source,
        tmp_path / "out",
        {},
        30,
        progress=lambda _, now, total: told.append((now, total)),
    )
    so_far = [now for now, _ in told]
    assert so_far == sorted(set(so_far))
    assert [total for _, total in told] == ([COUNT] * len(told) if kind == "folder" else so_far)
    assert told[-1] == (COUNT, COUNT)


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
    for half in (".shard-00001.parquet.1.part", ".shard-00002.parquet.1.part"):
        (tmp_path / "out" / half).write_bytes(b"what a kill leaves")
    assert {"shard-00000.parquet", "shard-00001.parquet"} == {
        p.name for p in (tmp_path / "out").glob("shard*")
    }
    (tmp_path / "out" / "shard-00000.parquet").unlink()
    score_shards(watched, source, tmp_path / "out", {}, 20)
    assert asked == [0, 1, 4, 16, 40, 41, 44, 56, 60, 61, 64]
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
    assert [one["id"] for one in rejected] == [
        f"{number:03d}.png" for number in (*range(20, 40), 45)
    ]
    assert "not an image" in rejected[0]["reason"]
    found, every = (
        {row["id"]: row[f"score_{METHODS[0]}"] for row in shards(tmp_path / run).to_pylist()}
        for run in ("out", "all")
    )
    assert len(found) == COUNT - 21
    assert found == pytest.approx({one: every[one] for one in found}, rel=1e-4)
    said = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert said["done"] == {"scored": COUNT - 21, "rejected": 21, "accepted": None}


def test_a_source_of_which_nothing_can_be_read_is_an_error(
    tmp_path: Path, score: ScoreImages
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(b"no image")
    (tmp_path / "data" / "b.png").symlink_to("nowhere")
    source = open_source(str(tmp_path / "data"), None, None)
    with pytest.raises(
        qualms.QualmsError, match=r"no image of .* can be read: a.png is truncated or not"
    ):
        score_shards(score, source, tmp_path / "out", {}, 20)


@pytest.mark.parametrize(
    ("about", "size", "told"),
    [
        ({"seed": 1}, 20, "seed 0, not 1"),
        ({"seed": 0}, 10, "shard_size 20, not 10"),
        ({}, 20, "seed 0, not None"),
    ],
)
def test_a_folder_of_another_run_is_refused(
    about: dict[str, Any], size: int, told: str, digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    source = open_source(as_folder(digits, tmp_path / "data"), None, None)
    score_shards(score, source, tmp_path / "out", {"seed": 0}, 20)
    before = contents(tmp_path / "out")
    with pytest.raises(
        qualms.QualmsError, match=f"made with other settings: {told}; use those settings"
    ):
        score_shards(score, source, tmp_path / "out", about, size)
    assert contents(tmp_path / "out") == before


def test_other_images_are_refused(digits: Images, score: ScoreImages, tmp_path: Path) -> None:
    data = as_folder(digits, tmp_path / "data")
    score_shards(score, open_source(data, None, None), tmp_path / "out", {}, 20)
    (tmp_path / "data" / "new.png").write_bytes((tmp_path / "data" / "000.png").read_bytes())
    with pytest.raises(qualms.QualmsError, match="made with other settings: inputs "):
        score_shards(score, open_source(data, None, None), tmp_path / "out", {}, 20)


def test_a_folder_that_holds_something_else_is_refused(
    digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    source = open_source(as_folder(digits, tmp_path / "data"), None, None)
    with pytest.raises(
        qualms.QualmsError,
        match=r"out holds mine.txt but no manifest.json; choose an empty or new folder",
    ):
        score_shards(score, source, tmp_path / "out", {}, 20)


def test_two_runs_do_not_meet_in_one_folder(
    digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    source = open_source(as_folder(digits, tmp_path / "data"), None, None)
    with (
        lock_file(tmp_path / "out" / LOCK),
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
    with pytest.raises(
        qualms.QualmsError, match=r"shard-00000.parquet cannot be written .No space left on device"
    ):
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
    parts = list(source.batches(start, 50))
    found = (
        torch.cat([part.images.pixels[:, :1] for part in parts]) if parts else digits.pixels[COUNT:]
    )
    assert torch.equal(found, digits.pixels[start:])
    sizes = [part.count for part in parts]
    assert sizes[:-1] == [1, 3, 12, 16, 18, 1, 3, 12][: max(0, len(sizes) - 1)]
    assert max(sizes, default=0) <= BATCH


def test_files_of_one_name_in_several_folders_have_ids_of_their_own(
    digits: Images, tmp_path: Path
) -> None:
    as_parquet(digits, tmp_path / "a")
    as_parquet(digits, tmp_path / "b")
    source = open_source(f"{tmp_path}/*/0.parquet", None, None)
    ids = [one for part in source.batches(0, 100) for one in part.images.ids]
    assert ids == [f"{folder}/0.parquet row {row}" for folder in "ab" for row in range(27)]


def test_a_source_keeps_no_file_open(digits: Images, tmp_path: Path) -> None:
    """There may be more of them than a process may have open."""
    source = open_source(as_parquet(digits, tmp_path / "data"), None, None)
    held = {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
    list(source.batches(0, 100))
    held |= {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
    assert not [name for name in held if name.startswith(str(tmp_path))]


def test_memory_holds_a_few_parts_and_not_all(digits: Images, tmp_path: Path) -> None:
    """What was read and not asked for yet, whatever the number of images."""
    from qualms.stream import source as module

    read: list[int] = []
    original = module.read_images

    def counted(files: Any, *rest: Any, **options: Any) -> Any:
        read.append(len(files))
        return original(files, *rest, **options)

    data = as_folder(digits, tmp_path / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_images", counted)
        patch.setattr(module, "BATCH", 4)
        parts = open_source(data, None, None).batches(0, 4096)
        next(parts)
        assert sum(read) <= 4 * (module.THREADS + 1)
        parts.close()


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (
            lambda p: (p / "a.tar").write_bytes(b"nothing" * 200),
            "a.tar is truncated, not a .tar file",
        ),
        (
            lambda p: (p / "a.parquet").write_bytes(b"PAR1 no"),
            "a.parquet is truncated or not a parquet file",
        ),
        (lambda p: (p / "a.npz").write_bytes(b"no"), "a.npz is truncated or not a .npz file"),
        (
            lambda p: parquet.write_table(pyarrow.table({"y": [1]}), p / "a.parquet"),
            "the columns y, but no images",
        ),
        (
            lambda p: [(p / "a.tar").touch(), (p / "a.parquet").touch()],
            r"matches a\.(tar|parquet) and 1 more; a pattern must match only .parquet or only .tar files",
        ),
    ],
)
def test_broken_files_are_told(write: Any, told: str, tmp_path: Path) -> None:
    write(tmp_path)
    name = "a.*"
    with pytest.raises(qualms.QualmsError, match=told):
        list(open_source(str(tmp_path / name), None, None).batches(0, 10))


def tar(place: Path, *names: str) -> str:
    """Write a .tar file with a digit for each name that ends in png, and empty files for others."""
    with tarfile.open(place, "w") as file:
        for name in names:
            content = png(load("digits").pixels[0]) if name.endswith("png") else b""
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))
    return str(place)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("one.txt",), "a sample with no readable images"),
        (("2024.01.02.png", "2024.01.03.png"), "a sample with 2 readable images"),
    ],
)
def test_a_sample_without_one_image_is_rejected(
    names: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    (part,) = open_source(tar(tmp_path / "a.tar", *names), None, None).batches(0, 10)
    assert [one.reason for one in part.rejected] == [told]


def test_the_image_of_a_sample_is_the_one_with_a_plain_ending(tmp_path: Path) -> None:
    (part,) = open_source(tar(tmp_path / "a.tar", "one.mask.png", "one.png"), None, None).batches(
        0, 10
    )
    assert (part.images.ids, part.rejected) == (("one",), ())


def test_two_samples_of_one_name_are_an_error(tmp_path: Path) -> None:
    source = open_source(tar(tmp_path / "a.tar", "one.png", "two.png", "one.png"), None, None)
    with pytest.raises(qualms.QualmsError, match="has two samples called one"):
        list(source.batches(0, 10))


@pytest.mark.parametrize("damage", ["cut between samples", "cut in a header", "a header is broken"])
def test_a_tar_file_that_seems_to_end_early_is_an_error(damage: str, tmp_path: Path) -> None:
    place = Path(tar(tmp_path / "a.tar", "one.png", "two.png", "three.png"))
    content = bytearray(place.read_bytes())
    with tarfile.open(place) as file:
        second = file.getmember("two.png").offset
    if damage == "a header is broken":
        content[second : second + 512] = b"x" * 512
    else:
        del content[second + (0 if damage == "cut between samples" else 100) :]
    place.write_bytes(content)
    with pytest.raises(qualms.QualmsError, match=r"is truncated, not a \.tar file"):
        list(open_source(str(place), None, None).batches(0, 10))


def test_images_that_changed_meanwhile_are_refused(
    digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    """Also if their files have the same names and sizes."""
    data = as_npz(digits, tmp_path / "data")
    score_shards(score, open_source(data, None, None), tmp_path / "out", {}, 30)
    as_npz(replace(digits, pixels=255 - digits.pixels), tmp_path / "data")
    with pytest.raises(qualms.QualmsError, match="made with other settings: inputs "):
        score_shards(score, open_source(data, None, None), tmp_path / "out", {}, 30)


def test_a_folder_without_a_shard_is_begun_anew(
    digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    """What was tried there before, and came to nothing, does not matter."""
    source = open_source(as_folder(digits, tmp_path / "data"), None, None)

    def fails(images: Images, place: int) -> qualms.Scored:
        raise qualms.QualmsError("no")

    with pytest.raises(qualms.QualmsError, match=r"^no$"):
        score_shards(fails, source, tmp_path / "out", {"seed": 1}, 30)
    assert score_shards(score, source, tmp_path / "out", {"seed": 0}, 30).scored == COUNT
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["seed"] == 0


def test_a_link_to_nowhere_is_an_image_that_cannot_be_read(
    digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    source_of = as_folder(digits, tmp_path / "data")
    (tmp_path / "data" / "link.png").symlink_to("nowhere.png")
    done = score_shards(score, open_source(source_of, None, None), tmp_path / "out", {}, 30)
    assert done == Done(COUNT, 1, None)
    (tmp_path / "data" / "another.png").symlink_to("nowhere")
    with pytest.raises(qualms.QualmsError, match="made with other settings"):
        score_shards(score, open_source(source_of, None, None), tmp_path / "out", {}, 30)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_next_images_are_read_while_the_caller_works(
    kind: str, digits: Images, tmp_path: Path
) -> None:
    source = open_source(FORMATS[kind](digits, tmp_path / "data"), None, None)
    begun = threading.Event()

    def watched(start: int, sizes: Iterator[int]) -> Iterator[Callable[[], ImageBatch]]:
        for number, task in enumerate(source.readers(start, sizes)):
            yield task if number == 0 else lambda task=task: begun.set() or task()

    with closing(replace(source, readers=watched).batches(0, 100)) as parts:
        next(parts)
        assert begun.wait(60), "the second part waits until it is asked for"


def test_a_folder_of_many_files_is_cut_into_pieces_and_none_is_lost(
    digits: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qualms.stream.source.SPLIT_FILES", 32)
    source = open_source(as_folder(digits, tmp_path / "data"), None, None)
    assert source.splits is not None
    ids = [[file.id for file in piece()] for piece in source.splits()]
    assert [len(some) for some in ids] == [32, 32, COUNT - 64]
    assert list(chain(*ids)) == [f"{i:03d}.png" for i in range(COUNT)]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_shard_that_is_taken_away_meanwhile_is_missed(
    lost: int, digits: Images, score: ScoreImages, tmp_path: Path
) -> None:
    def taken_away(images: Images, place: int) -> qualms.Scored:
        if place >= 60:
            (tmp_path / "out" / f"shard-{lost:05d}.parquet").unlink(missing_ok=True)
        return score(images, place)

    source = open_source(as_npz(digits, tmp_path / "data"), None, None)
    with pytest.raises(qualms.QualmsError, match=r"were deleted during the run"):
        score_shards(taken_away, source, tmp_path / "out", {}, 20)
    assert score_shards(score, source, tmp_path / "out", {}, 20) == Done(COUNT, 0, None)


def test_one_image_is_a_source(digits: Images, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(digits.pixels[0]))
    (part,) = open_source(str(tmp_path / "a.png"), None, None).batches(0, 8)
    assert torch.equal(
        part.images.pixels, digits.pixels[:1].expand_as(part.images.pixels)
    )  # gray, in three channels


def test_a_machine_without_the_folder_says_so(digits: Images, tmp_path: Path) -> None:
    source = open_source(as_folder(digits, tmp_path / "data"), None, None)
    assert source.splits is not None
    (piece,) = source.splits()
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    with pytest.raises(
        qualms.QualmsError, match=r"data does not exist on .*; every machine must find"
    ):
        piece()


def test_pieces_hold_what_parts_hold(digits: Images, tmp_path: Path) -> None:
    """In other processes, whose working folder is another, and each without the rest."""
    for kind in ("folder", "parquet", "tar"):
        source = open_source(FORMATS[kind](digits, tmp_path / kind), None, None)
        assert source.splits is not None
        pieces = source.splits()
        ids = [file.id for piece in pieces for file in pickle.loads(pickle.dumps(piece))()]
        assert ids == [one for part in source.batches(0, 100) for one in part.images.ids]
        assert len(pieces) == {"folder": 1, "parquet": 8, "tar": 3}[kind]
