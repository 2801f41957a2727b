"""`qualms bench text`: can token scores detect texts that a language model does not know?

Texts are cut into windows of as many tokens, whose scores are kept in a file of rows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.bench_common import Out, parse_outside, print_rows, rows_file
from qualms.cli.options import (
    Device,
    Json,
    Outside,
    Root,
    Seed,
    resolve_device,
    split_list,
    with_options,
)
from qualms.cli.progress_bar import show_progress
from qualms.data.texts import read_texts
from qualms.errors import QualmsError
from qualms.gradients.settings import Sketch
from qualms.methods.registry import parse
from qualms.models.language import load_language_model
from qualms.report.text_tables import text_table
from qualms.tasks import text_benchmark as task
from qualms.tasks.journal import Journal
from qualms.tasks.rows import Row
from qualms.tasks.token_scores import describe_language_model, usable_for_tokens
from qualms.tasks.windows import cut_windows

METHODS = "regrad,exgrad,fisher,isotropic,entropy,msp,energy,gen"


@dataclass(frozen=True, kw_only=True)
class TokenTaskOptions:
    """The options of `qualms bench text`."""

    inside: Annotated[
        str,
        typer.Option(
            "--id", help="Text that the model knows: a .txt, .jsonl or .parquet file, or a folder."
        ),
    ]
    model: Annotated[str, typer.Option("--model", help="A language model: hf:FOLDER or hf:NAME.")]
    outside: Outside = ""
    methods: Annotated[str, typer.Option("--methods", help="Comma-separated methods.")] = METHODS
    count: Annotated[
        int, typer.Option("--count", min=0, help="Number of windows per text; 0 for all.")
    ] = 100
    window: Annotated[
        int, typer.Option("--window", min=2, help="Number of tokens in a window.")
    ] = 128
    tangents: Annotated[
        int, typer.Option("--tangents", min=2, help="Number of tangents of the gradient sketch.")
    ] = 16
    root: Root = None
    out: Out = None
    seed: Seed = 0
    device: Device = "auto"
    json_lines: Json = False


@with_options(TokenTaskOptions)
def text(options: TokenTaskOptions) -> None:
    """Measure how well token scores detect other texts, and wrong next tokens.

    Texts are cut into windows, each from within one document. Two baselines that use only the
    tokens read so far, `surprise` and `perplexity`, are always included. Run an interrupted command
    again to resume it. Example:

        qualms bench text --model hf:my/model --id known.txt --ood other.txt,more.jsonl
    """
    names = [options.inside, *parse_outside("text", options.inside, options.outside)]
    wanted = {spec: parse(spec) for spec in split_list(options.methods)}
    if not wanted:
        raise QualmsError("--methods names no method; pass comma-separated specs.")
    file = options.out or rows_file("text", Path(options.inside).stem, options.model, options.seed)
    device = resolve_device(options.device)
    documents = {}
    for name, title in zip(names, _titles(names), strict=True):
        documents[title] = read_texts(name, options.root).documents
    with show_progress() as progress:
        language = load_language_model(options.model)
        language.model.to(device)
        texts = []
        for title, documents_of_text in documents.items():
            windows = cut_windows(title, documents_of_text, language, options.window)
            texts.append(windows.subset(options.count or None))
        usable, left_out = usable_for_tokens(language.model, texts[0], wanted)
        with Journal(file, {"task": "text", **describe_language_model(language)}) as journal:
            measured = task.text(
                language.model,
                texts[0],
                texts[1:],
                usable,
                journal,
                seed=options.seed,
                engine=Sketch(options.tangents),
                progress=progress,
            )
            rows: list[Row] = [*left_out, *measured]
    print_rows(rows, text_table, file, options.seed, options.json_lines)


def _titles(names: list[str]) -> list[str]:
    """Return what tables call the texts: the stems of the files, or whole names if two are equal.

    Args:
        names: Files or folders, as the command line names them.
    """
    stems = [Path(name).stem for name in names]
    has_distinct_stems = len(set(stems)) == len(names)
    return stems if has_distinct_stems else names
