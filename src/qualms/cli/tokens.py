"""`qualms score --tokens`: texts in, a table with the uncertainty of every token out."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.image_options import echo_rejected
from qualms.cli.options import resolve_device
from qualms.cli.own_images import exit_if_rejected
from qualms.cli.progress_bar import show_progress
from qualms.cli.shards import ToScore, is_folder
from qualms.cli.specs import parse_methods
from qualms.cli.status import echo, status_line
from qualms.cli.writing import STDOUT, deliver, rejected_file, table, unread
from qualms.data.texts import Document, Texts, read_texts
from qualms.errors import QualmsError
from qualms.gradients.settings import Sketch
from qualms.methods.at_positions import require_positions
from qualms.models.language import LanguageModel, load_language_model
from qualms.texts.document import ScoredDocument
from qualms.texts.generation import generate
from qualms.texts.scoring import METHOD, score_documents
from qualms.texts.spans import worst_span_of
from qualms.texts.token_table import TokenTable

USED = ("engine", "seed", "root", "device", "strict", "tokens", "generate", "tangents")
QUOTED = 60  # characters of the worst span


@dataclass(frozen=True)
class ToScoreAny(ToScore):
    """What `qualms score` is told, of images or of the tokens of texts."""

    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="Score every token of texts by a language model, --model hf:FOLDER; gradients are sketched then.",
        ),
    ] = False
    generate: Annotated[
        int | None,
        typer.Option(
            help="With --tokens: first let the model write so many tokens after each text.", min=1
        ),
    ] = None
    tangents: Annotated[
        int | None,
        typer.Option(
            help="With --tokens: passes of the sketch.", min=2, show_default=str(Sketch().tangents)
        ),
    ] = None

    def require_tokens(self, **more: object) -> None:
        """An error if something was said that is about images, or without --tokens about texts."""
        if not self.tokens:
            if self.generate or self.tangents:
                raise QualmsError(
                    "--generate and --tangents are for texts; pass --tokens too, or leave them out."
                )
            return
        said = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        said = [*said, *(name for name, value in more.items() if value is not None)]
        idle = [f"--{name.replace('_', '-')}" for name in said if name not in USED]
        if idle:
            raise QualmsError(f"{' and '.join(idle)} cannot be used with --tokens; leave that out.")
        if self.engine in ("exact", "reference"):
            raise QualmsError(
                f"--engine {self.engine} would take a pass for each class at each token; use sketch."
            )


def score_tokens(
    texts: str,
    model: str,
    methods: str | None,
    place: str | None,
    overwrite: bool,
    json_lines: bool,
    given: ToScoreAny,
) -> None:
    """Score every token of texts into one table; prints how many, where the model knows least, and
    where that is.
    """
    if place is not None and is_folder(place):
        raise QualmsError("--tokens writes one table; name a file in --out.")
    wanted = parse_methods(METHOD if methods is None else methods, "")
    require_positions(wanted)
    device = resolve_device(given.device)
    goes_to = None if place is None else table(place, overwrite, json_lines)
    status_line(f"reading {texts} …")
    read = read_texts(texts, given.root, given.strict)
    echo_texts(read)
    status_line(f"loading {model} …")
    language_model = load_language_model(model)
    language_model.model.to(device)
    documents = _written_on(language_model, read.documents, given)
    with show_progress("first tokens") as progress:
        scored = list(
            score_documents(
                language_model,
                documents,
                wanted,
                engine=given.engine if given.tangents is None else Sketch(given.tangents),
                seed=given.seed,
                progress=progress,
            )
        )
    written_from = {one.name: len(one.text) for one in read.documents} if given.generate else None
    rows = TokenTable(scored, written_from)
    if goes_to is not None:
        goes_to.write(rows, read.rejected)
    deliver(rows, place, json_lines, _summary(scored, list(wanted), place, read))
    exit_if_rejected(read)


def _written_on(
    language_model: LanguageModel, documents: Sequence[Document], given: ToScoreAny
) -> Sequence[Document]:
    if given.generate is None:
        return documents
    with show_progress("first text") as progress:
        return list(
            generate(language_model, documents, given.generate, seed=given.seed, progress=progress)
        )


def echo_texts(read: Texts) -> None:
    """Say on stderr how many documents were read, and what could not be."""
    count = len(read.documents)
    echo(f"{read.source}: {count} document{'' if count == 1 else 's'}")
    echo_rejected(read.rejected)


def _summary(
    scored: Sequence[ScoredDocument], methods: Sequence[str], place: str | None, read: Texts
) -> str:
    tokens = sum(len(one.ids) for one in scored)
    told = f"{len(scored)} document{'' if len(scored) == 1 else 's'}, {tokens} tokens scored by {', '.join(methods)}"
    file = None if place in (None, STDOUT) else Path(str(place))
    told += "" if file is None else f": {file}"
    told += unread(len(read.rejected), None if file is None else rejected_file(file))
    return f"{told}\n{_worst(scored, methods[0])}"


def _worst(scored: Sequence[ScoredDocument], method: str) -> str:
    """Where in which document the scores of neighboring tokens are highest."""
    spans = [(span, one) for one in scored if (span := worst_span_of(one, method)) is not None]
    worst, one = max(spans, key=lambda found: found[0].score)
    start, end = one.offsets[worst.start][0], one.offsets[worst.end - 1][1]
    quoted = " ".join(one.document.text[start:end].split())
    quoted = quoted if len(quoted) <= QUOTED else f"{quoted[:QUOTED]} …"
    return f"most uncertain by {method}: {one.document.name}, characters {start} to {end}: {quoted}"
