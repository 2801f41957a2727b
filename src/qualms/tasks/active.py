"""Active learning: which unlabeled images are worth labeling?

Wang & Ji, CVPR 2024, section 5.3: training starts with m1 labeled images, as many of each class.
Each cycle then labels the m2 most uncertain images of a pool, and trains again from scratch. The m1
images are drawn from the training images 1 to 10,000, images 10,001 to 20,000 are for validation
(they select the best epoch), and the others are the pool.
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

# The number of images that the start is drawn from, and the largest number for validation.
BLOCK = 10_000
# Purposes of random numbers, as for `generator`: each has numbers of its own under one seed.
DRAW_START, DRAW_PICK = range(2)
RANDOM = "Random"
# The paper trains one small network on all its datasets.
NETWORKS = {"mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "digits": "digits-cnn"}
COLOR_NETWORK = "cnn-32"  # of all other datasets, which are in color


@dataclass(frozen=True)
class Plan:
    """An experiment of active learning.

    Args:
        start: The number of labeled images to start with.
        more: The number of images that are labeled in each cycle.
        recipe: How the network is trained.
        cycles: How often images are picked.
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
    """Compare methods by how good a network gets with the images that each picks for labeling.

    Args:
        build: Builds the network with fresh weights, drawn under torch's global seed. It is seeded
            with `seed`, so all cycles and methods start from the same weights.
        train: Labeled training images, which are split into start, validation images and pool.
        test: The images that accuracy and negative log-likelihood are measured on.
        normalization: The mean and standard deviation that inputs are normalized by.
        methods: The methods by the names that rows have, with noise levels for pixels in [0, 1];
            None picks at random.
        plan: How many images are picked, and how often.
        journal: Saves the rows; cycles that it has are not run again.
        seed: Decides the start, the weights and the order of training.
        progress: Called with the number of cycles done so far, and of all cycles.

    Yields:
        For each method and cycle, a row with accuracy and negative log-likelihood on the test
        images. The row of the start, which all methods share, is yielded once.
    """
    if plan.diversity is not None:
        # Diverse images are those whose gradients differ.
        for method in methods.values():
            if method is not None:
                require_gradients(method)
    parts = split(train, plan, seed)
    trainer = _Trainer(build, train, normalization, plan, parts, seed)
    total = len(methods) * (plan.cycles + 1)  # the start counts as a cycle
    done = 0
    for name, method in methods.items():
        for row in _cycle_rows(trainer, name, method, test, journal):
            # Cycle 0 is the start, which every method has: yield it for the first method only.
            if row["cycle"] > 0 or done == 0:
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
        test: The images that accuracy and negative log-likelihood are measured on.
        journal: Saves the rows; cycles that it has are not run again.

    Yields:
        The row of the start, and a row for each cycle.
    """
    # The positions, in the training set, of the images picked so far.
    chosen: list[int] = []
    # Cycle 0 trains on the start alone.
    for cycle in range(trainer.plan.cycles + 1):
        key: CycleKey = {
            "row": "cycle",
            "data": trainer.images.name,
            "seed": trainer.seed,
            "from": trainer.weights,
            "method": name if cycle else "start",
            "cycle": cycle,
        }
        if cycle:  # nothing was picked for the start, so its row names no method
            key["exactly"] = repr(method)
        yield journal.get_or_add(key, partial(_measure_cycle, trainer, key, chosen, test))
        is_last = cycle == trainer.plan.cycles
        if not is_last:
            pick_key: PickKey = {
                "row": "pick",
                "data": trainer.images.name,
                "seed": trainer.seed,
                "from": trainer.weights,
                "method": name,
                "exactly": repr(method),
                "cycle": cycle,
            }
            pick = journal.get_or_add(
                pick_key, partial(_pick_row, trainer, pick_key, chosen, method)
            )
            chosen = chosen + pick["chosen"]


def _measure_cycle(trainer: "_Trainer", key: CycleKey, chosen: list[int], test: Images) -> CycleRow:
    """Train the network on the start and the images picked so far, and measure how good it is.

    Args:
        trainer: Trains the network.
        key: The entries that identify the row, such as the method and the cycle.
        chosen: The positions, in the training set, of the images picked so far.
        test: The images that accuracy and negative log-likelihood are measured on.

    Returns:
        The entries of `key`, the measures, the number of labeled images, and the seconds.
    """
    start = time.perf_counter()
    logits = trainer.train(chosen).logits(test)
    measures: CycleMeasures = {
        "accuracy": accuracy(logits, test.labels),
        "nll": nll(logits, test.labels),
        # The paper's numbers suggest that it applied softmax to probabilities.
        "nll_softmax_twice": nll_softmax_twice(logits, test.labels),
    }
    seconds = round(time.perf_counter() - start, 2)
    labeled = len(trainer.parts.start) + len(chosen)
    return CycleRow(**key, labeled=labeled, **measures, seconds=seconds)


def _pick_row(
    trainer: "_Trainer", key: PickKey, chosen: list[int], method: Method | None
) -> PickRow:
    """Pick the images that are labeled next; return them in a row of the journal.

    Args:
        trainer: Trains the network that scores the images of the pool.
        key: The entries that identify the row, such as the method and the cycle.
        chosen: The positions, in the training set, of the images picked so far.
        method: Scores the images; None picks at random.
    """
    return PickRow(**key, chosen=trainer.pick(chosen, method))


class _Trainer:
    """Trains a network on the images picked so far, and picks the next ones.

    Attributes:
        weights: A digest of the weights before training, and the normalization; rows have it as
            `from`.
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
            build: Builds the network with fresh weights, drawn under torch's global seed.
            images: The training images.
            normalization: The mean and standard deviation that inputs are normalized by.
            plan: How to train, and how many images to pick.
            parts: The positions of the start, of the validation images and of the pool.
            seed: The seed of the weights and of all random draws.
        """
        self.build, self.images, self.normalization = build, images, normalization
        self.plan, self.parts, self.seed = plan, parts, seed
        # What a row's training started from: equal text, equal weights and inputs.
        self.weights = f"{fingerprint(self._make_model())} {normalization}"
        # At most two trained networks, by the positions of the picked images (`chosen`).
        self._networks: dict[tuple[int, ...], Network] = {}

    def train(self, chosen: list[int]) -> Network:
        """Return a network trained from scratch on the start and on the images picked so far.

        Two networks are cached: that of the start, which all methods share, and the latest one,
        which is first measured and then picks.

        Args:
            chosen: The positions, in the training set, of the images picked so far.
        """
        key = tuple(chosen)
        if key in self._networks:
            return self._networks[key]
        # Drop all networks but that of the start, for which nothing was picked.
        start_network = self._networks.get(())
        self._networks = {} if start_network is None else {(): start_network}
        model = self._make_model()
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
        """Pick the images of the pool that are labeled next.

        Args:
            chosen: The positions, in the training set, of the images picked so far.
            method: Scores the images; None picks at random.

        Returns:
            The positions, in the training set, of `plan.more` further images.
        """
        pool, count = self.parts.pool, self.plan.more
        unlabeled = pool[~torch.isin(pool, torch.tensor(chosen).long())]
        if len(unlabeled) < count:
            raise QualmsError(
                f"the pool has {len(unlabeled)} images left, but a cycle adds {count}; run fewer "
                "cycles."
            )
        if method is None:
            # `len(chosen)` gives each cycle random numbers of its own.
            draws = generator(self.seed, DRAW_PICK, len(chosen))
            order = torch.randperm(len(unlabeled), generator=draws)
            return unlabeled[order[:count]].tolist()
        network = self.train(chosen)
        labeled_batches = None
        if TRAINING_DATA in method.needs:
            labeled_batches = InputBatches(network, self._take_labeled(chosen))
        picked = select(
            network.model,
            InputBatches(network, self.images.take(unlabeled)),
            count,
            network.scale_noise(method),  # from pixels to normalized inputs
            diversity=self.plan.diversity,
            seed=self.seed,
            train=labeled_batches,
        )
        # `picked` has positions in `unlabeled`, which has positions in the training set.
        return unlabeled[picked].tolist()

    def _make_model(self) -> nn.Module:
        """Build the untrained network; its weights, drawn under the seed, are equal each time."""
        # `fork_rng` restores torch's global random state afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.build()

    def _take_labeled(self, chosen: list[int]) -> Images:
        """Return the images of the start, then those at the positions `chosen`, with labels."""
        # `long`: an empty list would become a tensor of floats.
        chosen_positions = torch.tensor(chosen).long()
        return self.images.take(torch.cat([self.parts.start, chosen_positions]))


def split(train: Images, plan: Plan, seed: int) -> Parts:
    """Split training images into the first labeled ones, validation images and a pool to pick from.

    The first labeled ones, the start, are drawn from the first block of 10,000 images, as many of
    each class. The validation images begin the second block, and the pool is all that follows. Of
    at most 20,000 images, a block is a third.

    Args:
        train: Labeled images.
        plan: How many images to start with, to validate on and to pick from.
        seed: The seed of the start's random draw.

    Returns:
        The positions of the images of each part.

    Raises:
        QualmsError: If the images have no labels, or too few of a class for a balanced start.
    """
    if train.labels is None:
        raise QualmsError(f"{train.name} has no labels; active learning needs them.")
    block = BLOCK if len(train) > 2 * BLOCK else len(train) // 3
    num_classes = int(train.labels.max()) + 1
    per_class, remainder = divmod(plan.start, num_classes)
    if per_class < 1 or remainder:
        raise QualmsError(
            f"a balanced start with {plan.start} images is impossible for {num_classes} classes; "
            f"pass a multiple of {num_classes}."
        )
    order = torch.randperm(block, generator=generator(seed, DRAW_START))
    start = []
    for label in range(num_classes):
        # The positions of the first images of this class in the random order.
        of_class = order[train.labels[order] == label][:per_class]
        if len(of_class) < per_class:
            raise QualmsError(
                f"class {label} has fewer than {per_class} of the first {block} images; start with "
                "fewer images."
            )
        start.append(of_class)
    return Parts(
        start=torch.cat(start),
        validation=torch.arange(block, 2 * block)[: plan.validation],
        pool=torch.arange(2 * block, len(train))[: plan.pool],
    )
