"""`qualms report --tokens`: texts in, a page with the uncertainty of every token out."""

from pathlib import Path

from qualms.cli.input_texts import parse_token_methods, read_text_input, require_sketch
from qualms.cli.options import resolve_device
from qualms.cli.status import NOTHING, interruption
from qualms.data.texts import Texts
from qualms.errors import QualmsError
from qualms.gradients.settings import Engine
from qualms.models.language import PREFIX
from qualms.report.text_page import write_text_page

METHODS = "regrad,entropy"


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
    """Score every token of texts, and write a page about them.

    Args:
        texts: A file, folder or dataset.
        model: A language model, as --model names it.
        methods: The value of --methods; None for `METHODS`.
        out: The page.
        engine: The engine of the gradient scores; None for the sketch.
        root: The folder with the datasets.
        seed: The seed of all random draws.
        device: The device that the model runs on.
        strict: Whether a document that cannot be read is an error.

    Returns:
        The texts (the documents that were read, and those that could not be), and facts about the
        page by name.
    """
    if texts is None or model is None:
        raise QualmsError(
            "--tokens needs texts and a language model, as in `qualms report story.txt --model "
            "hf:FOLDER`."
        )
    require_sketch(engine)
    wanted = parse_token_methods(METHODS if methods is None else methods)
    device = resolve_device(device)
    try:
        text_input = read_text_input(texts, model, device, root, strict)
        scored = text_input.score(text_input.texts.documents, wanted, engine, seed)
    # The page is written at the end, so that nothing is kept.
    except KeyboardInterrupt:
        raise interruption(NOTHING) from None
    about = {"Model": model, "Texts": text_input.texts.source, "Seed": str(seed)}
    title = f"What {Path(model.removeprefix(PREFIX)).name} does not know"
    write_text_page(scored, out, title, about)
    return text_input.texts, {**about, "methods": list(wanted)}
