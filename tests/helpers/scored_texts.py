"""Made-up scored texts: a token that is not in the text, the last without a score, characters of
several tokens.
"""

import math
import random
import re
from collections.abc import Mapping, Sequence

from qualms.texts.document import Document, ScoredDocument

NASTY = "</script><script>alert('x')</script><b>bold</b> &amp; <!-- ]]>"
LIKELY = ((" the", 0.5), (" dog", 0.25), (".", 0.125), ("\n", 0.0625), (NASTY, 0.0001))
BEFORE = 99.0  # the score of the token in front of the text, which must never be seen
METHODS = ("regrad", "entropy")
STORY = "Once upon a time there was a little dog.\n\n  It had one shoe,\tand a cat.\nThe end"
PAPER = "We prove that gradients of log-probabilities vanish; see §3 (naïve bounds, 😀 emoji) and the appendix of [7]."


def cut(text: str) -> list[tuple[int, int]]:
    """Words with the space in front of them, and single characters in between."""
    return [match.span() for match in re.finditer(r" ?\w+|\s|[^\w\s]", text)]


def scored(
    name: str, text: str, scores: Mapping[str, Sequence[float]], sequence: float | None = None
) -> ScoredDocument:
    """A text with a score for each of its tokens but the last; one token stands in front of it."""
    offsets = ((0, 0), *cut(text))
    logs = [-0.5 - i / 8 for i in range(len(offsets) - 1)]
    return ScoredDocument(
        Document(name, text),
        tuple(range(len(offsets))),
        offsets,
        {method: (BEFORE, *values, math.nan) for method, values in scores.items()},
        (LIKELY,) * len(offsets),
        (*logs, math.nan),
        sequence,
    )


def noise(name: str, text: str, seed: int, scale: float = 1.0) -> ScoredDocument:
    """A text with random scores, by one method higher where by the other they are lower."""
    draws = random.Random(seed)
    values = [scale * draws.lognormvariate(0, 1) for _ in cut(text)[:-1]]
    return scored(name, text, {"regrad": values, "entropy": [-x for x in values]}, sequence=0.25)


def some() -> list[ScoredDocument]:
    """Three texts, whose order by worst span, by name and as given are three different ones."""
    return [
        noise("b-paper", PAPER, 1),
        noise("c-story", STORY, 2, scale=9.0),
        noise("a-poem", "O Rose\nthou art sick!\n" * 9, 3, 3.0),
    ]
