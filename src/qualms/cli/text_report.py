"""`qualms report --tokens`: texts in, a page with the uncertainty of every token out."""

from pathlib import Path

from qualms.cli.options import resolve_device
from qualms.cli.progress_bar import show_progress
from qualms.cli.specs import parse_methods
from qualms.cli.status import NOTHING, interruption, status_line
from qualms.cli.tokens import echo_texts
from qualms.data.texts import Texts, read_texts
from qualms.errors import QualmsError
from qualms.gradients.settings import Engine
from qualms.methods.at_positions import require_positions
from qualms.models.language import PREFIX, load_language_model
from qualms.report.text_page import write_text_page
from qualms.texts.scoring import score_documents

METHODS = "regrad,entropy"


def require_unused(**options: object) -> None:
    """An error that names those that were given: they say something of images."""
    idle = [f"--{name}" for name, value in options.items() if value not in (None, "")]
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
) -> tuple[Texts, dict[str, object]]:
    """Write a page about texts; returns what was read, and what there is to say of the page."""
    if texts is None or model is None:
        raise QualmsError(
            "--tokens needs texts and a language model, as in `qualms report story.txt --model hf:FOLDER`."
        )
    if engine in ("exact", "reference"):
        raise QualmsError(
            f"--engine {engine} would take a pass for each class at each token; use sketch."
        )
    wanted = parse_methods(METHODS if methods is None else methods, "")
    require_positions(wanted)
    place = resolve_device(device)
    try:
        status_line(f"reading {texts} …")
        read = read_texts(texts, root, strict)
        echo_texts(read)
        status_line(f"loading {model} …")
        language_model = load_language_model(model)
        language_model.model.to(place)
        with show_progress("first tokens") as progress:
            scored = list(
                score_documents(
                    language_model,
                    read.documents,
                    wanted,
                    engine=engine,
                    seed=seed,
                    progress=progress,
                )
            )
    except KeyboardInterrupt:
        raise interruption(NOTHING) from None
    about = {"Model": model, "Texts": read.source, "Seed": str(seed)}
    write_text_page(
        scored, out, f"What {Path(model.removeprefix(PREFIX)).name} does not know", about
    )
    return read, {**about, "methods": list(wanted)}
