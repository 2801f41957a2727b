"""Texts that a model writes on."""

import pytest
import torch

from qualms.data.texts import Document
from qualms.errors import QualmsError
from qualms.models.language import LanguageModel
from qualms.texts.generation import generate
from tests.helpers.tiny_llama import llama, tokenizer


@pytest.fixture
def tiny() -> LanguageModel:
    return LanguageModel("tiny", llama(), tokenizer())


def greedy(model: LanguageModel, ids: list[int], count: int) -> list[int]:
    """Continue these tokens greedily, one token after the other; return the new tokens."""
    ids, read = list(ids), len(ids)
    for _ in range(count):
        ids.append(int(model.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[read:]


def after(model: LanguageModel, text: str, count: int) -> str:
    """Return the text with its greedy continuation."""
    return text + words(model, greedy(model, model.tokenizer(text)["input_ids"], count))


def words(model: LanguageModel, ids: list[int]) -> str:
    return str(model.tokenizer.decode(ids)).rstrip("\ufffd")


def test_a_text_goes_on_with_the_likeliest_tokens(tiny: LanguageModel) -> None:
    documents = [Document("a", "Once upon a time"), Document("b", "One day")]
    found = list(generate(tiny, documents, 5))
    assert [one.name for one in found] == ["a", "b"]
    assert [one.text for one in found] == [after(tiny, one.text, 5) for one in documents]
    assert len(found[0].text) > len("Once upon a time")


def test_what_is_published_beside_the_model_does_not_change_what_is_likeliest(
    tiny: LanguageModel,
) -> None:
    document = Document("a", "Once upon a time")
    tiny.model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9, top_k=5)
    assert next(generate(tiny, [document], 5)).text == after(tiny, document.text, 5)


def test_draws_follow_the_seed_and_leave_the_random_state_alone(tiny: LanguageModel) -> None:
    document = Document("a", "Once upon a time")
    state = torch.get_rng_state()
    one, same, other = (
        next(generate(tiny, [document], 9, sample=True, seed=seed)).text for seed in (1, 1, 2)
    )
    assert one == same != other
    assert torch.equal(torch.get_rng_state(), state)


def test_the_end_of_the_text_ends_it(tiny: LanguageModel) -> None:
    document = Document("a", "Once upon a time")
    first, second = greedy(tiny, tiny.tokenizer(document.text)["input_ids"], 2)
    assert first != second
    tiny.model.generation_config.eos_token_id = second
    found = next(generate(tiny, [document], 9)).text
    assert found == after(tiny, document.text, 2) != after(tiny, document.text, 9)


def test_of_a_long_text_the_last_tokens_are_read(tiny: LanguageModel) -> None:
    long = "She had a red ball. " * 20
    last = [1, *tiny.tokenizer(long)["input_ids"][-(32 - 4 - 1) :]]
    assert next(generate(tiny, [Document("a", long)], 4)).text == long + words(
        tiny, greedy(tiny, last, 4)
    )


@pytest.mark.parametrize("count", [0, 31])
def test_more_than_the_model_can_read_is_refused(tiny: LanguageModel, count: int) -> None:
    with pytest.raises(QualmsError, match=f"{count} new tokens; choose from 1 to 30"):
        next(generate(tiny, [Document("a", "Once")], count))
