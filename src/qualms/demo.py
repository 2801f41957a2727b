"""From nothing to a picture of what a network does not know, with images that need no file.

The paper's CNN learns the digits 0 to 6. Test digits of these classes are known to it; the digits 7
to 9, letters, and patches of photographs are not. Every method that the network allows scores them
all.
"""

from dataclasses import dataclass

import torch

from qualms.data import DATASETS, Images, load
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT, METHODS, parse
from qualms.models.cnn import paper_cnn
from qualms.progress import ProgressFn
from qualms.report.content import Content, Group
from qualms.report.layer_chart import layers_of
from qualms.stream.network import Network
from qualms.tasks.journal import Journal
from qualms.tasks.rows import LeftOutRow
from qualms.tasks.runtime import runtime
from qualms.tasks.scoring import score_images, select_usable
from qualms.training import RECIPES, fit

KNOWN = 7  # the digits 0 to 6 are learnt
SIZE = 16
EPOCHS = 10
TRAININGS = 3  # the first is the network, the others its ensemble
EACH = 96  # images of each kind
TIMED = 16  # images on which methods are timed
NORMALIZATION = DATASETS["digits"].normalization


@dataclass(frozen=True)
class Scene:
    """A network that has learnt some digits, the images that it learnt from, and images of four
    kinds.
    """

    network: Network
    train: Images
    known: Images
    unknown: list[Images]


def prepare(seed: int = 0, progress: ProgressFn | None = None) -> Scene:
    """Train the network and gather the images."""
    train, test = (load("data:digits", split=split).convert(1, SIZE) for split in ("train", "test"))
    learnt, known = (_classes(images, range(KNOWN), "digits 0 to 6") for images in (train, test))
    # Digits 7 to 9 were held back from training altogether, so those of both splits are unknown.
    held_back = _classes(_joined(train, test), range(KNOWN, 10), "digits 7 to 9")
    models = []
    for number in range(TRAININGS):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + number)
            models.append(paper_cnn(channels=1, size=SIZE, classes=KNOWN))
        fit(
            models[-1],
            learnt,
            RECIPES["digits"].shortened(EPOCHS),
            NORMALIZATION,
            seed=seed + number,
        )
        if progress is not None:
            progress("networks trained", number + 1, TRAININGS)
    network = Network("the paper's CNN", models[0], NORMALIZATION, members=tuple(models[1:]))
    others = [held_back, load("data:letters"), load("data:photos")]
    shown = [images.convert(1, SIZE).subset(EACH, seed) for images in others]
    return Scene(network, learnt, known.subset(2 * EACH, seed), shown)


def every_method() -> dict[str, Method]:
    """Methods by spec: the paper's REGrad* first, then all others at their defaults; noise in
    pixels from 0 to 1.
    """
    return {
        spec: parse(spec) for spec in (DEFAULT, "regrad+layers", *(kind.name for kind in METHODS))
    }


def evaluate(
    scene: Scene, seed: int = 0, progress: ProgressFn | None = None
) -> tuple[Content, list[LeftOutRow]]:
    """What the report shows, and a row with the reason for each method that the network does not
    allow.
    """
    network, journal = scene.network, Journal(None, {})
    methods, reasons = select_usable(network, scene.known, every_method(), scene.train)
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
    about = {
        "Network": f"{network.name}, trained on {len(scene.train)} images of the {scene.train.name}",
        "Seed": str(seed),
    }
    content = Content(
        "What a network for digits does not know",
        groups[0],
        groups[1:],
        about=about,
        costs={row["method"]: row["ratio"] for row in timed},
        layers=layers_of(network, groups, methods),
        left_out=reasons,
        classes=tuple(scene.known.classes[:KNOWN]),
    )
    return content, reasons


def _classes(images: Images, wanted: range, name: str) -> Images:
    assert images.labels is not None
    some = images.take(torch.isin(images.labels, torch.tensor(list(wanted))).nonzero().squeeze(1))
    return Images(name, some.pixels, some.labels, images.classes)


def _joined(a: Images, b: Images) -> Images:
    assert a.labels is not None
    assert b.labels is not None
    return Images(
        a.name, torch.cat([a.pixels, b.pixels]), torch.cat([a.labels, b.labels]), a.classes
    )
