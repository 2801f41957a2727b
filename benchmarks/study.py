"""Where does `heat` lead, and where not? Every score on the networks of `study_networks.py` and
`study_text.py`.

    QUALMS_DATA=folder python benchmarks/study.py score [NAME …]       (1000 inputs a side, float32,
    seed 0) QUALMS_DATA=folder python benchmarks/study.py smoothing [NAME …]   (how much noise, for
    networks behind a norm) QUALMS_DATA=folder python benchmarks/study.py growth [NAME …]      (what
    the rule for normalizations looks at) python benchmarks/study.py page
             (fills docs/heat.md from the rows)

Rows go to `results/study.jsonl` as they come, one for each network, other dataset and method; what
has a row is passed over. Test inputs of the network's own dataset against those of another: AUROC,
AUPR (the other is positive) and, on the own ones alone, rAULC. Noise in specs is in pixels.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import study_page
import torch
from study_networks import STUDY, WEIGHTS, Subject
from study_page import WITH_DATA
from study_text import UNKNOWN, TextCnn, TextSubject, TextTransformer, known, unknown
from torch import Tensor, nn

import qualms
from qualms.gradients.isolation import preserve_state
from qualms.methods.context import BatchContext
from qualms.methods.context import ModelContext as Inside
from qualms.methods.heat import NOISE_INPUTS, feature_growth
from qualms.methods.noise import noise_inputs
from qualms.metrics import aupr, auroc, interval, raulc

RESULTS = Path(__file__).parent / "results" / "study.jsonl"
COUNT = 1000
LEARNT = 2000  # training inputs for the methods that need some
LOGITS = ("entropy", "msp", "max-logit", "energy", "gen", "gradnorm-huang", "scale", "ash-s", "lts")
# Methods that share a pass, in the order in which they are run.
TOGETHER = (
    LOGITS,
    tuple(method for method in WITH_DATA if method != "quam"),
    *(
        (method,)
        for method in (
            "heat",
            "heat-geometric",
            "odin",
            "clafr",
            "rankfeat",
            "gaia",
            "quam",
            "coherence",
        )
    ),
    ("regrad+layers",),
)
SIGMAS = (0.05, 0.1, 0.2, 0.4)  # in pixels
TEXT_SIGMAS = (0.2, 0.4, 0.8, 1.6)  # of embeddings, which begin as N(0, 1)
TEXTS = (("Text CNN", TextCnn), ("Text transformer", TextTransformer))
NEAR_TEXTS = ("literature quotes", "science quotes")
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A network with its inputs, of any kind."""

    name: str
    model: nn.Module
    pixel_std: tuple[float, ...] | None
    inside: Callable[[int], tuple[Tensor, Tensor]]  # inputs and labels
    others: dict[str, tuple[str, Callable[[int], Tensor]]]  # near or far, and inputs
    train: Callable[[], list[tuple[Tensor, Tensor]]]


def images_case(subject: Subject) -> Case:
    """A network for images."""
    network = subject.build()

    def inside(count: int, split: str = "test") -> tuple[Tensor, Tensor]:
        images = subject.images(subject.known, split).subset(count)
        assert images.labels is not None
        return network.inputs(images), images.labels

    def outside(dataset: str) -> Callable[[int], Tensor]:
        return lambda count: network.inputs(subject.images(dataset).subset(count))

    sides = [("near", name) for name in subject.near] + [("far", name) for name in subject.far]
    others = {name: (side, outside(name)) for side, name in sides}
    std = tuple(network.normalization.std)
    return Case(
        subject.name,
        network.model,
        std,
        inside,
        others,
        lambda: in_batches(*inside(LEARNT, "train")),
    )


def text_case(subject: TextSubject) -> Case:
    """A network for texts."""

    def inside(count: int, split: str = "test") -> tuple[Tensor, Tensor]:
        x, y = known(split)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count]
        return x[order], y[order]

    def outside(name: str) -> Callable[[int], Tensor]:
        return lambda count: unknown(name)[:count]

    others = {name: ("near" if name in NEAR_TEXTS else "far", outside(name)) for name in UNKNOWN}
    return Case(
        subject.name,
        subject.build(),
        None,
        inside,
        others,
        lambda: in_batches(*inside(LEARNT, "train")),
    )


def in_batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Training inputs with their labels."""
    return list(zip(x.split(200), y.split(200), strict=True))


CASES: dict[str, Callable[[], Case]] = {
    **{name: partial(images_case, subject) for name, subject in STUDY.items()},
    **{name: partial(text_case, TextSubject(name, build, WEIGHTS)) for name, build in TEXTS},
}


def scored(case: Case, methods: Sequence[str], count: int, **how: Any) -> Iterable[Row]:
    """Rows of some methods on one network, which share its passes; one that it is not for has a row
    that says why.
    """
    x, labels = case.inside(count)
    with torch.no_grad():
        correct = torch.cat([case.model(part).argmax(1) for part in x.split(200)]) == labels
    start = time.monotonic()
    scorer = qualms.Scorer(case.model, methods, pixel_std=case.pixel_std, **how)
    try:
        own = scorer(list(x.split(100)))
        others = {
            name: (side, scorer(list(read(count).split(100))))
            for name, (side, read) in case.others.items()
        }
    except qualms.QualmsError as error:
        if len(methods) > 1:
            for method in methods:
                yield from scored(case, [method], count, **how)
        else:
            yield {"network": case.name, "method": methods[0], "refused": str(error), "seconds": 0}
        return
    seconds = round((time.monotonic() - start) / len(methods), 1)
    for method in methods:
        row: Row = {
            "network": case.name,
            "method": method,
            "accuracy": float(correct.double().mean()),
        }
        inside = own.scores[method].numpy()
        row |= {"n": len(inside), "raulc": raulc(inside, correct.numpy()), "pairs": {}}
        row |= {"note": own.notes[method]} if method in own.notes else {}
        for name, (side, other) in others.items():
            out = other.scores[method].numpy()
            low, high = interval(auroc, inside, out)
            ranks = {
                "auroc": auroc(inside, out),
                "low": low,
                "high": high,
                "aupr": aupr(inside, out),
            }
            row["pairs"][name] = {"side": side, "n": len(out), **ranks}
        yield row | {"seconds": seconds}


def score(names: list[str]) -> None:
    """All methods on all networks, the expensive ones last."""
    for together in TOGETHER:
        for name in names:
            done = {row["method"] for row in read("score") if row["network"] == name}
            # Searching a hundred heads for each input takes hours.
            left = [m for m in together if m not in done and not (m == "quam" and "100" in name)]
            if not left:
                continue
            case = CASES[name]()
            how: Row = {"train": case.train() if left[0] in WITH_DATA else None}
            if left == ["regrad+layers"] and "100" in name:
                how["tolerance"] = 0.025
            for row in scored(case, left, COUNT, **how):
                keep({"part": "score", **row})


def smoothing(names: list[str], count: int = 100) -> None:
    """REGrad* at several levels of noise, and how far that noise moves the predictions."""
    for name in names:
        done = {row["method"] for row in read("smoothing") if row["network"] == name}
        case = CASES[name]()
        specs = [
            "regrad+layers",
            *(
                f"regrad+layers+smooth({sigma},4)"
                for sigma in (TEXT_SIGMAS if case.pixel_std is None else SIGMAS)
            ),
        ]
        for spec in [s for s in (*specs, "entropy", "gen", "heat") if s not in done]:
            for row in scored(case, [spec], count):
                keep({"part": "smoothing", **row, **moved(case, spec, count)})


def moved(case: Case, spec: str, count: int) -> Row:
    """The mean KL(p(x + Δ) ‖ p(x)) at a spec's noise, for N(0, 1) inputs and for the network's own."""
    if "smooth" not in spec:
        return {}
    sigma = float(spec.partition("smooth(")[2].partition(",")[0])
    x = case.inside(count)[0]
    source = torch.Generator().manual_seed(0)
    noise = (
        torch.randn(x.shape, generator=source)
        if x.is_floating_point()
        else torch.randint(0, 256, x.shape, generator=source)
    )
    inputs = {"own": x, "noise": noise}
    perturbed = f"perturb-x({sigma},8)"
    return {
        f"kl_{of}": float(qualms.score(case.model, y, perturbed, pixel_std=case.pixel_std).mean())
        for of, y in inputs.items()
    }


def grown(names: list[str]) -> None:
    """What the rule that sets T to 1 looks at: how much the features of louder noise grow, and how
    they spread.
    """
    done = {row["network"] for row in read("growth")}
    for name in (n for n in names if n not in done):
        case = CASES[name]()
        with preserve_state(case.model) as model:
            passes = BatchContext(Inside(model), case.inside(1)[0])
            noise = BatchContext(passes.model_context, noise_inputs(passes, NOISE_INPUTS, "heat"))
            lengths = noise.head.features.double().norm(dim=-1)
            row = {"growth": feature_growth(noise), "spread": float(lengths.std() / lengths.mean())}
        keep({"part": "growth", "network": name, "method": "heat", **row, "seconds": 0})


def read(part: str) -> list[Row]:
    """The rows of one part."""
    rows = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    return [row for row in rows if row["part"] == part]


def keep(row: Row) -> None:
    """Write a row, and show it."""
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    mean = {
        side: _mean([p["auroc"] for p in row.get("pairs", {}).values() if p["side"] == side])
        for side in SIDES
    }
    print(
        row["network"],
        row["method"],
        mean,
        row.get("raulc"),
        row["seconds"],
        row.get("refused", "")[:60],
        flush=True,
    )


SIDES = ("near", "far")


def _mean(values: list[float]) -> float | None:
    return round(100 * sum(values) / len(values), 1) if values else None


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["score", "smoothing", "growth", "page"])
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.part == "page":
        order = [
            "heat",
            "heat-geometric",
            "coherence",
            "regrad+layers",
            *(m for some in TOGETHER for m in some),
        ]
        networks = list(CASES)
        rows = sorted(
            read("score"),
            key=lambda row: (networks.index(row["network"]), order.index(row["method"])),
        )
        noisy = sorted(read("smoothing"), key=lambda row: networks.index(row["network"]))
        study_page.fill(rows, noisy, read("growth"))
    elif given.part in ("score", "growth"):
        (score if given.part == "score" else grown)(given.names or list(CASES))
    else:
        smoothing(given.names or ["SVHN ViT", "MNIST ViT", "Text transformer"])


if __name__ == "__main__":
    main()
