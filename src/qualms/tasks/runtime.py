"""Runtime: what each method costs, in units of Entropy's single forward pass."""

import statistics
import time
from collections.abc import Iterator

import torch

from qualms.data import Images
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.entropy import Entropy
from qualms.methods.method import TRAINING_DATA, Method
from qualms.progress import ProgressFn
from qualms.scorer import Scorer
from qualms.stream.network import InputBatches, Network
from qualms.stream.sizes import BATCH
from qualms.tasks.journal import Journal
from qualms.tasks.rows import RuntimeKey, RuntimeRow
from qualms.tasks.scoring import Methods, engine_label, parameters

UNIT = "Entropy"


def runtime(
    network: Network,
    images: Images,
    methods: Methods,
    journal: Journal,
    *,
    seed: int = 0,
    engine: Engine | Sketch = "exact",
    tolerance: float | None = None,
    train: Images | None = None,
    rounds: int = 3,
    progress: ProgressFn | None = None,
) -> Iterator[RuntimeRow]:
    """A row for each method: the median over rounds of its time, divided by Entropy's in the same
    round.

    Each method runs alone, on the same images in batches of 32, by a `Scorer` that has scored a
    batch before: what is done once for many batches, such as the fit of `laplace` on `train`, is
    not timed.
    """
    x = list(network.inputs(images).split(BATCH))

    def ready(method: Method) -> Scorer:
        learn = (
            InputBatches(network, train)
            if train is not None and TRAINING_DATA in method.needs
            else None
        )
        one: dict[str, Method] = {"timed": method}
        scorer = Scorer(
            network.model,
            one,
            train=learn,
            models=network.members,
            seed=seed,
            engine=engine,
            tolerance=tolerance,
        )
        scorer(x[0])
        return scorer

    def seconds(scorer: Scorer) -> float:
        """Wall-clock time to score all images."""
        began = time.perf_counter()
        scorer(x).scores["timed"].cpu()  # a GPU is asked for the last scores before the clock is
        return time.perf_counter() - began

    unit = ready(Entropy())
    if progress is not None:
        progress("methods timed", 0, len(methods))
    for done, (name, method) in enumerate(methods.items(), start=1):
        key: RuntimeKey = {
            "row": "runtime",
            "method": name,
            "exactly": parameters(method, train),
            "n": len(images),
            "engine": engine_label(engine, tolerance),
            "rounds": rounds,
            "device": str(x[0].device),
            "threads": torch.get_num_threads(),
        }
        known = journal.where(**key)
        if known:
            yield known[0]
            continue
        scorer = ready(network.scale_noise(method))
        timed = [(seconds(unit), seconds(scorer)) for _ in range(rounds)]
        median, ratio = (
            statistics.median(t for _, t in timed),
            statistics.median(t / u for u, t in timed),
        )
        yield journal.add(RuntimeRow(**key, seconds=median, ratio=ratio))
        if progress is not None:
            progress("methods timed", done, len(methods))
