"""Made-up reports: scores with ties, in both precisions and all equal, and names that would like to be markup."""

import numpy as np
import torch

from qualms.data import Images
from qualms.report.content import Content, Group, LayerContributions

NASTY = "<script>alert('x')</script><b>&amp;"
CLASSES = ("zero", "one", f"two {NASTY}")
LONG = "a-method-with-a-name-that-never-ends(0.123456789, 100)+and+further+modifiers+without+a+space"


def group(name: str, count: int, shift: float, *, labelled: bool = False, seed: int = 0, channels: int = 1) -> Group:
    """Images of noise, with scores around `shift`; wrong predictions are the less certain ones by `exact`."""
    random = np.random.default_rng([seed, count])
    pixels = torch.from_numpy(random.integers(0, 256, (count, channels, 8, 8), dtype=np.uint8))
    predicted = random.integers(0, 3, count)
    exact = random.normal(shift, 1, count)
    scores = {
        "exact": exact,
        "tied": (exact + random.normal(0, 1, count)).round(0),
        "wide": np.exp(3 * exact).astype(np.float32),
        "flat": np.zeros(count),
    }
    labels = np.where(exact + random.normal(0, 1, count) > 1, (predicted + 1) % 3, predicted) if labelled else None
    images = Images(name, pixels, None if labels is None else torch.from_numpy(labels), CLASSES if labelled else ())
    return Group(name, images, scores, predicted, labels)


def cycles() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for seed in (0, 1):
        about = {"row": "cycle", "data": "digits", "seed": seed}
        rows.append({**about, "method": "start", "cycle": 0, "labelled": 10, "accuracy": 0.5, "nll": 1.5})
        for method, gain in (("Random", 0.1), ("entropy", 0.2)):
            for cycle in (1, 2):
                accuracy = 0.5 + gain * cycle + 0.02 * seed
                row = {"labelled": 10 + 10 * cycle, "accuracy": accuracy, "nll": 2 - accuracy}
                rows.append({**about, "method": method, "cycle": cycle, **row})
    return [*rows, {"row": "pick", "method": "entropy", "cycle": 0, "chosen": [1, 2]}]


def full(known: str = "digits", title: str = "A report") -> Content:
    """Everything that a report can hold."""
    inside = group(known, 150, 0, labelled=True)
    outside = [group("letters", 90, 1.5), group("noise", 60, 3, channels=3)]
    random = np.random.default_rng(0)
    layers = LayerContributions(
        ["conv1", "conv2", "fc"],
        (random.uniform(0, 1, (40, 3)) * [1, 2, 5]).astype(np.float32),  # as gradients are
        [known] * 25 + ["letters"] * 15,
        np.concatenate([np.arange(25), np.arange(15)]),
    )
    costs: dict[str, int | float | str] = {"exact": 12.0, "tied": "3, and C backward", "flat": 1}
    return Content(title, inside, outside, {"network": "cnn", "seed": "0"}, costs, layers, cycles())


def bare() -> Content:
    """No unknown images, no labels, nothing else."""
    return Content("Bare", group("digits", 30, 0))
