"""`qualms score --tokens`: texts in, a table with the uncertainty of every token out."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.input_texts import (
    TextInput,
    forbid_options,
    parse_token_methods,
    read_text_input,
    require_sketch,
)
from qualms.cli.options import resolve_device
from qualms.cli.progress_bar import show_progress
from qualms.cli.score_shards import ShardOptions, is_folder
from qualms.cli.status import count_of, exit_if_incomplete
from qualms.cli.table_file import (
    STDOUT,
    describe_rejections,
    open_table,
    print_result,
    rejected_file,
)
from qualms.data.texts import Document, Texts
from qualms.errors import QualmsError
from qualms.gradients.settings import Sketch
from qualms.texts.document import ScoredDocument
from qualms.texts.document_scores import METHOD
from qualms.texts.generation import generate
from qualms.texts.spans import worst_span_of
from qualms.texts.token_table import TokenTable

# The options that have an effect with --tokens.
TOKEN_OPTIONS = ("engine", "seed", "root", "device", "strict", "tokens", "generate", "tangents")
QUOTE_LENGTH = 60  # the largest number of characters of the worst span that are printed


@dataclass(frozen=True, kw_only=True)
class ImageOrTokenOptions(ShardOptions):
    """The options of `qualms score`, for images or for the tokens of texts."""

    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="Score every token of texts with a language model (--model hf:FOLDER) and "
            "sketched gradients.",
        ),
    ] = False
    generate: Annotated[
        int | None,
        typer.Option(
            help="With --tokens: first let the model continue each text by this many tokens.",
            min=1,
        ),
    ] = None
    tangents: Annotated[
        int | None,
        typer.Option(
            help="With --tokens: number of tangents of the gradient sketch.",
            min=2,
            show_default=str(Sketch().tangents),
        ),
    ] = None

    def check_token_options(self, **image_options: object) -> None:
        """Raise an error if options are given that have no effect: with --tokens, or without it.

        Args:
            image_options: Further options for images alone, by name, which are not fields of this
                class; None if they are not given.
        """
        if not self.tokens:
            if self.generate or self.tangents:
                raise QualmsError(
                    "--generate and --tangents apply only to texts; pass --tokens too, or leave "
                    "them out."
                )
            return
        given_names = []
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                given_names.append(field.name)
        for name, value in image_options.items():
            if value is not None:
                given_names.append(name)
        unused_names = []
        for name in given_names:
            if name not in TOKEN_OPTIONS:
                unused_names.append(name.replace("_", "-"))
        forbid_options(unused_names)
        require_sketch(self.engine)


def score_tokens(
    texts: str,
    model: str,
    methods: str | None,
    out: str | None,
    overwrite: bool,
    json_lines: bool,
    options: ImageOrTokenOptions,
) -> None:
    """Score every token of texts into one table; print how many, and where the model knows least.

    Args:
        texts: The texts, as the command line names them.
        model: The language model, as --model names it.
        methods: The value of --methods; None for the default.
        out: The table; None if only JSON lines are printed.
        overwrite: Whether an existing table is replaced.
        json_lines: Whether to print JSON lines.
        options: The other options of the command.
    """
    if out is not None and is_folder(out):
        raise QualmsError("--tokens writes one table; pass a file as --out.")
    requested_methods = parse_token_methods(METHOD if methods is None else methods)
    device = resolve_device(options.device)
    table = None if out is None else open_table(out, overwrite, json_lines)
    text_input = read_text_input(texts, model, device, options.root, options.strict)
    documents = _continue_documents(text_input, options)
    # Without --tangents, the sketch has its default number of tangents.
    engine = options.engine if options.tangents is None else Sketch(options.tangents)
    scored = text_input.score(documents, requested_methods, engine, options.seed)
    # The table marks the tokens behind the end of the prompt as generated.
    prompt_lengths = None
    if options.generate:
        prompt_lengths = {
            document.name: len(document.text) for document in text_input.texts.documents
        }
    rows = TokenTable(scored, prompt_lengths)
    if table is not None:
        table.write(rows, text_input.texts.rejected)
    summary = _describe_result(scored, list(requested_methods), out, text_input.texts)
    print_result(rows, out, json_lines, summary)
    exit_if_incomplete(len(text_input.texts.rejected))


def _continue_documents(text_input: TextInput, options: ImageOrTokenOptions) -> Sequence[Document]:
    """Return the documents; with --generate, each continued by that many tokens of the model.

    Args:
        text_input: The documents and the model.
        options: The options of the command.
    """
    documents = text_input.texts.documents
    if options.generate is None:
        return documents
    model, count = text_input.language_model, options.generate
    with show_progress("first text") as progress:
        return list(generate(model, documents, count, seed=options.seed, progress=progress))


def _describe_result(
    scored: Sequence[ScoredDocument], methods: Sequence[str], out: str | None, texts: Texts
) -> str:
    """Return the last lines: how many tokens were scored, where they are, and the worst span.

    Args:
        scored: All documents with the scores of their tokens.
        methods: The methods; the first one decides which span is worst.
        out: The value of --out.
        texts: The documents that were read, and those that could not be read.
    """
    num_tokens = sum(len(document.ids) for document in scored)
    documents = count_of(len(scored), "document")
    text = f"{documents}, {num_tokens} tokens scored by {', '.join(methods)}"
    rejected_list = None
    if out not in (None, STDOUT):
        text += f": {Path(str(out))}"
        rejected_list = rejected_file(Path(str(out)))
    text += describe_rejections(len(texts.rejected), rejected_list)
    return f"{text}\n{_describe_worst(scored, methods[0])}"


def _describe_worst(scored: Sequence[ScoredDocument], method: str) -> str:
    """Describe the span with the highest mean score: its document, position and words.

    Args:
        scored: All documents with the scores of their tokens.
        method: The method whose scores are compared.
    """
    candidates = []
    for document in scored:
        span = worst_span_of(document, method)
        # A document without a scored token has no span.
        if span is not None:
            candidates.append((span, document))
    worst, document = max(candidates, key=lambda candidate: candidate[0].score)
    # From the first character of the first token to the end of the last token.
    start = document.offsets[worst.start][0]
    end = document.offsets[worst.end - 1][1]
    # Line breaks and repeated spaces become single spaces.
    quote = " ".join(document.document.text[start:end].split())
    if len(quote) > QUOTE_LENGTH:
        quote = f"{quote[:QUOTE_LENGTH]} …"
    place = f"{document.document.name}, characters {start} to {end}"
    return f"most uncertain by {method}: {place}: {quote}"
