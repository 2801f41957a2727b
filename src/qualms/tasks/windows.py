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
    """n windows of one text, each from within one document.

    A window may begin anywhere in its document, so a token's position in it means nothing.

    Args:
        name: the display name of the text.
        ids: the tokens, [n, opening + length].
        opening: how many tokens open each window and are not judged: the tokens that the tokenizer
            adds in front of a text, or else the first token of the window.
    """

    name: str
    ids: Int[Tensor, "windows length"]
    opening: int = 1

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.ids)

    @property
    def length(self) -> int:
        """The number of tokens in a window that are judged."""
        return self.ids.shape[1] - self.opening

    def take(self, part: slice) -> "Windows":
        """Return the windows at the positions of a slice."""
        return replace(self, ids=self.ids[part])

    def subset(self, count: int | None) -> "Windows":
        """Return `count` windows, spread evenly over the text; all of them for None."""
        if count is None or count >= len(self):
            return self
        return replace(self, ids=self.ids[torch.linspace(0, len(self) - 1, count).round().long()])

    def fingerprint(self) -> str:
        """Return a short hash of the tokens and of `opening`."""
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
        """False: all windows can be read."""
        return False


def window_batches(windows: Windows) -> Iterator[WindowBatch]:
    """Yield the windows of a text in batches of `SAVED_WINDOWS`, which are saved as they are scored."""
    for first in range(0, len(windows), SAVED_WINDOWS):
        yield WindowBatch(windows.take(slice(first, first + SAVED_WINDOWS)), first)


def cut_windows(
    name: str, documents: Iterable[Document], language: LanguageModel, length: int
) -> Windows:
    """Cut documents into windows; drop the tokens left over at the end of each document.

    Args:
        name: the display name of the text.
        documents: the documents of the text; each is cut from its beginning.
        language: the language model, whose tokenizer encodes the documents and which must be able
            to read a window.
        length: the number of tokens in a window that are judged.

    Raises:
        QualmsError: if no document has a whole window, or if the model cannot read so many tokens.
    """
    if length < 2:
        raise QualmsError(
            f"windows of {length} tokens have no next token to predict; make them longer."
        )
    rows: list[tuple[int, ...]] = []
    opening = 1
    for document in documents:
        encoded = encode(language, document)
        lead, ids = encoded.ids[: encoded.lead], encoded.ids[encoded.lead :]
        opening = max(encoded.lead, 1)
        # Without added tokens, the first token of the window is the one that is not judged.
        width = length + opening - encoded.lead
        for start in range(0, len(ids) - width + 1, width):
            rows.append((*lead, *ids[start : start + width]))
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
