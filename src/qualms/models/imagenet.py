"""ImageNet's 1000 classes (ILSVRC 2012), in the order of its labels: that of their WordNet ids."""

from functools import cache
from pathlib import Path


@cache
def imagenet_classes() -> tuple[str, ...]:
    """Read the short name of each class; "crane" and "maillot" are names of two classes each."""
    return tuple(name for _, name in _lines())


@cache
def imagenet_ids() -> tuple[str, ...]:
    """Read the WordNet id of each class, such as n01440764, by which its folder is named."""
    return tuple(number for number, _ in _lines())


def _lines() -> list[list[str]]:
    """Read the list of classes: pairs of WordNet id and name."""
    text = Path(__file__).with_name("imagenet_classes.txt").read_text(encoding="utf-8")
    return [line.split(" ", 1) for line in text.splitlines()]
