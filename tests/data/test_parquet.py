""".parquet files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import qualms
from qualms.data import Images, load
from tests.helpers.layouts import IMAGES, LABELS, png, write_parquet

FILES = [png(image.transpose(1, 2, 0)) for image in IMAGES]


def table(folder: Path, metadata: dict[str, str] | None = None, **columns: Any) -> Images:
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), folder / "set.parquet")
    return load("set.parquet", folder)


def test_as_hugging_face_writes_them(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    found = load("things.parquet", tmp_path)
    np.testing.assert_array_equal(found.pixels, IMAGES)
    assert found.pixels[0].nonzero().tolist() == [[0, 1, 5]]
    assert found.labels is not None
    assert found.labels.tolist() == LABELS
    assert found.name == "things"


@pytest.mark.parametrize("image", ["image", "img", "images"])
@pytest.mark.parametrize("label", ["label", "labels", "fine_label"])
def test_columns_by_any_of_their_names(image: str, label: str, tmp_path: Path) -> None:
    found = table(tmp_path, other=["a", "b", "c"], **{label: LABELS, image: FILES})
    np.testing.assert_array_equal(found.pixels, IMAGES)
    assert found.labels is not None
    assert found.labels.tolist() == LABELS


def test_images_alone(tmp_path: Path) -> None:
    found = table(tmp_path, image=FILES)
    assert found.labels is None
    assert found.classes == ()


def test_names_of_classes_are_taken_from_the_schema(tmp_path: Path) -> None:
    names = [f"kind {i}" for i in range(10)]
    notes = json.dumps({"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}})
    assert table(tmp_path, {"huggingface": notes}, image=FILES, label=LABELS).classes == tuple(
        names
    )
    for other in (
        "not json",
        "[]",
        '{"info": null}',
        '{"info": {"features": {"label": {"names": [1]}}}}',
    ):
        assert table(tmp_path, {"huggingface": other}, image=FILES, label=LABELS).classes == ()


def test_a_size_is_taken_while_reading(tmp_path: Path) -> None:
    other = png(np.full((5, 7, 3), 4, np.uint8))
    with pytest.raises(
        qualms.QualmsError, match="row 0 is 32 x 32, but row 1 is 7 x 5; pass size="
    ):
        table(tmp_path, image=[FILES[0], other])
    found = load("set.parquet", tmp_path, size=8)
    assert found.pixels.shape == (2, 3, 8, 8)
    assert found.pixels[1].unique().tolist() == [4]


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(qualms.QualmsError, match=r"set\.parquet has the columns a, but no images"):
        table(tmp_path, a=[1])
    with pytest.raises(
        qualms.QualmsError, match=r"row 1 of .*set\.parquet is truncated or not an image"
    ):
        table(tmp_path, image=[FILES[0], b"hello"])
    for column in (["a.png"], [1], [None], [{"path": "a.png"}], [{"bytes": None}]):
        with pytest.raises(
            qualms.QualmsError,
            match=r"row 0 of .*set\.parquet is not the contents of an image file",
        ):
            table(tmp_path, image=column)
    with pytest.raises(qualms.QualmsError, match=r"set\.parquet contains no images"):
        table(tmp_path, image=pa.array([], pa.binary()))
    for labels in (["a", "b", "c"], [0.5, 1.0, 2.0], [1, None, 2]):
        with pytest.raises(
            qualms.QualmsError, match=r"column label of .*set\.parquet contains values other than"
        ):
            table(tmp_path, image=FILES, label=labels)
    with pytest.raises(qualms.QualmsError, match="range from -1 to 1"):
        table(tmp_path, image=FILES, label=[0, 1, -1])
    notes = json.dumps({"info": {"features": {"label": {"names": ["a", "b"]}}}})
    with pytest.raises(
        qualms.QualmsError, match="range from 0 to 9, but classes are numbered 0 to 1"
    ):
        table(tmp_path, {"huggingface": notes}, image=FILES, label=LABELS)
    whole = write_parquet(tmp_path).read_bytes()
    for content in (whole[:-5], whole[:100], b"", b"PAR1"):
        (tmp_path / "things.parquet").write_bytes(content)
        with pytest.raises(
            qualms.QualmsError, match=r"things\.parquet is truncated or not a parquet file"
        ):
            load("things.parquet", tmp_path)
