"""Scores of a text's tokens, kept in a journal: no window is scored twice by one method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.settings import Sketch
from qualms.methods.method import Method
from qualms.metrics.checks import Bools, Floats
from qualms.models.fingerprint import fingerprint
from qualms.models.language import LanguageModel
from qualms.positions import next_tokens
from qualms.progress import ProgressFn
from qualms.result import Scored
from qualms.scorer import Scorer
from qualms.stream.sink import report_to, score_stream
from qualms.tasks.journal import Journal
from qualms.tasks.rows import LeftOutRow
from qualms.tasks.score_rows import Methods, ScoreRows, keep_usable
from qualms.tasks.windows import WindowBatch, Windows, window_batches
from qualms.version import __version__

# The significant digits of a score in a file: those that float32 has.
DIGITS = 7
# The sketch with which `usable_for_tokens` tries methods, as cheap as possible.
FEW_TANGENTS = Sketch(2)


@dataclass(frozen=True)
class ScoredWindows:
    """The scores of n windows of `length` scored tokens, and the model's predictions there.

    Args:
        scores: by method, the score of each token, [n, length].
        log_probs: log p of each token, given the tokens before it, [n, length].
        right: for each token but a window's last, whether the most likely next token is the one
            that follows, [n, length - 1].
    """

    scores: dict[str, Float[Floats, "windows length"]]
    log_probs: Float[Floats, "windows length"]
    right: Bool[Bools, "windows next"]


def score_windows(
    model: nn.Module,
    windows: Windows,
    methods: Methods,
    journal: Journal,
    *,
    seed: int = 0,
    engine: Sketch | None = None,
    params: str = "",
    progress: ProgressFn | None = None,
) -> ScoredWindows:
    """Score all tokens by all methods; only scores that the journal lacks are computed.

    Args:
        model: a language model, which returns logits [windows, tokens, vocabulary] for tokens
            [windows, tokens].
        windows: the text, in windows.
        methods: the methods by the names that rows have.
        journal: saves the scores; scores that it has are not computed again.
        seed: the seed of the sketch's tangents.
        engine: the settings of the sketch that estimates gradient scores.
        params: a pattern of the parameters whose gradients count; empty for all.
        progress: called with the number of windows scored so far, and of all windows.

    Returns:
        The scores of all windows, old and new, and the model's predictions.
    """
    engine = engine or Sketch()
    about = {"data": windows.name, "seed": seed, "engine": str(engine), "params": params}
    exactly = {name: repr(method) for name, method in methods.items()}
    rows = _TokenRows(journal, about, exactly)
    # The scorers made so far, by the names of their methods. Usually one is enough; if the journal
    # has some of the scores, batches may lack scores by different methods.
    scorers: dict[tuple[str, ...], Scorer] = {}

    def score(batch: WindowBatch) -> Scored:
        """Score a batch by those methods of which the journal has no scores for it."""
        names = rows.missing(batch)
        if names not in scorers:
            missing_methods = {name: methods[name] for name in names}
            scorers[names] = _make_scorer(model, missing_methods, seed, engine, params)
        ids = batch.windows.ids
        return scorers[names]({"input_ids": ids}, targets=next_tokens(ids))

    report = report_to(progress, windows.name, len(windows), "windows")
    score_stream(window_batches(windows), score, rows, report)
    return rows.collect(windows)


class _TokenRows(ScoreRows[WindowBatch]):
    """The rows of one text's scores in a journal: a sink to which each batch of windows adds a row.

    `about` holds the entries that all rows share, `exactly` the `repr` of each method by name.
    """

    def key(self, batch: WindowBatch) -> Mapping[str, Any]:
        """Return the entries that identify a batch's rows, with a fingerprint of its windows."""
        texts = batch.windows.fingerprint()
        return {"row": "tokens", **self.about, "first": batch.first, "texts": texts}

    def measures(self, batch: WindowBatch, scored: Scored) -> dict[str, Any]:
        """Return what a row has of each token: scores by method, log p, and what was predicted.

        Args:
            batch: The windows; their first `opening` tokens, which get no score, are left out.
            scored: The scores of all tokens of the windows, with the next tokens as targets.

        Returns:
            `scores` by method, `log_probs`, and `right`: whether the next token is predicted. All
            are nested lists, [windows, tokens].

        Raises:
            QualmsError: If a score is not finite.
        """
        assert scored.target_log_probs is not None
        windows = batch.windows
        start = windows.opening
        for name, values in scored.scores.items():
            if not torch.isfinite(values[:, start:]).all():
                raise QualmsError(
                    f"{name} has no finite score for a token of {windows.name}; leave the method "
                    "out."
                )
        right = scored.prediction.cpu() == next_tokens(windows.ids)
        return {
            "scores": {name: _round(values[:, start:]) for name, values in scored.scores.items()},
            # The targets are the next tokens, so the log p of a token is one entry to its left.
            "log_probs": _round(scored.target_log_probs[:, start - 1 : -1]),
            # The token after the last of a window is not known.
            "right": right[:, start:-1].tolist(),
        }

    def collect(self, windows: Windows) -> ScoredWindows:
        """Join the scores and predictions of all batches, once all are in the journal."""
        scores_by_method: dict[str, list[list[float]]] = {name: [] for name in self.exactly}
        log_probs: list[list[float]] = []
        right: list[list[bool]] = []
        for batch in window_batches(windows):
            batch_scores = self.scores(batch)
            for name, scores in scores_by_method.items():
                scores.extend(batch_scores[name])
            # A batch can have several rows, with other methods; predictions are equal in all.
            row = self.rows(batch)[0]
            log_probs += row["log_probs"]
            right += row["right"]
        return ScoredWindows(
            scores={name: np.array(scores) for name, scores in scores_by_method.items()},
            log_probs=np.array(log_probs),
            right=np.array(right, bool),
        )


def usable_for_tokens(
    model: nn.Module, windows: Windows, methods: Methods
) -> tuple[dict[str, Method], list[LeftOutRow]]:
    """Try each method on four tokens, with few draws, and keep the methods that work.

    Args:
        model: a language model.
        windows: at least one window, of four tokens or more.
        methods: the methods by name.

    Returns:
        The methods that can score this model's tokens, by name, and a row with the reason for each
        other method.
    """
    few_tokens = {"input_ids": windows.ids[:1, :4]}  # [1 window, 4 tokens]

    def try_method(name: str, method: Method) -> None:
        """Score four tokens by a method; raise a QualmsError if the model does not support it."""
        scorer = _make_scorer(
            model,
            {name: method.quick()},
            seed=0,
            engine=FEW_TANGENTS,
            params="",
        )
        scorer(few_tokens)

    return keep_usable(methods, try_method)


def describe_language_model(language: LanguageModel) -> dict[str, Any]:
    """Return what identifies a language model in a journal's header, and the version of qualms."""
    return {"qualms": __version__, "network": language.name, "weights": fingerprint(language.model)}


def _make_scorer(
    model: nn.Module, methods: Methods, seed: int, engine: Sketch, params: str
) -> Scorer:
    """Build a scorer of tokens.

    Args:
        model: a language model, which returns logits [windows, tokens, vocabulary] for tokens
            [windows, tokens].
        methods: the methods by name.
        seed: the seed of the sketch's tangents.
        engine: the settings of the sketch that estimates gradient scores.
        params: a pattern of the parameters whose gradients count; empty for all.
    """
    return Scorer(
        model,
        dict(methods),
        class_dim=-1,
        engine=engine,
        params=params or None,
        seed=seed,
    )


def _round(values: Tensor) -> list[list[float]]:
    """Convert a tensor [windows, tokens] to nested lists, rounded to `DIGITS` significant digits."""
    windows: list[list[float]] = []
    for window in values.double().tolist():
        windows.append([float(f"{value:.{DIGITS}g}") for value in window])
    return windows
