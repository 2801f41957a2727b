"""Documents in tokens, and the windows of long ones."""

import pytest

from qualms.data.texts import Document
from qualms.errors import QualmsError
from qualms.models.language import LanguageModel
from qualms.texts.encoding import Window, decoder, encode, windows
from tests.helpers.tiny_llama import llama, tokenizer


def test_tokens_know_where_they_stand_in_the_text() -> None:
    text = "Once a café 🙂"
    found = encode(LanguageModel("mine", llama(), tokenizer()), Document("x", text))
    assert (found.ids[0], found.offsets[0], found.lead) == (1, (0, 0), 1)
    assert "".join(text[start:end] for start, end in dict.fromkeys(found.offsets)) == text
    assert found.offsets.count((12, 13)) > 1  # bytes of one character
    bare = encode(LanguageModel("mine", llama(), tokenizer(bos=False)), Document("x", text))
    assert (bare.ids, bare.lead) == (found.ids[1:], 0)


@pytest.mark.parametrize("lead", [0, 1, 2])
@pytest.mark.parametrize("context", [4, 7, 8, 16])
@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 9, 15, 16, 17, 40])
def test_windows_score_every_token_once_after_reading_half_a_window(
    tokens: int, context: int, lead: int
) -> None:
    every, room = list(windows(tokens, lead, context)), context - lead
    text = tuple(range(tokens))
    assert [place for one in every for place in range(one.scored, one.end)] == list(text)
    for one in every:
        held = one.of(text)
        assert held[one.places] == text[one.scored : one.end]
        assert len(held) == min(context, tokens)
        assert held[: one.lead] == text[: one.lead]
    assert all(one.scored - one.start >= room - max(room // 2, 1) for one in every[1:])


def test_a_text_that_fits_is_read_at_once() -> None:
    assert list(windows(8, 1, 8)) == [Window(0, 0, 0, 8)]
    assert list(windows(10, 1, 8)) == [Window(0, 0, 0, 8), Window(1, 3, 8, 10)]


def test_a_piece_keeps_the_space_in_front_of_it() -> None:
    words = tokenizer(bos=False)
    piece = decoder(words)
    ids = words("Once upon a time, there was")["input_ids"]
    assert "".join(map(piece, ids)) == "Once upon a time, there was"
    assert any(piece(token).startswith(" ") and len(piece(token)) > 1 for token in ids)


def test_tokens_that_the_model_does_not_know_are_told() -> None:
    model = llama()
    model.resize_token_embeddings(100)
    with pytest.raises(
        QualmsError,
        match=r"x has token \d+, but mine has tokens 0 to 99; use the model",
    ):
        encode(LanguageModel("mine", model, tokenizer()), Document("x", "a little girl"))
