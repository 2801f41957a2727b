"""Texts that a language model has written on."""

from collections.abc import Iterator, Sequence

import torch

from qualms.data.texts import Document
from qualms.errors import QualmsError
from qualms.models.language import LanguageModel
from qualms.progress import ProgressFn
from qualms.texts.encoding import NO_TEXT, encoded, reading_width


def generated(
    language_model: LanguageModel,
    documents: Sequence[Document],
    new_tokens: int,
    *,
    sample: bool = False,
    seed: int = 0,
    progress: ProgressFn | None = None,
) -> Iterator[Document]:
    """Each document with what the model writes after it, under the same name.

    Args:
        language_model: what writes.
        documents: the beginnings. Of one that leaves no room in the model's context, the last
            tokens are read.
        new_tokens: how many tokens are written at most; fewer if the model ends the text itself.
        sample: draw each token by its probability, instead of taking the likeliest.
        seed: decides the draws.
        progress: is told how many documents are done.
    """
    width = reading_width(language_model)
    if not 0 < new_tokens <= width - 2:
        raise QualmsError(
            f"{new_tokens} new tokens cannot be written; choose from 1 to {width - 2}."
        )
    for number, document in enumerate(documents):
        yield Document(
            document.name,
            document.text + _continuation(language_model, document, new_tokens, sample, seed),
        )
        if progress is not None:
            progress("documents written on", number + 1, len(documents))


def _continuation(
    language_model: LanguageModel, document: Document, new_tokens: int, sample: bool, seed: int
) -> str:
    from transformers import GenerationConfig

    model, tokenizer = language_model.model, language_model.tokenizer
    text = encoded(language_model, document)
    own = [
        token for token, place in zip(text.ids, text.offsets, strict=True) if place != NO_TEXT
    ]  # no end of the text
    room = reading_width(language_model) - new_tokens - text.lead
    read = [*text.ids[: text.lead], *own[-max(room, 1) :]]
    ends = model.generation_config.eos_token_id
    settings = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=sample,
        eos_token_id=tokenizer.eos_token_id if ends is None else ends,
        pad_token_id=0,  # one text has no padding
        **({"top_k": 0, "top_p": 1.0, "temperature": 1.0} if sample else {}),
    )
    ids = torch.tensor([read], device=model.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )[0].tolist()
    before, after = (
        tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for some in (read, found)
    )
    return after[len(before) :].rstrip(
        "\ufffd"
    )  # the last character may have been cut within its bytes
