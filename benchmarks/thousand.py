"""A thousand classes: estimates against exact gradients on real ImageNet networks, and what scores cost there.

    QUALMS_DATA=folder python benchmarks/thousand.py exact    # all 1000 classes of each image: half a minute each
    QUALMS_DATA=folder python benchmarks/thousand.py compare  # the default on the same images
    QUALMS_DATA=folder python benchmarks/thousand.py speed    # forward passes an image, on an idle machine

Rows go to benchmarks/results/thousand.jsonl as they come; images that have one are passed over. The weights are those
of the packages in requirements-imagenet.txt.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import qualms
from qualms.data import load
from qualms.models import load_model, preprocessing_of

ROWS = Path(__file__).parent / "results" / "thousand.jsonl"
NETWORKS = ("imagenet-efficientnet-lite0", "imagenet-mobilenet-v2")
SUMS = ("regrad", "regrad+layers", "exgrad", "ungrad", "fisher", "isotropic")  # one pass serves them all
SPEED = ("regrad+layers", "regrad+layers+smooth", "regrad", "exgrad", "fisher", "isotropic", "heat", "coherence")
EVERY, EVERY_OTHER, INSIDE, OUTSIDE = 25, 50, 40, 20
BATCH = 16
AT_ONCE = 4  # images by all classes: what a chunk of the exact engine takes
STD = {"imagenet-efficientnet-lite0": (0.5, 0.5, 0.5), "imagenet-mobilenet-v2": (0.229, 0.224, 0.225)}


def images_of(name: str, model: nn.Module) -> tuple[list[str], Tensor]:
    """40 validation images, every 25th, and 20 of other sets, every 50th, as the network takes them."""
    root = Path(os.environ["QUALMS_DATA"]) / "imagenet"
    said = preprocessing_of(name, model)
    assert said.normalisation is not None
    ids: list[str] = []
    pixels: list[Tensor] = []
    for folder, every, most in (("val", EVERY, INSIDE), ("ood", EVERY_OTHER, OUTSIDE)):
        found = load(str(root / folder), None, "test", fit=said.fit)
        chosen = list(range(0, len(found), every))[:most]
        ids += [found.ids[i] for i in chosen]
        pixels.append(said.normalisation.apply(found.pixels[chosen]))
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


def measure_exact(name: str, model: nn.Module, specs: tuple[str, ...]) -> None:
    """Each image by all of its classes."""
    ids, x = images_of(name, model)
    scorer = qualms.Scorer(model, list(specs), engine="exact", pixel_std=STD[name])
    done = {row["image"] for row in rows(row="exact", network=name)}
    left = [i for i, one in enumerate(ids) if one not in done]
    for start in range(0, len(left), AT_ONCE):
        some = left[start : start + AT_ONCE]
        found = scorer(x[some], numbers=some)
        for place, i in enumerate(some):
            scores = {spec: float(values[place]) for spec, values in found.scores.items()}
            add(row="exact", network=name, image=ids[i], scores=scores)


def compare_default(name: str, model: nn.Module) -> None:
    """The default engine on the images that have exact scores: rank correlation, errors, and how often they hold."""
    ids, x = images_of(name, model)
    known: dict[str, dict[str, float]] = {}
    for row in rows(row="exact", network=name):
        known.setdefault(row["image"], {}).update(row["scores"])
    chosen = [i for i, one in enumerate(ids) if one in known]
    for spec in SUMS:
        scorer = qualms.Scorer(model, spec, pixel_std=STD[name])
        parts = [scorer(x[i : i + 1], first=i) for i in chosen]
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


def measure_speed(name: str, model: nn.Module) -> None:
    """Forward passes an image in batches of 16, and of one image, the second time that a scorer is asked."""
    _, x = images_of(name, model)
    with torch.no_grad():
        forward = _seconds(lambda: model(x[:BATCH]))
        forward_one = _seconds(lambda: model(x[:1]))
    for spec in SPEED:
        scorer = qualms.Scorer(model, spec, pixel_std=STD[name])
        scorer(x[:BATCH])
        scorer(x[:1])
        passes = round(_seconds(partial(scorer, x[:BATCH])) / forward, 1)
        alone = round(_seconds(partial(scorer, x[1:2])) / forward_one, 1)
        add(row="speed", network=name, spec=spec, passes=passes, one=alone, counted=scorer.price(x).forward_passes)


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main(what: str) -> None:
    """One of the three parts, for both networks."""
    for name in NETWORKS:
        model = load_model(name)
        if what == "exact":
            measure_exact(name, model, SUMS)
        elif what == "compare":
            compare_default(name, model)
        else:
            measure_speed(name, model)


if __name__ == "__main__":
    main(sys.argv[1])
