"""The process with the model: scores the images of several requests together.

An image's score does not depend on the images it shares a batch with, and a request that fails does
not affect the others.
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
from jaxtyping import Float, UInt8
from torch import Tensor

from qualms.data import Images
from qualms.errors import QualmsError, explain_failure, reason
from qualms.methods.method import Method
from qualms.methods.pricing import Price
from qualms.models.fingerprint import fingerprint
from qualms.report.layer_chart import has_layers, layer_sums
from qualms.result import Scored
from qualms.scorer import Scorer
from qualms.service.schemas import ModelInfo
from qualms.service.uploads import Pixels
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import Network
from qualms.stream.sizes import SERVICE_BATCH
from qualms.threshold import Threshold

IMAGES_NAME = "the request"  # what errors call the images
GRAY = 128
# The positions of a request in its batch, and of an image in it.
ImageKey = tuple[int, int]
# Around the scoring of so many images.
WatchFn = Callable[[int], AbstractContextManager[None]]
log = logging.getLogger(__name__)


class ModelError(QualmsError):
    """The model raised something other than a `QualmsError`.

    Args:
        original: What it raised.
    """

    def __init__(self, original: Exception) -> None:
        """Keep the original error, and describe it in one sentence."""
        self.original = original
        super().__init__(f"the model raised {type(original).__name__} ({reason(original)}).")


@dataclass(frozen=True)
class ScoringService:
    """A network, and the scorer of its model.

    Args:
        name: The model's name in answers and paths.
        network: The model, and how images become its inputs.
        scorer: The scorer of the model, with the methods and the threshold.
    """

    name: str
    network: Network
    scorer: Scorer

    @property
    def model_info(self) -> ModelInfo:
        """The description of the loaded model."""
        info = describe_unloaded(self.name, self.scorer.methods, self.scorer.threshold)
        loaded = {
            "model_hash": fingerprint(self.network.model),
            "class_names": list(self.network.class_names) or None,
            "tolerance": self.scorer.settings.tolerance,
        }
        return info.model_copy(update=loaded)

    @property
    def first_method(self) -> tuple[str, Method]:
        """The name of the method that decides, and the method."""
        return next(iter(self.scorer.methods.items()))

    def gray_image(self) -> UInt8[Tensor, "1 c h w"] | None:
        """Return a gray image to try the network on; None if the network's input size is unknown."""
        transform = self.network.transform
        if transform is None:
            return None
        channels = len(self.network.normalization.mean)
        return torch.full((1, channels, *transform.size), GRAY, dtype=torch.uint8)

    def price(self) -> Price | None:
        """Return the price of one image: its forward passes, counted, and their seconds.

        None if the network's input size is unknown.
        """
        image = self.gray_image()
        if image is None:
            return None
        inputs = self.network.inputs(_as_images(image))
        return self.scorer.price(inputs)

    def warm_up(self) -> Scored | None:
        """Score a gray image, so that an invalid setup fails now and the first request is not slow.

        Returns:
            The scores of the image; None if the network's input size is unknown.
        """
        image = self.gray_image()
        if image is None:
            return None
        return self.score(image)

    def score(self, pixels: UInt8[Tensor, "n c h w"]) -> Scored:
        """Score images of one size.

        Random draws follow the pixels, so an image's score does not depend on its batch.
        """
        return ImageScorer(self.network, self.scorer).score(_as_images(pixels))

    def layer_shares(self, pixels: UInt8[Tensor, "n c h w"]) -> list[list[dict[str, Any]]]:
        """Compute each layer's share of the first method's score, without smoothing.

        Args:
            pixels: Images of one size.

        Returns:
            For each image, the fields of a `LayerShare` for each layer.
        """
        name, method = self.first_method
        inputs = self.network.inputs(_as_images(pixels))
        settings = self.scorer.settings
        layers, sums = layer_sums(self.network.model, inputs, {name: method}, settings)
        shares = _normalize_rows(sums[name])
        rows = []
        for row in shares.tolist():
            pairs = zip(layers, row, strict=True)
            rows.append([{"name": layer, "share": share} for layer, share in pairs])
        return rows


def describe_unloaded(
    name: str,
    methods: Mapping[str, Method],
    threshold: Threshold | None,
) -> ModelInfo:
    """Describe a model before it is loaded: without its hash, class names and tolerance.

    Args:
        name: The model's name in answers and paths.
        methods: The methods by name; the first one decides.
        threshold: The threshold, if there is one.
    """
    first = next(iter(methods.values()))
    info = ModelInfo(
        model=name,
        model_hash="",
        methods=list(methods),
        class_names=None,
        threshold=None,
        rule=None,
        reference=[],
        layers=has_layers(first),
        tolerance=None,
    )
    if threshold is None:
        return info
    is_finite = math.isfinite(threshold.value)  # JSON has no infinity
    decides = {
        "threshold": threshold.value if is_finite else None,
        "rule": threshold.rule,
        "reference": list(threshold.reference),
    }
    return info.model_copy(update=decides)


@dataclass(frozen=True)
class ScoreRequest:
    """The images of one request.

    Args:
        images: The images, which may differ in size.
        with_layers: Whether the results hold each layer's share of the score.
        received_at: When the headers arrived, by `time.monotonic`.
    """

    images: list[Pixels]
    with_layers: bool = False
    received_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class ScoreResponse:
    """The results of one request, or why there are none.

    Args:
        results: For each image the fields of a `Result`, without its id. None if there are none.
        batch_images: The number of images in the batch, with those of other requests.
        failed: Whether the model raised an unexpected error.
        timed_out: Whether the deadline passed first.

    If there are no results, and the request has neither failed nor timed out, the network cannot
    score such images.
    """

    results: list[dict[str, Any]] | None
    batch_images: int = 0
    failed: bool = False
    timed_out: bool = False


def score_requests(
    service: ScoringService,
    requests: Sequence[ScoreRequest],
    deadline: float = math.inf,
    watch: WatchFn = lambda _: nullcontext(),
) -> list[ScoreResponse]:
    """Score the images of several requests, in batches of images of one size.

    A request whose deadline has passed is dropped between batches, because nobody waits for it.

    Args:
        service: The network and its scorer.
        requests: The requests, in order of arrival.
        deadline: Seconds from the arrival of a request to its deadline.
        watch: Maps a number of images to the context manager in which they are scored.

    Returns:
        A response to each request.
    """
    batch = _RequestBatch(service, requests, watch)
    for keys in batch.split_by_size():
        batch.drop_expired(keys, deadline)
        left = batch.open_keys(keys)
        if left:
            batch.score(left)
    return batch.responses


class _RequestBatch:
    """Requests that are scored together, and their responses as they are filled in.

    Args:
        service: The network and its scorer.
        requests: The requests, in order of arrival.
        watch: Maps a number of images to the context manager in which they are scored.

    Attributes:
        responses: A response for each request, with an empty result for each image to begin with.
    """

    def __init__(
        self,
        service: ScoringService,
        requests: Sequence[ScoreRequest],
        watch: WatchFn,
    ) -> None:
        """Begin with empty results."""
        self.service = service
        self.requests = requests
        self.watch = watch
        total = sum(len(request.images) for request in requests)
        self.responses = []
        for request in requests:
            empty: list[dict[str, Any]] = [{}] * len(request.images)
            self.responses.append(ScoreResponse(empty, total))

    def split_by_size(self) -> Iterator[list[ImageKey]]:
        """Yield the keys of all images, at most `SERVICE_BATCH` of one size at a time."""
        by_size: dict[tuple[int, ...], list[ImageKey]] = {}
        for r, request in enumerate(self.requests):
            for i, image in enumerate(request.images):
                by_size.setdefault(image.shape, []).append((r, i))
        for keys in by_size.values():
            for start in range(0, len(keys), SERVICE_BATCH):
                yield keys[start : start + SERVICE_BATCH]

    def drop_expired(self, keys: list[ImageKey], deadline: float) -> None:
        """Time out those requests of these images whose deadline has passed.

        Args:
            keys: The keys of the images that are about to be scored.
            deadline: Seconds from the arrival of a request to its deadline.
        """
        for r in {r for r, _ in keys}:
            if time.monotonic() > self.requests[r].received_at + deadline:
                self.responses[r] = ScoreResponse(None, timed_out=True)

    def open_keys(self, keys: list[ImageKey]) -> list[ImageKey]:
        """Return the keys whose requests have neither failed nor timed out."""
        return [(r, i) for r, i in keys if self.responses[r].results is not None]

    def score(self, keys: list[ImageKey]) -> None:
        """Score images of one size, and fill in their results.

        If they cannot be scored together, the images of each request are scored on their own.

        Args:
            keys: The keys of the images.
        """
        try:
            with self.watch(len(keys)), explain_failure(ModelError):
                results = self._compute_results(keys)
        except QualmsError as error:
            self._handle_failure(keys, error)
            return
        for (r, i), result in zip(keys, results, strict=True):
            self.responses[r].results[i] = result  # type: ignore[index]

    def _handle_failure(self, keys: list[ImageKey], error: QualmsError) -> None:
        """Score the images of each request on their own, or log why a single one fails.

        Args:
            keys: The keys of images that could not be scored together, sorted by request.
            error: The error of scoring them together.
        """
        first = keys[0][0]  # the position of the first request
        if first != keys[-1][0]:
            for _, request_keys in groupby(keys, itemgetter(0)):
                self.score(list(request_keys))
        elif isinstance(error, ModelError):
            log.error("the images of a request could not be scored", exc_info=error.original)
            self.responses[first] = ScoreResponse(None, failed=True)
        else:
            log.warning("the images of a request cannot be scored: %s", error)
            self.responses[first] = ScoreResponse(None)

    def _compute_results(self, keys: list[ImageKey]) -> list[dict[str, Any]]:
        """Score images of one size together, with the shares of layers where these were requested.

        Args:
            keys: The keys of the images.

        Returns:
            The fields of a `Result` for each image, without its id.
        """
        images = [self.requests[r].images[i] for r, i in keys]
        pixels = torch.from_numpy(np.stack(images))
        results = _to_results(self.service.score(pixels))
        positions = [p for p, (r, _) in enumerate(keys) if self.requests[r].with_layers]
        if positions and has_layers(self.service.first_method[1]):
            shares = self.service.layer_shares(pixels[positions])
            for position, layers in zip(positions, shares, strict=True):
                results[position]["layers"] = layers
        return results


def _to_results(scored: Scored) -> list[dict[str, Any]]:
    """Convert scores to values for JSON, a dict for each image.

    Args:
        scored: The scores of images of one size.

    Returns:
        The fields of a `Result` for each image, without its id and its layers.
    """
    threshold = scored.threshold
    percentiles: list[float | None] = [None] * len(scored)
    decisions: list[str | None] = [None] * len(scored)
    if threshold is not None:
        decisions = ["accepted" if taken else "abstain" for taken in scored.accepted.tolist()]
        if threshold.reference:
            percentiles = scored.percentile.tolist()
    names = scored.class_names
    results = []
    for i, prediction in enumerate(scored.prediction.tolist()):
        scores = {method: float(values[i]) for method, values in scored.scores.items()}
        result = {
            "prediction": prediction,
            "class_name": names[prediction] if names else None,
            "confidence": float(scored.confidence[i]),
            "scores": scores,
            "percentile": percentiles[i],
            "decision": decisions[i],
            "layers": None,
        }
        results.append(result)
    return results


def _as_images(pixels: UInt8[Tensor, "n c h w"]) -> Images:
    """Wrap pixels as `Images` without labels, which errors call "the request"."""
    return Images(IMAGES_NAME, pixels, None)


def _normalize_rows(sums: Float[np.ndarray, "n layers"]) -> Float[np.ndarray, "n layers"]:
    """Divide each row by its sum; leave rows of zeros unchanged."""
    totals = sums.sum(1, keepdims=True)
    return np.divide(sums, totals, out=np.zeros_like(sums), where=totals > 0)
