"""Runtime: the time that each method takes, in units of Entropy, which is one forward pass."""

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from qualms.data import Images
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.logits import Entropy
from qualms.methods.method import Method
from qualms.progress import ProgressFn
from qualms.scorer import Scorer
from qualms.stream.image_scorer import make_scorer
from qualms.stream.network import Network
from qualms.stream.sizes import BATCH
from qualms.tasks.image_scores import describe_parameters, engine_label
from qualms.tasks.journal import Journal
from qualms.tasks.rows import RuntimeKey, RuntimeRow
from qualms.tasks.score_rows import Methods

TIMED = "timed"  # the method's name in a scorer that is timed


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
    """Time each method on the same images, in seconds and as a multiple of Entropy's time.

    Each method runs alone, by a `Scorer` that has scored a batch before: what is done once for many
    batches, such as the fit of `laplace` on `train`, is not timed.

    Args:
        network: The network that is scored.
        images: The images to score.
        methods: The methods by the names that rows have, with noise levels for pixels in [0, 1].
        journal: Saves the rows; rows that it has are not computed again.
        seed: The seed of all random draws.
        engine: How gradient scores are computed.
        tolerance: The tolerance of the engine, as for `Scorer`; None for its default.
        train: Training images, for the methods that need some.
        rounds: How often each method is timed.
        progress: Called with the number of methods that were timed so far, and of all methods.

    Yields:
        For each method, a row with the median over rounds of the method's seconds, and of
        their ratio to Entropy's seconds in the same round.
    """
    batches = list(network.inputs(images).split(BATCH))

    def make_warm_scorer(method: Method) -> Scorer:
        """Return a scorer of one method that has scored a batch, so that setup is not timed."""
        scorer = make_scorer(
            network,
            {TIMED: method},
            train,
            seed=seed,
            engine=engine,
            tolerance=tolerance,
        )
        scorer(batches[0])
        return scorer

    # Timed in each round as well: the ratio to it depends less on what else the machine does.
    entropy_scorer = make_warm_scorer(Entropy())

    def measure(key: RuntimeKey, method: Method) -> RuntimeRow:
        """Return a row with the time of one method, and its ratio to Entropy's in the same round.

        Args:
            key: The entries that identify the row.
            method: The method to time.
        """
        scorer = make_warm_scorer(method)
        seconds, ratios = [], []
        for _ in range(rounds):
            entropy_seconds = _time(entropy_scorer, batches)
            method_seconds = _time(scorer, batches)
            seconds.append(method_seconds)
            ratios.append(method_seconds / entropy_seconds)
        return RuntimeRow(
            **key, seconds=statistics.median(seconds), ratio=statistics.median(ratios)
        )

    if progress is not None:
        progress("methods timed", 0, len(methods))
    for done, (name, method) in enumerate(methods.items(), start=1):
        key: RuntimeKey = {
            "row": "runtime",
            "method": name,
            "exactly": describe_parameters(method, train),
            "n": len(images),
            "engine": engine_label(engine, tolerance),
            "rounds": rounds,
            "device": str(batches[0].device),
            "threads": torch.get_num_threads(),
        }
        yield journal.get_or_add(key, partial(measure, key, method))
        if progress is not None:
            progress("methods timed", done, len(methods))


def _time(scorer: Scorer, batches: list[Tensor]) -> float:
    """Return the seconds that a scorer of one method, named `TIMED`, takes for some batches."""
    start = time.perf_counter()
    # A GPU computes asynchronously; `cpu` waits for the scores.
    scorer(batches).scores[TIMED].cpu()
    return time.perf_counter() - start
