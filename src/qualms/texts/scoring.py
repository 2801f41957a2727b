"""Documents through a language model: scores of every token, and what is likely to come next."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qualms.data.images import number_of
from qualms.data.texts import Document
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.chosen import Methods
from qualms.models.language import LanguageModel
from qualms.positions import next_tokens
from qualms.progress import ProgressFn
from qualms.scorer import Scorer
from qualms.stream.sizes import TOKEN_WINDOWS
from qualms.texts.document import ScoredDocument
from qualms.texts.encoding import Encoded, Window, decoder, encoded, reading_width, windows

METHOD = "regrad"
NO_TARGET = -100


def scored_documents(
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
    """Each document with the scores of its tokens, in the order given and as soon as it is done.

    A document that is longer than the context is read in windows: each moves on by half of what it
    holds, so that a token is judged after reading at least half a window, and each token is scored
    once. Such a document has no `sequence`, which is about all of its tokens at once.

    Args:
        language_model: what reads them.
        documents: the texts.
        methods: specs or methods, as for `Scorer`.
        engine: of the gradient scores, as for `Scorer`; a `Sketch` says how many tangents it takes.
        seed: decides every random draw.
        context: how many tokens are read at once: by default as many as the model can read, and at
            most 1024.
        batch_size: how many windows are scored in one call.
        progress: is told how many tokens are done.
    """
    width = reading_width(language_model, context)
    scorer = Scorer(language_model.model, methods, class_dim=-1, engine=engine, seed=seed)
    growing = [_Growing(encoded(language_model, document)) for document in documents]
    todo = [
        (one, window)
        for one in growing
        for window in windows(len(one.text.ids), one.text.lead, width)
    ]
    piece, done, total = (
        decoder(language_model.tokenizer),
        0,
        sum(len(one.text.ids) for one in growing),
    )
    for first in range(0, len(todo), batch_size):
        part = todo[first : first + batch_size]
        batch = _Batch.of([(one.text, window) for one, window in part], language_model.model.device)
        found = scorer(batch.inputs, numbers=batch.numbers, mask=batch.mask, targets=batch.targets)
        for row, (one, window) in enumerate(part):
            one.add(found, row, window, piece)
            done += window.end - window.scored
            if one.complete:
                yield one.scored()
        if progress is not None:
            progress("tokens scored", done, total)


@dataclass(frozen=True)
class _Batch:
    """Windows side by side, filled up at their ends: what is read, which positions are scored, and
    what follows.

    Their numbers, which decide random draws, follow their tokens and not their place among the
    others.
    """

    numbers: list[int]
    inputs: dict[str, Int[Tensor, "windows tokens"]]
    mask: Bool[Tensor, "windows tokens"]
    targets: Int[Tensor, "windows tokens"]

    @staticmethod
    def of(parts: Sequence[tuple[Encoded, Window]], device: Any) -> "_Batch":
        read = [window.of(text.ids) for text, window in parts]
        shape = len(parts), max(map(len, read))
        ids, there = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        mask, targets = torch.zeros(shape, dtype=torch.bool), torch.full(shape, NO_TARGET)
        for row, (tokens, (text, window)) in enumerate(zip(read, parts, strict=True)):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            there[row, : len(tokens)] = 1
            mask[row, window.places] = True
            # With the token after the window, so that its last one has a target too, unless it is
            # the last of all.
            goes_on = torch.tensor([text.ids[window.scored : window.end + 1]])
            targets[row, window.places] = next_tokens(goes_on)[0, : window.end - window.scored]
        inputs = {"input_ids": ids.to(device), "attention_mask": there.to(device)}
        return _Batch(
            [number_of(np.array(tokens)) for tokens in read],
            inputs,
            mask.to(device),
            targets.to(device),
        )


@dataclass
class _Growing:
    """A document whose windows are being scored."""

    text: Encoded
    scores: dict[str, list[float]] = field(default_factory=dict)
    alternatives: list[tuple[tuple[str, float], ...]] = field(default_factory=list)
    next_log_probs: list[float] = field(default_factory=list)
    sequence: float | None = None

    @property
    def complete(self) -> bool:
        return len(self.next_log_probs) == len(self.text.ids)

    def add(self, found: Any, row: int, window: Window, piece: Callable[[int], str]) -> None:
        places = window.places
        for name, values in found.scores.items():
            self.scores.setdefault(name, []).extend(values[row, places].tolist())
        for classes, probs in zip(
            found.classes[row, places].tolist(), found.probs[row, places].tolist(), strict=True
        ):
            self.alternatives.append(tuple(zip(map(piece, classes), probs, strict=True)))
        self.next_log_probs += found.target_log_probs[row, places].tolist()
        whole = (
            window.end - window.scored == len(self.text.ids) > 1
        )  # after a single token nothing follows
        self.sequence = float(found.sequence[row]) if whole and found.sequence is not None else None

    def scored(self) -> ScoredDocument:
        return ScoredDocument(
            self.text.document,
            self.text.ids,
            self.text.offsets,
            {name: tuple(values) for name, values in self.scores.items()},
            tuple(self.alternatives),
            tuple(self.next_log_probs),
            self.sequence,
        )
