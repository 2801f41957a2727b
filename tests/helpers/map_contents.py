"""Made-up maps: scores with ties, pixels without a score, labels of all kinds, and names that look
like markup.
"""

from dataclasses import replace

import numpy as np
import torch

from qualms.data import Images
from qualms.report.maps import Maps
from tests.helpers.report_contents import LONG, NASTY

UNKNOWN, IGNORED = 254, 255
CLASSES = ("background", f"one {NASTY}", "two")


def full(count: int = 14, high: int = 16, wide: int = 24) -> Maps:
    """Labels, unknown objects and ignored pixels; scores that are good, coarse, and worth nothing."""
    random = np.random.default_rng(0)
    labels = np.zeros((count, high, wide), np.int64)
    labels[:, 2:7, 3:9], labels[:, 9:14, 3:9], labels[:, 4:12, 14:20] = 1, 2, UNKNOWN
    labels[:, :, 10] = IGNORED
    wrong = random.random(labels.shape) < 0.1
    prediction = np.where(wrong | (labels > 2), random.integers(0, 3, labels.shape), labels)
    exact = random.normal(0, 1, labels.shape) + 2 * (labels == UNKNOWN) + 1.5 * wrong
    scores = {
        "coarse": np.round(exact + random.normal(0, 1, labels.shape)),
        "exact": exact,
        LONG: 0 * exact,
    }
    scores = {
        method: np.where(labels == IGNORED, np.nan, values) for method, values in scores.items()
    }
    pixels = torch.from_numpy(random.integers(0, 256, (count, 1, high, wide), dtype=np.uint8))
    ids = tuple(f"{i}, {NASTY}" for i in range(count))
    about = {"network": "fcn", "seed": "0"}
    images = Images("scenes", pixels, None, ids=ids)
    return Maps("Scenes", images, prediction, scores, labels, CLASSES, (UNKNOWN,), IGNORED, about)


def bare() -> Maps:
    """No labels, no names."""
    maps = full(3)
    images = replace(maps.images, ids=())
    scores = {method: np.nan_to_num(values) for method, values in maps.scores.items()}
    return Maps("Bare", images, maps.prediction, scores)
