"""A document in tokens, and the windows in which a model reads one that exceeds its context."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from qualms.data.texts import Document
from qualms.errors import QualmsError
from qualms.models.language import LanguageModel

# Tokens read at once, even if the model could read more: memory grows with them.
MAX_CONTEXT = 1024
MIN_CONTEXT = 4  # tokens in a window
NO_TEXT = (0, 0)  # the offsets of a token that the tokenizer adds


@dataclass(frozen=True)
class Encoded:
    """The tokens of a document.

    Args:
        document: the text.
        ids: the tokens' indices in the vocabulary.
        offsets: where each token starts and ends in the text, in characters.
        lead: how many tokens the tokenizer adds in front of the text.
    """

    document: Document
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    lead: int


@dataclass(frozen=True)
class Window:
    """The tokens that a model reads at once.

    Args:
        lead: how many of the document's first tokens, which the tokenizer added, are repeated at
            the front of the window; 0 for the first window, which starts with them anyway.
        start: the position in the document of the first token after the repeated ones.
        scored: the position in the document of the first token that is scored; the window's tokens
            before it are context.
        end: the position in the document after the window's last token.
    """

    lead: int
    start: int
    scored: int
    end: int

    def of(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of this window, given all tokens of the document."""
        return tokens[: self.lead] + tokens[self.start : self.end]

    @property
    def places(self) -> slice:
        """The positions of the scored tokens, which end the window, counted within the window."""
        length = self.lead + self.end - self.start
        num_scored = self.end - self.scored
        return slice(length - num_scored, length)


def encode(language_model: LanguageModel, document: Document) -> Encoded:
    """Split a document into tokens with the model's tokenizer.

    Raises:
        QualmsError: if the document has no tokens of text, or if the tokenizer belongs to another
            model.
    """
    # Without verbose=False the tokenizer warns of texts that exceed the model's context.
    encoding = language_model.tokenizer(document.text, return_offsets_mapping=True, verbose=False)
    ids = tuple(encoding["input_ids"])
    offsets = tuple((start, end) for start, end in encoding["offset_mapping"])
    # Counts the tokens in front of the text.
    lead = 0
    while lead < len(offsets) and offsets[lead] == NO_TEXT:
        lead += 1
    if lead == len(offsets):
        raise QualmsError(
            f"the tokenizer of {language_model.name} finds no tokens in {document.name}; leave it "
            "out."
        )
    vocabulary_size = language_model.model.get_input_embeddings().num_embeddings
    if max(ids) >= vocabulary_size:
        raise QualmsError(
            f"{document.name} has token {max(ids)}, but {language_model.name} has tokens 0 to "
            f"{vocabulary_size - 1}; use the model's own tokenizer."
        )
    return Encoded(document, ids, offsets, lead)


def reading_width(language_model: LanguageModel, context: int | None = None) -> int:
    """Return how many tokens the model reads at once.

    Args:
        language_model: the model, whose context may be limited.
        context: the number of tokens that the user asked for; None takes as many as the model can
            read, but at most 1024.

    Raises:
        QualmsError: if `context` is below 4 tokens, or more than the model can read.
    """
    model_limit = language_model.context
    if context is None:
        return min(model_limit or MAX_CONTEXT, MAX_CONTEXT)
    # A limit of None means that the model can read any number.
    if context < MIN_CONTEXT or context > (model_limit or context):
        limit = " or more"
        if model_limit is not None:
            limit = f" to {model_limit}, the limit of {language_model.name}"
        raise QualmsError(f"the context is {context} tokens; choose {MIN_CONTEXT}{limit}.")
    return context


def windows(tokens: int, lead: int, context: int) -> Iterator[Window]:
    """Yield overlapping windows over a document such that each token is scored once.

    All tokens of the first window are scored. Each further window begins half a window after the
    one before; its first half is context, and its second half is scored. So a token is scored after
    reading at least half a window. The tokens that the tokenizer adds are repeated at the front of
    every window.

    Args:
        tokens: the number of tokens of the document.
        lead: how many of these tokens the tokenizer added in front.
        context: the most tokens in a window.
    """
    yield Window(
        lead=0,
        start=0,
        scored=0,
        end=min(context, tokens),
    )
    # The number of tokens in a further window, besides those that are repeated.
    room = context - lead
    step = max(room // 2, 1)
    for scored in range(context, tokens, step):
        end = min(scored + step, tokens)
        yield Window(
            lead=lead,
            start=end - room,
            scored=scored,
            end=end,
        )


def decoder(tokenizer: Any) -> Callable[[int], str]:
    """Return a function that decodes one token, with the space in front of it.

    Tokenizers drop that space at the start of a text, so the token is decoded after the letter "a",
    which is then cut off.

    Args:
        tokenizer: a tokenizer of transformers.

    Returns:
        A function from a token's index in the vocabulary to its text; results are cached.
    """
    letter_tokens = tokenizer("a", add_special_tokens=False)["input_ids"]
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    letter_length = len(decode(letter_tokens))

    @cache
    def decode_token(token: int) -> str:
        """Decode a token after the letter "a", and cut off the letter."""
        return decode([*letter_tokens, token])[letter_length:]

    return decode_token
