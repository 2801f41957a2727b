"""Scores of tokens: do they tell other texts from those that a language model knows, and where it
errs?
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import nn

from qualms.errors import QualmsError
from qualms.gradients.settings import Sketch
from qualms.metrics import aupr, auroc, fpr95, interval, prr, raulc
from qualms.metrics.checks import Floats
from qualms.metrics.groups import auroc_interval
from qualms.progress import ProgressFn
from qualms.tasks.journal import Journal
from qualms.tasks.rows import (
    LeftOutRow,
    NextTokenKey,
    NextTokenMeasures,
    NextTokenRow,
    OodMeasures,
    TextAbout,
    TextKey,
    TextRow,
)
from qualms.tasks.scoring import Methods
from qualms.tasks.windows import ScoredWindows, Windows, score_windows

SPANS = (1, 8, 32)  # tokens whose scores are averaged; whole windows too
RESAMPLES = 200  # of rAULC and PRR, which rank all tokens anew each time
SURPRISE, PERPLEXITY = (
    "surprise",
    "perplexity",
)  # what tokens that were read say, without any method


def text(
    model: nn.Module,
    inside: Windows,
    outside: Sequence[Windows],
    methods: Methods,
    journal: Journal,
    *,
    seed: int = 0,
    engine: Sketch | None = None,
    params: str = "",
    progress: ProgressFn | None = None,
) -> Iterator[TextRow | NextTokenRow | LeftOutRow]:
    """Rows for each method: each text of `outside` beside `inside`, by tokens and by spans; then
    errors on `inside`.

    What stands at a token is the score after reading it, of what comes next; the token that does
    come next is not used. A span's score is the mean of its tokens'. Two baselines of the tokens
    read so far are always among the
    methods: `surprise`, -log p of the token just read, and `perplexity`, the mean of that over the
    window up to there.

    Args:
        model: a language model.
        inside: text that it knows.
        outside: other texts, in windows of the same length.
        methods: by the name that rows give them.
        journal: where rows are kept.
        seed: decides the tangents.
        engine: the sketch of gradient methods.
        params: whose gradients, a pattern; empty for all.
        progress: is told how far it is.
    """
    engine = engine or Sketch()
    if any(other.length != inside.length for other in outside):
        raise QualmsError("the windows of the texts differ in length; cut them alike.")
    how: dict[str, Any] = {"seed": seed, "engine": engine, "params": params, "progress": progress}
    known, *others = (
        score_windows(model, windows, methods, journal, **how) for windows in (inside, *outside)
    )
    scores = with_baselines(known)
    about: TextAbout = {
        "seed": seed,
        "engine": str(engine),
        "params": params,
        "window": inside.length,
    }
    exactly = {name: repr(methods[name]) if name in methods else name for name in scores}
    for windows, scored in zip(outside, others, strict=True):
        for name, of_other in with_baselines(scored).items():
            for span in spans(inside.length):
                key: TextKey = {
                    "row": "text",
                    "in": inside.name,
                    "out": windows.name,
                    "method": name,
                    "exactly": exactly[name],
                    **about,
                    "span": span,
                    "n_in": len(inside),
                    "n_out": len(windows),
                    "texts": f"{inside.fingerprint()} {windows.fingerprint()}",
                }
                found = journal.where(**key)
                yield (
                    found[0]
                    if found
                    else journal.add(TextRow(**key, **told_apart(scores[name], of_other, span)))
                )
    if known.right.all() or not known.right.any():
        outcome = "right" if known.right.all() else "wrong"
        yield {
            "row": "left out",
            "method": "next tokens",
            "why": f"all of {inside.name} are predicted {outcome}.",
        }
        return
    for name, of_known in scores.items():
        own: NextTokenKey = {
            "row": "next-token",
            "in": inside.name,
            "method": name,
            "exactly": exactly[name],
            **about,
            "n": len(inside),
            "texts": inside.fingerprint(),
        }
        there = journal.where(**own)
        yield (
            there[0] if there else journal.add(NextTokenRow(**own, **errors_found(of_known, known)))
        )


def spans(length: int) -> list[int]:
    """The numbers of tokens that are averaged in windows of a length."""
    return [*(span for span in SPANS if span < length), length]


def with_baselines(scored: ScoredWindows) -> dict[str, Floats]:
    """The methods' scores, and those of the tokens that were read."""
    surprise = -scored.log_probs
    return {**scored.scores, SURPRISE: surprise, PERPLEXITY: running(surprise)}


def running(scores: Floats) -> Floats:
    """The mean over a window up to each token."""
    return scores.cumsum(1) / np.arange(1, scores.shape[1] + 1)


def span_means(scores: Floats, span: int) -> Floats:
    """The means over consecutive spans of each window; tokens that are left over at its end are
    left out.
    """
    whole = scores.shape[1] // span
    return scores[:, : whole * span].reshape(len(scores), whole, span).mean(2)


def told_apart(inside: Floats, outside: Floats, span: int) -> OodMeasures:
    """How well scores [windows, tokens] tell two texts apart by spans."""
    a, b = span_means(inside, span), span_means(outside, span)
    low, high = auroc_interval(list(a), list(b))
    return {
        "auroc": auroc(a.ravel(), b.ravel()),
        "auroc_low": low,
        "auroc_high": high,
        "aupr_out": aupr(a.ravel(), b.ravel()),
        "aupr_in": aupr(a.ravel(), b.ravel(), positive="in"),
        "fpr95": fpr95(a.ravel(), b.ravel()),
    }


def errors_found(scores: Floats, scored: ScoredWindows) -> NextTokenMeasures:
    """How well scores [windows, tokens] tell where the likeliest next token is wrong."""
    u, right = scores[:, :-1], scored.right
    quality = np.exp(
        scored.log_probs[:, 1:]
    )  # what the model gave to the token that does come next
    groups = (
        [some[good == outcome] for some, good in zip(u, right, strict=True)]
        for outcome in (True, False)
    )
    low, high = auroc_interval(*groups, paired=True)
    lifts, ratios = (
        interval(_flat(measure), u, of, paired=True, resamples=RESAMPLES)
        for measure, of in ((raulc, right), (prr, quality))
    )
    return {
        "accuracy": float(right.mean()),
        "auroc": auroc(u[right], u[~right]),
        "auroc_low": low,
        "auroc_high": high,
        "raulc": raulc(u.ravel(), right.ravel()),
        "raulc_low": lifts[0],
        "raulc_high": lifts[1],
        "prr": prr(u.ravel(), quality.ravel()),
        "prr_low": ratios[0],
        "prr_high": ratios[1],
    }


def _flat(measure: Any) -> Any:
    """A measure of all tokens of some windows."""
    return lambda *tables: measure(*(table.ravel() for table in tables))
