"""ImageNet's 1000 classes (ILSVRC 2012) in the order of its labels: sorted by WordNet id."""

from functools import cache
from pathlib import Path


@cache
def imagenet_classes() -> tuple[str, ...]:
    """Read the short name of each ImageNet class, in the order of the labels.

    "crane" and "maillot" are the names of two classes each.
    """
    return tuple(name for _, name in _read_lines())


@cache
def imagenet_ids() -> tuple[str, ...]:
    """Read the WordNet id of each ImageNet class, in the order of the labels.

    Such an id, for example n01440764, is the name of the class's folder of images.
    """
    return tuple(wordnet_id for wordnet_id, _ in _read_lines())


def _read_lines() -> list[list[str]]:
    """Read pairs of WordNet id and name from the list of ImageNet's classes beside this file."""
    text = Path(__file__).with_name("imagenet_classes.txt").read_text(encoding="utf-8")
    return [line.split(" ", 1) for line in text.splitlines()]
