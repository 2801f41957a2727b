"""`qualms score --out folder/`: shards of scores, for more images than memory holds."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from qualms.cli.own_images import SOME_REJECTED, ScoreOptions, ScoringRun
from qualms.cli.price import echo_price
from qualms.cli.progress_bar import show_progress
from qualms.cli.status import GOES_ON, echo, interruption, status_line
from qualms.cli.writing import ENDINGS, summary
from qualms.errors import QualmsError
from qualms.scale.batch import BatchScorer
from qualms.scale.cluster import score_on_ray
from qualms.scale.shard_folder import REJECTED, shards_in
from qualms.scale.shards import SIZE, score_shards
from qualms.scorer import Scorer
from qualms.stream.source import open_source


def is_folder(out: str) -> bool:
    """Whether --out names a folder; a folder that is called like a table is a mistake."""
    return out.endswith(("/", os.sep)) or (
        Path(out).is_dir() and Path(out).suffix.lower() not in ENDINGS
    )


@dataclass(frozen=True)
class ToScore(ScoreOptions):
    """What `qualms score` is told beside model, methods and images; the rest of it is about shards."""

    shard_size: Annotated[
        int | None,
        typer.Option(
            help="Images in a shard, if --out is a folder.", min=1, show_default=str(SIZE)
        ),
    ] = None
    runner: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Who scores into a folder: this process, or workers of Ray."),
    ] = "local"
    workers: Annotated[
        int | None,
        typer.Option(help="The number of Ray workers.", min=1, show_default="one for each core"),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(help="Of a Ray cluster.", show_default="one is started on this machine"),
    ] = None

    def require_use(self, folder: bool) -> None:
        """An error if something was said that plays no part."""
        if not folder and (
            self.shard_size or self.runner != "local" or self.workers or self.ray_address
        ):
            raise QualmsError(
                "--shard-size, --runner, --workers and --ray-address are for shards; end --out with a / to name a "
                "folder for them."
            )
        if self.runner != "ray" and (self.workers or self.ray_address):
            raise QualmsError(
                "--workers and --ray-address are for --runner ray; pass that too, or leave them out."
            )


def score_to_folder(
    prepared: ScoringRun, scorer: Scorer, images: str, out: Path, given: ToScore, by: str
) -> None:
    """Score all images into shards, or go on with them; prints what was done."""
    network = prepared.network
    source = open_source(images, given.root, network.transform, given.strict)
    echo(f"{source.name}: {'images' if source.count is None else f'{source.count} images'}")
    first = source.first()
    if prepared.train is not None and torch.equal(
        prepared.train.pixels[: len(first)], first.pixels
    ):
        raise QualmsError(f"--train names the images of {images} themselves; name others.")
    network.require_input_size(first)
    size = first.size if network.transform is None else None
    batches = BatchScorer(network, scorer, source.name, source.classes, size, given.strict)
    trial = batches.score(first.take(slice(0, 1)))
    prepared.require_class_count(trial.probs.shape[1])
    for note in trial.notes.values():
        echo(note)
    about, rows = prepared.about(scorer), given.shard_size or SIZE
    before = min(rows * len(shards_in(out)), source.count or 0)
    left = None if source.count is None else source.count - before
    if left != 0:
        echo_price(scorer, network.inputs(first.take(slice(0, 1))), left)
    try:
        if given.runner == "ray":
            status_line("starting Ray …")
            done = score_on_ray(batches, source, out, about, rows, given.workers, given.ray_address)
        else:
            with show_progress(f"images of {source.name} scored", before, source.count) as progress:
                done = score_shards(batches.score, source, out, about, rows, progress)
    except KeyboardInterrupt:
        raise interruption(GOES_ON) from None
    typer.echo(
        summary(
            scorer, done.scored, done.accepted, by, f"{out}{os.sep}", done.rejected, out / REJECTED
        )
    )
    if done.rejected:
        raise typer.Exit(SOME_REJECTED)
