"""The page of scored texts: every token shaded by its score, with the likely next tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qualms.disk import require_writable
from qualms.errors import QualmsError
from qualms.report.offline import (
    format_facts,
    pack_array,
    render_template,
    require_packages,
    write_html,
)
from qualms.texts.document import ScoredDocument
from qualms.texts.spans import LENGTH as SPAN_LENGTH
from qualms.texts.spans import Span, worst_span_of

MARKED_PERCENT = 10  # of the tokens are marked at first


def write_text_page(
    documents: Sequence[ScoredDocument], out: Path, title: str, about: dict[str, str]
) -> Path:
    """Write a page about some texts as one HTML file.

    The page opens on the first method, with the least certain text first.

    Args:
        documents: The texts, scored by the same methods.
        out: The file.
        title: The title of the page.
        about: Short facts by name.

    Returns:
        The path of the file.
    """
    require_packages("jinja2")
    require_writable(out)
    methods = _require_same_methods(documents)
    shown_documents = list(map(_ShownDocument.from_scored, documents))
    # Filled by `_document_data` with the likely next tokens of all documents.
    index_by_word: dict[str, int] = {}
    data = {
        "methods": methods,
        "documents": [
            _document_data(document, methods, index_by_word) for document in shown_documents
        ],
        "words": list(index_by_word),
    }
    order = []
    for index in _rank_documents(shown_documents, methods[0]):
        order.append((index, documents[index].document.name))
    page = render_template(
        "text.html.jinja",
        styles=("page.css", "text.css"),
        scripts=("page.values.js", "page.charts.js", "text.js", "text.tip.js"),
        title=title,
        facts=format_facts(about),
        methods=methods,
        order=order,
        length=SPAN_LENGTH,
        marked=MARKED_PERCENT,
        data=data,
    )
    return write_html(out, page)


@dataclass(frozen=True)
class ShownToken:
    """A stretch of a text that is shown as one token.

    Args:
        start: The position of the first character.
        end: The position after the last character.
        indices: The indices of the document's tokens that are shown as this one: one token, or
            several that share a character.
    """

    start: int
    end: int
    indices: tuple[int, ...]


def shown_tokens(offsets: Sequence[tuple[int, int]]) -> list[ShownToken]:
    """Group the tokens of a text to be shown: tokens that share a character are joined.

    Tokens without characters, which the tokenizer adds, are left out.

    Args:
        offsets: The start and the end of each token, in characters.
    """
    joined: list[ShownToken] = []
    for index, (start, end) in enumerate(offsets):
        if start == end:
            continue
        # The end of the text that the tokens so far cover.
        covered_end = 0
        if joined:
            covered_end = joined[-1].end
        # If the token has new characters, only these are shown as its own. If all of its characters
        # are covered, it is joined to the last token.
        if end > covered_end:
            joined.append(ShownToken(max(start, covered_end), end, (index,)))
        else:
            last = joined.pop()
            joined.append(ShownToken(last.start, last.end, (*last.indices, index)))
    return joined


@dataclass(frozen=True)
class _ShownDocument:
    """A document as it is shown: its tokens, joined where they share a character.

    Args:
        document: The document with the scores of its tokens.
        tokens: The tokens that are shown.
        scores: A dict from each method to the scores of the shown tokens.
        worst: A dict from each method to the span of tokens with the highest mean score; None if no
            token has a score.
    """

    document: ScoredDocument
    tokens: list[ShownToken]
    scores: dict[str, np.ndarray]
    worst: dict[str, Span | None]

    @staticmethod
    def from_scored(document: ScoredDocument) -> "_ShownDocument":
        """Find what is shown of a document: its tokens, their scores, and the worst spans.

        Tokens that share a character, such as the bytes of an emoji, are shown as one. Its score is
        the highest score of the tokens that it joins; NaN is ignored, unless all are NaN.
        """
        tokens = shown_tokens(document.offsets)
        # The indices of the tokens that each shown token joins, one group after the other, and
        # where each group starts.
        token_indices: list[int] = []
        group_starts = []
        for shown in tokens:
            group_starts.append(len(token_indices))
            token_indices += shown.indices
        scores = {}
        worst = {}
        for method, values in document.scores.items():
            scores[method] = np.zeros(0)
            # `reduceat` needs a group.
            if tokens:
                # The maximum over the tokens from each group's start to the next one's.
                scores[method] = np.fmax.reduceat(np.array(values)[token_indices], group_starts)
            worst[method] = worst_span_of(document, method)
        return _ShownDocument(
            document=document,
            tokens=tokens,
            scores=scores,
            worst=worst,
        )


def _require_same_methods(documents: Sequence[ScoredDocument]) -> list[str]:
    """Return the names of the methods that all documents have; raise an error if they differ."""
    if not documents:
        raise QualmsError("there are no texts to show; pass at least one scored document.")
    first = documents[0]
    methods = list(first.scores)
    if not methods:
        raise QualmsError(
            f"{first.document.name} has no scores; score it with at least one method."
        )
    for other in documents:
        if set(other.scores) != set(methods):
            theirs = ", ".join(other.scores) or "no method"
            raise QualmsError(
                f"{other.document.name} is scored by {theirs}, and {first.document.name} by "
                f"{', '.join(methods)}; score all texts of a page with the same methods."
            )
    return methods


def _rank_documents(shown_documents: list[_ShownDocument], method: str) -> list[int]:
    """Return the indices of the documents, in descending order of the score of the worst span.

    Args:
        shown_documents: The documents.
        method: The method whose spans are compared; documents without a span are last.
    """
    sort_keys = []
    for document in shown_documents:
        span = document.worst[method]
        sort_key = np.inf
        if span is not None:
            sort_key = -span.score
        sort_keys.append(sort_key)
    return sorted(range(len(shown_documents)), key=sort_keys.__getitem__)


def _document_data(
    shown: _ShownDocument, methods: list[str], index_by_word: dict[str, int]
) -> dict[str, Any]:
    """Return what the page's script reads about a document.

    Args:
        shown: The document.
        methods: The methods in the order of the page.
        index_by_word: The index of each likely next token, shared by all documents; new tokens are
            added.

    Returns:
        Values for JSON. Positions of tokens are in UTF-16, as JavaScript counts; `counts` has the
        number of tokens that are shown as one; `logs` has log p of the token that follows; `codes`
        and `probs` have `width` likely next tokens per shown token (see `_likely_tokens`).
    """
    document = shown.document
    positions = _utf16_positions(document.document.text)
    starts = []
    ends = []
    counts = []
    alternatives = []
    log_probs = []
    for token in shown.tokens:
        starts.append(token.start)
        ends.append(token.end)
        counts.append(len(token.indices))
        # What may come next follows the last of the tokens that are shown as one.
        last = token.indices[-1]
        alternatives.append(document.alternatives[last])
        log_probs.append(document.next_log_probs[last])
    word_indices, probs = _likely_tokens(alternatives, index_by_word)
    return {
        "name": document.document.name,
        "text": document.document.text,
        "starts": pack_array(positions[starts]),
        "ends": pack_array(positions[ends]),
        "counts": pack_array(np.array(counts, np.int32)),
        "scores": [pack_array(shown.scores[method]) for method in methods],
        **_worst_spans(shown, methods),
        "logs": pack_array(np.array(log_probs)),
        "width": word_indices.shape[1],
        "codes": pack_array(word_indices),
        "probs": pack_array(probs),
        "sequence": document.sequence,
    }


def _worst_spans(shown: _ShownDocument, methods: list[str]) -> dict[str, Any]:
    """Return each method's worst span (`worst`), as indices of shown tokens, and its score.

    Args:
        shown: The document.
        methods: The methods in the order of the page.
    """
    # The index of the shown token that each token of the document is part of.
    shown_index = {}
    for index, token in enumerate(shown.tokens):
        shown_index.update(dict.fromkeys(token.indices, index))
    # The end of a span is the index after its last token.
    spans: list[dict[str, int] | None] = []
    scores = []
    for method in methods:
        span = shown.worst[method]
        if span is None:
            spans.append(None)
            scores.append(np.nan)
        else:
            spans.append({"start": shown_index[span.start], "end": shown_index[span.end - 1] + 1})
            scores.append(span.score)
    return {"worst": spans, "worstScores": pack_array(np.array(scores))}


def _likely_tokens(
    alternatives: Sequence[Sequence[tuple[str, float]]], index_by_word: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the likely next tokens at each position as indices, and their probabilities.

    Args:
        alternatives: At each position, the likely next tokens with their probabilities.
        index_by_word: The index of each token; new tokens are added.

    Returns:
        Indices and probabilities, both of shape [positions, width], padded with -1 and 0.
    """
    width = max(map(len, alternatives), default=0)
    word_indices = np.full((len(alternatives), width), -1, np.int32)
    probs = np.zeros((len(alternatives), width))
    for position, likely_tokens in enumerate(alternatives):
        for rank, (word, prob) in enumerate(likely_tokens):
            word_indices[position, rank] = index_by_word.setdefault(word, len(index_by_word))
            probs[position, rank] = prob
    return word_indices, probs


def _utf16_positions(text: str) -> np.ndarray:
    """Return where each character starts in UTF-16, and where the last one ends, of shape [n + 1].

    Characters above U+FFFF take two units of UTF-16, and JavaScript counts units.
    """
    # UTF-32 has 4 bytes per character; "surrogatepass" lets half a surrogate pair through.
    code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    return np.concatenate([[0], np.cumsum(1 + (code_points > 0xFFFF))]).astype(np.int32)
