"""Runtime: what each method costs, in units of Entropy's single forward pass."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from qualms.data import Images
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.entropy import Entropy
from qualms.methods.method import Method
from qualms.progress import Tell
from qualms.scores import compare
from qualms.tasks.journal import Journal
from qualms.tasks.network import Network
from qualms.tasks.rows import RuntimeKey, RuntimeRow
from qualms.tasks.scoring import Inputs, Methods, parameters

BATCH = 32
UNIT = "Entropy"


def runtime(
    network: Network,
    images: Images,
    methods: Methods,
    journal: Journal,
    *,
    seed: int = 0,
    engine: Engine | Sketch = "exact",
    train: Images | None = None,
    rounds: int = 3,
    tell: Tell | None = None,
) -> Iterator[RuntimeRow]:
    """A row for each method: the median over rounds of its time, divided by Entropy's in the same round.

    Each method runs alone, on the same images in batches of 32. `laplace` is timed with the fit on `train`.
    """
    x = list(network.inputs(images).split(BATCH))
    batches = None if train is None else Inputs(network, train)

    def seconds(method: Method) -> float:
        """Wall-clock time to score all images by this method alone."""
        began = time.perf_counter()
        one: dict[str, Any] = {"timed": method}
        found = compare(network.model, x, one, train=batches, models=network.members, seed=seed, engine=engine)
        found["timed"].cpu()  # a GPU is asked for the last scores before the clock is
        return time.perf_counter() - began

    seconds(Entropy())  # the first run pays for what later ones find ready
    for done, (name, method) in enumerate(methods.items(), start=1):
        key: RuntimeKey = {
            "row": "runtime",
            "method": name,
            "exactly": parameters(method, train),
            "n": len(images),
            "engine": str(engine),
            "rounds": rounds,
            "device": str(x[0].device),
            "threads": torch.get_num_threads(),
        }
        known = journal.where(**key)
        if known:
            yield known[0]
            continue
        timed = [(seconds(Entropy()), seconds(network.in_its_units(method))) for _ in range(rounds)]
        median, ratio = statistics.median(t for _, t in timed), statistics.median(t / u for u, t in timed)
        yield journal.add(RuntimeRow(**key, seconds=median, ratio=ratio))
        if tell is not None:
            tell("methods timed", done, len(methods))
