"""Scores of every token: those of the scorer, put back where the tokens stand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qualms
from qualms.data.texts import Document
from qualms.errors import QualmsError
from qualms.models.language import LanguageModel
from qualms.texts.document import ScoredDocument
from qualms.texts.document_scores import score_documents
from tests.helpers.tiny_llama import LEARNT, llama, tokenizer

SHORT, LONG = Document("short", "Once upon a time"), Document("long", f"{LEARNT} {LEARNT}")
CONTEXT = 32  # of the tiny model


@pytest.fixture(scope="module")
def tiny() -> LanguageModel:
    return LanguageModel("tiny", llama(CONTEXT), tokenizer())


def scored(
    model: LanguageModel, *documents: Document, methods: Any = "entropy", **how: Any
) -> list[ScoredDocument]:
    return list(score_documents(model, documents, methods, **how))


def log_probs(model: LanguageModel, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model.model(torch.tensor([ids])).logits[0].log_softmax(-1)


def entropy(said: Tensor) -> float:
    return float(-(said.exp() * said).sum())


def test_a_text_has_the_scores_of_the_scorer(tiny: LanguageModel) -> None:
    methods = ["regrad", "exgrad", "entropy"]
    (found,) = scored(tiny, SHORT, methods=methods, seed=3)
    ids = torch.tensor([tiny.tokenizer(SHORT.text)["input_ids"]])
    want = qualms.Scorer(tiny.model, methods, class_dim=-1, seed=3)(
        ids, targets=qualms.next_tokens(ids)
    )
    assert found.document is SHORT
    assert list(found.ids) == ids[0].tolist()
    assert list(found.scores) == methods
    for name in methods:
        assert found.scores[name] == pytest.approx(want.scores[name][0].tolist(), rel=1e-5)
    assert want.sequence is not None
    assert found.sequence == pytest.approx(float(want.sequence[0]), rel=1e-5)
    (other,) = scored(tiny, SHORT, methods=methods, seed=4)
    assert other.scores["regrad"] != pytest.approx(found.scores["regrad"], rel=1e-3)


def test_what_stands_at_a_token_is_of_the_one_that_follows(tiny: LanguageModel) -> None:
    (found,) = scored(tiny, SHORT)
    said = log_probs(tiny, list(found.ids))
    assert found.scores["entropy"] == pytest.approx([entropy(one) for one in said], rel=1e-4)
    *known, last = found.next_log_probs
    assert known == pytest.approx(
        [float(said[t, found.ids[t + 1]]) for t in range(len(known))], rel=1e-4
    )
    assert math.isnan(last)
    assert "".join(found.tokens) == SHORT.text
    assert found.sequence is None  # no gradients were taken


def test_alternatives_are_the_five_likeliest_next_tokens(tiny: LanguageModel) -> None:
    (found,) = scored(tiny, SHORT)
    for said, alternatives in zip(
        log_probs(tiny, list(found.ids)), found.alternatives, strict=True
    ):
        probs, classes = said.exp().topk(5)
        assert [prob for _, prob in alternatives] == pytest.approx(probs.tolist(), rel=1e-4)
        # After a letter, so that a space in front of a token is not lost.
        wanted = [
            tiny.tokenizer.decode([*tiny.tokenizer("a").input_ids[1:], one])[1:]
            for one in classes.tolist()
        ]
        assert [token for token, _ in alternatives] == wanted


def window_of(token: int, tokens: int) -> tuple[int, int]:
    """Compute the window of a token: the first has 32, others <s> and 31, of which 15 are new."""
    if token < CONTEXT:
        return 0, CONTEXT
    end = min(CONTEXT + 15 * ((token - CONTEXT) // 15 + 1), tokens)
    return end - 31, end


def test_a_text_longer_than_the_context_is_read_in_windows_and_each_token_scored_once(
    tiny: LanguageModel,
) -> None:
    (found,) = scored(tiny, LONG, methods=["entropy", "regrad"])
    ids = list(found.ids)
    assert len(ids) > 2 * CONTEXT
    assert ids == tiny.tokenizer(LONG.text)["input_ids"]
    for at in range(len(ids)):
        start, end = window_of(at, len(ids))
        said = log_probs(tiny, [*([1] if start else []), *ids[start:end]])[at - start + bool(start)]
        assert found.scores["entropy"][at] == pytest.approx(entropy(said), rel=1e-4)
        if at + 1 < len(ids):
            assert found.next_log_probs[at] == pytest.approx(float(said[ids[at + 1]]), rel=1e-4)
    assert all(map(math.isfinite, found.scores["regrad"]))
    assert math.isnan(found.next_log_probs[-1])
    assert found.sequence is None  # its gradient is one of all tokens at once


@pytest.mark.slow
def test_neither_batches_nor_neighbors_change_a_score(tiny: LanguageModel) -> None:
    documents = [SHORT, LONG, Document("other", "She had a red ball.")]
    together = scored(tiny, *documents, methods="regrad")
    assert [one.document for one in together] == documents
    alone = [
        one
        for document in documents
        for one in scored(tiny, document, methods="regrad", batch_size=1)
    ]
    for one, other in zip(together, alone, strict=True):
        assert one.ids == other.ids
        assert one.scores["regrad"] == pytest.approx(other.scores["regrad"], rel=1e-4)
        assert one.next_log_probs[:-1] == pytest.approx(other.next_log_probs[:-1], rel=1e-4)
        assert one.alternatives[0][0][0] == other.alternatives[0][0][0]


def test_documents_come_as_they_are_done_and_how_far_it_is_is_told(tiny: LanguageModel) -> None:
    told: list[tuple[str, int, int]] = []
    progress: Callable[[str, int, int], None] = lambda *words: told.append(words)  # noqa: E731
    stream = score_documents(tiny, [SHORT, LONG], "entropy", batch_size=1, progress=progress)
    assert next(stream).document is SHORT
    assert told == []
    rest = list(stream)
    total = sum(len(tiny.tokenizer(one.text)["input_ids"]) for one in (SHORT, LONG))
    assert [one.document for one in rest] == [LONG]
    assert {(what, of) for what, _, of in told} == {("tokens scored", total)}
    done = [count for _, count, _ in told]
    assert done == sorted(done)
    assert done[-1] == total


def test_a_single_token_is_scored_though_nothing_follows() -> None:
    model = LanguageModel("tiny", llama(), tokenizer(bos=False))
    (found,) = scored(model, Document("x", "a"), methods=["regrad", "entropy"])
    assert len(found.ids) == 1
    assert found.scores["entropy"][0] == pytest.approx(
        entropy(log_probs(model, list(found.ids))[0]), rel=1e-4
    )
    assert math.isfinite(found.scores["regrad"][0])
    assert math.isnan(found.next_log_probs[0])
    assert found.sequence is None


def test_a_shorter_context_can_be_asked_for_and_a_longer_one_not(tiny: LanguageModel) -> None:
    (found,) = scored(tiny, LONG, context=8)
    said = log_probs(
        tiny, [1, *found.ids[11 - 7 : 11]]
    )  # <s>, four tokens to be read, three to be scored
    assert found.scores["entropy"][8:11] == pytest.approx(
        [entropy(one) for one in said[-3:]], rel=1e-4
    )
    with pytest.raises(
        QualmsError, match="the context is 33 tokens; choose 4 to 32, the limit of tiny"
    ):
        scored(tiny, SHORT, context=33)
    with pytest.raises(QualmsError, match="the context is 2 tokens"):
        scored(tiny, SHORT, context=2)
