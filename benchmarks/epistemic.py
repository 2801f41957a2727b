"""Are the scores epistemic? Three checks on MNIST, for every score.

    QUALMS_DATA=folder python benchmarks/epistemic.py train | size | ensemble | ambiguous   [--out
    runs]

Knowledge grows with training data and not with the noise of labels; a deep ensemble's members
disagree where it is missing; an input that two classes share is ambiguous, not unknown. All
networks are the small 5x5 CNN for MNIST, by the paper's recipe for 2000 steps, and the last weights
stay. They differ in what they saw.

- size: training sets of 100 to 60,000 images, and of 60,000 with up to 40 % of the labels replaced
  by others, each for 30 epochs at least. Of all pairs of networks of one seed, how often is the
  score of a test image higher for the one that saw less, and how often for the one whose labels
  were noisier? Methods that see training data are left out: what they see would change too.
- ensemble: the rank correlation of one network's score with the mutual information of ten other
  networks; controlling for the network's entropy; and for the mean entropy of the ten, which is
  what they agree to be noise. Within test images, Omniglot and Fashion-MNIST, and the mean of the
  three: between them, it would be OOD detection again.
- ambiguous: half of the training images are means of two digits of different classes, labeled by
  either one. On new such means, on digits, and on images of other datasets: does the score tell the
  unknown from the ambiguous, and the ambiguous from the clear?

Rows go to `results/epistemic.jsonl`, one for each check, method and seed; what has a row is passed
over. Noise in methods is in pixels. Networks go to OUT/epistemic.
"""

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import root
from scipy.stats import rankdata

from qualms import Scorer
from qualms.data import DATASETS, Images, load
from qualms.methods.divergence import mutual_information
from qualms.methods.method import TRAINING_DATA
from qualms.metrics import auroc
from qualms.models.cnn import mnist_cnn_5x5
from qualms.random import generator
from qualms.stream.network import Network
from qualms.stream.sizes import FORWARD_BATCH
from qualms.tasks.paper_numbers import comparison_methods, paper_methods
from qualms.tasks.score_rows import Methods
from qualms.training import RECIPES, fit

RESULTS = Path(__file__).parent / "results" / "epistemic.jsonl"
SIZES = (100, 300, 1000, 3000, 10_000, 30_000, 60_000)
NOISE = (0.0, 0.1, 0.2, 0.4)
SEEDS = (0, 1, 2)
MEMBERS = tuple(range(10, 20))  # seeds of the ensemble, none of which is scored
STEPS = 2000
EPOCHS = 30  # at least, where training sets are compared: less would leave the large ones unlearnt
COUNT = 500  # images of each kind
LEARNT = 2000  # training images that methods with data see
LEFT_OUT = ("gaia",)  # counts gradients that are zero, and behind this network's GELUs none are
PURPOSE = {"subset": 20, "noise": 21, "mixture": 22}  # of random numbers
Row = dict[str, Any]
Scores = dict[str, np.ndarray]


def noisy(images: Images, share: float, seed: int) -> Images:
    """With this share of the labels replaced by other classes."""
    source, labels = generator(seed, PURPOSE["noise"]), images.labels
    assert labels is not None
    changed = torch.rand(len(images), generator=source) < share
    others = (labels + torch.randint(1, 10, labels.shape, generator=source)) % 10
    return replace(images, labels=torch.where(changed, others, labels))


def mixtures(images: Images, count: int, seed: int) -> Images:
    """Means of two images of different classes, labeled by one of the two: no network can know by
    which.
    """
    source, labels = generator(seed, PURPOSE["mixture"]), images.labels
    assert labels is not None
    one, other = (torch.randint(len(images), (2 * count,), generator=source) for _ in range(2))
    differ = (labels[one] != labels[other]).nonzero()[:count, 0]
    one, other = one[differ], other[differ]
    pixels = (images.pixels[one].float() + images.pixels[other].float()).div(2).to(torch.uint8)
    return Images(
        "mixtures",
        pixels,
        torch.where(torch.rand(count, generator=source) < 0.5, labels[one], labels[other]),
    )


def half_mixtures(images: Images, seed: int) -> Images:
    """Half plain images, half mixtures."""
    mixed, plain = (
        mixtures(images, len(images) // 2, seed),
        images.subset(len(images) // 2, seed=seed),
    )
    assert plain.labels is not None
    assert mixed.labels is not None
    return Images(
        "mnist", torch.cat([plain.pixels, mixed.pixels]), torch.cat([plain.labels, mixed.labels])
    )


def training_sets(every: Images, seed: int) -> Iterator[tuple[str, Images]]:
    """Every training set of a seed but the one with mixtures, made of all training images."""
    yield from ((f"size {n}", every.subset(n, seed=seed)) for n in SIZES)
    yield from ((f"noise {share:g}", noisy(every, share, seed)) for share in NOISE[1:])


def trained(name: str, images: Images, seed: int, out: Path, least: int = 1) -> Network:
    """A network for this training set after this many epochs at least, read if it is there."""
    torch.manual_seed(seed)
    model, normalization = mnist_cnn_5x5(), DATASETS["mnist"].normalization
    epochs = max(least, -(-STEPS // -(-round(0.9 * len(images)) // RECIPES["mnist"].batch)))
    file = out / "epistemic" / f"{name.replace(' ', '-')}-{epochs}epochs-seed{seed}.pt"
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        # One look at the end: on ten validation images an early epoch would often seem the best.
        recipe = replace(RECIPES["mnist"], epochs=epochs, validate_every=epochs)
        fit(model, images, recipe, normalization, seed=seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
        print(name, seed, "trained", flush=True)
    return Network(name, model.eval(), normalization)


def every_method(with_data: bool = True) -> Methods:
    """The rows of the tables, under the names that they have there."""
    found = {**paper_methods("mnist", draws=20), **comparison_methods("mnist")}
    found = {name: method for name, method in found.items() if name not in LEFT_OUT}
    return {
        name: method
        for name, method in found.items()
        if with_data or TRAINING_DATA not in method.needs
    }


def scored(
    network: Network, train: Images, parts: list[Images], seed: int, methods: Methods
) -> list[Scores]:
    """The scores of several sets of images; methods that need training data see the network's own."""
    own = {name: network.scale_noise(method) for name, method in methods.items()}
    seen = train.subset(LEARNT)
    assert seen.labels is not None
    learnt = list(
        zip(
            network.inputs(seen).split(FORWARD_BATCH), seen.labels.split(FORWARD_BATCH), strict=True
        )
    )
    scorer = Scorer(network.model, own, train=learnt, seed=seed)
    found = [scorer(list(network.inputs(part).split(100))).scores for part in parts]
    return [{name: scores.double().numpy() for name, scores in part.items()} for part in found]


def size(every: Images, test: Images, seed: int, out: Path) -> dict[str, Row]:
    """How often scores fall with more training images, and rise with more noise in their labels."""
    methods, found = every_method(with_data=False), dict[str, Scores]()
    for name, images in training_sets(every, seed):
        (found[name],) = scored(
            trained(name, images, seed, out, EPOCHS), images, [test], seed, methods
        )
    sizes = [found[f"size {n}"] for n in SIZES]
    noises = [sizes[-1], *(found[f"noise {share:g}"] for share in NOISE[1:])]
    return {
        method: {
            "falls_with_size": ordered([s[method] for s in sizes[::-1]]),
            "rises_with_noise": ordered([s[method] for s in noises]),
            "by_size": [float(np.median(s[method])) for s in sizes],
            "by_noise": [float(np.median(s[method])) for s in noises],
        }
        for method in methods
    }


def ordered(scores: list[np.ndarray]) -> float:
    """Of all images and pairs of networks: the share in which the later network's score is higher;
    a tie is half.
    """
    pairs = list(itertools.combinations(scores, 2))
    return float(np.mean([(b > a).mean() + (b == a).mean() / 2 for a, b in pairs]))


def ensemble(every: Images, test: Images, seed: int, out: Path) -> dict[str, Row]:
    """Rank correlations with the mutual information of ten other networks, within each dataset, and
    their means.
    """
    name, parts, methods = f"size {SIZES[-1]}", [test, *unknown()], every_method()
    members = [trained(name, every, member, out) for member in MEMBERS]
    log_q = [
        torch.stack([m.logits(part).double().log_softmax(-1) for m in members], dim=1)
        for part in parts
    ]
    information = [mutual_information(q).numpy() for q in log_q]
    noise = [-(q.exp() * q).sum(-1).mean(1).numpy() for q in log_q]
    own = scored(trained(name, every, seed, out), every, parts, seed, methods)
    entropy = [found["Entropy"] for found in own]
    rows: dict[str, Row] = {}
    for method in methods:
        score = [found[method] for found in own]
        rows[method] = {
            "rank": mean(map(correlation, score, information)),
            "partial": mean(map(partial, score, information, entropy)),
            "partial_to_noise": mean(map(partial, score, information, noise)),
        }
    return rows


def mean(values: Iterable[float | None]) -> float | None:
    """Of all, or none if one is missing."""
    found = list(values)
    return None if None in found else float(np.mean(np.array(found, dtype=float)))


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Of ranks, ties averaged; none for a score that is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def partial(a: np.ndarray, b: np.ndarray, given: np.ndarray) -> float | None:
    """The rank correlation of a and b that a third quantity does not explain; none where that ranks
    like one.
    """
    ab, ag, bg = correlation(a, b), correlation(a, given), correlation(b, given)
    if ab is None or ag is None or bg is None or max(abs(ag), abs(bg)) > 1 - 1e-9:
        return None
    return float((ab - ag * bg) / np.sqrt((1 - ag**2) * (1 - bg**2)))


def ambiguous(every: Images, test: Images, seed: int, out: Path) -> dict[str, Row]:
    """Whether scores separate the unknown from the ambiguous, and the ambiguous from the clear."""
    images = half_mixtures(every, seed)
    network = trained("mixtures", images, seed, out)
    both = mixtures(load("data:mnist", root()), COUNT, seed)
    methods = every_method()
    clear, shared, *others = scored(network, images, [test, both, *unknown()], seed, methods)
    away = {method: np.concatenate([other[method] for other in others]) for method in methods}
    return {
        method: {
            "unknown_over_ambiguous": auroc(shared[method], away[method]),
            "ambiguous_over_clear": auroc(clear[method], shared[method]),
            "unknown_over_clear": auroc(clear[method], away[method]),
        }
        for method in methods
    }


def unknown() -> list[Images]:
    """Images of other datasets."""
    return [
        load(f"data:{name}", root()).subset(COUNT).convert(1, 28)
        for name in ("omniglot", "fashion-mnist")
    ]


CHECKS = {"size": size, "ensemble": ensemble, "ambiguous": ambiguous}


def main() -> None:
    """Run what has no row yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["train", *CHECKS])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    given = parser.parse_args()
    every, test = load("data:mnist", root(), "train"), load("data:mnist", root()).subset(COUNT)
    if given.part == "train":
        for seed in SEEDS:
            trained("mixtures", half_mixtures(every, seed), seed, given.out)
            for name, images in training_sets(every, seed):
                trained(name, images, seed, given.out, EPOCHS)
        for seed in (*SEEDS, *MEMBERS):
            trained(f"size {SIZES[-1]}", every, seed, given.out)
        return
    rows = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    done = {row["seed"] for row in rows if row["check"] == given.part}
    for seed in [seed for seed in SEEDS if seed not in done]:
        found = CHECKS[given.part](every, test, seed, given.out)
        text = "".join(
            json.dumps({"check": given.part, "method": method, "seed": seed, "n": COUNT, **row})
            + "\n"
            for method, row in found.items()
        )
        with RESULTS.open("a") as file:
            file.write(text)
        print(given.part, seed, "done", flush=True)


if __name__ == "__main__":
    main()
