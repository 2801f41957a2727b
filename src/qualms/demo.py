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

# The number of classes that the network learns, the digits 0 to 6.
NUM_KNOWN = 7
SIZE = 16  # height and width of the images, in pixels
EPOCHS = 10
TRAININGS = 3  # of the same CNN: the first is the network to evaluate, the others its ensemble
IMAGES_PER_KIND = 96  # of each kind of unknown images; there are twice as many known ones
TIMED_IMAGES = 16  # known images on which methods are timed
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


def prepare_scene(seed: int = 0, progress: ProgressFn | None = None) -> Scene:
    """Train the network and gather the images.

    Args:
        seed: The seed of the initial weights, the training and the choice of images.
        progress: Called with a kind of work, the number of networks trained so far, and their
            number in all.
    """
    train = load("data:digits", split="train").convert(1, SIZE)
    test = load("data:digits", split="test").convert(1, SIZE)
    train_digits = _take_classes(train, range(NUM_KNOWN), "digits 0 to 6")
    known = _take_classes(test, range(NUM_KNOWN), "digits 0 to 6")
    # The network saw no digit from 7 to 9, so those of both splits are unknown to it.
    unknown_digits = _take_classes(_concatenate(train, test), range(NUM_KNOWN, 10), "digits 7 to 9")
    # The first network is scored; the others are an ensemble for the methods that need several.
    models = []
    for index in range(TRAININGS):
        models.append(_train(train_digits, seed + index))
        if progress is not None:
            progress("networks trained", index + 1, TRAININGS)
    network = Network("the paper's CNN", models[0], NORMALIZATION, members=tuple(models[1:]))
    unknown = []
    for images in (unknown_digits, load("data:letters"), load("data:photos")):
        unknown.append(images.convert(1, SIZE).subset(IMAGES_PER_KIND, seed))
    return Scene(
        network=network,
        train=train_digits,
        known=known.subset(2 * IMAGES_PER_KIND, seed),
        unknown=unknown,
    )


def every_method() -> dict[str, Method]:
    """Return every method by its spec: REGrad* with and without smoothing, then all with defaults.

    The noise of smoothing is for pixels from 0 to 1.
    """
    names = [method_type.name for method_type in METHODS]
    return {spec: parse(spec) for spec in (DEFAULT, "regrad+layers", *names)}


def score_and_time(
    scene: Scene, seed: int = 0, progress: ProgressFn | None = None
) -> tuple[Content, list[LeftOutRow]]:
    """Score all images by every method, and time the methods.

    Args:
        scene: The network and the images, from `prepare_scene`.
        seed: The seed of all random draws.
        progress: Called with a kind of work, how much of it is done, and how much there is.

    Returns:
        What the report shows, and a row with the reason for each method that the network does not
        support.
    """
    network = scene.network
    # Keeps the rows in memory only.
    journal = Journal(None, {})
    methods, left_out = select_usable(network, scene.known, every_method(), scene.train)
    groups = []
    for images in (scene.known, *scene.unknown):
        scored = score_images(
            network,
            images,
            methods,
            journal,
            seed=seed,
            train=scene.train,
            progress=progress,
        )
        # Labels of the unknown images are not classes of the network.
        labels = scored.labels if images is scene.known else None
        group = Group(
            name=images.name,
            images=images,
            scores=scored.scores,
            predicted=scored.predicted,
            labels=labels,
            confidence=scored.confidence,
        )
        groups.append(group)
    timed_images = scene.known.take(slice(0, TIMED_IMAGES))
    time_rows = runtime(
        network,
        timed_images,
        methods,
        journal,
        seed=seed,
        train=scene.train,
        rounds=3,
        progress=progress,
    )
    training = f"trained on {len(scene.train)} images of the {scene.train.name}"
    content = Content(
        "What a network for digits does not know",
        known=groups[0],
        unknown=groups[1:],
        about={"Network": f"{network.name}, {training}", "Seed": str(seed)},
        costs={row["method"]: row["ratio"] for row in time_rows},
        layers=layers_of(network, groups, methods),
        left_out=left_out,
        classes=tuple(scene.known.classes[:NUM_KNOWN]),
    )
    return content, left_out


def _train(images: Images, seed: int) -> nn.Module:
    """Train a CNN on images of the known digits; the global random state is left unchanged."""
    # The initial weights follow the seed. On exit, the random state of the CPU (no other one is
    # used) is restored.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = paper_cnn(
            channels=1,
            size=SIZE,
            classes=NUM_KNOWN,
        )
    fit(model, images, RECIPES["digits"].shortened(EPOCHS), NORMALIZATION, seed=seed)
    return model


def _take_classes(images: Images, wanted: range, name: str) -> Images:
    """Select the images of some classes.

    Args:
        images: Images with labels.
        wanted: The indices of the classes to select.
        name: What tables call the selected images.
    """
    assert images.labels is not None
    is_wanted = torch.isin(images.labels, torch.tensor(list(wanted)))
    selected = images.take(is_wanted.nonzero().squeeze(1))
    return Images(
        name=name,
        pixels=selected.pixels,
        labels=selected.labels,
        classes=images.classes,
    )


def _concatenate(train: Images, test: Images) -> Images:
    """Join the labeled images of the two splits of a dataset."""
    assert train.labels is not None
    assert test.labels is not None
    pixels = torch.cat([train.pixels, test.pixels])
    labels = torch.cat([train.labels, test.labels])
    return Images(
        name=train.name,
        pixels=pixels,
        labels=labels,
        classes=train.classes,
    )
