"""A disk that is full, read-only or gone is told in one sentence; no file is half written, and what
was there stays.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qualms.cli import reproduce_command
from qualms.data import load
from qualms.stream.image_scorer import ImageScorer
from qualms.tasks.journal import Journal
from qualms.tasks.presets import CPU, Setup
from qualms.training import RECIPES, fit
from tests.helpers.commands import run
from tests.helpers.datasets import write_datasets

resource = pytest.importorskip("resource", reason="a system without limits for processes")
NETWORK = ("--model", "digits-cnn", "--weights", "weights.pt")
OWN = (*NETWORK, "--mean", "0.3", "--std", "0.4", "--methods", "entropy")
SCORE = ("score", "many.npz", *OWN, "--overwrite", "--out")
BENCH = (
    "bench",
    "calibration",
    "--id",
    "digits",
    "--weights",
    "weights.pt",
    "--count",
    "60",
    "--methods",
)
REPORT = (
    "report",
    "--id",
    "digits",
    *NETWORK,
    "--count",
    "40",
    "--methods",
    "entropy",
    "--rows",
    "rows.jsonl",
)
COMMANDS = {  # the last word is where it writes
    "score to .csv": (*SCORE, "out/scores.csv"),
    "score to .parquet": (*SCORE, "out/scores.parquet"),
    "score to shards": ("score", "many.npz", *OWN, "--shard-size", "100", "--out", "out/"),
    "bench": (*BENCH, "entropy,msp", "--out", "out/rows.jsonl"),
    "train": ("train", "digits", "--epochs", "2", "--count", "100", "--out", "out/weights.pt"),
    "report": (*REPORT, "--out", "out/page.html"),
    "threshold": ("threshold", "many.npz", *OWN, "--overwrite", "--out", "out/threshold.json"),
}
pytestmark = pytest.mark.slow
each_command = pytest.mark.parametrize("name", COMMANDS)
Tell = pytest.CaptureFixture[str]


@pytest.fixture
def archive_here(weights_here: Path) -> Path:
    np.savez(weights_here / "many.npz", x=load("digits").pixels[:300, 0].numpy())
    return weights_here


@pytest.fixture
def disk(archive_here: Path) -> Iterator[Path]:
    """A disk of 256 kilobytes at `out`."""
    out = archive_here / "out"
    out.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0
    if (
        not mounted
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", out]).returncode
    ):
        pytest.skip("mounting a small disk needs root")
    yield out
    subprocess.run(["umount", out], check=True)


def content(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder, except for the empty lock files."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def tables(folder: Path) -> dict[str, bytes]:
    """Read all files but the partial ones; check that these end with a whole line."""
    found = content(folder)
    partial = [name for name in found if name.endswith(".partial")]
    assert all(found.pop(name).endswith(b"}\n") for name in partial)
    return found


def refused(err: str, why: str) -> None:
    """Check that the error is one sentence, after the progress of the command."""
    last = err.splitlines()[-1]
    assert re.fullmatch(rf"qualms: .*out.* cannot be written \({re.escape(why)}\); .*\.", last), err
    assert err.count("qualms: ") == 1
    assert "Traceback" not in err


def fill(disk: Path, room: int) -> None:
    """Fill the disk until `room` bytes are left."""
    left = os.statvfs(disk)
    (disk / ".filler").write_bytes(bytes(left.f_bavail * left.f_frsize - room))


def earlier(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Tell) -> None:
    """Write an earlier result of the same command, or of its first half if the command resumes."""
    words = COMMANDS[name]
    if name == "bench":
        words = tuple("entropy" if word.startswith("entropy,") else word for word in words)
    if name not in ("score to shards", "train"):  # these go on: nothing would be left to do
        assert run(monkeypatch, *words) == 0
    capsys.readouterr()


@each_command
@pytest.mark.parametrize("room", [0, 4096], ids=["no room", "little room"])
def test_a_full_disk_is_told_and_keeps_what_it_held(
    disk: Path, name: str, room: int, monkeypatch: pytest.MonkeyPatch, capsys: Tell
) -> None:
    if name == "report":
        (disk / "page.html").write_text(
            "an earlier page"
        )  # a page of its own leaves no room for another
    else:
        earlier(name, monkeypatch, capsys)
    fill(disk, room)
    before = content(disk)
    code = run(monkeypatch, *COMMANDS[name])
    if code == 0:
        assert (name, room) in (("threshold", 4096), ("bench", 4096)), (
            "a small file fits into little room"
        )
        return
    assert code == 1
    refused(capsys.readouterr().err, "No space left on device")
    after = {key: kept for key, kept in tables(disk).items() if kept}
    if name == "score to shards":
        after.pop("manifest.json", None)
    if name == "bench":  # rows for which there was room are there, whole
        assert after["rows.jsonl"].endswith(b"}\n")
        after["rows.jsonl"] = after["rows.jsonl"][: len(before["rows.jsonl"])]
    assert after == before
    (disk / ".filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
    assert run(monkeypatch, *COMMANDS[name]) == 0  # once there is room


@each_command
def test_a_disk_that_may_not_be_written_is_told_and_not_touched(
    disk: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Tell
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert run(monkeypatch, *COMMANDS[name]) == 1
    refused(capsys.readouterr().err, "Read-only file system")
    assert content(disk) == {}


@each_command
def test_a_place_below_a_file_is_told(
    archive_here: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Tell
) -> None:
    (archive_here / "out").write_text("a file")
    assert run(monkeypatch, *COMMANDS[name]) == 1
    refused(capsys.readouterr().err, "File exists")
    assert (archive_here / "out").read_text() == "a file"


@pytest.mark.parametrize("call", ["fsync", "replace"])
@each_command
def test_a_disk_that_refuses_the_last_step_is_told(
    archive_here: Path, name: str, call: str, monkeypatch: pytest.MonkeyPatch, capsys: Tell
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if (name, call) == ("bench", "replace"):
        pytest.skip("rows are put in no other's place")
    earlier(name, monkeypatch, capsys)
    before = content(archive_here / "out")
    monkeypatch.setattr(f"qualms.disk.os.{call}", full)
    assert run(monkeypatch, *COMMANDS[name]) == 1
    refused(capsys.readouterr().err, "No space left on device")
    assert tables(archive_here / "out") == before
    assert not list(archive_here.rglob("*.part"))


@each_command
def test_a_file_that_may_not_grow_is_told_and_is_not_left_half_written(
    archive_here: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Tell
) -> None:
    """As a full disk is, where nobody may mount one: the system lets no file grow beyond a
    kilobyte.
    """
    earlier(name, monkeypatch, capsys)
    before = content(archive_here / "out")
    if name == "threshold":
        monkeypatch.setattr("qualms.threshold.Threshold.to_json", lambda _: "0" * 2000)
    largest = max([1024, *(len(kept) for kept in before.values() if name == "bench")])
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, usual[1]))
    try:
        code = run(monkeypatch, *COMMANDS[name])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert code == 1
    refused(capsys.readouterr().err, "File too large")
    after = tables(archive_here / "out")
    if name == "score to shards":
        after.pop("manifest.json", None)
    assert after == before
    assert not list(archive_here.rglob("*.part"))


def test_a_table_that_is_there_has_its_list_of_what_could_not_be_read(
    archive_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (archive_here / "pictures").mkdir()
    Image.fromarray(load("digits").pixels[0, 0].numpy()).save(
        archive_here / "pictures" / "good.png"
    )
    (archive_here / "pictures" / "bad.png").write_bytes(b"cut")
    usual, order = os.replace, list[str]()

    def watched(part: Path, path: Path) -> None:
        order.append(path.name)
        usual(part, path)

    monkeypatch.setattr("qualms.disk.os.replace", watched)
    assert (
        run(monkeypatch, "score", "pictures", *OWN, "--size", "8", "--out", "out/scores.csv") == 4
    )
    assert order == ["scores.rejected.csv", "scores.csv"]


def test_an_output_that_takes_no_more_is_told(archive_here: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "qualms", "methods"]
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    told = "qualms: the output of the command cannot be written (No space left on device);"
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1


def removing(what: Callable[..., Any], folder: Path, before_call: int) -> Callable[..., Any]:
    """Wrap a function: before its call number `before_call`, the folder is removed."""
    calls = 0

    def called(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == before_call:
            shutil.rmtree(folder)
        return what(*args, **more)

    return called


@pytest.mark.parametrize("name", ["score to .csv", "score to .parquet", "threshold"])
def test_a_folder_that_goes_during_the_work_is_made_again(
    archive_here: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, *COMMANDS[name]) == 0
    before = content(archive_here / "out")
    gone = removing(ImageScorer.score, archive_here / "out", 1)
    monkeypatch.setattr(ImageScorer, "score", gone)
    assert run(monkeypatch, *COMMANDS[name]) == 0
    assert content(archive_here / "out") == before


def test_a_folder_of_shards_that_goes_is_told_and_begun_again(
    archive_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Tell
) -> None:
    words = COMMANDS["score to shards"]
    with monkeypatch.context() as patch:
        patch.setattr(ImageScorer, "score", removing(ImageScorer.score, archive_here / "out", 4))
        assert run(patch, *words) == 1
    refused(capsys.readouterr().err, "No such file or directory")
    assert run(monkeypatch, *words) == 0
    assert sorted(content(archive_here / "out"))[-3:] == [
        f"shard-0000{i}.parquet" for i in range(3)
    ]


def test_shards_that_go_while_others_come_are_missed(
    archive_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Tell
) -> None:
    usual, lost_one = ImageScorer.score, False
    first = archive_here / "out" / "shard-00000.parquet"

    def lost(*args: Any, **more: Any) -> Any:
        nonlocal lost_one
        if first.exists() and not lost_one:
            first.unlink()
            lost_one = True
        return usual(*args, **more)

    monkeypatch.setattr(ImageScorer, "score", lost)
    assert run(monkeypatch, *COMMANDS["score to shards"]) == 1
    assert "were deleted during the run; run the same command again." in capsys.readouterr().err
    assert run(monkeypatch, *COMMANDS["score to shards"]) == 0
    assert capsys.readouterr().out.startswith("300 images scored")


def test_rows_whose_file_goes_are_told_and_not_lost_in_silence(
    archive_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Tell
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", removing(Journal.add, archive_here / "out", 2))
        assert run(patch, *COMMANDS["bench"]) == 1
    told = "out/rows.jsonl was removed while a run was writing to it; run the same command again."
    assert capsys.readouterr().err.splitlines()[-1] == f"qualms: {told}"
    assert run(monkeypatch, *COMMANDS["bench"]) == 0


def test_a_training_whose_folder_goes_writes_its_next_epoch_there(
    archive_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = COMMANDS["train"]
    assert run(monkeypatch, *words) == 0
    want = torch.load("out/weights.pt", weights_only=True)
    shutil.rmtree("out")
    from qualms.training.epochs import TrainingRun

    monkeypatch.setattr(
        TrainingRun,
        "remember_if_best",
        removing(TrainingRun.remember_if_best, archive_here / "out", 2),
    )
    assert run(monkeypatch, *words) == 0
    found = torch.load("out/weights.pt", weights_only=True)
    assert found["history"] == want["history"]
    assert all(
        torch.equal(value, want["state_dict"][key]) for key, value in found["state_dict"].items()
    )


def test_a_training_that_is_complete_needs_no_place_to_write(
    archive_here: Path, disk: Path
) -> None:
    from qualms.data import DATASETS
    from qualms.models import load_model

    images, recipe = load("data:digits").subset(60), RECIPES["digits"].shortened(1)
    for _ in range(2):
        torch.manual_seed(0)
        fitted = fit(
            load_model("digits-cnn"),
            images,
            recipe,
            DATASETS["digits"].normalization,
            checkpoint=disk / "w.pt",
        )
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert fitted.best_epoch == 1


def test_a_table_of_the_paper_goes_on_once_there_is_room(
    disk: Path, archive_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Tell
) -> None:
    write_datasets(archive_here / "data", train=60, test=20)
    short = RECIPES["mnist"].shortened(1)
    tiny = replace(CPU, setups={"svhn": Setup("svhn-cnn", short, images=10, seeds=(0,))})
    monkeypatch.setattr(reproduce_command, "PRESETS", {"cpu": tiny})
    words = ("reproduce", "table4", "--root", "data", "--out", "out", "--json")
    fill(disk, 4096)
    before = content(disk)
    assert run(monkeypatch, *words) == 1
    refused(capsys.readouterr().err, "No space left on device")
    assert {key: value for key, value in content(disk).items() if value} == before
    (disk / ".filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=40m", disk], check=True)
    assert run(monkeypatch, *words) == 0
    assert not list(disk.rglob("*.part"))
