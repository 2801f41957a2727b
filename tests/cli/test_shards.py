"""`qualms score --out folder/`: shards that a later run goes on with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from qualms.cli.status import SOME_REJECTED
from qualms.data import load
from tests.helpers.commands import own, rows, run

PATIENCE = 300  # seconds


def table(folder: Path) -> pyarrow.Table:
    return pyarrow.concat_tables(
        [parquet.read_table(path) for path in sorted(folder.glob("shard-*"))]
    )


def test_shards_have_the_rows_of_one_table(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = own("--methods", "regrad+layers(0.2)+smooth(0.02,4),entropy", "--reference", "known")
    assert run(monkeypatch, "score", "pictures", *words, "--out", "one.csv") == 0
    assert run(monkeypatch, "score", "pictures", *words, "--out", "many/", "--shard-size", "4") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1] == told[0].replace("one.csv", "many/")
    one, many = rows(here / "one.csv"), table(here / "many").to_pylist()
    assert list(one[0]) == list(many[0])
    for a, b in zip(one, many, strict=True):
        for column, value in b.items():
            if isinstance(value, float):
                assert float(a[column]) == pytest.approx(value, rel=1e-3), column
            else:
                assert a[column] == str(value), column
    said = json.loads((here / "many" / "manifest.json").read_text())
    assert said["methods"].keys() == {"regrad+layers(0.2)+smooth(0.02,4)", "entropy"}
    assert {
        "qualms",
        "torch",
        "weights",
        "engine",
        "seed",
        "inputs",
        "threshold",
        "mean",
        "std",
    } <= said.keys()


def test_what_differs_is_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(monkeypatch, "score", "pictures", *own("--methods", "entropy", "--out", "many/")) == 0
    )
    assert (
        run(
            monkeypatch,
            "score",
            "pictures",
            *own("--methods", "entropy", "--out", "many/", "--seed", "1"),
        )
        == 1
    )
    assert (
        "many holds shards made with other settings: seed 0, not 1; use those settings"
        in capsys.readouterr().err
    )
    (here / "pictures" / "00.png").unlink()
    assert (
        run(monkeypatch, "score", "pictures", *own("--methods", "entropy", "--out", "many/")) == 1
    )
    assert "made with other settings: inputs " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--methods", "knn", "--train", "./pictures"),
            "--train names the same images that are to be scored (pictures)",
        ),
    ],
)
def test_what_shards_cannot_be_made_with_is_told(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    assert run(monkeypatch, "score", "pictures", *own(*words, "--out", "many/")) == 1
    assert told in capsys.readouterr().err


def test_a_first_shard_of_which_nothing_can_be_read_stops_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("00.png", "01.png"):
        (here / "pictures" / name).write_bytes(b"no image")
    words = own("--methods", "entropy", "--out", "many/", "--shard-size", "2")
    assert run(monkeypatch, "score", "pictures", *words) == SOME_REJECTED
    assert "4 images scored by entropy: many/; 2 could not be read" in capsys.readouterr().out
    first, second, _ = (parquet.read_table(path) for path in sorted((here / "many").glob("shard*")))
    assert (len(first), len(second)) == (0, 2)
    assert first.schema.remove_metadata() == second.schema.remove_metadata()


def test_images_that_cannot_be_read_have_an_exit_code_and_a_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "pictures" / "03.png").write_bytes(b"no image")
    code = run(monkeypatch, "score", "pictures", *own("--methods", "entropy", "--out", "many/"))
    assert code == SOME_REJECTED
    assert (
        "5 images scored by entropy: many/; 1 could not be read: many/rejected.parquet\n"
        in capsys.readouterr().out
    )
    assert parquet.read_table(here / "many" / "rejected.parquet")["id"].to_pylist() == ["03.png"]


def test_images_of_two_sizes_are_an_error_wherever_they_stand(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where those of one size fill the parts that are read together, and the network takes
    both.
    """
    (here / "anysize.py").write_text(
        "from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), "
        "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))\n"
    )
    for i in range(26, 40):
        Image.new("L", (9, 9)).save(here / "pictures" / f"y{i:02d}.png")
    for i in range(26):
        Image.new("L", (8, 8)).save(here / "pictures" / f"x{i:02d}.png")
    words = (
        "--model",
        "anysize:make",
        "--mean",
        "0.3",
        "--std",
        "0.4",
        "--methods",
        "entropy",
        "--out",
        "many/",
    )
    assert run(monkeypatch, "score", "pictures", *words) == 1
    assert "the first are 8 x 8 and y26.png is 9 x 9; pass --size" in capsys.readouterr().err


def test_a_run_that_is_stopped_says_that_it_can_be_resumed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qualms.cli.score_shards.score_shards", stopped)
    assert (
        run(monkeypatch, "score", "pictures", *own("--methods", "entropy", "--out", "many/")) == 130
    )
    assert capsys.readouterr().err.endswith(
        "qualms: stopped; run the same command again to resume.\n"
    )


# Runs of the command in children that are killed at random moments. Their parent has loaded all
# modules, so that a run begins at once.
KILLED = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
import qualms.cli, qualms.cli.score_command
words, moments = sys.argv[1:], random.Random(0)

def child(out):
    pid = os.fork()
    if pid == 0:
        sys.argv = ["qualms", *words, "--out", out]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        qualms.cli.main()
        os._exit(0)
    return pid

def shards():
    return len([name for name in os.listdir("out") if name.startswith("shard")]) if os.path.isdir("out") else 0

assert os.waitpid(child("whole/"), 0)[1] == 0
for kill in range(20):
    before, pid = shards(), child("out/")
    while kill % 2 and shards() == before:  # every second one has some work done
        time.sleep(0.01)
    time.sleep((0.03 if kill % 2 else 0.5) * moments.random())
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "it was quicker"
print(shards())
assert os.waitpid(child("out/"), 0)[1] == 0
"""


@pytest.mark.slow
def test_twenty_kills_change_no_byte(here: Path) -> None:
    pixels = load("digits").pixels[:, 0].numpy()
    np.savez(here / "many.npz", x=np.resize(pixels, (6000, 8, 8)))
    words = ("score", "many.npz", *own("--methods", "regrad,entropy", "--shard-size", "50"))
    command = [sys.executable, "-c", KILLED, *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=here, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert 10 <= int(done.stdout) < 120

    def shards(out: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (here / out).iterdir()}

    assert shards("out") == shards("whole")
    assert len(shards("whole")) == 123  # with rejected.parquet, manifest.json and .lock
