"""A row for each token."""

import math

from qualms.data.texts import Document
from qualms.texts.document import ScoredDocument
from qualms.texts.token_table import TokenTable

SCORED = ScoredDocument(
    Document("story", "Hello"),
    ids=(1, 7, 9),
    offsets=((0, 0), (0, 3), (3, 5)),
    scores={"regrad": (0.5, 1.5, 2.5), "entropy": (1.0, 2.0, 3.0)},
    alternatives=((("Hel", 0.75), ("Ha", 0.25)), (("lo", 0.5),), ((" you", 0.125),)),
    next_log_probs=(-0.25, -0.5, math.nan),
)
COLUMNS = {
    "document": ["story"] * 3,
    "position": [0, 1, 2],
    "token": ["", "Hel", "lo"],
    "start": [0, 0, 3],
    "end": [0, 3, 5],
    "score_regrad": [0.5, 1.5, 2.5],
    "score_entropy": [1.0, 2.0, 3.0],
    "log_prob_next": [-0.25, -0.5, None],
    "likeliest_next": ["Hel", "lo", " you"],
    "likeliest_prob": [0.75, 0.5, 0.125],
}


def test_a_token_has_its_place_its_scores_and_what_comes_next() -> None:
    found = TokenTable([SCORED]).columns()
    assert found == COLUMNS
    assert list(found) == list(COLUMNS)
    assert TokenTable([SCORED, SCORED]).columns()["start"] == [0, 0, 3, 0, 0, 3]


def test_the_arrow_table_is_the_same_with_types() -> None:
    found = TokenTable([SCORED]).to_arrow()
    assert found.to_pydict() == COLUMNS
    assert {
        name: str(found.schema.field(name).type) for name in ("token", "start", "log_prob_next")
    } == {
        "token": "string",
        "start": "int64",
        "log_prob_next": "double",
    }


def test_what_the_model_wrote_is_marked() -> None:
    found = TokenTable([SCORED], {"story": 3})
    assert found.columns()["generated"] == [False, False, True]
    assert str(found.to_arrow().schema.field("generated").type) == "bool"
