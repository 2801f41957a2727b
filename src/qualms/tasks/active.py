"""Active learning: which unlabeled images are worth labeling?

Wang & Ji, CVPR 2024, section 5.3: m1 balanced images to start with, then cycles that each add the
m2 most uncertain of the pool and retrain from scratch. The start is drawn from the training images
1 to 10,000, images 10,001 to 20,000 choose the best epoch, those above are the pool.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from qualms.data import Images, Normalization
from qualms.errors import QualmsError
from qualms.methods.method import TRAINING_DATA, Method
from qualms.metrics import accuracy, nll, nll_softmax_twice
from qualms.models.fingerprint import fingerprint
from qualms.progress import ProgressFn
from qualms.random import generator
from qualms.selection import require_gradients, select
from qualms.stream.network import InputBatches, Network
from qualms.tasks.journal import Journal
from qualms.tasks.row_measures import CycleMeasures
from qualms.tasks.rows import CycleKey, CycleRow, PickKey, PickRow
from qualms.training import Recipe, fit

BLOCK = 10_000  # images to start from, and as many for validation
# Seeds differ by purpose, so that random numbers do not coincide.
START, PICK = range(2)
RANDOM = "Random"
# The paper learns all its datasets with one small network.
NETWORKS = {"mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "digits": "digits-cnn"}
COLOR = "cnn-32"


@dataclass(frozen=True)
class Plan:
    """An experiment of active learning.

    Args:
        start: The number of labeled images to start with.
        more: The number of images that each cycle adds.
        recipe: How the network is trained.
        cycles: How often images are added.
        pool: The number of images to pick from; None for all.
        validation: The number of images that select the best epoch; None for all.
        diversity: The factor of candidates among which diverse images are picked, as in
            `qualms.select`; None picks the highest scores.
    """

    start: int
    more: int
    recipe: Recipe
    cycles: int = 10
    pool: int | None = None
    validation: int | None = None
    diversity: float | None = None


@dataclass(frozen=True)
class Parts:
    """How the training images are split, as positions of images in the training set.

    Args:
        start: The positions of the images to start with.
        validation: The positions of the images that select the best epoch.
        pool: The positions of the images to pick from.
    """

    start: Tensor
    validation: Tensor
    pool: Tensor


def active(
    build: Callable[[], nn.Module],
    train: Images,
    test: Images,
    normalization: Normalization,
    methods: Mapping[str, Method | None],
    plan: Plan,
    journal: Journal,
    *,
    seed: int = 0,
    progress: ProgressFn | None = None,
) -> Iterator[CycleRow]:
    """Compare methods by how much the images that they pick improve a network.

    Args:
        build: Makes the network with fresh weights. The seed decides the weights, which are the
            same for all cycles and methods.
        train: Labeled training images, which are split into start, validation images and pool.
        test: The images that the network is judged on.
        normalization: The mean and standard deviation that inputs are normalized by.
        methods: The methods by the names that rows have, with noise for pixels in [0, 1]; None
            picks at random.
        plan: How many images are picked, and how often.
        journal: Saves the rows; cycles that it has are not run again.
        seed: Decides the start, the weights and the order of training.
        progress: Called with the number of cycles that are done.

    Yields:
        For each method and cycle, a row with accuracy and negative log-likelihood on the test
        images. The start, which all methods share, comes once.
    """
    if plan.diversity is not None:
        for method in methods.values():
            if method is not None:
                require_gradients(method)
    trainer = _Trainer(build, train, normalization, plan, split(train, plan, seed), seed)
    total = len(methods) * (plan.cycles + 1)
    done = 0
    for name, method in methods.items():
        for row in _cycle_rows(trainer, name, method, test, journal):
            # Every method yields the shared start; keep the first.
            if row["cycle"] or done == 0:
                yield row
            done += 1
            if progress is not None:
                progress("cycles", done, total)


def _cycle_rows(
    trainer: "_Trainer", name: str, method: Method | None, test: Images, journal: Journal
) -> Iterator[CycleRow]:
    """Run all cycles of one method.

    Args:
        trainer: Trains the network.
        name: The name of the method in rows.
        method: The method that picks the images; None picks at random.
        test: The images that the network is judged on.
        journal: Saves the rows; cycles that it has are not run again.

    Yields:
        The row of the start, and a row for each cycle.
    """
    chosen: list[int] = []
    for cycle in range(trainer.plan.cycles + 1):
        key: CycleKey = {
            "row": "cycle",
            "data": trainer.images.name,
            "seed": trainer.seed,
            "from": trainer.weights,
            "method": name if cycle else "start",
            "cycle": cycle,
        }
        if cycle:
            key["exactly"] = repr(method)
        yield journal.get_or_add(key, partial(_measure_cycle, trainer, key, chosen, test))
        if cycle < trainer.plan.cycles:
            pick_key: PickKey = {
                "row": "pick",
                "data": trainer.images.name,
                "seed": trainer.seed,
                "from": trainer.weights,
                "method": name,
                "exactly": repr(method),
                "cycle": cycle,
            }
            pick = journal.get_or_add(pick_key, partial(_pick, trainer, pick_key, chosen, method))
            chosen = chosen + pick["chosen"]


def _measure_cycle(trainer: "_Trainer", key: CycleKey, chosen: list[int], test: Images) -> CycleRow:
    """Train the network on the start and the images picked so far, and measure how good it is.

    Args:
        trainer: Trains the network.
        key: Identifies the row.
        chosen: The positions of the images picked so far in the training set.
        test: The images that the network is judged on.
    """
    start = time.perf_counter()
    logits = trainer.train(chosen).logits(test)
    measures: CycleMeasures = {
        "accuracy": accuracy(logits, test.labels),
        "nll": nll(logits, test.labels),
        "nll_softmax_twice": nll_softmax_twice(logits, test.labels),
    }
    seconds = round(time.perf_counter() - start, 2)
    labeled = len(trainer.parts.start) + len(chosen)
    row: CycleRow = {**key, "labeled": labeled, **measures, "seconds": seconds}
    return row


def _pick(trainer: "_Trainer", key: PickKey, chosen: list[int], method: Method | None) -> PickRow:
    """Pick the images that get a label next, as a row.

    Args:
        trainer: Trains the network that scores the images of the pool.
        key: Identifies the row.
        chosen: The positions of the images picked so far in the training set.
        method: Scores the images; None picks at random.
    """
    return PickRow(**key, chosen=trainer.pick(chosen, method))


class _Trainer:
    """Trains a network on the images picked so far, and picks the next ones.

    Attributes:
        weights: A digest of the fresh weights, with the normalization: rows have it as `from`.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        images: Images,
        normalization: Normalization,
        plan: Plan,
        parts: Parts,
        seed: int,
    ) -> None:
        """Set up the training; nothing is trained yet.

        Args:
            build: Makes the network with fresh weights, as in `active`.
            images: The training images.
            normalization: The mean and standard deviation that inputs are normalized by.
            plan: How to train, and how many images to pick.
            parts: The positions of the start, of the validation images and of the pool.
            seed: Decides the weights and all draws.
        """
        self.build, self.images, self.normalization = build, images, normalization
        self.plan, self.parts, self.seed = plan, parts, seed
        self.weights = f"{fingerprint(self._build())} {normalization}"
        self._networks: dict[tuple[int, ...], Network] = {}

    def train(self, chosen: list[int]) -> Network:
        """Train the network on the start and on the images at these positions of the training set.

        The network of the start, which all methods share, and the latest network are cached.
        """
        key = tuple(chosen)
        if key in self._networks:
            return self._networks[key]
        start = self._networks.get(())
        self._networks = {} if start is None else {(): start}
        model = self._build()
        fit(
            model,
            self._take_labeled(chosen),
            self.plan.recipe,
            self.normalization,
            validation=self.images.take(self.parts.validation),
            seed=self.seed,
        )
        self._networks[key] = Network("active", model, self.normalization)
        return self._networks[key]

    def pick(self, chosen: list[int], method: Method | None) -> list[int]:
        """Pick the images of the pool that get a label next; return positions in the training set.

        Args:
            chosen: The positions of the images picked so far.
            method: Scores the images; None picks at random.
        """
        pool, count = self.parts.pool, self.plan.more
        left = pool[~torch.isin(pool, torch.tensor(chosen).long())]
        if len(left) < count:
            raise QualmsError(
                f"the pool has {len(left)} images left, but a cycle adds {count}; run fewer cycles."
            )
        if method is None:
            order = torch.randperm(len(left), generator=generator(self.seed, PICK, len(chosen)))
            return left[order[:count]].tolist()
        network = self.train(chosen)
        batches = None
        if TRAINING_DATA in method.needs:
            batches = InputBatches(network, self._take_labeled(chosen))
        picked = select(
            network.model,
            InputBatches(network, self.images.take(left)),
            count,
            network.scale_noise(method),
            diversity=self.plan.diversity,
            seed=self.seed,
            train=batches,
        )
        return left[picked].tolist()

    def _build(self) -> nn.Module:
        """Build the network with the weights that every training starts from, decided by the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.build()

    def _take_labeled(self, chosen: list[int]) -> Images:
        """Return the images of the start, then those at the positions `chosen`, with labels."""
        return self.images.take(torch.cat([self.parts.start, torch.tensor(chosen).long()]))


def split(train: Images, plan: Plan, seed: int) -> Parts:
    """Split training images into a balanced start, validation images and the pool.

    Each of the first two is drawn from 10,000 images, or from a third where there are not more than
    20,000.

    Args:
        train: Labeled images.
        plan: How many images to start with, to validate on and to pick from.
        seed: Decides the start.
    """
    if train.labels is None:
        raise QualmsError(f"{train.name} has no labels; active learning needs them.")
    block = BLOCK if len(train) > 2 * BLOCK else len(train) // 3
    classes = int(train.labels.max()) + 1
    per_class, remainder = divmod(plan.start, classes)
    if per_class < 1 or remainder:
        raise QualmsError(
            f"a balanced start with {plan.start} images is impossible for {classes} classes; pass "
            f"a multiple of {classes}."
        )
    order = torch.randperm(block, generator=generator(seed, START))
    # For each class, the positions of its first images in the random order.
    start = []
    for number in range(classes):
        of_class = order[train.labels[order] == number][:per_class]
        if len(of_class) < per_class:
            raise QualmsError(
                f"class {number} has fewer than {per_class} of the first {block} images; start with "
                "fewer images."
            )
        start.append(of_class)
    validation = torch.arange(block, 2 * block)[: plan.validation]
    pool = torch.arange(2 * block, len(train))[: plan.pool]
    return Parts(torch.cat(start), validation, pool)
