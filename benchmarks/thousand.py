"""A thousand classes: estimates against exact gradients on real ImageNet networks, and the aims for
what they cost.

    QUALMS_DATA=folder python benchmarks/thousand.py exact    # all 1000 classes of each image: half
    a minute each QUALMS_DATA=folder python benchmarks/thousand.py compare  # the default on the
    same images python benchmarks/thousand.py page                        # fills
    docs/performance.md

Rows go to benchmarks/results/thousand.jsonl as they come; images that have one are passed over. The
weights are those of the packages in requirements-imagenet.txt.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from pages import fill, table
from scipy.stats import spearmanr
from torch import Tensor, nn

import qualms
from qualms.data import load
from qualms.models import load_model, preprocessing_of

ROWS = Path(__file__).parent / "results" / "thousand.jsonl"
COSTS = Path(__file__).parent / "results" / "costs.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TITLES = {
    "imagenet-efficientnet-lite0": "EfficientNet-Lite0",
    "imagenet-mobilenet-v2": "MobileNetV2",
}
NETWORKS = ("imagenet-efficientnet-lite0", "imagenet-mobilenet-v2")
SUMS = ("regrad", "regrad+layers", "exgrad", "fisher", "isotropic")
AIMS = {  # forward passes an image, in batches of 16; one image alone may take twice as many
    "regrad+layers": 4,
    "regrad+layers+smooth": 30,
    "regrad": 35,
    "exgrad": 40,
    "fisher": 40,
    "isotropic": 40,
    "heat": 6,
    "coherence": 12,
}
TEXT, TEXT_TITLE, TEXT_AIMS = "minilm-150", "MiniLM-L6, 150 classes", {"regrad+layers": 10}
EVERY, BETWEEN, EVERY_OTHER = 25, 250, 50
BATCH = 16
AT_ONCE = 4  # images by all classes: what a chunk of the exact engine takes
LAMBDA = 0.3  # of +layers
STD = {
    "imagenet-efficientnet-lite0": (0.5, 0.5, 0.5),
    "imagenet-mobilenet-v2": (0.229, 0.224, 0.225),
}


def images_of(name: str, model: nn.Module) -> tuple[list[str], Tensor]:
    """44 validation images (every 25th, four between) and 16 of other sets (every 50th), as the
    network takes them.
    """
    root = Path(os.environ["QUALMS_DATA"]) / "imagenet"
    preprocessing = preprocessing_of(name, model)
    assert preprocessing.normalization is not None
    ids: list[str] = []
    pixels: list[Tensor] = []
    for folder, places in (
        ("val", (0, EVERY)),
        ("val", (EVERY // 2, BETWEEN)),
        ("ood", (0, EVERY_OTHER)),
    ):
        found = load(str(root / folder), None, "test", transform=preprocessing.transform)
        chosen = list(range(places[0], len(found), places[1]))
        ids += [found.ids[i] for i in chosen]
        pixels.append(preprocessing.normalization.apply(found.pixels[chosen]))
    return ids, torch.cat(pixels)


def rows(**key: Any) -> list[dict[str, Any]]:
    """The rows that are there, with these values."""
    every = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    return [row for row in every if all(row.get(name) == value for name, value in key.items())]


def add(**row: Any) -> None:
    """One more row."""
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def measure_exact(name: str, model: nn.Module) -> None:
    """Each image by the norms of all classes and layers."""
    ids, x = images_of(name, model)
    done = {row["image"] for row in rows(row="exact", network=name)}
    left = [i for i, one in enumerate(ids) if one not in done]
    for start in range(0, len(left), AT_ONCE):
        some = left[start : start + AT_ONCE]
        found = qualms.class_gradient_norms(model, x[some], engine="exact")
        for norms, probs, i in zip(found.norms, found.probs, some, strict=True):
            add(
                row="exact", network=name, image=ids[i], scores=sums(norms.double(), probs.double())
            )


def sums(norms: Tensor, probs: Tensor) -> dict[str, float]:
    """The scores of one image, written out once more: Σ_c w_c ‖g_c‖ⁿ from norms [c, l] and
    probabilities [c].
    """
    layers = norms.shape[1]
    whole = norms.square().sum(1).sqrt()
    weighted = norms @ torch.exp(LAMBDA * torch.arange(1 - layers, 1, dtype=torch.double))
    found = {
        "regrad": (probs.sqrt() * whole).sum(),
        "regrad+layers": (probs.sqrt() * weighted).sum(),
        "exgrad": (probs * whole).sum(),
        "ungrad": whole.mean(),
        "fisher": (probs * whole.square()).sum(),
        "isotropic": (probs.square() * whole.square()).sum(),
    }
    return {spec: float(value) for spec, value in found.items()}


def compare_default(name: str, model: nn.Module) -> None:
    """The default engine on the images that have exact scores: rank correlation, errors, and how
    often they hold.
    """
    ids, x = images_of(name, model)
    known: dict[str, dict[str, float]] = {}
    for row in rows(row="exact", network=name):
        known.setdefault(row["image"], {}).update(row["scores"])
    chosen = [i for i, one in enumerate(ids) if one in known]
    for spec in SUMS:
        scorer = qualms.Scorer(model, spec, pixel_std=STD[name])
        groups = [chosen[i : i + BATCH] for i in range(0, len(chosen), BATCH)]
        parts = [scorer(x[group], numbers=group) for group in groups]
        have = torch.cat([part.scores[spec] for part in parts]).double()
        error = torch.cat([part.errors[spec] for part in parts]).double()
        want = torch.tensor([known[ids[i]][spec] for i in chosen], dtype=torch.double)
        off = (have - want).abs()
        add(
            row="compared",
            network=name,
            spec=spec,
            images=len(chosen),
            seed=0,
            spearman=round(float(spearmanr(have, want)[0]), 4),
            error=round(float((off / want).mean()), 4),
            stated=round(float((error / have).mean()), 4),
            within_two=round(float((off <= 2 * error).double().mean()), 3),
        )


def fill_page() -> None:
    """The last comparison of each network and score, and the aims at a thousand classes beside what
    was measured.
    """
    compared = {(row["network"], row["spec"]): row for row in rows(row="compared")}
    body = [
        [
            TITLES[network],
            f"`{spec}`",
            str(row["images"]),
            f"{row['spearman']:.4f}",
            f"{100 * row['error']:.1f}",
            f"{100 * row['stated']:.1f}",
            f"{100 * row['within_two']:.0f}",
        ]
        for (network, spec), row in compared.items()
    ]
    cases = sum(row["images"] for row in compared.values())
    held = sum(row["images"] * row["within_two"] for row in compared.values())
    body.append(["all", "", str(cases), "", "", "", f"{100 * held / max(1, cases):.1f}"])
    header = [
        "network",
        "score",
        "images",
        "Spearman",
        "mean error, %",
        "stated error, %",
        "within two of them, %",
    ]
    costs = [json.loads(line) for line in COSTS.read_text().splitlines()]
    timed = {(row["network"], row["method"]): row for row in costs}
    aims = []
    wanted = [(network, title, AIMS) for network, title in TITLES.items()]
    for network, title, aims_here in [*wanted, (TEXT, TEXT_TITLE, TEXT_AIMS)]:
        for spec, most in aims_here.items():
            row = timed.get((network, spec))
            if row is None:
                continue
            if "passes" not in row:
                aims.append(
                    [
                        title,
                        f"`{spec}`",
                        f"not run (at most {most})",
                        "",
                        f"{row['counted']:g}",
                        "**no**",
                    ]
                )
                continue
            met = "yes" if row["passes"] <= most and row["one"] <= 2 * most else "**no**"
            batch, alone = (
                f"{row['passes']:.3g} (at most {most})",
                f"{row['one']:.3g} (at most {2 * most})",
            )
            aims.append([title, f"`{spec}`", batch, alone, f"{row['counted']:g}", met])
    heads = ["network", "score", "batches of 16", "one image", "counted", "met"]
    fill(PAGE, {"thousand": table(header, body), "thousand-aims": table(heads, aims)})


def main(what: str) -> None:
    """One of the parts, for both networks."""
    if what == "page":
        fill_page()
        return
    for name in NETWORKS:
        model = load_model(name)
        if what == "exact":
            measure_exact(name, model)
        else:
            compare_default(name, model)


if __name__ == "__main__":
    main(sys.argv[1])
