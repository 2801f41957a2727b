"""Scores of every token of documents by a language model, and the likely next tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qualms.data.images import hash_array
from qualms.data.texts import Document
from qualms.deprecated import renamed_in
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.registry import Methods
from qualms.models.language import LanguageModel
from qualms.positions import next_tokens
from qualms.progress import ProgressFn
from qualms.scorer import Scorer
from qualms.stream.sizes import TOKEN_WINDOWS
from qualms.texts.document import ScoredDocument
from qualms.texts.encoding import Encoded, Window, decoder, encode, reading_width, windows

METHOD = "regrad"
NO_TARGET = -100


def score_documents(
    language_model: LanguageModel,
    documents: Sequence[Document],
    methods: Methods = METHOD,
    *,
    engine: Engine | Sketch | None = None,
    seed: int = 0,
    context: int | None = None,
    batch_size: int = TOKEN_WINDOWS,
    progress: ProgressFn | None = None,
) -> Iterator[ScoredDocument]:
    """Score the tokens of each document; yield the documents in order, each as soon as it is done.

    A document that exceeds the context is read in overlapping windows. Each window begins half a
    window after the one before, so that a token is scored after reading at least half a window, and
    each token is scored once. Such a document has no `sequence`: this norm of the whole text's
    gradient needs all tokens in one window.

    Args:
        language_model: the model and the tokenizer that read the documents.
        documents: the texts to score.
        methods: specs or methods, as for `Scorer`.
        engine: the engine of the gradient scores, as for `Scorer`; a `Sketch` sets the number of
            tangents.
        seed: decides every random draw.
        context: how many tokens are read at once; by default as many as the model can read, at
            most 1024.
        batch_size: how many windows are scored in one call.
        progress: called with ("tokens scored", done, total) after each call of the scorer.
    """
    window_size = reading_width(language_model, context)
    scorer = Scorer(
        language_model.model,
        methods,
        class_dim=-1,
        engine=engine,
        seed=seed,
    )
    partials = [_PartialDocument(encode(language_model, document)) for document in documents]
    pending: list[tuple[_PartialDocument, Window]] = []
    for partial in partials:
        for window in windows(len(partial.text.ids), partial.text.lead, window_size):
            pending.append((partial, window))
    decode_token = decoder(language_model.tokenizer)
    done, total = 0, sum(len(partial.text.ids) for partial in partials)
    for first in range(0, len(pending), batch_size):
        in_batch = pending[first : first + batch_size]
        parts = [(partial.text, window) for partial, window in in_batch]
        batch = _make_batch(parts, scorer.model)
        scored = scorer(
            batch.inputs,
            numbers=batch.numbers,
            mask=batch.mask,
            targets=batch.targets,
        )
        for row, (partial, window) in enumerate(in_batch):
            partial.add_window(scored, row, window, decode_token)
            done += window.end - window.scored
            if partial.is_complete:
                yield partial.finish()
        if progress is not None:
            progress("tokens scored", done, total)


__getattr__ = renamed_in(__name__, scored_documents=score_documents)


@dataclass(frozen=True)
class _Batch:
    """b windows of at most t tokens, padded at their ends.

    Args:
        numbers: a number for each window that seeds its random draws; it is a hash of the
            window's tokens, so it does not depend on the position in the batch.
        inputs: the model's keyword arguments, [b, t] each.
        mask: which positions are scored, [b, t].
        targets: the next token at each scored position, [b, t]; `NO_TARGET` elsewhere.
    """

    numbers: list[int]
    inputs: dict[str, Int[Tensor, "b t"]]
    mask: Bool[Tensor, "b t"]
    targets: Int[Tensor, "b t"]


def _make_batch(parts: Sequence[tuple[Encoded, Window]], model: Any) -> _Batch:
    """Pad some windows to one length, and put them on the model's device.

    Args:
        parts: the windows, each with the tokens of its document.
        model: the model that reads the windows.
    """
    window_tokens = [window.of(text.ids) for text, window in parts]
    shape = len(parts), max(map(len, window_tokens))
    ids = torch.zeros(shape, dtype=torch.long)
    attention = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    targets = torch.full(shape, NO_TARGET)
    for row, (text, window) in enumerate(parts):
        tokens = window_tokens[row]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        attention[row, : len(tokens)] = 1
        mask[row, window.places] = True
        # One token more than is scored, as it is the target of the window's last one. The last
        # token of the text has no target.
        scored_and_next = torch.tensor([text.ids[window.scored : window.end + 1]])
        num_scored = window.end - window.scored
        targets[row, window.places] = next_tokens(scored_and_next)[0, :num_scored]
    device = model.device
    return _Batch(
        numbers=[hash_array(np.array(tokens)) for tokens in window_tokens],
        inputs={"input_ids": ids.to(device), "attention_mask": attention.to(device)},
        mask=mask.to(device),
        targets=targets.to(device),
    )


@dataclass
class _PartialDocument:
    """A document whose windows are being scored; the lists grow window by window.

    Args:
        text: the tokens of the document.
        scores: by method, the scores of the tokens so far.
        alternatives: for each token so far, the likely next tokens with their probabilities.
        next_log_probs: for each token so far, log p of the token that follows.
        sequence: the norm that `ScoredDocument.sequence` describes, if a single window holds the
            whole text; else None.
    """

    text: Encoded
    scores: dict[str, list[float]] = field(default_factory=dict)
    alternatives: list[tuple[tuple[str, float], ...]] = field(default_factory=list)
    next_log_probs: list[float] = field(default_factory=list)
    sequence: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have scores."""
        # `add_window` extends all lists by the same tokens.
        return len(self.next_log_probs) == len(self.text.ids)

    def add_window(
        self,
        scored: Any,
        row: int,
        window: Window,
        decode_token: Callable[[int], str],
    ) -> None:
        """Append the scores, alternatives and log-probabilities of one window.

        Args:
            scored: the result of the scorer for a batch of windows.
            row: the index of this window in the batch.
            window: the next window of this document.
            decode_token: returns the text of a token, with the space in front of it.
        """
        places = window.places
        for name, values in scored.scores.items():
            self.scores.setdefault(name, []).extend(values[row, places].tolist())
        classes = scored.classes[row, places].tolist()
        probs = scored.probs[row, places].tolist()
        for likely_tokens, token_probs in zip(classes, probs, strict=True):
            texts = [decode_token(token) for token in likely_tokens]
            self.alternatives.append(tuple(zip(texts, token_probs, strict=True)))
        self.next_log_probs += scored.target_log_probs[row, places].tolist()
        num_tokens = len(self.text.ids)
        is_whole_text = window.end - window.scored == num_tokens
        # A text of one token has no next token, so no likelihood to take a gradient of.
        if is_whole_text and num_tokens > 1 and scored.sequence is not None:
            self.sequence = float(scored.sequence[row])

    def finish(self) -> ScoredDocument:
        """Return the document with the scores of all its tokens."""
        return ScoredDocument(
            self.text.document,
            self.text.ids,
            self.text.offsets,
            scores={name: tuple(values) for name, values in self.scores.items()},
            alternatives=tuple(self.alternatives),
            next_log_probs=tuple(self.next_log_probs),
            sequence=self.sequence,
        )
