"""Uncertainty calibration: are the predictions that a score calls certain the right ones?"""

from collections.abc import Iterator

import numpy as np

from qualms.data import Images
from qualms.errors import QualmsError
from qualms.gradients.settings import Engine, Sketch
from qualms.metrics import aurc, interval, raulc, selective_risk
from qualms.tasks.network import Network
from qualms.tasks.rows import Row, Rows
from qualms.tasks.scoring import Methods, definite, parameters, scored
from qualms.training.fit import Tell

COVERAGES = (0.8, 0.9, 0.95)


def calibration(
    network: Network,
    images: Images,
    methods: Methods,
    rows: Rows,
    *,
    seed: int = 0,
    engine: Engine | Sketch = "exact",
    train: Images | None = None,
    tell: Tell | None = None,
) -> Iterator[Row]:
    """A row for each method: rAULC with its 95 % interval, the area under risk and coverage, and selective risks.

    Where all predictions are right, or all wrong, there is no rAULC; the row has None and says why.
    """
    if images.labels is None:
        raise QualmsError(f"{images.name} has no labels, so it is not known which predictions are right.")
    engine = definite(network, images, methods, engine)
    found = scored(network, images, methods, rows, seed=seed, engine=engine, train=train, tell=tell)
    for name, method in methods.items():
        key: Row = {"row": "calibration", "in": images.name, "method": name, "exactly": parameters(method, train)}
        key |= {"seed": seed, "engine": str(engine), "n": len(images), "images": images.fingerprint()}
        known = rows.where(**key)
        yield known[0] if known else rows.add({**key, **_measures(found.scores[name], found.correct)})


def _measures(uncertainty: np.ndarray, correct: np.ndarray) -> Row:
    risks = {f"risk_at_{round(100 * c)}": selective_risk(uncertainty, correct, c) for c in COVERAGES}
    row: Row = {"accuracy": float(correct.mean()), "aurc": aurc(uncertainty, correct), **risks}
    try:
        low, high = interval(raulc, uncertainty, correct, paired=True)
        return {**row, "raulc": raulc(uncertainty, correct), "raulc_low": low, "raulc_high": high}
    except QualmsError as why:
        return {**row, "raulc": None, "why": str(why)}
