"""`ImageScorer`: images in, scores out. Every command, task and service scores images by it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from qualms.data import Images
from qualms.errors import QualmsError
from qualms.methods.method import TRAINING_DATA, Method, NotFinite
from qualms.result import Scored
from qualms.scorer import Scorer
from qualms.stream.network import InputBatches, Network


def make_scorer(
    network: Network,
    methods: Mapping[str, Method],
    train: Images | None = None,
    **options: Any,
) -> Scorer:
    """Build a `Scorer` of a network's model, with noise levels converted to the model's units.

    Args:
        network: the network whose model and ensemble members are used.
        methods: the methods by name, with noise for pixels in [0, 1], as papers give it.
        train: images that methods may learn from; used only if one of the methods needs training
            data.
        options: `engine`, `tolerance` and `seed`, as for `Scorer`.
    """
    scaled_methods: dict[str, Method] = {}
    train_batches = None
    for name, method in methods.items():
        scaled_methods[name] = network.scale_noise(method)
        if train is not None and TRAINING_DATA in method.needs:
            train_batches = InputBatches(network, train)
    return Scorer(
        network.model,
        scaled_methods,
        train=train_batches,
        models=network.members,
        **options,
    )


@dataclass(frozen=True)
class ImageScorer:
    """Scores images by a network, which turns them into inputs, and the scorer of its model.

    An image's random draws depend on its pixels and the seed alone. So its score does not depend on
    its position, on its batch, or on the command that scores it.

    Args:
        network: the network, which turns images into inputs.
        scorer: the scorer of the network's model (see `make_scorer`).
    """

    network: Network
    scorer: Scorer

    def score(self, images: Images, first: int = 0) -> Scored:
        """Score one batch of images.

        Args:
            images: n images of one size.
            first: the position of the first image in the stream; images without names have their
                positions as ids.

        Returns:
            The scores with the images' ids, and with the names of the classes if they are known.

        Raises:
            QualmsError: if an image has no finite score; the error names the image.
        """
        x, numbers = self.network.numbered_inputs(images)
        with _name_image(images, numbers, first):
            scored = self.scorer(x, numbers=numbers)
        ids = images.ids or range(first, first + len(images))
        num_classes = scored.probs.shape[1]
        names = self.network.names_of_classes(images, num_classes)
        return replace(scored, ids=ids, class_names=names)


@contextmanager
def _name_image(images: Images, numbers: Sequence[int], first: int) -> Iterator[None]:
    """Name the image if the scorer raises `NotFinite`, as the scorer knows images only by number.

    Args:
        images: the images of the batch that is scored inside the block.
        numbers: the numbers that were passed to the scorer, one for each image.
        first: the position of the first image in the stream.

    Raises:
        QualmsError: if the scorer raises `NotFinite`, as an image has no finite score.
    """
    try:
        yield
    except NotFinite as error:
        index = numbers.index(error.number)
        which = images.ids[index] if images.ids else f"image {first + index}"
        raise QualmsError(
            f"{error.method} has no finite score for {which} of {images.name}; leave the method "
            "out."
        ) from None
