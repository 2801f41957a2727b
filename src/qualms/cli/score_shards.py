"""`qualms score --out folder/`: shards of scores, for more images than memory holds.

Images come from a `Source` (`stream/source.py`), which never holds all of them. `score_shards`
(`scale/shards.py`) scores in this process, `score_on_ray` (`scale/cluster.py`) on Ray.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from qualms.cli.price_estimate import echo_price
from qualms.cli.progress_bar import show_progress
from qualms.cli.scoring_run import ScoreOptions, ScoringRun, same_training_images_error
from qualms.cli.status import (
    GOES_ON,
    count_of,
    echo,
    exit_if_incomplete,
    interruption,
    status_line,
)
from qualms.cli.table_file import ENDINGS, describe_result
from qualms.data import Images
from qualms.errors import QualmsError
from qualms.scale.batch import BatchScorer
from qualms.scale.cluster import score_on_ray
from qualms.scale.shard_folder import REJECTED, Done, shards_in
from qualms.scale.shards import SIZE, score_shards
from qualms.scorer import Scorer
from qualms.stream.source import Source, open_source


def is_folder(out: str) -> bool:
    """Whether --out names a folder: it ends with a slash, or the folder exists.

    An existing folder with the name of a table, such as `scores.csv`, does not count: the user
    probably wants a table, and gets an error.

    Args:
        out: The value of --out.
    """
    if out.endswith(("/", os.sep)):
        return True
    return Path(out).is_dir() and Path(out).suffix.lower() not in ENDINGS


@dataclass(frozen=True, kw_only=True)
class ShardOptions(ScoreOptions):
    """The options of `ScoreOptions`, and those of `qualms score` about shards."""

    shard_size: Annotated[
        int | None,
        typer.Option(
            help="Number of images per shard, if --out is a folder.",
            min=1,
            show_default=str(SIZE),
        ),
    ] = None
    runner: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Score shards in this process or on Ray."),
    ] = "local"
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of Ray workers.",
            min=1,
            show_default="one per core",
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster.", show_default="a new one on this machine"),
    ] = None

    def check_shard_options(self, has_folder: bool) -> None:
        """Raise an error if options about shards are given that have no effect.

        Args:
            has_folder: Whether --out names a folder, to which shards are written.
        """
        has_ray_options = bool(self.workers or self.ray_address)
        if not has_folder and (self.shard_size or self.runner != "local" or has_ray_options):
            raise QualmsError(
                "--shard-size, --runner, --workers and --ray-address apply only to shards; end "
                "--out with a / to write shards to a folder."
            )
        if self.runner != "ray" and has_ray_options:
            raise QualmsError(
                "--workers and --ray-address apply only to --runner ray; pass it too, or leave "
                "them out."
            )


def score_to_folder(
    run: ScoringRun,
    scorer: Scorer,
    images: str,
    folder: Path,
    options: ShardOptions,
    threshold_source: str,
) -> None:
    """Score all images into shards; shards of an earlier run are not computed again.

    Args:
        run: The network and the methods.
        scorer: The scorer of the run, with the threshold.
        images: The images, as the command line names them.
        folder: Where the shards go.
        options: The options of the command.
        threshold_source: The images or the file that the threshold comes from, for the last line.
    """
    network = run.network
    source = open_source(images, options.root, network.transform, options.strict)
    image_count = "images" if source.count is None else count_of(source.count, "image")
    echo(f"{source.name}: {image_count}")
    first_images = source.first()
    if _starts_with_training_images(first_images, run.train):
        raise same_training_images_error(images)
    network.require_input_size(first_images)
    # Without a transform that resizes them, all images must be as large as the first one.
    size = first_images.size if network.transform is None else None
    batch_scorer = BatchScorer(
        network=network,
        scorer=scorer,
        name=source.name,
        classes=source.classes,
        size=size,
        strict=options.strict,
    )
    first_image = first_images.take(slice(0, 1))
    # One image is scored before all others, so that a wrong setup fails now. Its probabilities also
    # show the number of classes.
    trial = batch_scorer.score(first_image)
    run.require_class_count(trial.probs.shape[1])
    for note in trial.notes.values():
        echo(note)
    shard_size = options.shard_size or SIZE
    # The last shard may not be full, so the product may exceed the number of images.
    already_scored = min(shard_size * len(shards_in(folder)), source.count or 0)
    remaining = None if source.count is None else source.count - already_scored
    if remaining != 0:
        echo_price(scorer, network.inputs(first_image), remaining)
    try:
        totals = _score_missing_shards(batch_scorer, source, folder, run, options, already_scored)
    except KeyboardInterrupt:
        raise interruption(GOES_ON) from None
    result = describe_result(
        scorer,
        num_scored=totals.scored,
        num_accepted=totals.accepted,
        threshold_source=threshold_source,
        out=f"{folder}{os.sep}",
        num_rejected=totals.rejected,
        rejected_list=folder / REJECTED,
    )
    typer.echo(result)
    exit_if_incomplete(totals.rejected)


def _score_missing_shards(
    batch_scorer: BatchScorer,
    source: Source,
    folder: Path,
    run: ScoringRun,
    options: ShardOptions,
    already_scored: int,
) -> Done:
    """Score the shards that the folder lacks, in this process or on Ray.

    Args:
        batch_scorer: Scores a batch of images.
        source: The source of all images.
        folder: Where the shards go.
        run: The network and the methods.
        options: The options of the command.
        already_scored: The number of images that an earlier run has scored, for the progress.

    Returns:
        How many images were scored, accepted and rejected in all shards.
    """
    about = run.describe(batch_scorer.scorer)
    size = options.shard_size or SIZE
    if options.runner == "ray":
        status_line("starting Ray …")
        return score_on_ray(
            batch_scorer,
            source,
            folder,
            about,
            size,
            workers=options.workers,
            address=options.ray_address,
        )
    with show_progress(f"images of {source.name} scored", already_scored, source.count) as progress:
        return score_shards(batch_scorer.score, source, folder, about, size, progress)


def _starts_with_training_images(images: Images, train: Images | None) -> bool:
    """Whether the training images begin with the same pixels as the images to score.

    They are then taken to be the same, an error of the user: methods may not learn from the images
    that they score.

    Args:
        images: The first images to score, [n].
        train: The training images; None if there are none, for which the answer is no.
    """
    return train is not None and torch.equal(train.pixels[: len(images)], images.pixels)
