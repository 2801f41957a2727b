"""`qualms report --tokens`: texts in, a page with the uncertainty of every token out."""

from pathlib import Path

import typer

from qualms.cli.images import tell_rejected
from qualms.cli.options import device_of, telling
from qualms.cli.specs import chosen_methods
from qualms.cli.status import passing, say
from qualms.data.texts import Texts, read_texts
from qualms.errors import QualmsError
from qualms.gradients.settings import Engine
from qualms.methods.at_positions import require_positions
from qualms.models.language import PREFIX, load_language_model
from qualms.report.texts import write_text_page
from qualms.texts.scoring import scored_documents

METHODS = "regrad,entropy"
USED = {  # by their names in Python
    *("texts", "tokens", "model", "methods", "engine", "out", "open_page"),
    *("root", "seed", "device", "strict", "json_lines"),
}


def require_about_texts(context: typer.Context) -> None:
    """An error that names the options of a command line that say something of images."""
    idle = [
        param.opts[0]
        for param in context.command.params
        if getattr(context.get_parameter_source(str(param.name)), "name", "") == "COMMANDLINE"
        and param.name not in USED
    ]
    if idle:
        raise QualmsError(f"{' and '.join(idle)} cannot be used with --tokens; leave that out.")


def report_texts(
    texts: str | None,
    model: str | None,
    methods: str | None,
    out: Path,
    *,
    engine: Engine | None,
    root: Path | None,
    seed: int,
    device: str,
    strict: bool,
) -> tuple[Texts, dict[str, str]]:
    """Write a page about texts; returns what was read and what the page says of its making."""
    if texts is None or model is None:
        raise QualmsError(
            "--tokens needs texts and a language model: qualms report story.txt --model hf:FOLDER --tokens."
        )
    if engine not in (None, "sketch"):
        raise QualmsError(f"--engine {engine} would take a pass for each class at each token; use sketch.")
    wanted = chosen_methods(METHODS if methods is None else methods, "")
    require_positions(wanted)
    place = device_of(device)
    passing(f"reading {texts} …")
    read = read_texts(texts, root, strict)
    say(f"{read.source}: {len(read.documents)} document{'' if len(read.documents) == 1 else 's'}")
    tell_rejected(read.rejected)
    passing(f"loading {model} …")
    language_model = load_language_model(model)
    language_model.model.to(place)
    with telling("first tokens") as tell:
        scored = list(scored_documents(language_model, read.documents, wanted, seed=seed, tell=tell))
    about = {"Model": model, "Texts": read.source, "Seed": str(seed)}
    write_text_page(scored, out, f"What {Path(model.removeprefix(PREFIX)).name} does not know", about)
    return read, about
