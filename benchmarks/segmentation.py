"""Which score finds the pixels of unknown objects, and those that are predicted wrong? Scenes of
`qualms.data.scenes`.

    python benchmarks/segmentation.py        three trainings, then their scores: some ten minutes on
    one core python benchmarks/segmentation.py page   fills docs/results.md from the rows

Rows go to results/segmentation.jsonl, one for each training, kind of unknown object and method;
what has a row is passed over. A U-Net learns background and the digits 0 to 7. Unknown pixels are
those of one object in each test scene; all pixels of all scenes are in one ranking. "wrong" are
known pixels that are predicted wrong, among known ones of scenes without unknown objects.
"""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pages
import torch
from torch import Tensor, nn

import qualms
from qualms.data.scenes import CLASSES, IGNORED, KINDS, NORMALIZATION, UNKNOWN, Scenes, scenes
from qualms.metrics import pixel_metrics
from qualms.models.fcn import FCN
from qualms.training.segmentation import RECIPE, fit_scenes

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "segmentation.jsonl", HERE.parent / "docs" / "results.md"
TANGENTS = 16  # of the sketch, as is the default
RUNS = (  # methods that share passes, and tangents
    (("entropy", "msp", "energy", "max-logit", "gen"), TANGENTS),
    (("regrad", "regrad+layers", "exgrad", "fisher", "isotropic"), TANGENTS),
    (("regrad", "fisher"), 64),
)
SEEDS = (0, 1, 2)
LEARNT, TESTED = 1000, 50  # scenes for training, and for each test
WRONG = "wrong"
TITLES = {
    "digits": "8 and 9",
    "letters": "letters",
    "photos": "photographs",
    WRONG: "wrong predictions",
}
MEASURES = {"auroc": max, "aupr": max, "fpr95": min}  # and which is best
Row = dict[str, Any]


def trained(seed: int) -> nn.Module:
    """The network with other weights to begin with, other scenes and another order of them for each
    seed.
    """
    torch.manual_seed(seed)
    model = FCN(len(CLASSES))
    fit_scenes(model, scenes(LEARNT, "train", seed=seed), NORMALIZATION, RECIPE, seed=seed)
    return model


def named(method: str, tangents: int) -> str:
    """What its rows are called."""
    return method if tangents == TANGENTS else f"{method}, {tangents} tangents"


def ranked(test: Scenes, prediction: Tensor, scores: Tensor, kind: str) -> Row:
    """What one score achieves on one set of scenes."""
    labels = test.labels
    if kind == WRONG:  # the same question, with another answer
        labels = torch.where(
            labels == IGNORED, IGNORED, torch.where(prediction == labels, 0, UNKNOWN)
        )
    counts = {"known": int((labels < UNKNOWN).sum()), "unknown": int((labels == UNKNOWN).sum())}
    return {"pixels": counts, **pixel_metrics(scores, labels, UNKNOWN)}


def rows(seed: int, done: set[tuple[str, str]]) -> Iterable[Row]:
    """Of one training."""
    left = [
        (kind, [m for m in methods if (kind, named(m, tangents)) not in done], tangents)
        for kind in TITLES
        for methods, tangents in RUNS
    ]
    if not any(methods for _, methods, _ in left):
        return
    model = trained(seed)
    for kind, methods, tangents in left:
        if not methods:
            continue
        test = scenes(TESTED, "test", None if kind == WRONG else kind, seed=seed)
        start = time.monotonic()
        scorer = qualms.Scorer(model, methods, class_dim=1, engine=qualms.Sketch(tangents=tangents))
        scored = scorer(NORMALIZATION.apply(test.pixels))
        seconds = round((time.monotonic() - start) / len(test), 3)
        right, known = scored.prediction == test.labels, test.labels < UNKNOWN
        every = {
            "scenes": len(test),
            "accuracy": float(right[known].double().mean()),
            "ink_accuracy": float(right[known & (test.labels > 0)].double().mean()),
            "seconds": seconds,
        }
        for method in methods:
            found = ranked(test, scored.prediction, scored.scores[method], kind)
            yield {"seed": seed, "kind": kind, "method": named(method, tangents), **every, **found}


def fill(found: list[Row]) -> None:
    """The tables of the page: means over the trainings, and the lowest and highest AUROC of each."""
    names = list(dict.fromkeys(row["method"] for row in found))
    order = sorted(names, key=lambda m: -sum(mean(found, kind, m, "auroc") for kind in KINDS))
    best = {
        (kind, key): pick(mean(found, kind, m, key) for m in names)
        for kind in TITLES
        for key, pick in MEASURES.items()
    }

    def cell(kind: str, method: str) -> str:
        texts = {key: f"{100 * mean(found, kind, method, key):.1f}" for key in MEASURES}
        return "/".join(
            f"**{t}**" if t == f"{100 * best[kind, key]:.1f}" else t for key, t in texts.items()
        )

    header = ["score", *TITLES.values()]
    parts = [
        about(found),
        "AUROC/AUPR/FPR95 in %, means over the trainings, the best of each in bold:",
        pages.table(header, [[code(m), *(cell(kind, m) for kind in TITLES)] for m in order]),
        "The lowest and the highest AUROC of the trainings:",
        pages.table(
            header, [[code(m), *(over_seeds(found, kind, m) for kind in TITLES)] for m in order]
        ),
    ]
    pages.fill(PAGE, {"segmentation": "\n\n".join(parts)})


def code(method: str) -> str:
    """A method's name as the page writes it."""
    name, *more = method.partition(",")
    return f"`{name}`{''.join(more)}"


def about(found: list[Row]) -> str:
    """What was run, and on how much."""
    right, ink = (mean(found, WRONG, "entropy", key) for key in ("accuracy", "ink_accuracy"))
    counts = []
    for kind, title in TITLES.items():
        pixels = [row["pixels"] for row in of(found, kind, "entropy")]
        positive = sum(p["unknown"] for p in pixels)
        counts.append(f"{title} {positive:,} of {positive + sum(p['known'] for p in pixels):,}")
    return (
        f"{len(SEEDS)} trainings on {LEARNT} scenes each (seeds {', '.join(map(str, SEEDS))}), {TESTED} test scenes of "
        f"each kind and training. In scenes without unknown objects {100 * right:.1f} % of the pixels are predicted "
        f"right, {100 * ink:.1f} % of those of digits. Positive pixels of all that count: {', '.join(counts)}. Scores "
        f"of gradients are sketched with {TANGENTS} tangents unless more are named."
    )


def of(found: list[Row], kind: str, method: str) -> list[Row]:
    """One for each training."""
    return [row for row in found if row["method"] == method and row["kind"] == kind]


def mean(found: list[Row], kind: str, method: str, key: str) -> float:
    """Over the trainings."""
    values = [row[key] for row in of(found, kind, method)]
    return sum(values) / len(values)


def over_seeds(found: list[Row], kind: str, method: str) -> str:
    """The lowest and the highest AUROC."""
    values = [100 * row["auroc"] for row in of(found, kind, method)]
    return f"{min(values):.1f} to {max(values):.1f}"


def read() -> list[Row]:
    """What is on disk."""
    return (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )


def main() -> None:
    """Run what has no row yet, or fill the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("run", "page"), default="run")
    if parser.parse_args().what == "run":
        for seed in SEEDS:
            done = {(row["kind"], row["method"]) for row in read() if row["seed"] == seed}
            for row in rows(seed, done):
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)
    fill(read())


if __name__ == "__main__":
    main()
