"""Out-of-distribution detection: do scores tell images of other datasets from those that the
network knows?
"""

from collections.abc import Iterator, Sequence

from qualms.data import Images
from qualms.gradients.settings import Engine, Sketch
from qualms.metrics import aupr, auroc, fpr95, interval
from qualms.progress import ProgressFn
from qualms.stream.network import Network
from qualms.tasks.journal import Journal
from qualms.tasks.rows import OodKey, OodMeasures, OodRow
from qualms.tasks.scoring import (
    DRAWS,
    Methods,
    choose_engine,
    engine_label,
    parameters,
    score_images,
)


def ood(
    network: Network,
    inside: Images,
    outside: Sequence[Images],
    methods: Methods,
    journal: Journal,
    *,
    seed: int = 0,
    engine: Engine | Sketch = "exact",
    tolerance: float | None = None,
    train: Images | None = None,
    progress: ProgressFn | None = None,
) -> Iterator[OodRow]:
    """A row for each method and each dataset of `outside`: AUROC with its 95 % interval, AUPR both
    ways, FPR95.

    OOD is the positive class, uncertainty the score; `aupr_in` swaps both. Shares, not percentages.
    """
    engine, tolerance = choose_engine(network, inside, methods, engine, tolerance)
    images = [inside, *(alike(network, inside, other) for other in outside)]
    known, *others = (
        score_images(
            network,
            i,
            methods,
            journal,
            seed=seed,
            engine=engine,
            tolerance=tolerance,
            train=train,
            progress=progress,
        )
        for i in images
    )
    for other, of in zip(others, images[1:], strict=True):
        for name, method in methods.items():
            key: OodKey = {
                "row": "ood",
                "in": inside.name,
                "out": of.name,
                "method": name,
                "exactly": parameters(method, train),
                "seed": seed,
                "engine": engine_label(engine, tolerance),
                "draws": DRAWS,
                "n_in": len(inside),
                "n_out": len(of),
                "images": f"{inside.fingerprint()} {of.fingerprint()}",
            }
            found = journal.where(**key)
            yield (
                found[0]
                if found
                else journal.add(OodRow(**key, **_measures(known.scores[name], other.scores[name])))
            )


def alike(network: Network, inside: Images, other: Images) -> Images:
    """In the size of the images that the network knows; if it fits those anew in each batch, then
    these too.
    """
    if network.transform is None:
        return other.convert(inside.pixels.shape[1], inside.size)
    return network.transform.apply(other) if inside.size == network.transform.size else other


def _measures(inside: object, outside: object) -> OodMeasures:
    low, high = interval(auroc, inside, outside)
    return {
        "auroc": auroc(inside, outside),
        "auroc_low": low,
        "auroc_high": high,
        "aupr_out": aupr(inside, outside),
        "aupr_in": aupr(inside, outside, positive="in"),
        "fpr95": fpr95(inside, outside),
    }
