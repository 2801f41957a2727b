"""Calibration of uncertainty: are the predictions with the lowest scores the correct ones?"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from qualms.data import Images
from qualms.errors import QualmsError
from qualms.gradients.settings import Engine, Sketch
from qualms.metrics import aurc, interval, raulc, selective_risk
from qualms.progress import ProgressFn
from qualms.stream.network import Network
from qualms.tasks.image_scores import (
    DRAWS,
    choose_engine,
    describe_parameters,
    engine_label,
    score_images,
)
from qualms.tasks.journal import Journal
from qualms.tasks.row_measures import CalibrationMeasures
from qualms.tasks.rows import CalibrationKey, CalibrationRow
from qualms.tasks.score_rows import Methods


def calibration(
    network: Network,
    images: Images,
    methods: Methods,
    journal: Journal,
    *,
    seed: int = 0,
    engine: Engine | Sketch = "exact",
    tolerance: float | None = None,
    train: Images | None = None,
    progress: ProgressFn | None = None,
) -> Iterator[CalibrationRow]:
    """Measure how well scores rank predictions by whether they are right.

    Args:
        network: The network that is scored.
        images: Labeled images.
        methods: The methods by the names that rows have, with noise levels for pixels in [0, 1].
        journal: Saves the rows; rows that it has are not computed again.
        seed: The seed of all random draws.
        engine: How gradient scores are computed.
        tolerance: The tolerance of the engine, as for `Scorer`; None for its default.
        train: Training images, for the methods that need some.
        progress: Called with the number of images scored so far, and of all images.

    Yields:
        For each method, a row with rAULC and its 95 % interval, the area under the risk-coverage
        curve, and selective risks. If all predictions are right, or all wrong, rAULC is None, and
        the row says why.
    """
    if images.labels is None:
        raise QualmsError(
            f"{images.name} has no labels, so it is not known which predictions are right."
        )
    # The engine that `auto` stands for, so that rows name it.
    engine, tolerance = choose_engine(network, images, methods, engine, tolerance)
    scored = score_images(
        network,
        images,
        methods,
        journal,
        seed=seed,
        engine=engine,
        tolerance=tolerance,
        train=train,
        progress=progress,
    )
    for name, method in methods.items():
        key: CalibrationKey = {
            "row": "calibration",
            "in": images.name,
            "method": name,
            "exactly": describe_parameters(method, train),
            "seed": seed,
            "engine": engine_label(engine, tolerance),
            "draws": DRAWS,
            "n": len(images),
            "images": images.fingerprint(),
        }
        yield journal.get_or_add(
            key, partial(_measure_row, key, scored.scores[name], scored.correct)
        )


def _measure_row(
    key: CalibrationKey, uncertainty: np.ndarray, correct: np.ndarray
) -> CalibrationRow:
    """Measure how well one method's scores rank n predictions by whether they are right.

    Args:
        key: The entries that identify the row, such as the method and the dataset.
        uncertainty: The method's score for each prediction, [n].
        correct: Whether each prediction is right, bool [n].

    Returns:
        The entries of `key`, and the measures.
    """
    return CalibrationRow(**key, **_measure_ranking(uncertainty, correct))


def _measure_ranking(uncertainty: np.ndarray, correct: np.ndarray) -> CalibrationMeasures:
    """Measure how well scores rank n predictions by whether they are right.

    Args:
        uncertainty: A score for each prediction, [n].
        correct: Whether each prediction is right, bool [n].

    Returns:
        The measures. If all predictions are right, or all are wrong, `raulc` is None, and `why`
        has the reason.
    """
    measures: CalibrationMeasures = {
        "accuracy": float(correct.mean()),
        "aurc": aurc(uncertainty, correct),
        "risk_at_80": selective_risk(uncertainty, correct, 0.8),
        "risk_at_90": selective_risk(uncertainty, correct, 0.9),
        "risk_at_95": selective_risk(uncertainty, correct, 0.95),
        "raulc": None,
    }
    try:
        # Paired: a resample has the score of each prediction with its correctness.
        low, high = interval(raulc, uncertainty, correct, paired=True)
        area = raulc(uncertainty, correct)
        return {**measures, "raulc": area, "raulc_low": low, "raulc_high": high}
    except QualmsError as why:
        return {**measures, "why": str(why)}
