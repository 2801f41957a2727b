"""`qualms threshold`: set on images that the network knows, and shown."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import qualms
from qualms import Threshold
from qualms.data import DATASETS, load
from qualms.models import load_model
from tests.helpers.commands import own, run

NORMAL = DATASETS["digits"].normalization


@pytest.fixture
def labeled_here(weights_here: Path) -> Path:
    digits = load("digits")
    model = load_model("digits-cnn", weights_here / "weights.pt").eval()
    with torch.no_grad():
        right = model(NORMAL.apply(digits.pixels)).argmax(
            1
        )  # so that the untrained network is always right
    np.savez(weights_here / "right.npz", x=digits.pixels[:, 0].numpy(), y=right.numpy())
    np.savez(weights_here / "few.npz", x=digits.pixels[:120, 0].numpy(), y=right[:120].numpy())
    np.savez(weights_here / "bare.npz", x=digits.pixels[:40, 0].numpy())
    return weights_here


def test_by_coverage_it_is_that_of_the_library(
    labeled_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--method", "entropy", "--coverage", "0.9", "--out", "t.json")
    assert run(monkeypatch, "threshold", "bare.npz", *own(*words)) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "At least 90 % of inputs like these are accepted. Of 40 images of bare.npz, 36 are accepted"
    )
    model, x = load_model("digits-cnn", "weights.pt"), NORMAL.apply(load("digits").pixels[:40])
    scorer = qualms.Scorer(model, "entropy")
    want = Threshold.from_scores(scorer(x).scores["entropy"], 0.9)
    found = Threshold.load(labeled_here / "t.json")
    assert found.value == pytest.approx(want.value, rel=1e-5)
    assert (found.samples, found.rule, found.provenance) == (40, "coverage 0.9", scorer.provenance)
    assert run(monkeypatch, "threshold", "bare.npz", *own(*words)) == 1
    assert "t.json already exists; pass --overwrite" in capsys.readouterr().err


def test_by_risk_it_says_what_it_promises(
    labeled_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--method", "entropy", "--risk", "0.01", "--confidence", "0.95", "--out", "t.json")
    assert run(monkeypatch, "threshold", "right.npz", *own(*words)) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "At most 1 % of accepted predictions are wrong, with 95 % confidence. Of 360 images of right.npz, "
    )
    assert re.search(r"35\d are accepted, 0 of them wrong: entropy is at most ", told)
    assert run(monkeypatch, "threshold", "few.npz", *own(*words, "--overwrite")) == 1
    refused = capsys.readouterr().err
    assert (
        "requires 300 labeled inputs, even if none of them is wrong, but there are only 120; add 180"
        in refused
    )
    assert run(monkeypatch, "threshold", "bare.npz", *own(*words, "--overwrite")) == 1
    assert "bare.npz has no labels, which --risk needs" in capsys.readouterr().err


def test_a_file_is_shown_in_words(
    labeled_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(monkeypatch, "threshold", "bare.npz", *own("--method", "msp", "--out", "t.json")) == 0
    )
    capsys.readouterr()
    assert run(monkeypatch, "threshold", "t.json") == 0
    out = capsys.readouterr().out
    assert out.startswith("t.json: inputs whose score is at most 0.")
    assert "At least 95 % of inputs like these are accepted; set on 40 scores." in out
    assert re.search(r"  method: MSP\(\)\n  network: [0-9a-f]{16}\n", out)
    assert run(monkeypatch, "threshold", "t.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["provenance"]["method"] == "MSP()"
    Threshold(1.5, 0, "given").save(labeled_here / "old.json")
    assert run(monkeypatch, "threshold", "old.json") == 0
    assert "It does not record its method and network" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "--model is missing"),
        (own("--risk", "0.1", "--coverage", "0.9"), "pass one of them"),
        (own("--confidence", "0.9"), "pass --risk too"),
        (own("--risk", "1"), "--risk is 1; pass a share"),
        (own("--method", "msp,gen"), "a threshold is for one method, but --method names 2"),
        (own("--out", "weights.pt/t.json"), "--out weights.pt/t.json cannot be written"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    labeled_here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    assert run(monkeypatch, "threshold", "bare.npz", *words) == 1
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_labels_are_folders_by_the_names_of_the_classes(
    labeled_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    saved = np.load(labeled_here / "right.npz")
    for i, (image, label) in enumerate(zip(saved["x"][:40], saved["y"][:40], strict=True)):
        folder = (
            labeled_here / "val" / names[label]
        )  # which sort otherwise than the classes are numbered
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i}.png")
    words = (
        "--method",
        "entropy",
        "--risk",
        "0.2",
        "--confidence",
        "0.9",
        "--out",
        "t.json",
        "--overwrite",
    )
    assert run(monkeypatch, "threshold", "val", *own(*words, "--classes", ",".join(names))) == 0
    assert ", 0 of them wrong" in capsys.readouterr().out
    assert run(monkeypatch, "threshold", "val", *own(*words)) == 1
    told = "'one', which digits-cnn does not have: its classes are 0, 1, 2 …; rename the folders"
    assert told in capsys.readouterr().err
    (labeled_here / "nameless_net.py").write_text(
        "from qualms.models.cnn import paper_cnn\n\ndef net():\n    return paper_cnn(1, 8)\n"
    )
    nameless = ("--model", "nameless_net:net", "--mean", "0.3", "--std", "0.4")
    assert (
        run(monkeypatch, "threshold", "val", *nameless, *words) == 1
    )  # nobody says which folder is which class
    assert "nameless_net:net outputs 10 classes, but val/ (folder) has 4" in capsys.readouterr().err
