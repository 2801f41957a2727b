"""Scored texts in, one HTML file out: every token shaded by its score, with what the model expected
in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qualms.disk import require_writable
from qualms.errors import QualmsError
from qualms.report.offline import filled, packed, require_packages, write_html
from qualms.texts.document import ScoredDocument
from qualms.texts.spans import LENGTH, Span, worst_span_of

MARKED = 10  # percent of the tokens that are marked first


def write_text_page(
    documents: Sequence[ScoredDocument], out: Path, title: str, about: dict[str, str]
) -> Path:
    """Write a page about some texts as one HTML file; it opens on the first method, the least
    certain text first.
    """
    require_packages("jinja2")
    require_writable(out)
    methods = _methods(documents)
    shown = [_Shown.of(document) for document in documents]
    words: dict[str, int] = {}
    data = {
        "methods": methods,
        "documents": [_document(each, methods, words) for each in shown],
        "words": list(words),
    }
    page = filled(
        "text.html.jinja",
        styles=("page.css", "text.css"),
        scripts=("page.values.js", "page.charts.js", "text.js", "text.tip.js"),
        title=title,
        facts=[f"{name}: {value}" for name, value in about.items()],
        methods=methods,
        order=[(i, documents[i].document.name) for i in _worst_first(shown, methods[0])],
        length=LENGTH,
        marked=MARKED,
        data=data,
    )
    return write_html(out, page)


@dataclass(frozen=True)
class ShownToken:
    """What stands in the text from `start` to `end`: a token, or several that share its last
    character.
    """

    start: int
    end: int
    tokens: tuple[int, ...]


def shown_tokens(offsets: Sequence[tuple[int, int]]) -> list[ShownToken]:
    """The tokens that have characters in the text. Those of a character's bytes stand there as one."""
    found: list[ShownToken] = []
    for number, (start, end) in enumerate(offsets):
        reached = found[-1].end if found else 0
        if start == end:
            continue
        if end > reached:
            found.append(ShownToken(max(start, reached), end, (number,)))
        else:
            last = found.pop()
            found.append(ShownToken(last.start, last.end, (*last.tokens, number)))
    return found


@dataclass(frozen=True)
class _Shown:
    """A document as it is shown: its tokens, and by method their scores and the worst span."""

    document: ScoredDocument
    tokens: list[ShownToken]
    scores: dict[str, np.ndarray]
    worst: dict[str, Span | None]

    @staticmethod
    def of(document: ScoredDocument) -> "_Shown":
        """A token that stands for several has the highest of their scores."""
        tokens = shown_tokens(document.offsets)
        own = [i for token in tokens for i in token.tokens]
        firsts = np.cumsum([0, *(len(token.tokens) for token in tokens)])[:-1]
        scores = {
            method: np.fmax.reduceat(np.array(values)[own], firsts) if tokens else np.zeros(0)
            for method, values in document.scores.items()
        }
        return _Shown(
            document, tokens, scores, {method: worst_span_of(document, method) for method in scores}
        )


def _methods(documents: Sequence[ScoredDocument]) -> list[str]:
    """Those of all documents."""
    if not documents:
        raise QualmsError(
            "there are no texts to write a page about; pass at least one scored document."
        )
    methods = list(documents[0].scores)
    if not methods:
        raise QualmsError(
            f"{documents[0].document.name} has no scores; score it by at least one method."
        )
    for each in documents:
        if set(each.scores) != set(methods):
            raise QualmsError(
                f"{each.document.name} is scored by {', '.join(each.scores) or 'nothing'}, and "
                f"{documents[0].document.name} by {', '.join(methods)}; score all texts of a page by the same methods."
            )
    return methods


def _worst_first(shown: list[_Shown], method: str) -> list[int]:
    """The documents' numbers, in falling order of their worst spans."""
    scores = [-np.inf if (span := each.worst[method]) is None else span.score for each in shown]
    return sorted(range(len(shown)), key=lambda i: -scores[i])


def _document(shown: _Shown, methods: list[str], words: dict[str, int]) -> dict[str, Any]:
    """What the page's script reads; `words` gathers the likely tokens of all documents, each once."""
    document, last = shown.document, [token.tokens[-1] for token in shown.tokens]
    worst = [shown.worst[method] for method in methods]
    place = {i: k for k, token in enumerate(shown.tokens) for i in token.tokens}
    places = _utf16(document.document.text)
    likely = [document.alternatives[i] for i in last]
    width = max((len(row) for row in likely), default=0)
    codes, probs = np.full((len(likely), width), -1, np.int32), np.zeros((len(likely), width))
    for i, row in enumerate(likely):
        codes[i, : len(row)] = [words.setdefault(word, len(words)) for word, _ in row]
        probs[i, : len(row)] = [p for _, p in row]
    return {
        "name": document.document.name,
        "text": document.document.text,
        "starts": packed(places[[token.start for token in shown.tokens]]),
        "ends": packed(places[[token.end for token in shown.tokens]]),
        "counts": packed(np.array([len(token.tokens) for token in shown.tokens], np.int32)),
        "scores": [packed(shown.scores[method]) for method in methods],
        "worst": [
            None if span is None else {"start": place[span.start], "end": place[span.end - 1] + 1}
            for span in worst
        ],
        "worstScores": packed(np.array([np.nan if span is None else span.score for span in worst])),
        "logs": packed(np.array([document.next_log_probs[i] for i in last])),
        "width": width,
        "codes": packed(codes),
        "probs": packed(probs),
        "sequence": document.sequence,
    }


def _utf16(text: str) -> np.ndarray:
    """Where each character starts, and the last one ends, as a browser counts: some characters are
    two.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    return np.concatenate([[0], np.cumsum(1 + (codes > 0xFFFF))]).astype(np.int32)
