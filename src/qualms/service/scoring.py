"""Questions in, answers out: the images of several requests in one batch, each scored as if it were
alone.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from qualms.data import Images
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.methods.price import Price
from qualms.models.fingerprint import fingerprint
from qualms.report.layer_chart import has_layers, layer_sums
from qualms.result import Scored
from qualms.scorer import Scorer
from qualms.service.answers import About, finite, results
from qualms.service.uploads import Pixels
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import Network
from qualms.stream.sizes import SERVICE_BATCH
from qualms.threshold import Threshold

NAME = "the request"  # what errors call its images
Place = tuple[int, int]  # the number of a question, and of an image in it
Watch = Callable[[int], AbstractContextManager[None]]  # around the scoring of so many images
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """A network, which knows how images become its inputs, and the scorer of its model."""

    name: str
    network: Network
    scorer: Scorer

    @property
    def about(self) -> About:
        """What the web side tells of it."""
        loaded = {
            "model_hash": fingerprint(self.network.model),
            "class_names": list(self.network.class_names) or None,
            "tolerance": self.scorer.settings.tolerance,
        }
        return about_unloaded(self.name, self.scorer.methods, self.scorer.threshold).model_copy(
            update=loaded
        )

    @property
    def decides(self) -> tuple[str, Method]:
        """The first method."""
        return next(iter(self.scorer.methods.items()))

    @property
    def gray_image(self) -> torch.Tensor | None:
        """An image to try the network on; None where nobody says which size it takes."""
        fit = self.network.transform
        if fit is None:
            return None
        channels = len(self.network.normalization.mean)
        return torch.full((1, channels, *fit.size), 128, dtype=torch.uint8)

    def price(self) -> Price | None:
        """What an image costs, as counted."""
        image = self.gray_image
        return (
            None
            if image is None
            else self.scorer.price(self.network.inputs(Images(NAME, image, None)))
        )

    def warm_up(self) -> Scored | None:
        """Score a gray image, so that what is wrong is told now, and the first request does not
        wait.
        """
        image = self.gray_image
        return None if image is None else self.score(image)

    def score(self, pixels: torch.Tensor) -> Scored:
        """Scores of images of one size. Draws follow the pixels, so an image's company does not
        change its score.
        """
        return ImageScorer(self.network, self.scorer).score(Images(NAME, pixels, None))


def about_unloaded(name: str, methods: Mapping[str, Method], threshold: Threshold | None) -> About:
    """What is known of what is served before it is loaded: all but the weights, the classes and the
    tolerance.
    """
    first = next(iter(methods.values()))
    return About(
        model=name,
        model_hash="",
        methods=list(methods),
        class_names=None,
        threshold=None if threshold is None else finite(threshold.value),
        rule=None if threshold is None else threshold.rule,
        reference=[] if threshold is None else list(threshold.reference),
        layers=has_layers(first),
        tolerance=None,
    )


@dataclass(frozen=True)
class Question:
    """The images of one request, and whether the answer says which layers their scores come from."""

    images: list[Pixels]
    layers: bool = False
    came: float = field(default_factory=time.monotonic)  # when the request's headers did


@dataclass(frozen=True)
class Reply:
    """For each image of a question what `Result` holds; None if the network cannot score them."""

    results: list[dict[str, Any]] | None
    together: int = 0  # images that were scored in the same batch
    broken: bool = False  # there are no results by a defect, and not by the images
    late: bool = False  # there are none since the deadline was over first


def replies(
    served: Served,
    questions: Sequence[Question],
    deadline: float = math.inf,
    watch: Watch = lambda _: nullcontext(),
) -> list[Reply]:
    """The answers to several requests. One that cannot be answered does not keep the others from
    it.

    A request whose seconds are over is given up: nobody waits for it, and others may.
    """
    total = sum(len(question.images) for question in questions)
    found = [Reply([{}] * len(question.images), total) for question in questions]
    for places in _parts(questions):
        for q in {q for q, _ in places}:
            if time.monotonic() > questions[q].came + deadline:
                found[q] = Reply(None, late=True)
        left = [(q, i) for q, i in places if found[q].results is not None]
        if left:
            _answer(served, questions, left, found, watch)
    return found


def _parts(questions: Sequence[Question]) -> Iterator[list[Place]]:
    """All images: those of one size together, a few at a time."""
    same: dict[tuple[int, ...], list[Place]] = {}
    for q, question in enumerate(questions):
        for i, image in enumerate(question.images):
            same.setdefault(image.shape, []).append((q, i))
    for places in same.values():
        yield from (
            places[start : start + SERVICE_BATCH] for start in range(0, len(places), SERVICE_BATCH)
        )


def _answer(
    served: Served,
    questions: Sequence[Question],
    places: list[Place],
    found: list[Reply],
    watch: Watch,
) -> None:
    """Fill in the results of some images; those of one request alone if they cannot be scored with
    others.
    """
    try:
        with watch(len(places)):
            told = _results(served, questions, places)
        for (q, i), result in zip(places, told, strict=True):
            found[q].results[i] = result  # type: ignore[index]
    except Exception as error:  # whatever a network raises
        if places[0][0] != places[-1][0]:
            for _, own in groupby(places, itemgetter(0)):
                _answer(served, questions, list(own), found, watch)
        elif isinstance(error, QualmsError):
            log.warning("images of a request cannot be scored: %s", error)
            found[places[0][0]] = Reply(None)
        else:
            log.exception("images of a request could not be scored")
            found[places[0][0]] = Reply(None, broken=True)


def _results(
    served: Served, questions: Sequence[Question], places: list[Place]
) -> list[dict[str, Any]]:
    """What is said of images of one size."""
    pixels = torch.from_numpy(np.stack([questions[q].images[i] for q, i in places]))
    found = results(served.score(pixels))
    asked = [place for place, (q, _) in enumerate(places) if questions[q].layers]
    if asked and has_layers(served.decides[1]):
        for place, layers in zip(asked, _shares(served, pixels[asked]), strict=True):
            found[place]["layers"] = layers
    return found


def _shares(served: Served, pixels: torch.Tensor) -> list[list[dict[str, Any]]]:
    """For each image what part of the first method's score each layer has, without smoothing."""
    name, method = served.decides
    x = served.network.inputs(Images(NAME, pixels, None))
    names, sums = layer_sums(served.network.model, x, {name: method}, served.scorer.settings)
    whole = sums[name].sum(1, keepdims=True)
    shares = np.divide(sums[name], whole, out=np.zeros_like(sums[name]), where=whole > 0)
    return [
        [{"name": n, "share": float(s)} for n, s in zip(names, row, strict=True)] for row in shares
    ]
