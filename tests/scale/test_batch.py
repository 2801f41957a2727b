"""`BatchScorer`: columns of image files in, columns of scores out, for any engine that maps
batches.
"""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

import qualms
from qualms.data import Images
from qualms.data.images import Rejected
from qualms.scale.batch import BatchScorer, Columns, rejected_in
from qualms.scale.cluster import filter_rejections, require_once
from qualms.stream.network import Network
from tests.helpers.stores import METHODS, png


@pytest.fixture
def batches(network: Network, tmp_path: Path) -> BatchScorer:
    methods = {name: network.scale_noise(qualms.methods.parse(name)) for name in METHODS}
    limit = qualms.Threshold.from_scores(np.arange(10.0), coverage=0.9)
    scorer = qualms.Scorer(network.model, methods, threshold=limit)
    return BatchScorer(network, scorer, "digits", size=(8, 8), rejected=tmp_path / "rejected")


def files(*contents: bytes | None) -> Columns:
    return {
        "id": np.array([f"{i}.png" for i in range(len(contents))]),
        "content": np.array(contents, dtype=object),
    }


def test_a_batch_of_files_has_the_columns_of_the_table(
    batches: BatchScorer, digits: Images, tmp_path: Path
) -> None:
    some = digits.take(slice(0, 3))
    found = batches(
        files(png(some.pixels[0]), png(some.pixels[1]), b"no image", png(some.pixels[2]), None)
    )
    want = batches.score(some).columns()
    assert list(found) == list(want)
    assert found["id"].tolist() == ["0.png", "1.png", "3.png"]
    for name in want.keys() - {"id"}:
        assert found[name].tolist() == want[name], name
    assert [(one.id, one.reason[:8]) for one in rejected_in(tmp_path / "rejected")] == [
        ("2.png", "truncate"),
        ("4.png", "not the "),
    ]


def test_a_batch_that_is_run_again_lists_nothing_twice(
    batches: BatchScorer, tmp_path: Path
) -> None:
    for _ in range(2):
        batches(files(b"", b"x"))
    assert len(rejected_in(tmp_path / "rejected")) == 2
    (file,) = (tmp_path / "rejected").iterdir()
    assert parquet.read_metadata(file).num_rows == 2


def test_a_batch_of_which_nothing_can_be_read_has_all_columns(
    batches: BatchScorer, digits: Images
) -> None:
    whole, empty = batches(files(png(digits.pixels[0]))), batches(files(b"x", b"y"))
    assert {name: values.dtype.kind for name, values in empty.items()} == {
        n: v.dtype.kind for n, v in whole.items()
    }
    assert all(len(values) == 0 for values in empty.values())


def test_a_reason_that_comes_along_is_kept(batches: BatchScorer, tmp_path: Path) -> None:
    batches({**files(None), "reason": np.array(["gone"])})
    assert [one.reason for one in rejected_in(tmp_path / "rejected")] == ["gone"]


def test_bytes_that_would_lose_their_end_are_refused(batches: BatchScorer) -> None:
    with pytest.raises(qualms.QualmsError, match=r"drops trailing zeros; .*dtype object"):
        batches({"id": np.array(["a"]), "content": np.array([b"a\0"])})


def test_an_image_without_a_score_is_named(network: Network, digits: Images) -> None:
    def not_a_number_for_the_second(_: object, __: object, out: torch.Tensor) -> torch.Tensor:
        return out.index_fill(0, torch.tensor([1]), torch.nan)

    broken = copy.deepcopy(network.model)
    broken.register_forward_hook(not_a_number_for_the_second)
    batches = BatchScorer(
        replace(network, model=broken), qualms.Scorer(broken, "entropy"), "digits", size=(8, 8)
    )
    with pytest.raises(qualms.QualmsError, match=r"1\.png of digits|input 1"):
        batches(files(png(digits.pixels[0]), png(digits.pixels[1])))


def test_images_of_another_size_are_an_error(network: Network, digits: Images) -> None:
    scorer = qualms.Scorer(network.model, "entropy")
    batches = BatchScorer(network, scorer, "digits", size=(9, 10))
    with pytest.raises(qualms.QualmsError, match=r"the first are 10 x 9 and 0\.png is 8 x 8"):
        batches(files(png(digits.pixels[0])))


def test_an_image_that_another_attempt_could_read_is_not_rejected(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"id": ["a.png", "b.png"]}), tmp_path / "shard-0.parquet")
    parquet.write_table(pyarrow.table({"id": ["c.png"]}), tmp_path / "shard-1.parquet")
    rejected = [Rejected(name, "cannot be read") for name in ("b.png", "c.png", "d.png")]
    assert [one.id for one in filter_rejections(rejected, tmp_path)] == ["d.png"]


def test_an_image_with_two_rows_is_an_error(tmp_path: Path) -> None:
    for shard, ids in enumerate((["a.png", "b.png"], ["c.png"])):
        parquet.write_table(pyarrow.table({"id": ids}), tmp_path / f"shard-{shard}.parquet")
    require_once(tmp_path)
    wide = pyarrow.array(["d.png", "b.png", "a.png"], pyarrow.large_string())
    parquet.write_table(pyarrow.table({"id": wide}), tmp_path / "shard-2.parquet")
    with pytest.raises(qualms.QualmsError, match="has 2 rows of images that were scored twice"):
        require_once(tmp_path)
