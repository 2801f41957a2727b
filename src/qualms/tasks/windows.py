"""Texts to scores of tokens: windows of equal length, kept chunk by chunk, so that none is scored
twice.
"""

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qualms.data.texts import Document
from qualms.errors import QualmsError
from qualms.gradients.settings import Sketch
from qualms.methods.method import Method
from qualms.metrics.checks import Bools, Floats
from qualms.models.fingerprint import fingerprint
from qualms.models.language import LanguageModel
from qualms.positions import next_tokens
from qualms.progress import ProgressFn
from qualms.scorer import Scorer
from qualms.tasks.journal import Journal
from qualms.tasks.rows import LeftOutRow, TokensAbout, TokensKey, TokensMeasures, TokensRow
from qualms.tasks.scoring import Methods
from qualms.texts.encoding import encode
from qualms.version import __version__

CHUNK = 8  # windows whose scores are written together; what a kill can lose
DIGITS = 7  # of a score in a file: what float32 holds


@dataclass(frozen=True)
class Windows:
    """A text in windows of equal length, each from within one document, so that a place in them
    says nothing.

    Args:
        name: of the text.
        ids: the tokens.
        opening: how many of them open a window and are not judged: those that the tokenizer puts in
            front of a text, or one of the text where it puts none.
    """

    name: str
    ids: Int[Tensor, "windows length"]
    opening: int = 1

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        """The tokens of a window that are judged."""
        return self.ids.shape[1] - self.opening

    def take(self, part: slice) -> "Windows":
        """Some of the windows."""
        return replace(self, ids=self.ids[part])

    def subset(self, count: int | None) -> "Windows":
        """As many windows, spread evenly over the text; None for all."""
        if count is None or count >= len(self):
            return self
        return replace(self, ids=self.ids[torch.linspace(0, len(self) - 1, count).round().long()])

    def fingerprint(self) -> str:
        """A short digest of the tokens, and of where they begin."""
        digest = hashlib.sha256(self.ids.contiguous().numpy().tobytes())
        digest.update(str(self.opening).encode())
        return digest.hexdigest()[:16]


def cut_windows(
    name: str, documents: Iterable[Document], language: LanguageModel, length: int
) -> Windows:
    """Every window of `length` tokens that fits into a document; what is left over at its end is
    left out.
    """
    if length < 2:
        raise QualmsError(
            f"windows of {length} tokens have no next token to predict; make them longer."
        )
    rows: list[tuple[int, ...]] = []
    opening = 1
    for found in (encode(language, document) for document in documents):
        lead, ids = found.ids[: found.lead], found.ids[found.lead :]
        opening = max(found.lead, 1)
        width = length + opening - found.lead
        rows += [(*lead, *ids[at : at + width]) for at in range(0, len(ids) - width + 1, width)]
    if not rows:
        raise QualmsError(
            f"no document of {name} has {length} tokens; give longer ones, or shorter windows."
        )
    if len(rows[0]) > (language.context or len(rows[0])):
        raise QualmsError(
            f"{language.name} reads {language.context} tokens at most, and a window has {len(rows[0])} with what opens "
            "it; shorten it."
        )
    return Windows(name, torch.tensor(rows), opening)


@dataclass(frozen=True)
class ScoredWindows:
    """What a model says after each judged token of each window."""

    scores: dict[str, Float[Floats, "windows length"]]
    log_probs: Float[Floats, "windows length"]  # of each token, given those before it
    right: Bool[
        Bools, "windows next"
    ]  # whether the likeliest next token follows; none is known after the last


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
    """The scores of all tokens by all methods, from `journal` where they are there, else computed
    and added to it.

    Args:
        model: gives logits for each place, the first axis being texts.
        windows: the text.
        methods: by the name that rows give them.
        journal: where rows are kept.
        seed: decides the tangents.
        engine: the sketch of gradient methods.
        params: whose gradients, a pattern; empty for all.
        progress: is told how far it is.
    """
    engine = engine or Sketch()
    starts = list(range(0, len(windows), CHUNK))
    parts = {start: windows.take(slice(start, start + CHUNK)) for start in starts}
    about: TokensAbout = {
        "data": windows.name,
        "seed": seed,
        "engine": str(engine),
        "params": params,
    }
    keys: dict[int, TokensKey] = {
        s: {"row": "tokens", **about, "first": s, "texts": part.fingerprint()}
        for s, part in parts.items()
    }
    exactly = {name: repr(method) for name, method in methods.items()}
    have = {start: journal.where(**keys[start]) for start in starts}

    def missing(start: int) -> tuple[str, ...]:
        known = {
            name
            for row in have[start]
            for name, how in row["methods"].items()
            if how == exactly.get(name)
        }
        return tuple(name for name in methods if name not in known)

    for names, group in groupby(starts, key=missing):
        if not names:
            continue
        scorer = _scorer(model, {name: methods[name] for name in names}, seed, engine, params)
        for start in group:
            began = time.perf_counter()
            found = _scored(scorer, parts[start])
            made = {name: exactly[name] for name in names}
            seconds = round(time.perf_counter() - began, 3)
            row = TokensRow(**keys[start], methods=made, seconds=seconds, **found)
            have[start].append(journal.add(row))
            if progress is not None:
                progress(
                    f"windows of {windows.name} scored",
                    min(start + CHUNK, len(windows)),
                    len(windows),
                )

    def by(name: str, start: int) -> list[list[float]]:
        return next(
            row["scores"][name] for row in have[start] if row["methods"].get(name) == exactly[name]
        )

    return ScoredWindows(
        {name: np.concatenate([np.array(by(name, start)) for start in starts]) for name in methods},
        np.concatenate([np.array(have[start][0]["log_probs"]) for start in starts]),
        np.concatenate([np.array(have[start][0]["right"], bool) for start in starts]),
    )


def usable_for_tokens(
    model: nn.Module, windows: Windows, methods: Methods
) -> tuple[dict[str, Method], list[LeftOutRow]]:
    """The methods that can score this model's tokens, and a row with the reason for each other one."""
    good: dict[str, Method] = {}
    rows: list[LeftOutRow] = []
    for name, method in methods.items():
        try:
            _scorer(model, {name: method.quick()}, 0, Sketch(2), "")(
                {"input_ids": windows.ids[:1, :4]}
            )
            good[name] = method
        except QualmsError as error:
            rows.append({"row": "left out", "method": name, "why": str(error)})
    if not good:
        raise QualmsError(f"no method can be used: {rows[0]['method']}: {rows[0]['why']}")
    return good, rows


def about(language: LanguageModel) -> dict[str, Any]:
    """What identifies a language model in a run's first row."""
    return {"qualms": __version__, "network": language.name, "weights": fingerprint(language.model)}


def _scorer(model: nn.Module, methods: Methods, seed: int, engine: Sketch, params: str) -> Scorer:
    return Scorer(
        model, dict(methods), class_dim=-1, engine=engine, params=params or None, seed=seed
    )


def _scored(scorer: Scorer, part: Windows) -> TokensMeasures:
    """What a row holds of some windows: scores, log-probabilities and outcomes, from what opens
    them on.
    """
    targets, start = next_tokens(part.ids), part.opening
    found = scorer({"input_ids": part.ids}, targets=targets)
    assert found.target_log_probs is not None
    for name, scores in found.scores.items():
        if not torch.isfinite(scores[:, start:]).all():
            raise QualmsError(
                f"{name} gives a token of {part.name} no finite score; leave the method out."
            )
    return {
        "scores": {name: _rounded(scores[:, start:]) for name, scores in found.scores.items()},
        "log_probs": _rounded(found.target_log_probs[:, start - 1 : -1]),
        "right": (found.prediction.cpu() == targets)[:, start:-1].tolist(),
    }


def _rounded(values: Tensor) -> list[list[float]]:
    return [[float(f"{value:.{DIGITS}g}") for value in row] for row in values.double().tolist()]
