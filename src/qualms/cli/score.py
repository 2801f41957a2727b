"""`qualms score`: images in, a table with the uncertainty of each out, and whether the network can be trusted."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.bench.options import with_options
from qualms.cli.options import Json, Overwrite
from qualms.cli.own_images import Given, Ready, end, ready
from qualms.cli.shards import is_folder, score_to_folder
from qualms.cli.specs import chosen_methods
from qualms.cli.status import say
from qualms.cli.writing import STDOUT, json_rows, rejected_file, table, write_rejected
from qualms.data import Images, dataset_name
from qualms.errors import QualmsError
from qualms.methods.registry import DEFAULT
from qualms.scale.shards import require_own
from qualms.scored import Scored
from qualms.threshold import Threshold

COVERAGE = 0.95
FILE = "scores.csv"


@with_options(Given)
def score(
    given: Given,
    images: Annotated[
        str,
        typer.Argument(
            help="A folder of images, an image, a .npz or .parquet file, or a dataset's name; for shards also a .tar "
            "file, or a pattern such as 'parts/*.parquet'."
        ),
    ],
    model: Annotated[str, typer.Option(help="As for load_model: a name, timm:…, hf:…, FILE.pt2, module:factory.")],
    methods: Annotated[str, typer.Option(help="Comma-separated specs; the first one decides.")] = DEFAULT,
    out: Annotated[
        str | None,
        typer.Option(
            help="The table: a .csv, .parquet or .jsonl file, or - for stdout; or a folder/ for shards of any number "
            "of images, which the same command goes on with.",
            show_default=FILE,
        ),
    ] = None,
    shard_size: Annotated[
        int | None, typer.Option(help="Images in a shard, if --out is a folder.", min=1, show_default="4096")
    ] = None,
    overwrite: Overwrite = False,
    reference: Annotated[
        str | None, typer.Option(help="Images that the network knows, to accept others like them by.")
    ] = None,
    coverage: Annotated[
        float | None, typer.Option(help="The share of the reference that is accepted.", show_default=str(COVERAGE))
    ] = None,
    threshold: Annotated[
        Path | None, typer.Option(help="Accept by this file of `qualms threshold` instead of a reference.")
    ] = None,
    json_lines: Json = False,
) -> None:
    """Score images: a row for each with its id, the prediction, its confidence, and one column for each method.

    Higher means more uncertain. Noise levels in specs are in pixels from 0 to 1. With a reference or a threshold, two
    columns say for the first method how many percent of the reference score lower, and whether the prediction is
    accepted. Images that cannot be read are listed beside the table, and the exit code is 4. Examples:

        qualms score photos/ --model timm:resnet18 --methods regrad+layers+smooth,energy --out scores.parquet

        qualms score new/ --model timm:resnet18 --reference val/ --coverage 0.95

        qualms score 'parts/*.tar' --model timm:resnet18 --methods heat --out scores/
    """
    if threshold is not None and (reference is not None or coverage is not None):
        raise QualmsError("--threshold has its own reference and coverage; leave out --reference and --coverage.")
    if coverage is not None and reference is None:
        raise QualmsError("--coverage is a share of a reference; name its images with --reference.")
    if coverage is not None and not 0 < coverage <= 1:
        raise QualmsError(f"--coverage is {coverage:g}; it is a share, above 0 and at most 1.")
    if out is not None and is_folder(out):
        if overwrite or json_lines:
            raise QualmsError("--overwrite and --json are for one table; shards in a folder are gone on with.")
        require_own(Path(out))
    elif shard_size is not None:
        raise QualmsError("--shard-size is for shards; end --out with a / to name a folder for them.")
    place = out or (None if json_lines else FILE)
    wanted = chosen_methods(methods, dataset_name(images, given.root) or "")
    with ExitStack() as stack:
        sharded = place is not None and is_folder(place)
        goes_to = None if place is None or sharded else stack.enter_context(table(place, overwrite, json_lines))
        limit = None if threshold is None else Threshold.load(threshold)
        prepared = ready(images, model, wanted, given)
        if limit is not None and given.engine != "auto":
            prepared.scorer(prepared.methods, limit)  # which refuses a threshold of other scores
        found = None if sharded else prepared.read(images)
        if reference is not None:
            prepared, limit = _limit(prepared, reference, COVERAGE if coverage is None else coverage)
        scorer = prepared.scorer(prepared.methods, limit)
        if found is None:
            assert place is not None
            score_to_folder(prepared, scorer, images, Path(place), shard_size, str(threshold or reference))
            return
        scored = prepared.scored(scorer, found)
        if goes_to is not None:
            goes_to.write(scored)
    if place is not None and place != STDOUT:
        write_rejected(Path(place), found.rejected)
    if json_lines and place != STDOUT:
        typer.echo("\n".join(json_rows(scored)))
    for note in scored.notes.values():
        say(note)
    summary = _summary(scored, found, place, str(threshold or reference))
    if json_lines or place == STDOUT:
        say(summary)
    else:
        typer.echo(summary)
    end(found)


def _limit(prepared: Ready, reference: str, coverage: float) -> tuple[Ready, Threshold]:
    prepared, scorer, scored = prepared.deciding(prepared.read(reference))
    (scores,) = scored.scores.values()
    return prepared, Threshold.from_scores(scores, coverage, made_by=scorer.made_by)


def _summary(scored: Scored, found: Images, place: str | None, by: str) -> str:
    """The last line."""
    named = ", ".join(scored.scores)
    done = f"{len(scored)} image{'' if len(scored) == 1 else 's'} scored by {named}"
    if scored.threshold is not None:
        accepted, rule = int(scored.accepted.sum()), scored.threshold.rule
        done += f"; {accepted} of {len(scored)} accepted by {next(iter(scored.scores))}, at {rule} of {by}"
    if place is not None and place != STDOUT:
        done += f": {place}"
    if found.rejected:
        listed = f": {rejected_file(Path(place))}" if place is not None and place != STDOUT else ""
        done += f"; {len(found.rejected)} could not be read{listed}"
    return done
