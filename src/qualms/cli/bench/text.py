"""`qualms bench text`: do scores of tokens tell other texts from those that a language model knows?"""

from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.bench.options import Out
from qualms.cli.bench.output import print_rows, rows_file
from qualms.cli.bench.scoring import Outside, told_apart
from qualms.cli.options import Device, Json, Root, Seed, resolve_device, split_list
from qualms.cli.progress_bar import show_progress
from qualms.data.texts import read_texts
from qualms.errors import QualmsError
from qualms.gradients.settings import Sketch
from qualms.methods.registry import parse
from qualms.models.language import load_language_model
from qualms.report.text_tables import text_table
from qualms.tasks import text as task
from qualms.tasks.journal import Journal
from qualms.tasks.rows import Row
from qualms.tasks.windows import about, cut, usable_for_tokens

METHODS = "regrad,exgrad,fisher,isotropic,entropy,msp,energy,gen"


def text(
    inside: Annotated[
        str,
        typer.Option("--id", help="Text that the model knows: .txt, .jsonl, .parquet or a folder."),
    ],
    model: Annotated[str, typer.Option("--model", help="A language model, hf:FOLDER or hf:NAME.")],
    outside: Outside = "",
    methods: Annotated[str, typer.Option("--methods", help="Comma-separated specs.")] = METHODS,
    count: Annotated[
        int, typer.Option("--count", min=0, help="Windows of each text; 0 for all.")
    ] = 100,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens in a window.")] = 128,
    tangents: Annotated[
        int, typer.Option("--tangents", min=2, help="Of the sketch of gradients.")
    ] = 16,
    root: Root = None,
    out: Out = None,
    seed: Seed = 0,
    device: Device = "auto",
    json_lines: Json = False,
) -> None:
    """Do scores of tokens tell other texts apart? If it is stopped, the same command resumes where
    it left off.

    Texts are cut into windows, each from within one document. Two baselines of the tokens that were
    read, `surprise` and `perplexity`, are always among the rows. Example:

        qualms bench text --model hf:my/model --id known.txt --ood other.txt,more.jsonl --methods
        regrad,entropy
    """
    names = [inside, *told_apart("text", inside, outside)]
    wanted = {spec: parse(spec) for spec in split_list(methods)}
    if not wanted:
        raise QualmsError("--methods names no method; give comma-separated specs.")
    file = out or rows_file("text", Path(inside).stem, model, seed)
    place = resolve_device(device)
    stems = [Path(name).stem for name in names]
    short = len(set(stems)) == len(names)  # else texts would go by one name
    found = {Path(name).stem if short else name: read_texts(name, root).documents for name in names}
    with show_progress() as progress:
        language = load_language_model(model)
        language.model.to(place)
        texts = [
            cut(name, one, language, window).subset(count or None) for name, one in found.items()
        ]
        good, reasons = usable_for_tokens(language.model, texts[0], wanted)
        with Journal(file, {"task": "text", **about(language)}) as journal:
            measured = task.text(
                language.model,
                texts[0],
                texts[1:],
                good,
                journal,
                seed=seed,
                engine=Sketch(tangents),
                progress=progress,
            )
            rows: list[Row] = [*reasons, *measured]
    print_rows(rows, text_table, file, seed, json_lines)
