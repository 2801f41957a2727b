"""`qualms score`: images in, a table with the uncertainty of each out, and whether the network can
be trusted.

Texts go through the same door: `qualms.cli.tokens`.
"""

from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.options import Json, Overwrite, with_options
from qualms.cli.own_images import ScoringRun, exit_if_rejected, prepare_run
from qualms.cli.partial_file import (
    IMAGES,
    REFERENCE,
    PartialFile,
    describe_images,
    partial_path,
    stopping,
)
from qualms.cli.shards import is_folder, score_to_folder
from qualms.cli.specs import parse_methods
from qualms.cli.status import echo
from qualms.cli.tokens import ToScoreAny, score_tokens
from qualms.cli.writing import STDOUT, deliver, rejected_file, summary, table
from qualms.data import Images, dataset_name
from qualms.errors import QualmsError
from qualms.methods.registry import DEFAULT
from qualms.scale.shard_folder import require_shard_folder
from qualms.texts.scoring import METHOD
from qualms.threshold import Threshold

COVERAGE = 0.95
FILE = "scores.csv"


@with_options(ToScoreAny)
def score(
    given: ToScoreAny,
    images: Annotated[
        str,
        typer.Argument(
            help="A folder of images, an image, a .npz or .parquet file, or a dataset's name; for shards also a .tar "
            "file, or a pattern such as 'parts/*.parquet'. With --tokens: a .txt, .jsonl or .parquet file, or a folder "
            "of .txt files."
        ),
    ],
    model: Annotated[
        str, typer.Option(help="As for load_model: a name, timm:…, hf:…, FILE.pt2, module:factory.")
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated specs; the first one decides.",
            show_default=f"{DEFAULT}; {METHOD} with --tokens",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="The table: a .csv, .parquet or .jsonl file, or - for stdout; or a folder/ for shards, with any "
            "number of images. A run into a file or a folder that is stopped goes on with the same command (not with "
            "--tokens).",
            show_default=FILE,
        ),
    ] = None,
    overwrite: Overwrite = False,
    reference: Annotated[
        str | None,
        typer.Option(help="Images that the network knows; others are accepted by their scores."),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="The share of the reference that is accepted.", show_default=str(COVERAGE)
        ),
    ] = None,
    threshold: Annotated[
        Path | None, typer.Option(help="A file from `qualms threshold`, instead of a reference.")
    ] = None,
    json_lines: Json = False,
) -> None:
    """Score images, or with --tokens the tokens of texts: a row for each, with one column for each
    method.

    That of an image has its id, the prediction and its confidence; that of a token its place in the
    text and the token that is likely to come next. Higher means more uncertain. Noise levels in
    specs are for pixel values from 0 to 1. With a reference or a threshold, two columns say for the
    first method what percentage of the reference scores are lower, and whether the prediction is
    accepted. Images that cannot be read are listed beside the table, and the exit code is 4.
    Examples:

        qualms score photos/ --model timm:resnet18 --methods regrad+layers+smooth,energy --out
        scores.parquet

        qualms score new/ --model timm:resnet18 --reference val/ --coverage 0.95

        qualms score 'parts/*.tar' --model timm:resnet18 --methods heat --out scores/

        qualms score texts.jsonl --model hf:FOLDER --tokens --out scores.parquet
    """
    given.require_tokens(reference=reference, coverage=coverage, threshold=threshold)
    if given.tokens:
        score_tokens(
            images,
            model,
            methods,
            out or (None if json_lines else FILE),
            overwrite,
            json_lines,
            given,
        )
        return
    if threshold is not None and (reference is not None or coverage is not None):
        raise QualmsError(
            "--threshold has its own reference and coverage; leave out --reference and --coverage."
        )
    if coverage is not None and reference is None:
        raise QualmsError("--coverage is a share of a reference; name its images with --reference.")
    if coverage is not None and not 0 < coverage <= 1:
        raise QualmsError(f"--coverage is {coverage:g}; it is a share, above 0 and at most 1.")
    folder = Path(out) if out is not None and is_folder(out) else None
    given.require_use(folder is not None)
    if folder is not None:
        if overwrite or json_lines:
            raise QualmsError(
                "--overwrite and --json are for one table; leave them out, or name a file in --out."
            )
        require_shard_folder(folder)
    place = out or (None if json_lines else FILE)
    wanted = parse_methods(
        DEFAULT if methods is None else methods, dataset_name(images, given.root) or ""
    )
    goes_to = None if place is None or folder is not None else table(place, overwrite, json_lines)
    limit = None if threshold is None else Threshold.load(threshold)
    by, share = str(threshold or reference), COVERAGE if coverage is None else coverage
    kept_in = None if goes_to is None or goes_to.path is None else partial_path(goes_to.path)
    with stopping(kept_in):
        prepared = prepare_run(images, model, wanted, given)
        if limit is not None:
            prepared.make_scorer(
                prepared.methods, limit
            )  # which refuses a threshold of other scores
        found = prepared.read(images) if folder is None else None
        known = None if reference is None else prepared.read(reference)
        if folder is not None:
            limit = limit if known is None else _limit(prepared, known, share)
            score_to_folder(
                prepared, prepared.make_scorer(prepared.methods, limit), images, folder, given, by
            )
            return
        assert found is not None
        with _partial_file(kept_in, prepared, limit, found, known, share, overwrite) as partial:
            if known is not None:
                limit = _limit(prepared, known, share, partial)
            scorer = prepared.make_scorer(prepared.methods, limit)
            scored = prepared.score(scorer, found, partial)
            if goes_to is not None:
                goes_to.write(scored, found.rejected)
            partial.finish()
    for note in scored.notes.values():
        echo(note)
    file = None if place in (None, STDOUT) else Path(str(place))
    accepted = None if scored.threshold is None else int(scored.accepted.sum())
    listed = None if file is None else rejected_file(file)
    told = summary(scorer, len(scored), accepted, by, file, len(found.rejected), listed)
    deliver(scored, place, json_lines, told)
    exit_if_rejected(found)


def _limit(
    prepared: ScoringRun, known: Images, coverage: float, partial: PartialFile | None = None
) -> Threshold:
    """The threshold that accepts this share of the images that the network knows."""
    scorer, scored = prepared.score_reference(known, partial)
    (scores,) = scored.scores.values()
    return Threshold.from_scores(scores, coverage, provenance=scorer.provenance)


def _partial_file(
    path: Path | None,
    prepared: ScoringRun,
    limit: Threshold | None,
    found: Images,
    known: Images | None,
    coverage: float,
    overwrite: bool,
) -> PartialFile:
    """What an earlier run of the same command has kept; says how much that is.

    Args:
        path: the file; None keeps nothing.
        prepared: the network and the methods.
        limit: the threshold, if it is known beforehand.
        found: the images of the table.
        known: those of the reference, if there is one.
        coverage: the share of them that is accepted.
        overwrite: whether to begin anew if the file was made with something else.
    """
    if path is None:
        return PartialFile(None, {})
    about = prepared.about(prepared.make_scorer(prepared.methods, limit)) | {
        IMAGES: describe_images(found),
        REFERENCE: None,
    }
    total = len(found)
    if known is not None:
        about[REFERENCE] = describe_images(known) | {"coverage": coverage}
        total += len(known)
    partial = PartialFile(path, about, overwrite)
    if partial.count():
        echo(f"resuming: {partial.count()} of {total} images are done already, in {path}")
    return partial
