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

# The numbers of consecutive tokens whose scores are averaged, in addition to whole windows.
SPANS = (1, 8, 32)
# Bootstrap resamples of rAULC and PRR, which rank all tokens in each resample.
RESAMPLES = 200
# The name of a baseline: -log p of the token just read.
SURPRISE = "surprise"
# The name of a baseline: the mean surprise over the window up to the token.
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
    """Measure how well token scores detect other texts, and wrong predictions of next tokens.

    The score at a token is the model's uncertainty about the next token, computed from this token
    and those before it. A span's score is the mean of its tokens' scores. Two baselines are always
    added, which use the same tokens: `surprise`, -log p of the token just read, and `perplexity`,
    the mean surprise over the window up to the token.

    Args:
        model: a language model.
        inside: the text that the model knows, in windows.
        outside: other texts, in windows of the same length.
        methods: the methods by the names that rows have.
        journal: saves the rows; rows that it has are not computed again.
        seed: the seed of the sketch's tangents.
        engine: the settings of the sketch that estimates gradient scores.
        params: a pattern of the parameters whose gradients count; empty for all.
        progress: called with the number of windows scored so far, and of all windows.

    Yields:
        For each other text, method and span length, a row with AUROC, AUPR and FPR95; then, for
        each method, a row that tells how well it detects wrong predictions in `inside`. If none of
        them, or all, are wrong, a single row says so instead.
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
    inside_scored, *outside_scored = scored
    for windows, windows_scored in zip(outside, outside_scored, strict=True):
        yield from _text_rows(
            inside, inside_scored, windows, windows_scored, about, exactly, journal
        )
    yield from _next_token_rows(inside, inside_scored, about, exactly, journal)


def _text_rows(
    inside: Windows,
    inside_scored: ScoredWindows,
    outside: Windows,
    outside_scored: ScoredWindows,
    about: TextAbout,
    exactly: dict[str, str],
    journal: Journal,
) -> Iterator[TextRow]:
    """Measure how well each method tells two texts apart, by spans of each length.

    Args:
        inside: the text that the model knows.
        inside_scored: the scores of `inside`.
        outside: the other text.
        outside_scored: the scores of `outside`.
        about: the entries that all rows share.
        exactly: the `repr` of each method, with all its parameters, by name.
        journal: saves the rows; rows that it has are not computed again.

    Yields:
        A row for each span length of each method and baseline.
    """
    scores_outside = add_baselines(outside_scored)
    for name, scores_inside in add_baselines(inside_scored).items():
        for span in span_lengths(inside.length):
            key: TextKey = {
                "row": "text",
                "in": inside.name,
                "out": outside.name,
                "method": name,
                # A baseline has no parameters: its name says all.
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
    """Return the row that says how well one method's scores tell two texts apart.

    Args:
        key: the entries that identify the row, such as the method and the texts.
        inside: scores of the text that the model knows, [windows, length].
        outside: scores of the other text, [windows, length].
        span: the number of tokens in a span.
    """
    return TextRow(**key, **detection_measures(inside, outside, span))


def _next_token_rows(
    inside: Windows,
    inside_scored: ScoredWindows,
    about: TextAbout,
    exactly: dict[str, str],
    journal: Journal,
) -> Iterator[NextTokenRow | LeftOutRow]:
    """Measure how well each method detects tokens after which the model predicts a wrong one.

    Args:
        inside: the text that the model knows.
        inside_scored: the scores of `inside`, and whether its next tokens are predicted correctly.
        about: the entries that all rows share.
        exactly: the `repr` of each method, with all its parameters, by name.
        journal: saves the rows; rows that it has are not computed again.

    Yields:
        A row for each method and baseline, or a single row if all next tokens are predicted
        correctly, or all wrongly, so that there is nothing to detect.
    """
    right = inside_scored.right
    if right.all() or not right.any():
        outcome = "correctly" if right.all() else "wrongly"
        why = f"all next tokens of {inside.name} are predicted {outcome}."
        yield {"row": "left out", "method": "next tokens", "why": why}
        return
    for name, scores in add_baselines(inside_scored).items():
        key: NextTokenKey = {
            "row": "next-token",
            "in": inside.name,
            "method": name,
            # A baseline has no parameters: its name says all.
            "exactly": exactly.get(name, name),
            **about,
            "n": len(inside),
            "texts": inside.fingerprint(),
        }
        yield journal.get_or_add(key, partial(_next_token_row, key, scores, inside_scored))


def _next_token_row(key: NextTokenKey, scores: Floats, scored: ScoredWindows) -> NextTokenRow:
    """Return the row that says how well one method's scores detect wrong predictions.

    Args:
        key: the entries that identify the row, such as the method and the text.
        scores: the method's scores of the tokens, [windows, length].
        scored: the model's predictions in the same windows.
    """
    return NextTokenRow(**key, **error_measures(scores, scored))


def span_lengths(length: int) -> list[int]:
    """Return the lengths of spans, in tokens: those in `SPANS` below a window's, and a window's.

    Args:
        length: the number of scored tokens in a window.
    """
    return [*(span for span in SPANS if span < length), length]


def add_baselines(scored: ScoredWindows) -> dict[str, Floats]:
    """Return the scores of all methods and of two baselines, by name, each [windows, length].

    The baselines are `surprise`, -log p of the token just read, and `perplexity`, the mean surprise
    from the window's start up to the token.
    """
    surprise = -scored.log_probs
    return {**scored.scores, SURPRISE: surprise, PERPLEXITY: running_mean(surprise)}


def running_mean(scores: Floats) -> Floats:
    """Average the scores from a window's start up to each token.

    Args:
        scores: the scores of the tokens, [windows, length].

    Returns:
        The means, [windows, length].
    """
    num_tokens = np.arange(1, scores.shape[1] + 1)
    return scores.cumsum(1) / num_tokens


def span_means(scores: Floats, span: int) -> Floats:
    """Average scores over consecutive spans of each window; drop the tokens left over at its end.

    Args:
        scores: the scores of the tokens, [windows, length].
        span: the number of tokens in a span.

    Returns:
        The means, [windows, length // span].
    """
    num_spans = scores.shape[1] // span
    complete_spans = scores[:, : num_spans * span]
    return complete_spans.reshape(len(scores), num_spans, span).mean(2)


def detection_measures(inside: Floats, outside: Floats, span: int) -> OodMeasures:
    """Measure how well the mean scores of spans tell two texts apart.

    Args:
        inside: scores of the text that the model knows, [windows, length].
        outside: scores of the other text, the positive class, [windows, length].
        span: the number of tokens in a span.

    Returns:
        AUROC with its 95 % interval, AUPR with either text as the positive class, and FPR95.
    """
    inside_means, outside_means = span_means(inside, span), span_means(outside, span)
    # Spans of a window are not independent: each item of the lists, a window, is resampled whole.
    low, high = auroc_interval(list(inside_means), list(outside_means))
    inside_spans, outside_spans = inside_means.ravel(), outside_means.ravel()
    return {
        "auroc": auroc(inside_spans, outside_spans),
        "auroc_low": low,
        "auroc_high": high,
        "aupr_out": aupr(inside_spans, outside_spans),
        "aupr_in": aupr(inside_spans, outside_spans, positive="in"),
        "fpr95": fpr95(inside_spans, outside_spans),
    }


def error_measures(scores: Floats, scored: ScoredWindows) -> NextTokenMeasures:
    """Measure how well scores detect the positions where the most likely next token is wrong.

    Args:
        scores: the scores of the tokens, [windows, length]. The last token of each window is not
            used, as the token that follows it is not known.
        scored: the model's predictions in the same windows.

    Returns:
        Accuracy, AUROC, rAULC and PRR, the last three with 95 % intervals.
    """
    # All three [windows, length - 1].
    uncertainty, right = scores[:, :-1], scored.right
    # For PRR, a prediction is as good as the probability that it gives to the token that follows.
    prob_of_next_token = np.exp(scored.log_probs[:, 1:])
    # For each window, the scores where the prediction is right, and those where it is wrong.
    scores_of_right, scores_of_wrong = [], []
    for window_scores, is_right in zip(uncertainty, right, strict=True):
        scores_of_right.append(window_scores[is_right])
        scores_of_wrong.append(window_scores[~is_right])
    # Paired, since right and wrong tokens share windows, which are resampled as a whole.
    low, high = auroc_interval(scores_of_right, scores_of_wrong, paired=True)
    raulc_low, raulc_high = _interval_over_windows(raulc, uncertainty, right)
    prr_low, prr_high = _interval_over_windows(prr, uncertainty, prob_of_next_token)
    return {
        "accuracy": float(right.mean()),
        "auroc": auroc(uncertainty[right], uncertainty[~right]),
        "auroc_low": low,
        "auroc_high": high,
        "raulc": raulc(uncertainty.ravel(), right.ravel()),
        "raulc_low": raulc_low,
        "raulc_high": raulc_high,
        "prr": prr(uncertainty.ravel(), prob_of_next_token.ravel()),
        "prr_low": prr_low,
        "prr_high": prr_high,
    }


def _interval_over_windows(
    measure: Callable[..., float], scores: Floats, outcome: np.ndarray
) -> tuple[float, float]:
    """Compute the 95 % interval of a measure of all tokens.

    Whole windows are resampled, since the tokens of a window are not independent.

    Args:
        measure: a function of the scores and the outcomes of all tokens, both [tokens].
        scores: the scores of the tokens, [windows, length].
        outcome: what `measure` compares the scores with, such as correctness, [windows, length].

    Returns:
        The lower and the upper end.
    """

    def measure_flat(scores: np.ndarray, outcome: np.ndarray) -> float:
        """Compute the measure of all tokens in the resampled windows, [windows, length]."""
        return measure(scores.ravel(), outcome.ravel())

    return interval(measure_flat, scores, outcome, paired=True, resamples=RESAMPLES)
