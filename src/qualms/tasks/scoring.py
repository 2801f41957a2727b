"""Images to scores, kept chunk by chunk, so that no chunk is ever scored twice by the same method."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch

from qualms.data import Images
from qualms.errors import QualmsError
from qualms.functional import compare
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.method import TRAINING_DATA, Method, NotFinite
from qualms.progress import ProgressFn, batch_sizes
from qualms.result import Scored
from qualms.scorer import Scorer
from qualms.stream.network import Network
from qualms.tasks.journal import Journal
from qualms.tasks.rows import (
    AccuracyKey,
    AccuracyRow,
    LeftOutRow,
    ScoresAbout,
    ScoresKey,
    ScoresRow,
)

CHUNK = 32  # inputs whose scores are written together; what a kill can lose
# What decides an image's random draws, beside the seed: its pixels. Rows say so, since the scores of
# earlier versions followed an image's place among the others.
DRAWS = "by pixels"
BATCH = 256  # images that are normalized at a time, where all are to be read
Methods = Mapping[str, Method]  # by the name that rows give them; noise in pixels scaled to [0, 1]


@dataclass(frozen=True)
class ScoredImages:
    """Scores of some images by method; the class that the network gives each, its probability, and
    the true class.
    """

    scores: dict[str, np.ndarray]
    predicted: np.ndarray
    confidence: np.ndarray
    labels: np.ndarray | None

    @property
    def correct(self) -> np.ndarray:
        """Whether each prediction was right."""
        if self.labels is None:
            raise QualmsError(
                "these images have no labels, so it is not known which predictions are right."
            )
        return self.predicted == self.labels


def score_images(
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
) -> ScoredImages:
    """The scores of all images by all methods, from `journal` where they are there, else computed
    and added to it.

    Args:
        network: what scores them.
        images: in a fixed order.
        methods: by name.
        journal: rows of scores, which are not computed again.
        seed: of all random draws.
        engine: of the gradient scores.
        tolerance: as for `Scorer`; None for its default.
        train: images that methods learn from.
        progress: is told how many images are scored.
    """
    parts = {place.start: images.take(place) for place in batch_slices(len(images))}
    starts = list(parts)
    about: ScoresAbout = {
        "data": images.name,
        "seed": seed,
        "engine": engine_label(engine, tolerance),
        "draws": DRAWS,
    }
    keys: dict[int, ScoresKey] = {
        s: {"row": "scores", **about, "first": s, "images": part.fingerprint()}
        for s, part in parts.items()
    }
    exactly = {name: parameters(method, train) for name, method in methods.items()}
    have = {start: _known(journal, keys[start], exactly) for start in starts}
    own = {name: network.scale_noise(method) for name, method in methods.items()}
    probs: dict[int, torch.Tensor] = {}
    if progress is not None:
        progress(f"images of {images.name} scored", 0, len(images))

    def missing(start: int) -> tuple[str, ...]:
        return tuple(name for name in own if name not in have[start])

    for names, group in groupby(starts, key=missing):
        if not names:
            continue
        learn = train if any(TRAINING_DATA in own[name].needs for name in names) else None
        scorer = Scorer(
            network.model,
            {name: own[name] for name in names},
            train=None if learn is None else Inputs(network, learn),
            models=network.members,
            engine=engine,
            seed=seed,
            tolerance=tolerance,
        )
        for start in group:
            began = time.perf_counter()
            found = scored_images(network, scorer, parts[start], start)
            values = {name: scores.tolist() for name, scores in found.scores.items()}
            seconds = round(time.perf_counter() - began, 3)
            have[start].update(values)
            probs[start] = found.probs.cpu()
            made = {name: exactly[name] for name in names}
            journal.add(ScoresRow(**keys[start], methods=made, seconds=seconds, scores=values))
            if progress is not None:
                progress(f"images of {images.name} scored", start + len(parts[start]), len(images))
    for start in starts:
        if start not in probs:  # all of its scores were there already
            probs[start] = network.logits(parts[start]).double().softmax(1)
    scores = {
        name: np.concatenate([np.array(have[start][name]) for start in starts]) for name in own
    }
    labels = None if images.labels is None else images.labels.numpy()
    confidence, predicted = torch.cat([probs[start] for start in starts]).double().max(1)
    return ScoredImages(scores, predicted.numpy(), confidence.numpy(), labels)


def scored_images(network: Network, scorer: Scorer, images: Images, first: int = 0) -> Scored:
    """Some images of a long run: `first` is the place of the first, which is its id where images
    have no names.

    Draws follow an image's pixels, so that its scores do not depend on where it stands, nor on what
    was read before it.
    """
    x, numbers = network.numbered_inputs(images)
    with by_name(images, numbers, first):
        found = scorer(x, numbers=numbers)
    names = names_of_classes(network, images, found.probs.shape[1])
    return replace(found, ids=images.ids or range(first, first + len(images)), class_names=names)


def names_of_classes(network: Network, images: Images, number: int) -> tuple[str, ...] | None:
    """The names of so many classes: those of the network or else of the images; None if neither has
    as many.
    """
    return next(
        (names for names in (network.class_names, images.classes) if len(names) == number), None
    )


def batch_slices(count: int) -> Iterator[slice]:
    """Where the batches of `count` images begin and end; the first ones are small."""
    start = 0
    for size in batch_sizes(count, CHUNK):
        yield slice(start, start + size)
        start += size


def engine_label(engine: Engine | Sketch, tolerance: float | None) -> str:
    """What rows call the engine: scores of another tolerance are other scores."""
    return str(engine) if not tolerance else f"{engine}, tolerance {tolerance:g}"


def chosen_engine(
    network: Network,
    images: Images,
    methods: Methods,
    engine: Engine | Sketch,
    tolerance: float | None = None,
) -> tuple[Engine | Sketch, float | None]:
    """The engine and the tolerance that scores will have, settled on the first images: so they
    stand in the rows.

    Args:
        network: what scores them.
        images: of which the first decide.
        methods: by name, noise in pixels.
        engine: that was asked for.
        tolerance: as for `Scorer`; None for its default.
    """
    own = {name: network.scale_noise(method) for name, method in methods.items()}
    scorer = Scorer(network.model, own, engine=engine, tolerance=tolerance)
    settled = scorer.choose_engine(network.inputs(images.take(slice(1))))
    return settled.engine, settled.tolerance


def accuracy_row(network: Network, images: Images, journal: Journal) -> AccuracyRow:
    """The network's accuracy on labeled images, computed once."""
    key: AccuracyKey = {
        "row": "accuracy",
        "data": images.name,
        "n": len(images),
        "images": images.fingerprint(),
    }
    return (
        journal.where(**key) or [journal.add(AccuracyRow(**key, accuracy=network.accuracy(images)))]
    )[0]


def usable(
    network: Network, images: Images, methods: Methods, train: Images | None
) -> tuple[dict[str, Method], list[LeftOutRow]]:
    """The methods that this network and this data allow, and a row with the reason for each other
    one.
    """
    good: dict[str, Method] = {}
    rows: list[LeftOutRow] = []
    few = network.inputs(images.take(slice(0, 2)))
    batches = None if train is None else Inputs(network, train.take(slice(0, 2 * BATCH)))
    for name, method in methods.items():
        try:
            quick = network.scale_noise(method).quick()
            compare(network.model, few, [quick], train=batches, models=network.members)
            good[name] = method
        except QualmsError as error:
            rows.append({"row": "left out", "method": name, "why": str(error)})
    if not good:
        raise QualmsError(f"no method can be used: {rows[0]['method']}: {rows[0]['why']}")
    return good, rows


@contextmanager
def by_name(images: Images, numbers: Sequence[int], first: int = 0) -> Iterator[None]:
    """Tells by its name which image has no finite score, of those that a scorer knows by numbers.

    `first` is the place of the first, by which it is called where images have no names.
    """
    try:
        yield
    except NotFinite as error:
        place = numbers.index(error.number)
        which = images.ids[place] if images.ids else f"image {first + place}"
        words = (
            f"{error.method} gives {which} of {images.name} no finite score; leave the method out."
        )
        raise QualmsError(words) from None


def parameters(method: Method, train: Images | None) -> str:
    """All that decides a method's scores beside network, image and seed: a row made otherwise is
    another row.
    """
    learnt = (
        f" on {train.fingerprint()}" if train is not None and TRAINING_DATA in method.needs else ""
    )
    return f"{method!r}{learnt}"


def _known(journal: Journal, key: ScoresKey, exactly: dict[str, str]) -> dict[str, list[float]]:
    known: dict[str, list[float]] = {}
    for row in journal.where(**key):
        known |= {
            name: s
            for name, s in row["scores"].items()
            if row["methods"][name] == exactly.get(name)
        }
    return known


@dataclass(frozen=True)
class Inputs:
    """Batches of what a network receives for some images, made as they are asked for, each time
    anew.
    """

    network: Network
    images: Images

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (
            self.network.inputs(self.images.take(part))
            for part in torch.arange(len(self.images)).split(BATCH)
        )
