"""`qualms score --out folder/`: shards of scores, for more images than memory holds."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer

from qualms.cli.options import telling
from qualms.cli.own_images import SOME_REJECTED, Ready
from qualms.cli.status import say
from qualms.cli.writing import ENDINGS
from qualms.data import Images
from qualms.errors import QualmsError
from qualms.scale.shards import REJECTED, SIZE, Done, score_shards
from qualms.scale.source import PART, open_source
from qualms.scored import Scored
from qualms.scorer import Scorer
from qualms.tasks.scoring import parameters, scored_images


def is_folder(out: str) -> bool:
    """Whether --out names a folder; a folder that is called like a table is a mistake."""
    return out.endswith(("/", os.sep)) or (Path(out).is_dir() and Path(out).suffix.lower() not in ENDINGS)


def score_to_folder(prepared: Ready, scorer: Scorer, images: str, out: Path, size: int | None, by: str) -> None:
    """Score all images into shards, or go on with them; prints what was done."""
    network, given = prepared.network, prepared.given
    if scorer.settings.engine == "auto":
        raise QualmsError(
            "--engine auto goes by measured times, which a run that goes on with the shards would not repeat; pass "
            "--engine exact or sketch."
        )
    source = open_source(images, given.root, network.fit, given.strict)
    say(f"{source.name}: {'images' if source.count is None else f'{source.count} images'}")
    first = next(source.parts(0, PART), None)
    if first is not None and len(first.images):
        network.try_on(first.images)
    said: set[str] = set()

    def score(some: Images, place: int) -> Scored:
        scored = scored_images(network, scorer, replace(some, classes=source.classes), place)
        prepared.check_classes(scored.probs.shape[1])
        for note in set(scored.notes.values()) - said:
            say(note)
            said.add(note)
        return scored

    with telling(f"{source.name}: first batch") as tell:
        done = score_shards(score, source, out, _about(prepared, scorer), size or SIZE, tell)
    typer.echo(_summary(done, scorer, out, by))
    if done.rejected:
        raise typer.Exit(SOME_REJECTED)


def _about(prepared: Ready, scorer: Scorer) -> dict[str, Any]:
    """What decides the scores, beside the images."""
    how, limit = scorer.settings, scorer.threshold
    return {
        **prepared.network.about,
        "torch": torch.__version__,
        "device": next(prepared.network.model.parameters()).device.type,
        "methods": {name: parameters(method, prepared.train) for name, method in scorer.methods.items()},
        "engine": repr(how.sketch) if how.sketch else how.engine_name,
        "seed": how.seed,
        "classes": list(prepared.network.class_names),
        "threshold": None if limit is None else f"{limit.value:g}, {limit.rule}, {limit.fingerprint()}",
    }


def _summary(done: Done, scorer: Scorer, out: Path, by: str) -> str:
    told = f"{done.scored} image{'' if done.scored == 1 else 's'} scored by {', '.join(scorer.methods)}"
    if scorer.threshold is not None:
        first = next(iter(scorer.methods))
        told += f"; {done.accepted or 0} of {done.scored} accepted by {first}, at {scorer.threshold.rule} of {by}"
    left = f"; {done.rejected} could not be read: {out / REJECTED}" if done.rejected else ""
    return f"{told}: {out}{os.sep}{left}"
