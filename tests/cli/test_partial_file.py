"""`qualms score` into a file: what is done is kept beside it, and the same command goes on from
there.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qualms
from qualms.cli import scoring_run
from qualms.cli.partial_file import PartialFile, part_row
from qualms.data import load
from qualms.errors import QualmsError
from qualms.stream.image_scorer import ImageScorer
from qualms.tasks.journal import Journal
from tests.helpers.commands import own, run

PARTIAL = Path("out/scores.csv.partial")
METHODS = ("--methods", "regrad+layers+smooth(0.02,2),entropy")
Told = pytest.CaptureFixture[str]


@pytest.fixture
def archives_here(here: Path) -> Path:
    np.savez(here / "many.npz", x=load("digits").pixels[:60, 0].numpy())
    np.savez(here / "more.npz", x=load("digits").pixels[60:100, 0].numpy())
    return here


def command(*more: str) -> tuple[str, ...]:
    return ("score", "many.npz", *own(*METHODS, "--out", "out/scores.csv", *more))


def stopped_at(batch: int, sizes: list[int] | None = None) -> Callable[..., Any]:
    """Replace `ImageScorer.score`: raise KeyboardInterrupt once `batch` batches are done."""
    usual, done = ImageScorer.score, [] if sizes is None else sizes

    def scored(self: ImageScorer, images: Any, first: int = 0) -> Any:
        if len(done) == batch:
            raise KeyboardInterrupt
        done.append(len(images))
        return usual(self, images, first)

    return scored


def stop(monkeypatch: pytest.MonkeyPatch, batch: int, *words: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ImageScorer, "score", stopped_at(batch))
        assert run(patch, *words) == 130


def whole_table(archives_here: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> bytes:
    """Run the command without interruption; return its table, and remove it."""
    assert run(monkeypatch, *words) == 0
    table = archives_here / "out" / "scores.csv"
    content = table.read_bytes()
    table.unlink()
    return content


def test_the_first_batch_is_one_image_and_the_next_ones_grow(
    archives_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(ImageScorer, "score", stopped_at(100, sizes))
    assert run(monkeypatch, "score", "many.npz", *own("--methods", "entropy")) == 0
    assert sizes == [1, 3, 12, 16, 28]


@pytest.mark.parametrize("engine", ["exact", "sketch"])
def test_a_run_that_is_stopped_goes_on_and_ends_with_the_same_table(
    engine: str, archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    words = command("--engine", engine)
    want = whole_table(archives_here, monkeypatch, *words)
    stop(monkeypatch, 1, *words)
    told = f"qualms: stopped; 1 of 60 images are kept in {PARTIAL}; run the same command again to resume."
    assert capsys.readouterr().err.splitlines()[-1] == told
    stop(monkeypatch, 2, *words)
    told = f"qualms: stopped; 16 of 60 images are kept in {PARTIAL}; run the same command again to resume."
    assert capsys.readouterr().err.splitlines()[-1] == told
    sizes: list[int] = []
    monkeypatch.setattr(ImageScorer, "score", stopped_at(100, sizes))
    assert run(monkeypatch, *words) == 0
    assert (
        f"resuming: 16 of 60 images are already scored, in {PARTIAL}\n" in capsys.readouterr().err
    )
    assert sizes == [16, 28]
    assert (archives_here / "out" / "scores.csv").read_bytes() == want
    assert [path.name for path in (archives_here / "out").iterdir()] == ["scores.csv"]


def test_the_scores_of_a_reference_are_kept_too(
    archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    words = command("--reference", "more.npz", "--coverage", "0.7")
    want = whole_table(archives_here, monkeypatch, *words)
    stop(monkeypatch, 6, *words)
    told = f"stopped; 41 of 100 images, including the reference, are kept in {PARTIAL};"
    assert told in capsys.readouterr().err
    assert run(monkeypatch, *words) == 0
    assert (archives_here / "out" / "scores.csv").read_bytes() == want
    stop(monkeypatch, 2, *words, "--overwrite")
    capsys.readouterr()
    assert (
        run(monkeypatch, *command("--reference", "more.npz", "--coverage", "0.8", "--overwrite"))
        == 0
    )
    assert "resuming" not in capsys.readouterr().err
    assert (archives_here / "out" / "scores.csv").read_bytes() != want


def test_nothing_is_kept_of_a_run_that_is_stopped_before_its_first_image(
    archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    stop(monkeypatch, 0, *command())
    assert capsys.readouterr().err.endswith(
        "qualms: stopped; nothing was kept, and no file was written.\n"
    )
    assert list((archives_here / "out").iterdir()) == []


def test_nothing_is_kept_of_a_table_that_goes_to_stdout(
    archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    before = sorted(archives_here.iterdir())
    for words in (("--out", "-"), ("--json",)):
        stop(monkeypatch, 2, "score", "many.npz", *own(*METHODS, *words))
        assert capsys.readouterr().err.endswith(
            "qualms: stopped; nothing was kept, and no file was written.\n"
        )
    assert sorted(archives_here.iterdir()) == before


def test_a_stop_while_the_network_is_loaded_again_says_what_is_still_kept(
    archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    stop(monkeypatch, 2, *command())
    monkeypatch.setattr(scoring_run, "load_network", stopped)
    assert run(monkeypatch, *command()) == 130
    assert f"stopped; 4 of 60 images are kept in {PARTIAL}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (("--seed", "1"), "another seed (0, not 1)"),
        (("--methods", "entropy"), "other methods ("),
        (("--engine", "sketch"), "another engine (auto, not Sketch("),
        (("--tolerance", "0.1"), "another tolerance (None, not 0.1)"),
        (("--std", "0.5"), "another std ([0.376], not [0.5])"),
        (("--reference", "more.npz"), "another reference (None, not "),
    ],
)
def test_a_file_that_was_made_otherwise_is_refused_unless_it_may_be_replaced(
    change: tuple[str, ...],
    differs: str,
    archives_here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Told,
) -> None:
    stop(monkeypatch, 2, *command())
    kept = PARTIAL.read_bytes()
    capsys.readouterr()
    assert run(monkeypatch, *command(*change)) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"{PARTIAL} holds a run with {differs}" in told
    assert told.endswith("; remove it, or pass --overwrite to start again.")
    assert PARTIAL.read_bytes() == kept
    assert run(monkeypatch, *command(*change, "--overwrite")) == 0
    assert "resuming" not in capsys.readouterr().err
    assert not PARTIAL.exists()


def test_other_images_are_refused(
    archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    stop(monkeypatch, 2, *command())
    pixels = load("digits").pixels[:60, 0].numpy().copy()
    pixels[50] += 1
    np.savez(archives_here / "many.npz", x=pixels)
    assert run(monkeypatch, *command()) == 1
    assert "holds a run with other images (" in capsys.readouterr().err


def test_a_line_that_was_cut_short_by_a_kill_is_dropped(
    archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    want = whole_table(archives_here, monkeypatch, *command())
    stop(monkeypatch, 3, *command())
    PARTIAL.write_bytes(PARTIAL.read_bytes()[:-40])
    assert run(monkeypatch, *command()) == 0
    assert "resuming: 4 of 60 images are already scored" in capsys.readouterr().err
    assert (archives_here / "out" / "scores.csv").read_bytes() == want


@pytest.mark.parametrize(
    "damage",
    [
        {"ids": [0]},
        {"prediction": [0, 1, 99]},
        {"confidence": {"dtype": "float32", "values": [0.5]}},
        {"confidence": {"dtype": "object", "values": [0.5, 0.5, 0.5]}},
        {"errors": None},
    ],
)
def test_a_file_that_somebody_has_changed_is_told(
    damage: dict[str, Any], archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    stop(monkeypatch, 2, *command())
    about, first, second = (json.loads(line) for line in PARTIAL.read_text().splitlines())
    changed = {key: value for key, value in {**second, **damage}.items() if value is not None}
    PARTIAL.write_text("".join(f"{json.dumps(row)}\n" for row in (about, first, changed)))
    assert run(monkeypatch, *command()) == 1
    assert (
        f"{PARTIAL} is damaged; remove it, and run the same command again."
        in capsys.readouterr().err
    )


def test_a_file_of_somebody_else_is_never_replaced(
    archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    PARTIAL.parent.mkdir()
    PARTIAL.write_text("mine\n")
    assert run(monkeypatch, *command("--overwrite")) == 1
    assert f"line 1 of {PARTIAL} is not a row of a run" in capsys.readouterr().err
    assert PARTIAL.read_text() == "mine\n"


def test_a_disk_that_takes_no_more_ends_no_run(
    archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    want = whole_table(archives_here, monkeypatch, *command())
    usual, calls = Journal.add, 0

    def full(journal: Journal, row: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise QualmsError("the disk is full.")
        return usual(journal, row)

    monkeypatch.setattr(Journal, "add", full)
    assert run(monkeypatch, *command()) == 0
    told = "the disk is full. Scoring continues, but if it is interrupted, later scores are lost"
    assert capsys.readouterr().err.count(told) == 1
    assert (archives_here / "out" / "scores.csv").read_bytes() == want
    assert not PARTIAL.exists()


def test_a_table_that_cannot_be_written_loses_no_score(
    archives_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Told
) -> None:
    def refuse(*_: object) -> None:
        raise QualmsError("the disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr("qualms.cli.table_file.Table.write", refuse)
        assert run(patch, *command()) == 1
    *_, kept, error = capsys.readouterr().err.splitlines()
    assert kept == f"60 of 60 images are kept in {PARTIAL}; run the same command again to resume."
    assert error == "qualms: the disk is full."
    monkeypatch.setattr(ImageScorer, "score", stopped_at(0))
    assert run(monkeypatch, *command()) == 0


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_keep_every_bit(tmp_path: Path, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    probs = torch.rand(5, 3).softmax(1).to(kind)
    scores = {"heat": torch.randn(5).to(kind) / 3}
    errors = {"heat": torch.tensor([0.0, torch.nan, torch.inf, 1e-7, 2.0]).to(kind)}
    given = qualms.Scored(
        scores, errors, probs, range(5), None, None, ("heat",), {"heat": "a note"}
    )
    with PartialFile(tmp_path / "a.partial", {}) as partial:
        partial.add(part_row("images", 0, given))
    with PartialFile(tmp_path / "a.partial", {}) as partial:
        row = partial.part("images", 0, 5)
        assert row is not None
        found = partial.restore(row, None)
    assert found.columns() | {"error_heat": 0} == given.columns() | {"error_heat": 0}
    assert torch.equal(found.scores["heat"], scores["heat"])
    assert torch.allclose(found.errors["heat"], errors["heat"], rtol=0, atol=0, equal_nan=True)
    assert found.scores["heat"].dtype == found.confidence.dtype == kind
    assert found.notes == {"heat": "a note"}
