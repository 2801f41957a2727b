"""Scores of tokens, judged: windows of texts, what tokens that were read say, spans, and wrong next
tokens.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qualms
from qualms.data.texts import Document
from qualms.errors import QualmsError
from qualms.gradients.settings import Sketch
from qualms.methods.registry import parse
from qualms.models.language import LanguageModel, load_language_model
from qualms.tasks import token_scores
from qualms.tasks.journal import Journal
from qualms.tasks.text_benchmark import (
    add_baselines,
    detection_measures,
    error_measures,
    span_means,
    text,
)
from qualms.tasks.token_scores import ScoredWindows, score_windows, usable_for_tokens
from qualms.tasks.windows import Windows, cut_windows

pytest.importorskip("transformers")
from tests.helpers.tiny_llama import LEARNT, llama, tokenizer

METHODS = {spec: parse(spec) for spec in ("entropy", "regrad", "fisher")}
TWO = {spec: METHODS[spec] for spec in ("entropy", "regrad")}
FEW = Sketch(4)


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def some(name: str, count: int, seed: int) -> Windows:
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 300, (count, 17), generator=source)
    ids[:, 0] = 1
    return Windows(name, ids)


def test_a_window_lies_within_one_document_and_begins_as_texts_do(model: Any) -> None:
    both = [Document("a", LEARNT), Document("b", "Once upon a time"), Document("c", LEARNT[::-1])]
    made = tokenizer()
    found = cut_windows("both", both, LanguageModel("tiny", model, made), 10)
    ids = [made(document.text, add_special_tokens=False).input_ids for document in both]
    assert len(ids[1]) < 10 <= min(len(ids[0]), len(ids[2]))
    assert found.ids[0].tolist() == [1, *ids[0][:10]]
    assert found.ids[1].tolist() == [1, *ids[0][10:20]]
    assert len(found) == len(ids[0]) // 10 + len(ids[2]) // 10
    assert found.ids[len(ids[0]) // 10].tolist() == [1, *ids[2][:10]]
    assert (len(found.subset(2)), found.length) == (2, 10)
    assert torch.equal(found.subset(2).ids, found.ids[[0, -1]])


def test_without_a_first_token_of_its_own_a_window_opens_with_one_of_the_text(model: Any) -> None:
    made = tokenizer(bos=False)
    ids = made(LEARNT).input_ids
    found = cut_windows("one", [Document("a", LEARNT)], LanguageModel("tiny", model, made), 10)
    assert found.ids.tolist() == [ids[at : at + 11] for at in range(0, len(ids) - 10, 11)]


def test_windows_that_no_text_fills_or_no_model_reads_are_refused(model: Any) -> None:
    language = LanguageModel("tiny", model, tokenizer())
    with pytest.raises(QualmsError, match="no document of short has as many as 20 tokens"):
        cut_windows("short", [Document("a", "Once upon a time")], language, 20)
    with pytest.raises(QualmsError, match=r"tiny reads at most 32 tokens, but a window has 33"):
        cut_windows("long", [Document("a", LEARNT)], language, 32)
    with pytest.raises(QualmsError, match="windows of 1 tokens have no next token"):
        cut_windows("long", [Document("a", LEARNT)], language, 1)


def test_what_opens_a_window_is_not_judged_however_long_it_is(model: Any) -> None:
    ids = some("a", 2, seed=6).ids
    one, three = (
        score_windows(
            model, Windows("a", ids, opening), {"entropy": METHODS["entropy"]}, Journal(None, {})
        )
        for opening in (1, 3)
    )
    np.testing.assert_array_equal(one.scores["entropy"][:, 2:], three.scores["entropy"])
    np.testing.assert_array_equal(one.log_probs[:, 2:], three.log_probs)
    np.testing.assert_array_equal(one.right[:, 2:], three.right)


def test_what_stands_at_a_token_is_said_after_reading_it(model: Any) -> None:
    text = some("a", 3, seed=0)
    found = score_windows(model, text, METHODS, Journal(None, {}), engine=FEW)
    with torch.no_grad():
        log_p = model(input_ids=text.ids).logits.double().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    np.testing.assert_allclose(found.scores["entropy"], entropy[:, 1:], rtol=1e-5)
    of_tokens = log_p[:, :-1].gather(-1, text.ids[:, 1:, None])[..., 0]
    np.testing.assert_allclose(found.log_probs, of_tokens, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found.right, log_p.argmax(-1)[:, 1:-1] == text.ids[:, 2:])
    direct = qualms.Scorer(model, "regrad", class_dim=-1, engine=FEW)({"input_ids": text.ids})
    np.testing.assert_allclose(found.scores["regrad"], direct.scores["regrad"][:, 1:], rtol=1e-5)


def test_a_run_that_was_killed_goes_on_with_the_next_chunk(model: Any, tmp_path: Path) -> None:
    text, done = some("a", 20, seed=1), list[int]()
    whole = score_windows(model, text, METHODS, Journal(None, {}), engine=FEW)

    def kill(what: str, now: int, total: int) -> None:
        done.append(now)
        if now == 16 and done.count(16) == 1:
            raise Killed

    with Journal(tmp_path / "rows", {}) as journal, pytest.raises(Killed):
        score_windows(model, text, METHODS, journal, engine=FEW, progress=kill)
    with Journal(tmp_path / "rows", {}) as journal:
        again = score_windows(model, text, METHODS, journal, engine=FEW, progress=kill)
        score_windows(
            model, text, METHODS | {"msp": parse("msp")}, journal, engine=FEW, progress=kill
        )
        rows = journal.where(row="tokens")
    assert done == [8, 16, 8, 16, 20, 8, 16, 20]
    assert [tuple(row["methods"]) for row in rows] == 3 * [tuple(METHODS)] + 3 * [("msp",)]
    for name in METHODS:
        np.testing.assert_array_equal(again.scores[name], whole.scores[name])
    np.testing.assert_array_equal(again.right, whole.right)


def test_another_seed_or_other_parameters_are_other_scores(model: Any) -> None:
    text, journal = some("a", 2, seed=2), Journal(None, {})
    one, other, last = (
        score_windows(model, text, METHODS, journal, engine=FEW, **how).scores
        for how in ({}, {"seed": 1}, {"params": "model.layers.1.*"})
    )
    assert np.abs(one["regrad"] - other["regrad"]).max() > 1e-3
    assert (last["fisher"] < one["fisher"]).mean() > 0.9  # fewer weights, smaller gradients
    np.testing.assert_array_equal(one["entropy"], other["entropy"])


def test_tokens_that_were_read_have_a_surprise_and_a_running_perplexity() -> None:
    scored = ScoredWindows({}, np.log([[0.5, 0.25, 0.125, 0.5]]), np.zeros((1, 3), bool))
    found = add_baselines(scored)
    np.testing.assert_allclose(found["surprise"] / np.log(2), [[1, 2, 3, 1]])
    np.testing.assert_allclose(found["perplexity"] / np.log(2), [[1, 1.5, 2, 1.75]])


def test_spans_are_means_of_their_tokens_and_begin_with_the_window() -> None:
    np.testing.assert_allclose(span_means(np.arange(14.0).reshape(2, 7), 3), [[1, 4], [8, 11]])


def test_spans_tell_texts_apart_that_tokens_do_not() -> None:
    random = np.random.default_rng(0)
    known, other = random.normal(size=(30, 32)), random.normal(size=(40, 32)) + 0.5
    token, whole = detection_measures(known, other, 1), detection_measures(known, other, 32)
    assert token["auroc"] == pytest.approx(0.638, abs=0.02)  # Φ(0.5/√2)
    assert whole["auroc"] == pytest.approx(0.977, abs=0.03)  # Φ(0.5·√32/√2)
    for found in (token, whole):
        assert found["auroc_low"] < found["auroc"] < found["auroc_high"]
    assert token["aupr_out"] > 40 / 70 > 0.5 > token["aupr_in"] * 0.5


def test_wrong_next_tokens_are_those_whose_score_should_be_high() -> None:
    right = np.array([[True, False, True], [False, True, True]])
    log_probs = np.log(
        [[0.3, 0.9, 0.1, 0.8], [0.3, 0.2, 0.6, 0.7]]
    )  # the first is of the token that opens the text
    scored = ScoredWindows({}, log_probs, right)
    found = error_measures(np.array([[0.1, 0.9, 0.2, 5.0], [0.8, 0.4, 0.3, -5.0]]), scored)
    assert (found["accuracy"], found["auroc"], found["raulc"], found["prr"]) == pytest.approx(
        (4 / 6, 1, 1, 1)
    )
    upside_down = error_measures(-np.array([[0.1, 0.9, 0.2, 5.0], [0.8, 0.4, 0.3, -5.0]]), scored)
    assert upside_down["auroc"] == 0
    assert upside_down["prr"] < 0


def test_every_method_has_a_row_for_each_text_and_span_and_one_for_errors(
    model: Any, tmp_path: Path
) -> None:
    known, others = some("known", 10, seed=3), [some("other", 9, seed=4), some("more", 8, seed=5)]
    # So that something is right: the likeliest token follows now and then.
    with torch.no_grad():
        known.ids[:, 9] = model(input_ids=known.ids[:, :9]).logits[:, -1].argmax(-1)
    with Journal(tmp_path / "rows", {}) as journal:
        rows = list(text(model, known, others, TWO, journal, engine=FEW))
    before = (tmp_path / "rows").read_bytes()
    names = [*TWO, "surprise", "perplexity"]
    assert [(r["out"], r["method"], r["span"]) for r in rows if r["row"] == "text"] == [
        (out, name, span) for out in ("other", "more") for name in names for span in (1, 8, 16)
    ]
    assert [r["method"] for r in rows if r["row"] == "next-token"] == names
    assert all(0 <= row["auroc_low"] <= row["auroc"] <= row["auroc_high"] <= 1 for row in rows)
    with Journal(tmp_path / "rows", {}) as journal:
        assert list(text(model, known, others, TWO, journal, engine=FEW)) == rows
    assert (tmp_path / "rows").read_bytes() == before


def test_a_text_of_which_nothing_is_predicted_has_no_errors_to_find_and_says_so(model: Any) -> None:
    known = some("known", 4, seed=3)
    with torch.no_grad():
        for at in range(1, 17):  # the unlikeliest token follows, everywhere
            known.ids[:, at] = model(input_ids=known.ids[:, :at]).logits[:, -1].argmin(-1)
    *rows, last = text(
        model, known, [some("other", 4, seed=4)], {"entropy": METHODS["entropy"]}, Journal(None, {})
    )
    assert {row["row"] for row in rows} == {"text"}
    assert last == {
        "row": "left out",
        "method": "next tokens",
        "why": "all next tokens of known are predicted wrongly.",
    }


def test_windows_of_two_lengths_are_not_compared(model: Any) -> None:
    short = Windows("short", some("a", 4, seed=0).ids[:, :9])
    with pytest.raises(QualmsError, match="differ in length"):
        list(text(model, some("known", 4, seed=3), [short], METHODS, Journal(None, {}), engine=FEW))


def test_methods_that_cannot_score_tokens_are_left_out_with_the_reason(model: Any) -> None:
    good, rows = usable_for_tokens(model, some("a", 2, seed=0), METHODS | {"heat": parse("heat")})
    assert list(good) == list(METHODS)
    assert [row["method"] for row in rows] == ["heat"]
    with pytest.raises(QualmsError, match="no method can be used: heat"):
        usable_for_tokens(model, some("a", 2, seed=0), {"heat": parse("heat")})


def test_a_score_that_is_not_finite_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(qualms.Scorer):
        def __call__(self, *args: Any, **more: Any) -> Any:
            found = super().__call__(*args, **more)
            found.scores["entropy"][0, 3] = float("nan")
            return found

    monkeypatch.setattr(token_scores, "Scorer", Broken)
    with pytest.raises(QualmsError, match=r"entropy has no finite score for a token of a\b"):
        score_windows(model, some("a", 2, seed=0), {"entropy": parse("entropy")}, Journal(None, {}))


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.skipif(
    "QUALMS_DATA" not in os.environ, reason="QUALMS_DATA, the folder of datasets, is not set"
)
def test_gradients_tell_a_book_from_stories_and_entropy_finds_wrong_next_tokens() -> None:
    folder = Path(os.environ["QUALMS_DATA"]) / "lm"
    if not folder.is_dir():
        pytest.skip("there is no lm in QUALMS_DATA")
    language = load_language_model(f"hf:{folder / 'stories260K'}")

    def read(name: str) -> Windows:
        whole = " ".join((folder / "text" / f"{name}.txt").read_text(encoding="utf-8").split())
        return cut_windows(name, [Document(name, whole)], language, 128).subset(12)

    known, oz = read("tinystories_sample"), read("wizard_of_oz")
    rows = list(text(language.model, known, [oz], METHODS, Journal(None, {})))
    spans = {
        row["method"]: row["auroc"] for row in rows if row["row"] == "text" and row["span"] == 8
    }
    errors = {row["method"]: row["auroc"] for row in rows if row["row"] == "next-token"}
    assert spans["regrad"] > spans["entropy"] > 0.6
    assert errors["entropy"] > errors["regrad"] > 0.6
