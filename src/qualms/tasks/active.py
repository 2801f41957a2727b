"""Active learning: which unlabeled images are worth a label? Start small, ask for the most
uncertain, train anew.

Wang & Ji, CVPR 2024, section 5.3: m1 balanced images to start with, then cycles that each add the
m2 most uncertain of the pool and retrain from scratch. The start is drawn from the training images
1 to 10,000, images 10,001 to 20,000 choose the best epoch, those above are the pool.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

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
from qualms.tasks.rows import CycleKey, CycleMeasures, CycleRow, PickKey, PickRow
from qualms.training import Recipe, fit

BLOCK = 10_000  # images to start from, and as many for validation
START, PICK = range(2)  # purposes of random numbers
RANDOM = "Random"
# The paper learns all its datasets with one small network.
NETWORKS = {"mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "digits": "digits-cnn"}
COLOR = "cnn-32"


@dataclass(frozen=True)
class Plan:
    """m1 images to start with, m2 more in each cycle; how to train; and limits for a small machine."""

    start: int
    more: int
    recipe: Recipe
    cycles: int = 10
    pool: int | None = None
    validation: int | None = None
    diversity: float | None = None


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
    """A row for each method and cycle: accuracy and negative log-likelihood on the test images.

    Args:
        build: makes the network with fresh weights; the seed decides them, the same for every cycle
            and method.
        train: training images with labels, which are cut into start, validation images and pool.
        test: what the network is judged on.
        normalization: of the network's inputs.
        methods: by name; None picks at random. Noise in pixels scaled to [0, 1].
        plan: how many images, how often.
        journal: where the rows are kept; cycles that it has are not run again.
        seed: decides the start, the weights and the order of training.
        progress: called with what is done.
    """
    parts = split(train, plan, seed)
    for method in methods.values():
        if plan.diversity is not None and method is not None:
            require_gradients(method)
    cached: dict[tuple[int, ...], Network] = {}

    def fresh() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    def trained(chosen: list[int]) -> Network:
        """The network after labels for these images of the pool; the start's and the newest are
        kept.
        """
        if tuple(chosen) not in cached:
            for old in [key for key in cached if key]:
                del cached[old]
            model, validation = fresh(), parts.validation
            labeled = train.take(torch.cat([parts.start, torch.tensor(chosen).long()]))
            fit(
                model,
                labeled,
                plan.recipe,
                normalization,
                validation=train.take(validation),
                seed=seed,
            )
            cached[tuple(chosen)] = Network("active", model, normalization)
        return cached[tuple(chosen)]

    data, weights = train.name, f"{fingerprint(fresh())} {normalization}"
    for done, (name, method) in enumerate(methods.items()):
        chosen: list[int] = []
        for cycle in range(plan.cycles + 1):
            by, exactly = name if cycle else "start", repr(method)
            key: CycleKey = {
                "row": "cycle",
                "data": data,
                "seed": seed,
                "from": weights,
                "method": by,
                "cycle": cycle,
            }
            if cycle:
                key["exactly"] = exactly
            judged = journal.where(**key)
            if judged:
                row = judged[0]
            else:
                began, labeled = time.perf_counter(), len(parts.start) + len(chosen)
                measures = _judged(trained(chosen), test)
                seconds = round(time.perf_counter() - began, 2)
                row = journal.add(CycleRow(**key, labeled=labeled, **measures, seconds=seconds))
            if cycle or not done:
                yield row
            if cycle < plan.cycles:
                asked: PickKey = {
                    "data": data,
                    "seed": seed,
                    "from": weights,
                    "row": "pick",
                    "method": name,
                    "exactly": exactly,
                    "cycle": cycle,
                }
                picks = journal.where(**asked)
                if not picks:
                    new = _pick(trained(chosen), train, parts, chosen, method, plan, seed)
                    picks = [journal.add(PickRow(**asked, chosen=new))]
                chosen = chosen + picks[0]["chosen"]
            if progress is not None:
                progress(
                    "cycles", done * (plan.cycles + 1) + cycle + 1, len(methods) * (plan.cycles + 1)
                )


def _judged(network: Network, test: Images) -> CycleMeasures:
    logits = network.logits(test)
    return {
        "accuracy": accuracy(logits, test.labels),
        "nll": nll(logits, test.labels),
        "nll_softmax_twice": nll_softmax_twice(logits, test.labels),
    }


def _pick(
    network: Network,
    train: Images,
    parts: "Parts",
    chosen: list[int],
    method: Method | None,
    plan: Plan,
    seed: int,
) -> list[int]:
    """The images of the pool, by their position in the training set, that get a label next."""
    left = parts.pool[~torch.isin(parts.pool, torch.tensor(chosen).long())]
    if len(left) < plan.more:
        raise QualmsError(
            f"the pool has {len(left)} images left, and {plan.more} are wanted; run fewer cycles."
        )
    if method is None:
        return left[
            torch.randperm(len(left), generator=generator(seed, PICK, len(chosen)))[: plan.more]
        ].tolist()
    labeled = train.take(torch.cat([parts.start, torch.tensor(chosen).long()]))
    needs = InputBatches(network, labeled) if TRAINING_DATA in method.needs else None
    inputs = InputBatches(network, train.take(left))
    own = network.scale_noise(method)
    return left[
        select(
            network.model, inputs, plan.more, own, diversity=plan.diversity, seed=seed, train=needs
        )
    ].tolist()


@dataclass(frozen=True)
class Parts:
    """Positions among the training images."""

    start: Tensor
    validation: Tensor
    pool: Tensor


def split(train: Images, plan: Plan, seed: int) -> Parts:
    """A balanced start, validation images and the pool; thirds where there are not more than 20,000
    images.
    """
    if train.labels is None:
        raise QualmsError(f"{train.name} has no labels; active learning needs them.")
    block = BLOCK if len(train) > 2 * BLOCK else len(train) // 3
    classes = int(train.labels.max()) + 1
    each, rest = divmod(plan.start, classes)
    if each < 1 or rest:
        raise QualmsError(
            f"a balanced start of {plan.start} images is not a multiple of the {classes} classes."
        )
    order = torch.randperm(block, generator=generator(seed, START))
    of_class = [order[train.labels[order] == c][:each] for c in range(classes)]
    short = next((c for c, found in enumerate(of_class) if len(found) < each), None)
    if short is not None:
        raise QualmsError(
            f"class {short} has fewer than {each} of the first {block} images; start with fewer images."
        )
    pool = torch.arange(2 * block, len(train))[: plan.pool]
    return Parts(torch.cat(of_class), torch.arange(block, 2 * block)[: plan.validation], pool)
