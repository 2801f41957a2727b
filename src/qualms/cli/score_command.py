"""`qualms score`: a table with the uncertainty of each image.

With a reference or a threshold, the table also has whether each prediction is accepted. With
--tokens, `score_tokens` scores texts. If --out is a folder, `score_shards` writes shards.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.options import (
    DECIDING_SPECS,
    Json,
    Model,
    Overwrite,
    methods_option,
    parse_methods,
    with_options,
)
from qualms.cli.partial_file import (
    IMAGES,
    REFERENCE,
    PartialFile,
    describe_images,
    partial_path,
    report_interruption,
)
from qualms.cli.score_shards import is_folder, score_to_folder
from qualms.cli.score_tokens import ImageOrTokenOptions, score_tokens
from qualms.cli.scoring_run import ScoringRun, prepare_run
from qualms.cli.status import echo, exit_if_incomplete
from qualms.cli.table_file import (
    Table,
    describe_result,
    open_table,
    print_result,
    rejected_file,
)
from qualms.data import Images, dataset_name
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT
from qualms.result import Scored
from qualms.scale.shard_folder import require_shard_folder
from qualms.scorer import Scorer
from qualms.texts.document_scores import METHOD
from qualms.threshold import Threshold

COVERAGE = 0.95
FILE = "scores.csv"


@with_options(ImageOrTokenOptions)
def score(
    options: ImageOrTokenOptions,
    images: Annotated[
        str,
        typer.Argument(
            help="A folder of images, an image, a .npz or .parquet file, or a dataset's name; for "
            "shards also a .tar file, or a pattern such as 'parts/*.parquet'. With --tokens: a "
            ".txt, .jsonl or .parquet file, or a folder of .txt files."
        ),
    ],
    model: Model,
    methods: Annotated[
        str | None, methods_option(DECIDING_SPECS, f"{DEFAULT}; {METHOD} with --tokens")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Write the table to this .csv, .parquet or .jsonl file or to stdout (-). For any "
            "number of images, write shards to a folder/. Run an interrupted command again to "
            "resume it (not with --tokens or stdout).",
            show_default=FILE,
        ),
    ] = None,
    overwrite: Overwrite = False,
    reference: Annotated[
        str | None,
        typer.Option(help="Images that the network knows; their scores set a threshold."),
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="Share of the reference images to accept, from 0 to 1.",
            show_default=str(COVERAGE),
        ),
    ] = None,
    threshold: Annotated[
        Path | None,
        typer.Option(help="Threshold file from `qualms threshold`, in place of --reference."),
    ] = None,
    json_lines: Json = False,
) -> None:
    """Score images, or with --tokens the tokens of texts.

    The table has one row per image (its id, the prediction and its confidence) or token (its
    position in the text and the most likely next token), and one column per method. Higher means
    more uncertain. With a reference or a threshold, two more columns show, for the first method,
    the percentage of reference scores that are lower, and whether the prediction is accepted. Noise
    levels in methods assume pixels from 0 to 1. Inputs that cannot be read are listed in a file
    next to the table, and the exit code is then 4. Examples:

        qualms score photos/ --model timm:resnet18 --methods regrad+layers+smooth,energy

        qualms score new/ --model timm:resnet18 --reference val/ --coverage 0.95

        qualms score 'parts/*.tar' --model timm:resnet18 --methods heat --out scores/

        qualms score texts.jsonl --model hf:FOLDER --tokens --out scores.parquet

    \f

    Args:
        options: The options that `score` shares with other commands, those of shards and tokens.
        images: What to score.
        model: The network.
        methods: The methods; None for the default.
        out: Where the table goes.
        overwrite: Whether to replace an existing table.
        reference: Images that the network knows.
        coverage: The share of them that is accepted.
        threshold: A file with a threshold.
        json_lines: Whether to print JSON lines.
    """
    options.check_token_options(
        reference=reference,
        coverage=coverage,
        threshold=threshold,
    )
    destination = out or (None if json_lines else FILE)
    if options.tokens:
        score_tokens(images, model, methods, destination, overwrite, json_lines, options)
        return
    acceptance = _parse_acceptance(reference, coverage, threshold)
    dataset = dataset_name(images, options.root) or ""
    requested_methods = parse_methods(DEFAULT if methods is None else methods, dataset)
    folder = Path(out) if out is not None and is_folder(out) else None
    options.check_shard_options(has_folder=folder is not None)
    if folder is not None:
        if overwrite or json_lines:
            raise QualmsError(
                "--overwrite and --json do not apply to shards; leave them out, or name a file "
                "in --out."
            )
        require_shard_folder(folder)
        # Until shards are scored, nothing is kept; then `score_to_folder` reports Ctrl-C itself.
        with report_interruption(None):
            run = _prepare_run(images, model, requested_methods, options, acceptance)
            reference_images = None if reference is None else run.read(reference)
            scorer = run.make_scorer(acceptance.make_threshold(run, reference_images))
            score_to_folder(run, scorer, images, folder, options, acceptance.source)
        return
    table = None if destination is None else open_table(destination, overwrite, json_lines)
    table_path = None if table is None else table.path
    with report_interruption(None if table_path is None else partial_path(table_path)):
        run = _prepare_run(images, model, requested_methods, options, acceptance)
        images_to_score = run.read(images)
        scorer, scored = _score_table(run, images_to_score, acceptance, table, overwrite)
    for note in scored.notes.values():
        echo(note)
    num_accepted = None if scored.threshold is None else int(scored.accepted.sum())
    rejected_list = None if table_path is None else rejected_file(table_path)
    num_rejected = len(images_to_score.rejected)
    table_name = None if table_path is None else str(table_path)
    summary = describe_result(
        scorer,
        num_scored=len(scored),
        num_accepted=num_accepted,
        threshold_source=acceptance.source,
        out=table_name,
        num_rejected=num_rejected,
        rejected_list=rejected_list,
    )
    print_result(scored, destination, json_lines, summary)
    exit_if_incomplete(num_rejected)


@dataclass(frozen=True)
class _AcceptanceRule:
    """What decides which predictions are accepted: a reference, a threshold file, or neither.

    Args:
        reference: Images that the network knows, to set a threshold on.
        coverage: The share of the reference images that is accepted.
        threshold: A threshold from a file, in place of a reference.
        source: The name of the reference or of the threshold's file, for the last line that is
            printed.
    """

    reference: str | None
    coverage: float
    threshold: Threshold | None
    source: str

    def make_threshold(
        self, run: ScoringRun, reference_images: Images | None, partial: PartialFile | None = None
    ) -> Threshold | None:
        """Return the threshold; if there is a reference, its images are scored to set one.

        Args:
            run: The run that scores the images of the reference.
            reference_images: The images of the reference; None if there is none.
            partial: The partial file that saves the scores of the reference.

        Returns:
            The threshold; None if there is neither a reference nor a threshold from a file.
        """
        if reference_images is None:
            return self.threshold
        scorer, scored = run.score_reference(reference_images, partial)
        # `score_reference` scores by the first method alone.
        (scores,) = scored.scores.values()
        return Threshold.from_scores(scores, self.coverage, provenance=scorer.provenance)


def _parse_acceptance(
    reference: str | None, coverage: float | None, threshold: Path | None
) -> _AcceptanceRule:
    """Combine --reference, --coverage and --threshold to the rule that accepts predictions.

    Args:
        reference: The value of --reference.
        coverage: The value of --coverage.
        threshold: The value of --threshold.

    Raises:
        QualmsError: If the options contradict each other.
    """
    if threshold is not None and (reference is not None or coverage is not None):
        raise QualmsError(
            "--threshold has its own reference and coverage; leave out --reference and --coverage."
        )
    if coverage is not None and reference is None:
        raise QualmsError("--coverage is a share of the reference images; pass --reference too.")
    if coverage is None:
        coverage = COVERAGE
    if not 0 < coverage <= 1:
        raise QualmsError(f"--coverage is {coverage:g}; pass a share above 0 and at most 1.")
    if threshold is not None:
        return _AcceptanceRule(
            reference=None,
            coverage=coverage,
            threshold=Threshold.load(threshold),
            source=str(threshold),
        )
    return _AcceptanceRule(
        reference=reference,
        coverage=coverage,
        threshold=None,
        source=str(reference),
    )


def _prepare_run(
    images: str,
    model: str,
    methods: dict[str, Method],
    options: ImageOrTokenOptions,
    acceptance: _AcceptanceRule,
) -> ScoringRun:
    """Load the network, and check that a threshold from a file was calibrated on its scores.

    Args:
        images: The images, as the command line names them.
        model: The network, as --model names it.
        methods: The methods by their specs, with noise for pixels in [0, 1].
        options: The options of the command.
        acceptance: The reference or threshold by which predictions are accepted.
    """
    run = prepare_run(images, model, methods, options)
    if acceptance.threshold is not None:
        # Called for its check of the threshold, so that an error is raised before images are read.
        run.make_scorer(acceptance.threshold)
    return run


def _score_table(
    run: ScoringRun,
    images: Images,
    acceptance: _AcceptanceRule,
    table: Table | None,
    overwrite: bool,
) -> tuple[Scorer, Scored]:
    """Score images into one table; scores that an earlier run has saved are not computed again.

    Args:
        run: The network and the methods.
        images: The images to score.
        acceptance: The reference or threshold by which predictions are accepted.
        table: The table that the rows go to; None if they are only printed.
        overwrite: Whether scores that another run has saved are replaced.

    Returns:
        The scorer and all scores.
    """
    reference_images = None if acceptance.reference is None else run.read(acceptance.reference)
    with _open_partial(run, images, reference_images, acceptance, table, overwrite) as partial:
        scorer = run.make_scorer(acceptance.make_threshold(run, reference_images, partial))
        scored = run.score(scorer, images, partial)
        if table is not None:
            table.write(scored, images.rejected)
        partial.finish()
    return scorer, scored


def _open_partial(
    run: ScoringRun,
    images: Images,
    reference_images: Images | None,
    acceptance: _AcceptanceRule,
    table: Table | None,
    overwrite: bool,
) -> PartialFile:
    """Open the partial file of a table, and print how many images an earlier run has scored.

    Args:
        run: The network and the methods.
        images: The images of the table.
        reference_images: The images of the reference, if there is one.
        acceptance: The reference or threshold by which predictions are accepted.
        table: The table; if it has no file, nothing is saved.
        overwrite: Whether scores that another run has saved are replaced.
    """
    if table is None or table.path is None:
        # Keeps the scores in memory only.
        return PartialFile(None, {})
    about = run.describe(run.make_scorer(acceptance.threshold))
    about |= {IMAGES: describe_images(images), REFERENCE: None}
    num_images = len(images)
    if reference_images is not None:
        about[REFERENCE] = describe_images(reference_images) | {"coverage": acceptance.coverage}
        num_images += len(reference_images)
    path = partial_path(table.path)
    partial = PartialFile(path, about, overwrite)
    if partial.count_scored():
        echo(
            f"resuming: {partial.count_scored()} of {num_images} images are already scored, in {path}"
        )
    return partial
