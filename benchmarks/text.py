"""What are scores of tokens good for? A small language model on texts that it knows, and on others.

    QUALMS_DATA=folder python benchmarks/text.py score     (detects unknown texts, and wrong next
    tokens, for each method) QUALMS_DATA=folder python benchmarks/text.py leads     (by how much
    REGrad is ahead of other scores) QUALMS_DATA=folder python benchmarks/text.py tangents  (how
    well few tangents rank tokens like many) QUALMS_DATA=folder python benchmarks/text.py hybrid
    (a mix of two scores for wrong next tokens) QUALMS_DATA=folder python benchmarks/text.py cost
      (in forward passes) python benchmarks/text.py page                         (fills
      docs/results.md from the rows)

`text_corpus.py` describes the folder. Rows go to `results/text.jsonl` as they are measured, and what
has a row is passed over; the scores of all tokens are in `runs/text-benchmark.jsonl`, so that a run
that was stopped loses little.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import text_page
import torch
from text_corpus import KNOWN, OTHERS, WINDOW, language, windows

import qualms
from qualms.methods import parse
from qualms.metrics import auroc
from qualms.metrics.groups import auroc_difference_interval, auroc_interval
from qualms.models.language import LanguageModel
from qualms.tasks.journal import Journal
from qualms.tasks.text_benchmark import (
    SURPRISE,
    add_baselines,
    detection_measures,
    error_measures,
    running_mean,
    span_lengths,
    span_means,
)
from qualms.tasks.token_scores import ScoredWindows, describe_language_model, score_windows
from qualms.tasks.windows import Windows

RESULTS = Path(__file__).parent / "results" / "text.jsonl"
TOKENS = Path("runs") / "text-benchmark.jsonl"
FEW = 10  # windows of each text, where many tangents are run
TWO = ("wizard_of_oz", "fortunes_science")
LOGITS = ("entropy", "msp", "energy", "gen")
GRADIENTS = ("regrad", "exgrad", "fisher", "isotropic")
ALL, SO_FAR = "", "so far"
BLOCKS, LAST_TWO, LAST = "model.layers.*", "model.layers.[34].*", "model.layers.4.*"
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Some methods with one set of tangents."""

    methods: tuple[str, ...]
    seed: int
    params: str = ALL
    tangents: int = 16
    others: tuple[str, ...] = TWO


RUNS = (
    Run((*LOGITS, *GRADIENTS), 0, others=OTHERS),
    *(Run(GRADIENTS, seed) for seed in (1, 2, 3, 4)),
    *(Run(("regrad",), seed, params) for seed in (0, 1, 2) for params in (BLOCKS, LAST_TWO, LAST)),
    *(Run(("regrad+layers",), seed) for seed in (0, 1, 2)),
)


def scored(model: LanguageModel, text: Windows, run: Run, journal: Journal) -> ScoredWindows:
    """The scores of all tokens, from the journal if they are there."""
    methods = {spec: parse(spec) for spec in run.methods}
    how: Row = {"seed": run.seed, "engine": qualms.Sketch(run.tangents), "params": run.params}
    return score_windows(model.model, text, methods, journal, **how)


def score() -> None:
    """A row for each method of each run: all other texts beside the known one, and errors on that."""
    model = language()
    with Journal(TOKENS, describe_language_model(model)) as journal:
        for run in RUNS:
            key = {
                "part": "score",
                "seed": run.seed,
                "tangents": run.tangents,
                "params": run.params,
            }
            if {row["method"] for row in read(**key)} >= set(run.methods):
                continue
            texts = {name: windows(name, model) for name in (KNOWN, *run.others)}
            found = {name: scored(model, text, run, journal) for name, text in texts.items()}
            every = {name: add_baselines(one) for name, one in found.items()}
            named = (
                every[KNOWN] if run == RUNS[0] else run.methods
            )  # what tokens read say is the same in every run
            for method in named:
                apart = {
                    name: {
                        "n": len(texts[name]),
                        **by_span(every[KNOWN][method], every[name][method]),
                    }
                    for name in run.others
                }
                row = {**key, "method": method, "n": len(texts[KNOWN]), "texts": apart}
                keep({**row, "errors": rounded(error_measures(every[KNOWN][method], found[KNOWN]))})


def by_span(inside: np.ndarray, outside: np.ndarray) -> Row:
    """How well two texts are separated, by the tokens that are averaged: spans, or all of a window
    so far.
    """
    apart = {str(span): detection_measures(inside, outside, span) for span in span_lengths(WINDOW)}
    apart[SO_FAR] = detection_measures(running_mean(inside), running_mean(outside), 1)
    return {name: rounded(measures) for name, measures in apart.items()}


def leads() -> None:
    """By how much REGrad is ahead of other scores, on the same resamples of windows."""
    model, first = language(), RUNS[0]
    if read(part="leads"):
        return
    with Journal(TOKENS, describe_language_model(model)) as journal:
        found = {
            name: add_baselines(scored(model, windows(name, model), first, journal))
            for name in (KNOWN, *first.others)
        }
        for other in first.others:
            for rival in (*LOGITS, SURPRISE):
                row: Row = {
                    "part": "leads",
                    "seed": first.seed,
                    "method": "regrad",
                    "rival": rival,
                    "text": other,
                }
                for span in span_lengths(WINDOW):
                    ours, theirs = (
                        tuple(span_means(found[name][method], span) for name in (KNOWN, other))
                        for method in ("regrad", rival)
                    )
                    areas = [auroc(a.ravel(), b.ravel()) for a, b in (ours, theirs)]
                    low, high = auroc_difference_interval(
                        (list(ours[0]), list(ours[1])), (list(theirs[0]), list(theirs[1]))
                    )
                    row[str(span)] = rounded(
                        {"lead": areas[0] - areas[1], "low": low, "high": high}
                    )
                keep(row)


def tangents() -> None:
    """Spearman's correlation of few tangents with 128 (of another seed), over all tokens of three
    texts.
    """
    model = language()
    with Journal(TOKENS, describe_language_model(model)) as journal:
        texts = [windows(name, model, FEW) for name in (KNOWN, *TWO)]

        def values(k: int, seed: int) -> dict[str, np.ndarray]:
            found = [
                scored(model, text, Run(GRADIENTS, seed, tangents=k), journal) for text in texts
            ]
            return {m: np.stack([one.scores[m] for one in found]) for m in GRADIENTS}

        for k in (8, 16, 32):
            for seed in (0, 1, 2):
                if read(part="tangents", tangents=k, seed=seed):
                    continue
                few, many = values(k, seed), values(128, 3)
                for method in GRADIENTS:
                    known, oz, science = few[method]
                    keep(
                        {"part": "tangents", "tangents": k, "seed": seed, "method": method}
                        | {
                            "n": few[method].size,
                            "spearman": round(spearman(few[method], many[method]), 4),
                        }
                        | {
                            "oz": auroc(known.ravel(), oz.ravel()),
                            "science": auroc(known.ravel(), science.ravel()),
                        }
                    )
        if not read(part="tangents", tangents=128):
            for method, (known, oz, science) in values(128, 3).items():
                areas = {
                    "oz": auroc(known.ravel(), oz.ravel()),
                    "science": auroc(known.ravel(), science.ravel()),
                }
                keep(
                    {
                        "part": "tangents",
                        "tangents": 128,
                        "seed": 3,
                        "method": method,
                        "n": 3 * known.size,
                        **areas,
                    }
                )


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of ranks."""
    return float(np.corrcoef(ranks(a.ravel()), ranks(b.ravel()))[0, 1])


def ranks(values: np.ndarray) -> np.ndarray:
    """Places in the order, from 0 to 1."""
    return values.argsort().argsort() / (values.size - 1)


MIXES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "mean rank": lambda a, b: (ranks(a.ravel()) + ranks(b.ravel())).reshape(a.shape),
    "product": lambda a, b: a * b,
}


def hybrid() -> None:
    """Mixes of a gradient score and one of the logits, chosen on every second window and reported
    on the others.
    """
    model = language()
    with Journal(TOKENS, describe_language_model(model)) as journal:
        for seed in (0, 1, 2):
            if read(part="hybrid", seed=seed):
                continue
            found = scored(model, windows(KNOWN, model), Run((*LOGITS, *GRADIENTS), seed), journal)
            plain = {name: values[:, :-1] for name, values in found.scores.items()}
            # The energy and 1 - p of the likeliest have signs and units that a product does not
            # bear.
            mixed = {
                f"{how} of {a} and {b}": mix(plain[a], plain[b])
                for how, mix in MIXES.items()
                for a in GRADIENTS
                for b in (("entropy",) if how == "product" else ("entropy", "msp", "gen"))
            }
            chosen = max(mixed, key=lambda name: on_half(mixed[name], found.right, 0)[0])
            best = max(plain, key=lambda name: on_half(plain[name], found.right, 0)[0])
            for role, name in (("mix", chosen), ("single", best)):
                area, low, high = on_half((mixed | plain)[name], found.right, 1)
                keep(
                    {
                        "part": "hybrid",
                        "seed": seed,
                        "role": role,
                        "method": name,
                        "n": len(found.right) // 2,
                    }
                    | rounded({"auroc": area, "low": low, "high": high})
                )


def on_half(scores: np.ndarray, right: np.ndarray, half: int) -> tuple[float, float, float]:
    """AUROC of wrong next tokens with its interval, on every second window."""
    u, good = scores[half::2], right[half::2]
    groups = (
        [one[ok == outcome] for one, ok in zip(u, good, strict=True)] for outcome in (True, False)
    )
    return auroc(u[good], u[~good]), *auroc_interval(*groups, paired=True)


def cost(rounds: int = 7) -> None:
    """The time of a score in forward passes of the same batch: the best of some rounds, in which
    all take turns.

    Scores run each text alone, so that passes one by one stand beside those of the batch. It is the
    CPU's time on one thread, which other work on the machine disturbs less than the clock on the
    wall.
    """
    torch.set_num_threads(1)
    model = language()
    for texts in (1, 8):
        ids = windows(KNOWN, model, texts).ids

        def plain(size: int, ids: torch.Tensor = ids) -> Callable[[], None]:
            def forward() -> None:
                with torch.no_grad():
                    for part in ids.split(size):
                        model.model(input_ids=part)

            return forward

        def by(methods: list[str], k: int, ids: torch.Tensor = ids) -> Callable[[], Any]:
            scorer = qualms.Scorer(model.model, methods, class_dim=-1, engine=qualms.Sketch(k))
            return lambda: scorer({"input_ids": ids})

        work = {"forward": plain(texts), "one by one": plain(1), "entropy": by(["entropy"], 2)}
        work |= {f"regrad {k}": by(["regrad"], k) for k in (8, 16, 32)}
        work |= {"all 16": by(list(GRADIENTS), 16), "regrad+layers 16": by(["regrad+layers"], 16)}
        best = {name: min(times) for name, times in timed(work, rounds).items()}
        in_passes = {name: round(seconds / best["forward"], 1) for name, seconds in best.items()}
        each = round((best["regrad 32"] - best["regrad 8"]) / 24 / best["forward"], 2)
        keep(
            {
                "part": "cost",
                "texts": texts,
                "tokens": WINDOW + 1,
                "forward_ms": round(1000 * best["forward"], 2),
            }
            | {"passes": in_passes, "per_tangent": each, "rounds": rounds}
        )


def timed(work: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each piece of work in each round, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, do in work.items():
            began = time.process_time()
            do()
            if number:
                times[name].append(time.process_time() - began)
    return times


def rounded(values: Any) -> Row:
    """Shares with five digits."""
    return {name: round(value, 5) for name, value in values.items()}


def read(**key: Any) -> list[Row]:
    """The rows with these values."""
    rows = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    return [row for row in rows if all(row.get(k) == v for k, v in key.items())]


def keep(row: Row) -> None:
    """Write a row, and show it."""
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(*shown(row), flush=True)


def shown(row: Row) -> Iterator[str]:
    """What of a row fits a line."""
    for name, value in row.items():
        if name == "texts" and isinstance(value, dict):
            areas = {
                text: [of["auroc"] for of in v.values() if isinstance(of, dict)]
                for text, v in value.items()
            }
            yield str(
                {text: [round(100 * area, 1) for area in some] for text, some in areas.items()}
            )
        else:
            yield f"{name}={value}"


COMMANDS = {"score": score, "leads": leads, "tangents": tangents, "hybrid": hybrid, "cost": cost}


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*COMMANDS, "page"])
    part = parser.parse_args().part
    if part == "page":
        text_page.fill(read())
    else:
        COMMANDS[part]()


if __name__ == "__main__":
    main()
