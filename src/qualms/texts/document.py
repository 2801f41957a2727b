"""A text, and how uncertain a language model is at each of its tokens."""

from dataclasses import dataclass

from qualms.data.texts import Document

__all__ = ["Document", "ScoredDocument"]


@dataclass(frozen=True)
class ScoredDocument:
    """A text in tokens, with scores.

    A token's scores say how uncertain the model is, after reading this token, about the next one.

    Args:
        document: the text.
        ids: the tokens' indices in the vocabulary.
        offsets: where each token starts and ends in the text, in characters; (0, 0) for a token
            that is not in the text.
        scores: by method, a score for each token; higher means more uncertain.
        alternatives: after each token, the likeliest next tokens with their probabilities,
            likeliest first.
        next_log_probs: for each token, log p of the token that follows; NaN after the last one.
        sequence: ‖∇θ Σ_t log p(y_t)‖ divided by the number of tokens y_t of the whole text; None if
            no method computes gradients, and for a text that was read in several windows.
    """

    document: Document
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    scores: dict[str, tuple[float, ...]]
    alternatives: tuple[tuple[tuple[str, float], ...], ...]
    next_log_probs: tuple[float, ...]
    sequence: float | None = None

    @property
    def tokens(self) -> list[str]:
        """The text of each token; empty for a token that the tokenizer added."""
        return [self.document.text[start:end] for start, end in self.offsets]
