"""What commands read: never another folder than the one that was named, nor another size than the
network's.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qualms.cli.commands import use_option_names
from qualms.data import load
from qualms.models import load_model
from tests.helpers.commands import run

NORMAL = ("--mean", "0.3", "--std", "0.4")


def pictures(folder: Path, count: int, high: int = 8, wide: int = 8, value: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        numbers = np.random.default_rng(i + value).integers(0, 256, (high, wide, 3), dtype=np.uint8)
        Image.fromarray(numbers).save(folder / f"{wide}x{high}-{i}.png")


def ids(file: Path) -> list[str]:
    with open(file) as lines:
        return [row["id"] for row in csv.DictReader(lines)]


def score(monkeypatch: pytest.MonkeyPatch, images: str, *more: str) -> int:
    return run(monkeypatch, "score", images, "--methods", "msp", "--overwrite", *more)


ZOO_NET = ("--model", "digits-cnn", "--weights", "weights.pt", *NORMAL)


def test_the_folder_that_was_named_is_scored_and_said(
    weights_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(weights_here / "mine", 10)
    pictures(weights_here / "data" / "mine", 3)
    pictures(weights_here / "photos", 2)
    assert score(monkeypatch, "mine", *ZOO_NET) == 0
    assert "mine: 10 images, mine/ (folder)" in capsys.readouterr().err
    assert len(ids(weights_here / "scores.csv")) == 10
    assert score(monkeypatch, "photos", *ZOO_NET) == 0
    assert "./photos: 2 images, photos/ (folder)" in capsys.readouterr().err
    assert score(monkeypatch, "data:photos", *ZOO_NET) == 0
    assert "photos: 260 images, bundled with scikit-learn" in capsys.readouterr().err


def test_another_size_than_the_networks_is_fitted_and_told(
    weights_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(weights_here / "mine", 2, 224, 224)
    pictures(weights_here / "mine", 1, 40, 60)
    assert score(monkeypatch, "mine", *ZOO_NET) == 0
    told = "3 images of 60 x 40 to 224 x 224 pixels were resized to 8 x 8 (bilinear), as digits-cnn expects"
    assert told in capsys.readouterr().err
    assert len(ids(weights_here / "scores.csv")) == 3


def factory(weights_here: Path, name: str, code: str) -> tuple[str, ...]:
    (weights_here / f"{name}.py").write_text(
        f"from torch import nn\nfrom qualms.models.cnn import paper_cnn\n\n{code}\n"
    )
    return ("--model", f"{name}:net", "--mean", "0.5,0.5,0.5", "--std", "0.2,0.2,0.2")


def test_a_size_that_nobody_knows_is_refused_and_given_by_an_option(
    weights_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = factory(weights_here, "fixed_size", "def net():\n    return paper_cnn(3, 16)")
    pictures(weights_here / "mine", 2, 24, 32)
    assert score(monkeypatch, "mine", *fixed) == 1
    err = capsys.readouterr().err
    assert "fixed_size:net does not accept images of 32 x 24 pixels (" in err
    assert "pass --size, the size it was trained on" in err
    assert score(monkeypatch, "mine", *fixed, "--size", "16") == 0
    assert (
        "2 images of 32 x 24 pixels were resized to 16 x 16 (bilinear), as set by --size"
        in capsys.readouterr().err
    )


def test_images_of_several_sizes_are_refused_where_nobody_knows_one(
    weights_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = "nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)"
    code = f"def net():\n    return nn.Sequential({layers})"
    any_size = factory(weights_here, "any_size", code)
    pictures(weights_here / "mine", 1, 24, 32)
    pictures(weights_here / "mine", 1, 20, 20)
    assert score(monkeypatch, "mine", *any_size) == 1
    assert (
        "20x20-0.png is 20 x 20, but 32x24-0.png is 32 x 24; pass --size" in capsys.readouterr().err
    )


def test_class_names_are_the_networks(weights_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(load_model("cifar10-resnet20").state_dict(), weights_here / "w.pt")
    pictures(weights_here / "mine", 2, 32, 32)
    assert score(monkeypatch, "mine", "--model", "cifar10-resnet20", "--weights", "w.pt") == 0
    with open(weights_here / "scores.csv") as lines:
        (name, _) = [row["prediction"] for row in csv.DictReader(lines)]
    assert name in (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )


def test_a_folder_called_like_a_dataset_has_no_published_network(
    weights_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(weights_here / "digits" / "7", 3)
    command = (
        "bench",
        "calibration",
        "--id",
        "digits",
        "--weights",
        "weights.pt",
        "--methods",
        "msp",
    )
    assert run(monkeypatch, *command) == 1
    assert "no published network for 'digits'; pass a network as --model" in capsys.readouterr().err
    assert run(monkeypatch, *command, "--model", "digits-cnn", "--out", "a.jsonl") == 1
    assert "the input normalization of digits-cnn is unknown" in capsys.readouterr().err
    assert (
        run(monkeypatch, *command, "--model", "digits-cnn", *NORMAL, "--out", "a.jsonl", "--json")
        == 0
    )
    assert json.loads(capsys.readouterr().out.splitlines()[0])["data"] == "./digits"
    assert (
        run(
            monkeypatch,
            "bench",
            "calibration",
            "--id",
            "data:digits",
            *command[4:],
            "--out",
            "b.jsonl",
        )
        == 0
    )
    assert "digits: 360 images, bundled with scikit-learn" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_shows_the_accuracy_on_the_images_it_scores(
    weights_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        "bench",
        "calibration",
        "--id",
        "digits",
        "--weights",
        "weights.pt",
        "--methods",
        "msp,gen",
    )
    assert run(monkeypatch, *command, "--count", "60", "--json") == 0
    accuracy, *others = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert accuracy["n"] == 60
    assert {row["accuracy"] for row in others} == {accuracy["accuracy"]}
    assert run(monkeypatch, *command, "--count", "60") == 0
    assert (
        f"{100 * accuracy['accuracy']:.2f} % of 60 digits test images right"
        in capsys.readouterr().out
    )


def test_bench_leaves_unreadable_files_out_and_says_so(
    weights_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(weights_here / "mine", 5, 20, 30)
    (weights_here / "mine" / "broken.png").write_bytes(b"no")
    command = (
        "bench",
        "ood",
        "--id",
        "digits",
        "--ood",
        "mine",
        "--weights",
        "weights.pt",
        "--count",
        "20",
    )
    assert run(monkeypatch, *command, "--methods", "msp") == 0
    err = capsys.readouterr().err
    assert "mine: 5 images, mine/ (folder)" in err
    assert (
        "1 could not be read (broken.png is truncated or not an image (UnidentifiedImageError))"
        in err
    )
    assert "5 images of 30 x 20 pixels were resized to 8 x 8" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", "weights.pt"), "name the network and pass --weights 'weights.pt'"),
        (
            (*ZOO_NET, "--classes", "7"),
            "weights.pt does not fit digits-cnn: 2 keys with a different shape",
        ),
        ((*ZOO_NET, "--classes", "7"), "pass --classes, the number"),
        (("--model", "cnn-32", "--weights", "weights.pt"), "weights.pt does not fit cnn-32"),
        (
            ("--model", "digits-cnn", "--weights", "other.pt"),
            "other.pt contains no named tensors, only 'epoch', 'stuff'",
        ),
        (("--model", "digits-cnn", "--weights", "none.pt"), "there is no checkpoint file none.pt"),
        (
            (*ZOO_NET[:4], "--mean", "0,0,0", "--std", "1,1,1"),
            "--mean 0,0,0 has 3 numbers, but digits-cnn takes 1",
        ),
    ],
)
def test_errors_speak_of_options_and_of_paths_as_typed(
    weights_here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    pictures(weights_here / "mine", 1)
    torch.save({"epoch": 3, "stuff": [1]}, weights_here / "other.pt")
    assert score(monkeypatch, "mine", *words) == 1
    err = capsys.readouterr().err
    assert told in err
    assert str(weights_here) not in err


def test_keywords_become_options() -> None:
    said = "leave out classes=, or pass weights='a.pt'; num_classes= stays."
    assert (
        use_option_names(said)
        == "leave out --classes, or pass --weights 'a.pt'; num_classes= stays."
    )


def test_a_dataset_is_trained_on_beside_a_folder_of_its_name(
    weights_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(weights_here / "digits", 1)
    assert run(monkeypatch, "train", "digits", "--epochs", "1", "--count", "100") == 0
    assert f"on {len(load('data:digits'))} test images" in capsys.readouterr().out


def test_methods_fit_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "methods") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
