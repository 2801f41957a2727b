"""Scores of tokens: can they detect texts that a language model does not know, and its errors?"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from torch import nn

from qualms.errors import QualmsError
from qualms.gradients.settings import Sketch
from qualms.metrics import aupr, auroc, fpr95, interval, prr, raulc
from qualms.metrics.checks import Floats
from qualms.metrics.groups import auroc_interval
from qualms.progress import ProgressFn
from qualms.tasks.journal import Journal
from qualms.tasks.row_measures import NextTokenMeasures, OodMeasures
from qualms.tasks.rows import LeftOutRow, NextTokenKey, NextTokenRow, TextAbout, TextKey, TextRow
from qualms.tasks.score_rows import Methods
from qualms.tasks.token_scores import ScoredWindows, score_windows
from qualms.tasks.windows import Windows

# Tokens whose scores are averaged; whole windows too.
SPANS = (1, 8, 32)
# Bootstrap resamples of rAULC and PRR, which rank all tokens in each resample.
RESAMPLES = 200
# -log p of the token just read, without any method.
SURPRISE = "surprise"
# The mean surprise over the window up to the token.
PERPLEXITY = "perplexity"


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
    """Measure how well token scores detect other texts, and wrong next tokens.

    The score at a token is computed after reading it, and is about what comes next; the token that
    does come next is not used. A span's score is the mean of its tokens' scores. Two baselines are
    always added, which use only the tokens read so far: `surprise`, -log p of the token just read,
    and `perplexity`, the mean surprise over the window up to the token.

    Args:
        model: a language model.
        inside: the text that the model knows, in windows.
        outside: other texts, in windows of the same length.
        methods: the methods by the names that rows have.
        journal: saves the rows; rows that it has are not computed again.
        seed: the seed of the sketch's tangents.
        engine: the sketch of gradient scores.
        params: a pattern of the parameters whose gradients count; empty for all.
        progress: called with the number of windows that are scored.

    Yields:
        For each other text, method and span length, a row with AUROC, AUPR and FPR95; then, for
        each method, a row that tells how well it detects wrong next tokens of `inside`.
    """
    engine = engine or Sketch()
    if any(other.length != inside.length for other in outside):
        raise QualmsError("the windows of the texts differ in length; cut them to the same length.")
    scored: list[ScoredWindows] = []
    for windows in (inside, *outside):
        scored.append(
            score_windows(
                model,
                windows,
                methods,
                journal,
                seed=seed,
                engine=engine,
                params=params,
                progress=progress,
            )
        )
    about: TextAbout = {
        "seed": seed,
        "engine": str(engine),
        "params": params,
        "window": inside.length,
    }
    exactly = {name: repr(method) for name, method in methods.items()}
    for windows, other in zip(outside, scored[1:], strict=True):
        yield from _text_rows(inside, scored[0], windows, other, about, exactly, journal)
    yield from _next_token_rows(inside, scored[0], about, exactly, journal)


def _text_rows(
    inside: Windows,
    known: ScoredWindows,
    outside: Windows,
    other: ScoredWindows,
    about: TextAbout,
    exactly: dict[str, str],
    journal: Journal,
) -> Iterator[TextRow]:
    """Measure how well each method tells two texts apart, by spans of each length.

    Args:
        inside: the text that the model knows.
        known: the scores of `inside`.
        outside: the other text.
        other: the scores of `outside`.
        about: the keys that all rows share.
        exactly: the `repr` of each method, with all its parameters, by name.
        journal: saves the rows; rows that it has are not computed again.

    Yields:
        A row for each method and length of spans, baselines included.
    """
    scores_outside = add_baselines(other)
    for name, scores_inside in add_baselines(known).items():
        for span in span_lengths(inside.length):
            key: TextKey = {
                "row": "text",
                "in": inside.name,
                "out": outside.name,
                "method": name,
                "exactly": exactly.get(name, name),
                **about,
                "span": span,
                "n_in": len(inside),
                "n_out": len(outside),
                "texts": f"{inside.fingerprint()} {outside.fingerprint()}",
            }
            measure = partial(_text_row, key, scores_inside, scores_outside[name], span)
            yield journal.get_or_add(key, measure)


def _text_row(key: TextKey, inside: Floats, outside: Floats, span: int) -> TextRow:
    """Measure how well one method's scores tell two texts apart, as a row.

    Args:
        key: the keys that identify the row.
        inside: scores of the text that the model knows, [windows, length].
        outside: scores of the other text, [windows, length].
        span: the number of tokens in a span.
    """
    return TextRow(**key, **detection_measures(inside, outside, span))


def _next_token_rows(
    inside: Windows,
    known: ScoredWindows,
    about: TextAbout,
    exactly: dict[str, str],
    journal: Journal,
) -> Iterator[NextTokenRow | LeftOutRow]:
    """Measure how well each method detects wrong next tokens.

    Args:
        inside: the text that the model knows.
        known: the scores of `inside`.
        about: the keys that all rows share.
        exactly: the `repr` of each method, with all its parameters, by name.
        journal: saves the rows; rows that it has are not computed again.

    Yields:
        A row for each method, or a single row that says why there is nothing to detect.
    """
    if known.right.all() or not known.right.any():
        outcome = "correctly" if known.right.all() else "wrongly"
        why = f"all next tokens of {inside.name} are predicted {outcome}."
        yield {"row": "left out", "method": "next tokens", "why": why}
        return
    for name, scores in add_baselines(known).items():
        key: NextTokenKey = {
            "row": "next-token",
            "in": inside.name,
            "method": name,
            "exactly": exactly.get(name, name),
            **about,
            "n": len(inside),
            "texts": inside.fingerprint(),
        }
        yield journal.get_or_add(key, partial(_next_token_row, key, scores, known))


def _next_token_row(key: NextTokenKey, scores: Floats, known: ScoredWindows) -> NextTokenRow:
    """Measure how well one method detects wrong next tokens, as a row (see `error_measures`)."""
    return NextTokenRow(**key, **error_measures(scores, known))


def span_lengths(length: int) -> list[int]:
    """Return the span lengths to measure: those of `SPANS` below a window's length, and that."""
    return [*(span for span in SPANS if span < length), length]


def add_baselines(scored: ScoredWindows) -> dict[str, Floats]:
    """Return the scores of all methods and of the two baselines by name, each [windows, length].

    `surprise` is -log p of the token just read; `perplexity` is the mean surprise up to the token.
    """
    surprise = -scored.log_probs
    return {**scored.scores, SURPRISE: surprise, PERPLEXITY: running_mean(surprise)}


def running_mean(scores: Floats) -> Floats:
    """Average the scores of each window from its start up to each token, [windows, length]."""
    return scores.cumsum(1) / np.arange(1, scores.shape[1] + 1)


def span_means(scores: Floats, span: int) -> Floats:
    """Average scores over consecutive spans of each window; left-over tokens are dropped.

    Args:
        scores: the scores of the tokens, [windows, length].
        span: the number of tokens in a span.

    Returns:
        The means, [windows, length // span].
    """
    count = scores.shape[1] // span
    return scores[:, : count * span].reshape(len(scores), count, span).mean(2)


def detection_measures(inside: Floats, outside: Floats, span: int) -> OodMeasures:
    """Measure how well span means tell two texts apart, with intervals over windows.

    Args:
        inside: scores of the text that the model knows, [windows, length].
        outside: scores of the other text, the positive class, [windows, length].
        span: the number of tokens in a span.

    Returns:
        AUROC with its 95 % interval, AUPR with either text as the positive class, and FPR95.
    """
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


def error_measures(scores: Floats, scored: ScoredWindows) -> NextTokenMeasures:
    """Measure how well scores detect the positions where the most likely next token is wrong.

    Args:
        scores: the scores of the tokens, [windows, length]. The last token of a window is not used,
            as its next token is not known.
        scored: the model's predictions in the same windows.

    Returns:
        Accuracy, AUROC, rAULC and PRR, the last three with 95 % intervals.
    """
    u, right = scores[:, :-1], scored.right
    # P of the token that does come next.
    quality = np.exp(scored.log_probs[:, 1:])
    of_right = [window[good] for window, good in zip(u, right, strict=True)]
    of_wrong = [window[~good] for window, good in zip(u, right, strict=True)]
    # Paired, since right and wrong tokens share windows, which are resampled as a whole.
    low, high = auroc_interval(of_right, of_wrong, paired=True)
    raulc_low, raulc_high = _interval_over_windows(raulc, u, right)
    prr_low, prr_high = _interval_over_windows(prr, u, quality)
    return {
        "accuracy": float(right.mean()),
        "auroc": auroc(u[right], u[~right]),
        "auroc_low": low,
        "auroc_high": high,
        "raulc": raulc(u.ravel(), right.ravel()),
        "raulc_low": raulc_low,
        "raulc_high": raulc_high,
        "prr": prr(u.ravel(), quality.ravel()),
        "prr_low": prr_low,
        "prr_high": prr_high,
    }


def _interval_over_windows(
    measure: Callable[..., float], scores: Floats, outcome: np.ndarray
) -> tuple[float, float]:
    """Compute the 95 % interval of a measure of all tokens, resampling whole windows.

    Args:
        measure: a function of two arrays of shape [tokens].
        scores: the scores of the tokens, [windows, length].
        outcome: the values that scores are compared with, [windows, length].
    """

    def measure_flat(scores: np.ndarray, outcome: np.ndarray) -> float:
        """Compute the measure of all tokens of the resampled windows."""
        return measure(scores.ravel(), outcome.ravel())

    return interval(measure_flat, scores, outcome, paired=True, resamples=RESAMPLES)
