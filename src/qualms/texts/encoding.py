"""A document in tokens, and the windows in which a model reads one that is longer than it can read
at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from qualms.data.texts import Document
from qualms.errors import QualmsError
from qualms.models.language import LanguageModel

MOST = 1024  # tokens that are read at once, where the model could read more: memory grows with them
NO_TEXT = (0, 0)  # the offsets of a token that a tokenizer adds


@dataclass(frozen=True)
class Encoded:
    """The tokens of a document and where they stand in it; the first `lead` of them were added by
    the tokenizer.
    """

    document: Document
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    lead: int


@dataclass(frozen=True)
class Window:
    """What a model reads at once: tokens added in front, then those from `start` to `end`, scored
    from `scored` on.
    """

    lead: int
    start: int
    scored: int
    end: int

    def of(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that it holds."""
        return tokens[: self.lead] + tokens[self.start : self.end]

    @property
    def places(self) -> slice:
        """Where in the window the tokens stand that are scored."""
        last = self.lead + self.end - self.start
        return slice(last - (self.end - self.scored), last)


def encoded(language_model: LanguageModel, document: Document) -> Encoded:
    """The document as its model reads it."""
    # Of long texts the tokenizer would warn that they do not fit; they are read in windows.
    found = language_model.tokenizer(document.text, return_offsets_mapping=True, verbose=False)
    ids, offsets = (
        tuple(found["input_ids"]),
        tuple((start, end) for start, end in found["offset_mapping"]),
    )
    if all(place == NO_TEXT for place in offsets):
        raise QualmsError(
            f"the tokenizer of {language_model.name} finds nothing in {document.name}; leave it out."
        )
    known = language_model.model.get_input_embeddings().num_embeddings
    if max(ids) >= known:
        raise QualmsError(
            f"{document.name} has token {max(ids)}, and {language_model.name} knows tokens 0 to {known - 1}; its "
            "tokenizer is another model's."
        )
    return Encoded(
        document, ids, offsets, next(at for at, place in enumerate(offsets) if place != NO_TEXT)
    )


def reading_width(language_model: LanguageModel, context: int | None = None) -> int:
    """How many tokens are read at once: as asked for, else as many as the model can and memory
    should.
    """
    can = language_model.context
    if context is not None and (context < 4 or context > (can or context)):
        limit = "" if can is None else f" to {can}, which {language_model.name} can read"
        raise QualmsError(f"the context is {context} tokens; choose from 4{limit or ' on'}.")
    return context or min(can or MOST, MOST)


def windows(tokens: int, lead: int, context: int) -> Iterator[Window]:
    """Windows of at most `context` tokens, in which each token is scored once.

    The first is full and scored all over. Each further one moves on by half of what it holds: the
    first half was scored before and is there to be read, so that a token is judged after reading at
    least half a window. The tokens that the tokenizer adds in front of a text stand in front of
    every window.
    """
    yield Window(0, 0, 0, min(context, tokens))
    room = context - lead
    step = max(room // 2, 1)
    for scored in range(context, tokens, step):
        end = min(scored + step, tokens)
        yield Window(lead, end - room, scored, end)


def decoder(tokenizer: Any) -> Callable[[int], str]:
    """What a token adds to a text that goes on, with the space in front of it; each is decoded
    once.
    """
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    before = len(whole(anchor))

    @cache
    def piece(token: int) -> str:
        return whole([*anchor, token])[before:]

    return piece
