"""Continue texts with a language model."""

from collections.abc import Iterator, Sequence

import torch

from qualms.data.texts import Document
from qualms.errors import QualmsError
from qualms.models.language import LanguageModel
from qualms.progress import ProgressFn
from qualms.texts.encoding import NO_TEXT, Encoded, encode, reading_width


def generate(
    language_model: LanguageModel,
    documents: Sequence[Document],
    new_tokens: int,
    *,
    sample: bool = False,
    seed: int = 0,
    progress: ProgressFn | None = None,
) -> Iterator[Document]:
    """Let the model continue each document; yield the longer documents under the same names.

    Args:
        language_model: the model and the tokenizer that write.
        documents: the beginnings. If a document leaves no room in the model's context, only its
            last tokens are read.
        new_tokens: the most tokens to write; the model may end the text earlier.
        sample: draw each token by its probability, instead of taking the likeliest one.
        seed: decides the draws.
        progress: called with ("documents continued", done, documents) after each document.
    """
    width = reading_width(language_model)
    if not 0 < new_tokens <= width - 2:
        raise QualmsError(f"cannot generate {new_tokens} new tokens; choose from 1 to {width - 2}.")
    for number, document in enumerate(documents, start=1):
        continuation = _continue(language_model, document, new_tokens, sample, seed)
        yield Document(document.name, document.text + continuation)
        if progress is not None:
            progress("documents continued", number, len(documents))


def _continue(
    language_model: LanguageModel,
    document: Document,
    new_tokens: int,
    sample: bool,
    seed: int,
) -> str:
    """Return the text that the model writes after a document.

    Args:
        language_model: the model and the tokenizer that write.
        document: the beginning.
        new_tokens: the most tokens to write.
        sample: whether tokens are drawn by their probability; else the likeliest is taken.
        seed: decides the draws.
    """
    tokenizer = language_model.tokenizer
    text = encode(language_model, document)
    room = reading_width(language_model) - new_tokens - text.lead
    read = [*text.ids[: text.lead], *_tokens_of_text(text)[-max(room, 1) :]]
    written = _write(language_model, read, new_tokens, sample, seed)

    def decode(tokens: list[int]) -> str:
        """Return the text of tokens, without special ones such as end-of-text."""
        text: str = tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    # Decoded together, since a token's text can depend on the tokens before it.
    continuation = decode(written)[len(decode(read)) :]
    # The last character may have been cut within its bytes.
    return continuation.rstrip("\ufffd")


def _tokens_of_text(text: Encoded) -> list[int]:
    """Return a text's tokens, without those that the tokenizer adds, such as end-of-text."""
    tokens = []
    for token, place in zip(text.ids, text.offsets, strict=True):
        if place != NO_TEXT:
            tokens.append(token)
    return tokens


def _write(
    language_model: LanguageModel,
    read: list[int],
    new_tokens: int,
    sample: bool,
    seed: int,
) -> list[int]:
    """Continue a sequence of tokens; return all tokens, the given and the new ones.

    Args:
        language_model: the model that writes.
        read: the tokens to continue.
        new_tokens: the most tokens to write.
        sample: whether tokens are drawn by their probability; else the likeliest is taken.
        seed: decides the draws.
    """
    from transformers import GenerationConfig

    model = language_model.model
    end = model.generation_config.eos_token_id
    settings = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=sample,
        eos_token_id=language_model.tokenizer.eos_token_id if end is None else end,
        pad_token_id=0,  # one text has no padding
        # Tokens are drawn from all of the model's probabilities, unchanged.
        **({"top_k": 0, "top_p": 1.0, "temperature": 1.0} if sample else {}),
    )
    ids = torch.tensor([read], device=model.device)
    mask = torch.ones_like(ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sequences = model.generate(ids, attention_mask=mask, generation_config=settings)
    tokens: list[int] = sequences[0].tolist()
    return tokens
