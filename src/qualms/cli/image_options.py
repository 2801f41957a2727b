"""The images that a command line names: to score, and to learn from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from qualms.cli.status import echo
from qualms.data import Images, ImageTransform, Rejected, dataset_name, load
from qualms.errors import QualmsError
from qualms.stream.network import Network
from qualms.tasks.reproduce import LEARNT_FROM

NAMED = 3  # of the inputs that could not be read, on the terminal


def test_images(
    names: list[str],
    root: Path | None,
    fit: ImageTransform | int | None,
    strict: bool = True,  # noqa: PT028 (not a test)
) -> list[Images]:
    """Test images; those whose files have the same name are called by the whole path.

    Files may hold images of several sizes, so those are fitted as they are read; named datasets by
    the network, batch by batch.
    """
    found = [_read(name, root, "test", fit, strict) for name in names]
    short = [images.name for images in found]
    return [
        replace(images, name=name) if short.count(images.name) > 1 else images
        for name, images in zip(names, found, strict=True)
    ]


def training_images(
    name: str, root: Path | None, fit: ImageTransform | int | None, test: Images
) -> Images | None:
    """Training images, if they are there, for the methods that learn from them.

    A file or folder without parts for training and testing gives the test images for both: those
    are not for learning.
    """
    try:
        train = _read(name, root, "train", fit, strict=True)
    except QualmsError:
        return None
    return None if train.fingerprint() == test.fingerprint() else train.subset(LEARNT_FROM)


def _read(
    name: str, root: Path | None, split: str, fit: ImageTransform | int | None, strict: bool
) -> Images:
    if dataset_name(name, root) is not None:
        return load(name, root, split)
    fit = ImageTransform((fit, fit), by="as --size says") if isinstance(fit, int) else fit
    return load(name, root, split, transform=fit, strict=strict)


def echo_images(network: Network, *found: Images) -> None:
    """Say on stderr where images come from, how many there are, and what is done to them."""
    for images in found:
        echo(
            f"{images.name}: {len(images)} image{'' if len(images) == 1 else 's'}, {images.source}"
        )
        for note in network.describe_preprocessing(images):
            echo(f"  {note}")
        echo_rejected(images.rejected)


def echo_rejected(rejected: Sequence[Rejected]) -> None:
    """Say on stderr what could not be read, if there is anything."""
    if rejected:
        some = "; ".join(f"{one.id} is {one.reason}" for one in rejected[:NAMED])
        more = f"; and {len(rejected) - NAMED} more" if len(rejected) > NAMED else ""
        echo(f"  {len(rejected)} could not be read ({some}{more})")
