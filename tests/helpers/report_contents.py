"""Made-up reports: scores with ties, in both precisions and all equal, and names that would like to
be markup.
"""

import numpy as np
import torch

from qualms.data import Images
from qualms.methods import parse
from qualms.methods.registry import DEFAULT
from qualms.report.content import Content, Group, LayerContributions
from qualms.tasks.rows import LeftOutRow

NASTY = "<script>alert('x')</script><b>&amp;"
CLASSES = ("zero", "one", f"two {NASTY}")
LONG = (
    "a-method-with-a-name-that-never-ends(0.123456789, 100)+and+further+modifiers+without+a+space"
)


def group(
    name: str, count: int, shift: float, *, labeled: bool = False, seed: int = 0, channels: int = 1
) -> Group:
    """Images of noise, with scores around `shift`; wrong predictions are the less certain ones by
    `exact`.
    """
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
    labels = (
        np.where(exact + random.normal(0, 1, count) > 1, (predicted + 1) % 3, predicted)
        if labeled
        else None
    )
    known = None if labels is None else torch.from_numpy(labels)
    files = tuple(f"{i:03d}, {NASTY.replace('/', '')}.png" for i in range(count)) if labeled else ()
    images = Images(name, pixels, known, CLASSES if labeled else (), files)
    return Group(name, images, scores, predicted, labels, random.uniform(0.3, 1, count))


def cycles() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for seed in (0, 1):
        about = {"row": "cycle", "data": "digits", "seed": seed}
        rows.append(
            {**about, "method": "start", "cycle": 0, "labeled": 10, "accuracy": 0.5, "nll": 1.5}
        )
        for method, gain in (("Random", 0.1), ("entropy", 0.2)):
            for cycle in (1, 2):
                accuracy = 0.5 + gain * cycle + 0.02 * seed
                row = {"labeled": 10 + 10 * cycle, "accuracy": accuracy, "nll": 2 - accuracy}
                rows.append({**about, "method": method, "cycle": cycle, **row})
    return [*rows, {"row": "pick", "method": "entropy", "cycle": 0, "chosen": [1, 2]}]


def full(known: str = "digits", title: str = "A report") -> Content:
    """Everything that a report can hold."""
    inside = group(known, 150, 0, labeled=True)
    outside = [group("letters", 90, 1.5), group("noise", 60, 3, channels=3)]
    random = np.random.default_rng(0)
    layers = {
        name: LayerContributions(
            ["Conv 5×5 · conv1", "Conv 3×3 · conv2", "Linear · fc"],
            (random.uniform(0, 1, (40, 3)) * sizes).astype(np.float32),  # as gradients are
            [known] * 25 + ["letters"] * 15,
        )
        for name, sizes in (("exact", [1, 2, 5]), ("tied", [5, 1, 1]))
    }
    costs: dict[str, int | float | str] = {"exact": 56.3, "tied": 3.0, "wide": 1.2, "flat": 1}
    kinds = {
        "exact": parse(DEFAULT),
        "tied": parse("exgrad"),
        "wide": parse("entropy"),
        "flat": parse("negrad"),
    }
    about = {"network": "cnn", "seed": "0"}
    left_out = [LeftOutRow(row="left out", method="laplace", why="there is no training data.")]
    return Content(title, inside, outside, about, costs, layers, cycles(), kinds, left_out)


def bare() -> Content:
    """No unknown images, no labels, nothing else."""
    return Content("Bare", group("digits", 30, 0))
