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
    """Let a language model continue each document; yield the longer documents under their names.

    Args:
        language_model: the model that continues the documents, and its tokenizer.
        documents: the beginnings. If a document leaves too little room in the model's context, only
            its last tokens are read.
        new_tokens: the most tokens to write; the model may end the text earlier.
        sample: draw each token by its probability, instead of taking the likeliest one.
        seed: decides the draws.
        progress: called with ("documents continued", done, documents) after each document.
    """
    context = reading_width(language_model)
    # At least two tokens must be left to read.
    if not 0 < new_tokens <= context - 2:
        raise QualmsError(
            f"cannot generate {new_tokens} new tokens; choose from 1 to {context - 2}."
        )
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
    """Generate the continuation of one document, and return it without the document's own text.

    Args:
        language_model: the model that continues the document, and its tokenizer.
        document: the beginning.
        new_tokens: the most tokens to generate.
        sample: whether tokens are drawn by their probability; else the likeliest is taken.
        seed: decides the draws.
    """
    tokenizer = language_model.tokenizer
    text = encode(language_model, document)
    # How many tokens of the text fit into the context with the new ones, and with those that the
    # tokenizer adds in front. At least one is read.
    room = reading_width(language_model) - new_tokens - text.lead
    last_tokens = _tokens_of_text(text)[-max(room, 1) :]
    prompt = [*text.ids[: text.lead], *last_tokens]
    all_tokens = _generate_tokens(language_model, prompt, new_tokens, sample, seed)

    def decode(tokens: list[int]) -> str:
        """Return the text of tokens, without special ones such as end-of-text."""
        decoded: str = tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return decoded

    # Decoded with the prompt, which is then cut off, since a token's text can depend on those
    # before it.
    continuation = decode(all_tokens)[len(decode(prompt)) :]
    # The last token may end within the bytes of a character, which is then decoded as U+FFFD.
    return continuation.rstrip("\ufffd")


def _tokens_of_text(text: Encoded) -> list[int]:
    """Return a text's tokens, without those that the tokenizer adds, such as end-of-text."""
    tokens = []
    for token, offsets in zip(text.ids, text.offsets, strict=True):
        if offsets != NO_TEXT:
            tokens.append(token)
    return tokens


def _generate_tokens(
    language_model: LanguageModel,
    prompt: list[int],
    new_tokens: int,
    sample: bool,
    seed: int,
) -> list[int]:
    """Let a language model continue a sequence of tokens.

    Args:
        language_model: the model.
        prompt: the tokens to continue.
        new_tokens: the most tokens to generate; the model may end the text earlier.
        sample: whether tokens are drawn by their probability; else the likeliest is taken.
        seed: decides the draws.

    Returns:
        The tokens of the prompt, and then the new ones.
    """
    # Imported here, as transformers is optional.
    from transformers import GenerationConfig

    model = language_model.model
    end_token = model.generation_config.eos_token_id
    if end_token is None:
        end_token = language_model.tokenizer.eos_token_id
    settings = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=sample,
        eos_token_id=end_token,
        pad_token_id=0,  # any token: a single text has no padding
        # Tokens are drawn from all of the model's probabilities, unchanged.
        **({"top_k": 0, "top_p": 1.0, "temperature": 1.0} if sample else {}),
    )
    ids = torch.tensor([prompt], device=model.device)  # a batch of one text
    mask = torch.ones_like(ids)
    # The caller's random numbers are not affected by the seed.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sequences = model.generate(ids, attention_mask=mask, generation_config=settings)
    tokens: list[int] = sequences[0].tolist()
    return tokens
