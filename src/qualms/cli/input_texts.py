"""Texts and the language model of a command line, for `score --tokens` and `report --tokens`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qualms.cli.input_images import echo_rejections
from qualms.cli.options import parse_methods
from qualms.cli.progress_bar import show_progress
from qualms.cli.status import count_of, echo, status_line
from qualms.data.texts import Document, Texts, read_texts
from qualms.errors import QualmsError
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.at_positions import require_positions
from qualms.methods.method import Method
from qualms.models.language import LanguageModel, load_language_model
from qualms.texts.document import ScoredDocument
from qualms.texts.document_scores import score_documents


@dataclass(frozen=True)
class TextInput:
    """The documents that a command scores, and the language model that scores them.

    Args:
        texts: The documents, and the documents that could not be read.
        language_model: The language model, on its device.
    """

    texts: Texts
    language_model: LanguageModel

    def score(
        self,
        documents: Sequence[Document],
        methods: dict[str, Method],
        engine: Engine | Sketch | None,
        seed: int,
    ) -> list[ScoredDocument]:
        """Score every token of documents.

        Args:
            documents: The documents; the model may have continued their texts.
            methods: The methods by their specs.
            engine: The engine of the gradient scores; None for the sketch.
            seed: The seed of all random draws.
        """
        with show_progress("first tokens") as progress:
            scored = score_documents(
                self.language_model,
                documents,
                methods,
                engine=engine,
                seed=seed,
                progress=progress,
            )
            return list(scored)


def read_text_input(
    texts: str, model: str, device: str, root: Path | None, strict: bool
) -> TextInput:
    """Read texts and load a language model; print how many documents there are.

    Args:
        texts: A file, folder or dataset.
        model: The language model, as --model names it.
        device: The device that the model runs on.
        root: The folder with the datasets.
        strict: Whether a document that cannot be read is an error.
    """
    status_line(f"reading {texts} …")
    loaded_texts = read_texts(texts, root, strict)
    echo(f"{loaded_texts.source}: {count_of(len(loaded_texts.documents), 'document')}")
    echo_rejections(loaded_texts.rejected)
    status_line(f"loading {model} …")
    language_model = load_language_model(model)
    language_model.model.to(device)
    return TextInput(loaded_texts, language_model)


def parse_token_methods(text: str) -> dict[str, Method]:
    """Parse --methods; raise an error if a method cannot score single tokens.

    Args:
        text: The value of --methods.

    Returns:
        The methods by name.
    """
    methods = parse_methods(text)
    require_positions(methods)
    return methods


def require_sketch(engine: str | None) -> None:
    """Raise an error if --engine names an engine that takes too long for tokens.

    Args:
        engine: The value of --engine; None for the default.
    """
    if engine in ("exact", "reference"):
        raise QualmsError(f"--engine {engine} would take one pass per class and token; use sketch.")


def forbid_options(names: list[str]) -> None:
    """Raise an error if options are given that have no effect with --tokens.

    Args:
        names: The given options without effect, without their leading hyphens; may be empty.
    """
    if names:
        options = " and ".join(f"--{name}" for name in names)
        pronoun = "it" if len(names) == 1 else "them"
        raise QualmsError(f"{options} cannot be used with --tokens; leave {pronoun} out.")
