"""The demo: what a network for digits does not know, with bundled images only.

The paper's CNN learns the digits 0 to 6. Test digits of these classes are known to it; the digits 7
to 9, letters, and patches of photographs are not. All of them are scored by every method that the
network supports.
"""

from dataclasses import dataclass

import torch
from torch import nn

from qualms.data import DATASETS, Images, load
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT, METHODS, parse
from qualms.models.cnn import paper_cnn
from qualms.progress import ProgressFn
from qualms.report.content import Content, Group
from qualms.report.layer_chart import layers_of
from qualms.stream.network import Network
from qualms.tasks.image_scores import score_images, select_usable
from qualms.tasks.journal import Journal
from qualms.tasks.rows import LeftOutRow
from qualms.tasks.runtime import runtime
from qualms.training import RECIPES, fit

# The number of classes that the network learns: the digits 0 to 6.
KNOWN = 7
SIZE = 16  # height and width of the images, in pixels
EPOCHS = 10
TRAININGS = 3  # the first is the network, the others its ensemble
EACH = 96  # the number of images of each kind
TIMED = 16  # images on which methods are timed
NORMALIZATION = DATASETS["digits"].normalization


@dataclass(frozen=True)
class Scene:
    """A network and the images of the demo.

    Args:
        network: A CNN that has learned some digits, with its ensemble.
        train: The images that it learned from.
        known: Test images of the same digits.
        unknown: Images of three other kinds.
    """

    network: Network
    train: Images
    known: Images
    unknown: list[Images]


def prepare(seed: int = 0, progress: ProgressFn | None = None) -> Scene:
    """Train the network and gather the images.

    Args:
        seed: The seed of the initial weights, the training and the choice of images.
        progress: Called with a kind of work, the number of networks trained so far, and their
            number in all.
    """
    train = load("data:digits", split="train").convert(1, SIZE)
    test = load("data:digits", split="test").convert(1, SIZE)
    seen = _take_classes(train, range(KNOWN), "digits 0 to 6")
    known = _take_classes(test, range(KNOWN), "digits 0 to 6")
    # The network saw no digit from 7 to 9, so those of both splits are unknown to it.
    unseen = _take_classes(_concatenate(train, test), range(KNOWN, 10), "digits 7 to 9")
    models = []
    for number in range(TRAININGS):
        models.append(_train(seen, seed + number))
        if progress is not None:
            progress("networks trained", number + 1, TRAININGS)
    network = Network("the paper's CNN", models[0], NORMALIZATION, members=tuple(models[1:]))
    unknown = []
    for images in (unseen, load("data:letters"), load("data:photos")):
        unknown.append(images.convert(1, SIZE).subset(EACH, seed))
    return Scene(network, seen, known.subset(2 * EACH, seed), unknown)


def every_method() -> dict[str, Method]:
    """Return every method by its spec: REGrad* first, then all others with default parameters.

    Noise levels are in pixels.
    """
    names = [kind.name for kind in METHODS]
    return {spec: parse(spec) for spec in (DEFAULT, "regrad+layers", *names)}


def evaluate(
    scene: Scene, seed: int = 0, progress: ProgressFn | None = None
) -> tuple[Content, list[LeftOutRow]]:
    """Score all images by every method, and time the methods.

    Args:
        scene: The scene that `prepare` returned.
        seed: The seed of all random draws.
        progress: Called with a kind of work, how much of it is done, and how much there is.

    Returns:
        What the report shows, and a row with the reason for each method that the network does not
        support.
    """
    network, journal = scene.network, Journal(None, {})
    methods, left_out = select_usable(network, scene.known, every_method(), scene.train)
    groups = []
    for images in (scene.known, *scene.unknown):
        found = score_images(
            network, images, methods, journal, seed=seed, train=scene.train, progress=progress
        )
        labels = found.labels if images is scene.known else None
        groups.append(
            Group(images.name, images, found.scores, found.predicted, labels, found.confidence)
        )
    few = scene.known.take(slice(0, TIMED))
    timed = runtime(
        network, few, methods, journal, seed=seed, train=scene.train, rounds=3, progress=progress
    )
    training = f"trained on {len(scene.train)} images of the {scene.train.name}"
    content = Content(
        "What a network for digits does not know",
        groups[0],
        groups[1:],
        about={"Network": f"{network.name}, {training}", "Seed": str(seed)},
        costs={row["method"]: row["ratio"] for row in timed},
        layers=layers_of(network, groups, methods),
        left_out=left_out,
        classes=tuple(scene.known.classes[:KNOWN]),
    )
    return content, left_out


def _train(images: Images, seed: int) -> nn.Module:
    """Train a CNN on images of the known digits; the global random state is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = paper_cnn(channels=1, size=SIZE, classes=KNOWN)
    fit(model, images, RECIPES["digits"].shortened(EPOCHS), NORMALIZATION, seed=seed)
    return model


def _take_classes(images: Images, wanted: range, name: str) -> Images:
    """Select the images of some classes.

    Args:
        images: Images with labels.
        wanted: The numbers of the classes to take.
        name: What tables call the selected images.
    """
    assert images.labels is not None
    is_wanted = torch.isin(images.labels, torch.tensor(list(wanted)))
    selected = images.take(is_wanted.nonzero().squeeze(1))
    return Images(name, selected.pixels, selected.labels, images.classes)


def _concatenate(a: Images, b: Images) -> Images:
    """Join the labeled images of two splits of one dataset."""
    assert a.labels is not None
    assert b.labels is not None
    pixels, labels = torch.cat([a.pixels, b.pixels]), torch.cat([a.labels, b.labels])
    return Images(a.name, pixels, labels, a.classes)
