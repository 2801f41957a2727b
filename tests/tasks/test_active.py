"""Active learning: the protocol's splits, honest cycles, and a run that goes on where it was."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qualms.data import DATASETS, Images, load
from qualms.errors import QualmsError
from qualms.methods.registry import parse
from qualms.models import load_model
from qualms.report.tables import active_table
from qualms.tasks import active as module
from qualms.tasks.active import RANDOM, Plan, active, split
from qualms.tasks.journal import Journal
from qualms.tasks.rows import CycleRow
from qualms.training import RECIPES

PLAN = Plan(20, 10, replace(RECIPES["digits"], epochs=3), cycles=2, pool=200, validation=50)
METHODS = {RANDOM: None, "entropy": parse("entropy"), "laplace": parse("laplace")}


def build() -> nn.Module:
    return load_model("digits-cnn")


def run(journal: Journal, plan: Plan = PLAN, **more: object) -> Iterator[CycleRow]:
    train, test = load("digits", split="train"), load("digits").subset(100)
    return active(
        build, train, test, DATASETS["digits"].normalization, METHODS, plan, journal, **more
    )  # type: ignore[arg-type]


def blank(count: int, classes: int = 10) -> Images:
    return Images(
        "blank", torch.zeros(count, 1, 1, 1, dtype=torch.uint8), torch.arange(count) % classes
    )


def test_the_papers_indices_are_used_where_there_are_enough_images() -> None:
    parts = split(blank(30_000), Plan(50, 10, PLAN.recipe), seed=0)
    assert len(parts.start) == 50
    assert parts.start.max() < 10_000
    assert torch.equal(parts.validation, torch.arange(10_000, 20_000))
    assert torch.equal(parts.pool, torch.arange(20_000, 30_000))


def test_fewer_images_are_cut_into_thirds() -> None:
    parts = split(blank(300), Plan(20, 10, PLAN.recipe, pool=30, validation=20), seed=0)
    assert parts.start.max() < 100
    assert torch.equal(parts.validation, torch.arange(100, 120))
    assert torch.equal(parts.pool, torch.arange(200, 230))


def test_the_start_is_balanced_and_the_seed_decides_it() -> None:
    train = load("digits", split="train")
    assert train.labels is not None
    start = split(train, PLAN, seed=0).start
    assert torch.bincount(train.labels[start]).tolist() == [2] * 10
    assert torch.equal(start, split(train, PLAN, seed=0).start)
    assert not torch.equal(start, split(train, PLAN, seed=1).start)


@pytest.mark.parametrize(
    ("start", "words"), [(25, "25 images .*multiple of 10"), (400, "fewer than 40")]
)
def test_a_start_that_cannot_be_balanced_is_refused(start: int, words: str) -> None:
    with pytest.raises(QualmsError, match=words):
        split(blank(300), replace(PLAN, start=start), seed=0)


def test_each_cycle_adds_new_images_of_the_pool_and_judges_a_network_trained_on_them() -> None:
    journal = Journal(None, {})
    found = list(run(journal))
    assert [(r["method"], r["cycle"], r["labeled"]) for r in found] == [
        ("start", 0, 20), (RANDOM, 1, 30), (RANDOM, 2, 40), ("entropy", 1, 30), ("entropy", 2, 40),
        ("laplace", 1, 30), ("laplace", 2, 40),
    ]  # fmt: skip
    pool = split(load("digits", split="train"), PLAN, seed=0).pool
    for name in METHODS:
        chosen = [i for row in journal.where(row="pick", method=name) for i in row["chosen"]]
        assert len(set(chosen)) == 20
        assert set(chosen) <= set(pool.tolist())
    assert all(0 <= r["accuracy"] <= 1 and r["nll"] > 0 for r in found)
    assert all(1.461 <= r["nll_softmax_twice"] <= 2.303 + 1 for r in found)
    assert {
        line.split("|")[1].strip() for line in active_table(found).splitlines() if "|" in line
    } >= {
        "start",
        *METHODS,
    }


def test_the_most_uncertain_images_are_picked() -> None:
    import qualms

    journal = Journal(None, {})
    list(run(journal))
    (picked,) = journal.where(row="pick", method="entropy", cycle=0)
    train, normalization = load("digits", split="train"), DATASETS["digits"].normalization
    parts = split(train, PLAN, seed=0)
    torch.manual_seed(0)
    model = build()
    module.fit(
        model,
        train.take(parts.start),
        PLAN.recipe,
        normalization,
        validation=train.take(parts.validation),
    )
    scores = qualms.score(model, normalization.apply(train.take(parts.pool).pixels), "entropy")
    assert set(picked["chosen"]) == set(parts.pool[scores.topk(10).indices].tolist())


def test_a_run_that_was_killed_goes_on_and_trains_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    real = module.fit

    def counted(model: nn.Module, images: Images, *args: object, **more: object) -> object:
        trained.append(len(images))
        return real(model, images, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "fit", counted)
    whole = list(run(Journal(None, {})))
    assert sorted(trained) == [20, 30, 30, 30, 40, 40, 40]  # the start is shared
    del trained[:]
    with Journal(tmp_path / "rows", {}) as journal:
        for row in run(journal):
            if (row["method"], row["cycle"]) == ("entropy", 1):
                break
    assert trained == [20, 30, 40, 30]
    del trained[:]
    with Journal(tmp_path / "rows", {}) as journal:
        again = list(run(journal))
    # The network of the cycle under way, from which the next images are picked, and of the start,
    # for the last method.
    assert trained == [30, 40, 20, 30, 40]
    assert [{**r, "seconds": 0} for r in again] == [{**r, "seconds": 0} for r in whole]
    del trained[:]
    with Journal(tmp_path / "rows", {}) as journal:
        list(run(journal))
    assert trained == []


def test_rows_of_another_method_or_network_are_not_taken_for_its_own() -> None:
    train, test, journal = (
        load("digits", split="train"),
        load("digits").subset(50),
        Journal(None, {}),
    )
    plan, normalization = replace(PLAN, cycles=1), DATASETS["digits"].normalization

    def done(make: Callable[[], nn.Module], spec: str) -> int:
        before = len(journal.where(row="pick"))
        list(active(make, train, test, normalization, {"mine": parse(spec)}, plan, journal))
        return len(journal.where(row="pick")) - before

    assert [done(build, "regrad"), done(build, "regrad"), done(build, "entropy")] == [1, 0, 1]
    assert done(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "entropy") == 1


def test_a_pool_that_runs_out_is_told() -> None:
    with pytest.raises(QualmsError, match="the pool has 5 images left, but a cycle adds 10"):
        list(run(Journal(None, {}), replace(PLAN, pool=15)))


def test_diversity_changes_what_is_picked() -> None:
    train, test = load("digits", split="train"), load("digits").subset(50)
    normalization = DATASETS["digits"].normalization
    picks = []
    for diversity in (None, 5.0):
        plan, journal = replace(PLAN, cycles=1, diversity=diversity), Journal(None, {})
        list(active(build, train, test, normalization, {"regrad": parse("regrad")}, plan, journal))
        picks.append(journal.where(row="pick")[0]["chosen"])
    assert picks[0][0] == picks[1][0]  # the most uncertain comes first
    assert set(picks[0]) != set(picks[1])


def test_the_table_has_means_over_cycles_and_how_far_seeds_are_apart() -> None:
    def row(seed: int, cycle: int, share: float) -> dict[str, object]:
        measures = {"accuracy": share, "nll": 1.0 + seed, "nll_softmax_twice": 2.0}
        return {
            "row": "cycle",
            "data": "mnist",
            "method": "Entropy",
            "seed": seed,
            "cycle": cycle,
            "labeled": 40,
            **measures,
        }

    rows: list[Any] = [row(0, 1, 0.5), row(0, 2, 0.7), row(1, 1, 0.7), row(1, 2, 0.9)]
    several, one = active_table(rows), active_table(rows[:2])
    # Means of seeds: 60 and 80 %, NLL 1 and 2.
    assert "| 70.00 ± 14.14 | 1.500 ± 0.707 | 2.000 ± 0.000 " in several
    assert "| 60.00 " in one
    assert "±" not in one
