"""The language model and the texts of `text.py`: `lm/stories260K`, as Hugging Face keeps models,
and `lm/text/*.txt`.

White space becomes single spaces, so that line breaks give no text away.
"""

import os
from pathlib import Path

from qualms.data.texts import Document
from qualms.models.language import LanguageModel, load_language_model
from qualms.tasks.windows import Windows, cut_windows

WINDOW, COUNT = 128, 100  # tokens in a window, windows of each text
KNOWN = "tinystories_sample"
OTHERS = (
    "wizard_of_oz",
    "hamlet_gutenberg",
    "fortunes_science",
    "fortunes_literature",
    "tinystories_valid_excerpt",
)


def documents(name: str) -> list[Document]:
    """Quotations end with a line `%`, held-out stories with their line; anything else is one
    document.
    """
    whole = (data() / "text" / f"{name}.txt").read_text(encoding="utf-8")
    parts = (
        whole.split("\n%\n")
        if "fortunes" in name
        else whole.splitlines()
        if "valid" in name
        else [whole]
    )
    plain = (" ".join(part.split()) for part in parts)
    once = {part.casefold(): part for part in plain if part}  # some stories are there twice
    return [Document(f"{name} {i}", part) for i, part in enumerate(once.values())]


def data() -> Path:
    """The folder of the model and the texts."""
    if "QUALMS_DATA" not in os.environ:
        raise SystemExit("set QUALMS_DATA to the folder that has lm/stories260K and lm/text.")
    return Path(os.environ["QUALMS_DATA"]) / "lm"


def language() -> LanguageModel:
    """The model."""
    return load_language_model(f"hf:{data() / 'stories260K'}")


def windows(name: str, model: LanguageModel, count: int = COUNT) -> Windows:
    """Windows spread over a text."""
    return cut_windows(name, documents(name), model, WINDOW).subset(count)
