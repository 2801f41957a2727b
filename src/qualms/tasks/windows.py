"""Texts cut into windows of equal length."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from qualms.data.texts import Document
from qualms.errors import QualmsError
from qualms.models.language import LanguageModel
from qualms.stream.sizes import SAVED_WINDOWS
from qualms.texts.encoding import encode


@dataclass(frozen=True)
class Windows:
    """n windows of one text, each cut from one document.

    A window may begin anywhere in its document, so a token's position in its window has no meaning.

    Args:
        name: the display name of the text.
        ids: the tokens of all windows, [n, opening + length].
        opening: the number of tokens at the start of each window that get no score: the tokens that
            the tokenizer adds in front of a text, or else the first token of the window.
    """

    name: str
    ids: Int[Tensor, "windows length"]
    opening: int = 1

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.ids)

    @property
    def length(self) -> int:
        """The number of tokens in a window that get a score."""
        return self.ids.shape[1] - self.opening

    def take(self, positions: slice) -> "Windows":
        """Return the windows at the positions of a slice."""
        return replace(self, ids=self.ids[positions])

    def subset(self, count: int | None) -> "Windows":
        """Return `count` windows, spread evenly over the text; all of them for None."""
        if count is None or count >= len(self):
            return self
        positions = torch.linspace(0, len(self) - 1, count).round().long()
        return replace(self, ids=self.ids[positions])

    def fingerprint(self) -> str:
        """Return a short hash of the tokens, and of how many at the start get no score."""
        digest = hashlib.sha256(self.ids.contiguous().numpy().tobytes())
        digest.update(str(self.opening).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class WindowBatch:
    """Consecutive windows that are scored and saved together.

    Args:
        windows: the windows of the batch.
        first: the position of the batch's first window in the text.
    """

    windows: Windows
    first: int

    @property
    def count(self) -> int:
        """The number of windows in this batch."""
        return len(self.windows)

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be read, as of a batch of files; False, as windows are in memory."""
        return False


def window_batches(windows: Windows) -> Iterator[WindowBatch]:
    """Yield the windows of a text in batches of `SAVED_WINDOWS`; each batch is saved once scored."""
    for first in range(0, len(windows), SAVED_WINDOWS):
        batch = windows.take(slice(first, first + SAVED_WINDOWS))
        yield WindowBatch(batch, first)


def cut_windows(
    name: str, documents: Iterable[Document], language: LanguageModel, length: int
) -> Windows:
    """Cut documents into windows of equal length, each of one document; drop what is left over.

    A window has `length` tokens with a score, after an opening of tokens without one.

    Args:
        name: the display name of the text.
        documents: the documents of the text; each is cut from its beginning.
        language: the language model. Its tokenizer encodes the documents, and its context must have
            room for a window.
        length: the number of tokens in a window that get a score.

    Raises:
        QualmsError: if every document is shorter than a window, or if a window is longer than the
            model's context.
    """
    if length < 2:
        raise QualmsError(
            f"windows of {length} tokens have no next token to predict; make them longer."
        )
    rows: list[tuple[int, ...]] = []
    opening = 1
    for document in documents:
        encoded = encode(language, document)
        # The tokens that the tokenizer adds in front, such as <s>, and those of the document.
        lead, ids = encoded.ids[: encoded.lead], encoded.ids[encoded.lead :]
        # Without added tokens, the first token of each window gets no score instead.
        opening = max(encoded.lead, 1)
        # The document's own tokens in a window: `lead` is added to each.
        tokens_per_window = length + opening - encoded.lead
        for start in range(0, len(ids) - tokens_per_window + 1, tokens_per_window):
            rows.append((*lead, *ids[start : start + tokens_per_window]))
    if not rows:
        raise QualmsError(
            f"no document of {name} has as many as {length} tokens; pass longer documents or "
            "shorter windows."
        )
    if language.context is not None and len(rows[0]) > language.context:
        raise QualmsError(
            f"{language.name} reads at most {language.context} tokens, but a window has "
            f"{len(rows[0])}, including those added at its start; make the windows shorter."
        )
    return Windows(name, torch.tensor(rows), opening)
