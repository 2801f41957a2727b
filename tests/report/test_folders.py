"""`qualms report` on a user's own folders: with and without labels, with and without unknown
images.
"""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qualms.data import DATASETS, Images, load
from qualms.methods import parse
from qualms.models import load_model
from qualms.stream.network import Network
from qualms.tasks.image_scores import score_images
from qualms.tasks.journal import Journal
from tests.helpers.commands import run
from tests.helpers.pages import Page

NORMALIZED = ("--mean", "0.3053", "--std", "0.376", "--size", "8")
OWN = ("--model", "digits-cnn", "--weights", "weights.pt", *NORMALIZED, "--out", "page.html")


def saved(images: Images, folder: Path, classes: bool = False) -> None:
    assert images.labels is not None
    for i, (image, label) in enumerate(zip(images.pixels, images.labels.tolist(), strict=True)):
        place = folder / str(label) if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(place / f"photo {i}.png")


@pytest.fixture
def folders_here(weights_here: Path) -> Path:
    digits, letters = load("digits").take(slice(0, 40)), load("letters").subset(12).convert(1, 8)
    saved(digits, weights_here / "sorted", classes=True)
    saved(digits, weights_here / "flat")
    saved(letters, weights_here / "others")
    saved(letters, weights_here / "further")
    return weights_here


@pytest.mark.slow
def test_folders_with_labels_and_unknown_groups(
    folders_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (
        "--id",
        "sorted/",
        "--ood",
        "others/,further/",
        "--methods",
        "regrad+layers+smooth(0.02,2),entropy,negrad",
    )
    assert run(monkeypatch, "report", *asked, *OWN) == 0
    page = Page((folders_here / "page.html").read_text("utf-8"))
    sorted_, others, further = page.data["groups"]
    assert [group["name"] for group in (sorted_, others, further)] == [
        "sorted",
        "others",
        "further",
    ]
    assert set(sorted_["ids"]) == {
        f"{path.parent.name}/{path.name}" for path in (folders_here / "sorted").glob("*/*.png")
    }
    assert set(others["ids"]) == {f"photo {i}.png" for i in range(12)}
    assert set(sorted_["labels"]["words"]) <= set("0123456789")
    assert others["labels"] is None
    assert sorted_["confidence"] is not None
    assert {"roc", "accuracy", "let-through-2", "layers", "folded"} <= set(page.ids)
    bars = {m["name"]: len(m["layers"]["bars"]) for m in page.data["methods"]}
    assert bars == {"regrad+layers+smooth(0.02,2)": 4, "entropy": 0, "negrad": 0}


def test_a_folder_without_labels_or_unknown_images(
    folders_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, "report", "--id", "flat", "--methods", "entropy,msp", *OWN) == 0
    page = Page((folders_here / "page.html").read_text("utf-8"))
    (only,) = page.data["groups"]
    assert (only["labels"], only["right"]) == (None, None)
    assert sorted(only["ids"]) == sorted(f"photo {i}.png" for i in range(40))
    words = " ".join(page.words)
    assert "there are no unknown images: name some with --ood" in words
    assert "was not among the requested methods" in words
    assert not {"accuracy", "roc", "lift", "layers"} & set(page.ids)


def test_a_page_that_cannot_be_written_is_told_before_the_work(
    folders_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "report", "--id", "flat", *OWN[:-1], "weights.pt/page.html") != 0
    assert "cannot be written" in capsys.readouterr().err
    assert not (folders_here / "runs").exists()


def test_scores_from_an_earlier_run_come_with_the_same_confidence(folders_here: Path) -> None:
    network = Network(
        "digits-cnn", load_model("digits-cnn", "weights.pt"), DATASETS["digits"].normalization
    )
    images, methods = load("digits").take(slice(0, 40)), {"entropy": parse("entropy")}
    with Journal(folders_here / "rows.jsonl", {}) as journal:
        first = score_images(network, images, methods, journal)
    with Journal(folders_here / "rows.jsonl", {}) as journal:
        again = score_images(network, images, methods, journal)
    probs = network.logits(images).softmax(1).max(1)
    for found in (first, again):
        np.testing.assert_allclose(found.confidence, probs.values.numpy(), rtol=1e-5)
        assert (found.predicted == probs.indices.numpy()).all()
