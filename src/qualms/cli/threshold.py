"""`qualms threshold`: the score up to which a network is trusted, set on images that it knows, or
shown.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from qualms.cli.options import Json, Overwrite, with_options
from qualms.cli.own_images import ScoreOptions, exit_if_rejected, prepare_run
from qualms.cli.specs import parse_methods
from qualms.cli.status import echo
from qualms.cli.writing import complete, require_place
from qualms.data import dataset_name
from qualms.errors import QualmsError
from qualms.methods.registry import DEFAULT
from qualms.threshold import Threshold

COVERAGE, CONFIDENCE = 0.95, 0.95


@with_options(ScoreOptions)
def threshold(
    given: ScoreOptions,
    images: Annotated[
        str,
        typer.Argument(
            help="Images that the network knows, as for `qualms score`; or a threshold file to show."
        ),
    ],
    model: Annotated[str | None, typer.Option(help="As for `qualms score`.")] = None,
    method: Annotated[
        str, typer.Option("--method", "--methods", help="The spec of the one that decides.")
    ] = DEFAULT,
    coverage: Annotated[
        float | None,
        typer.Option(help="Accept this share of the images.", show_default=str(COVERAGE)),
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(
            help="Accept what is wrong at most this often; needs labels, as class folders."
        ),
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(help="How certain --risk is to hold.", show_default=str(CONFIDENCE)),
    ] = None,
    out: Annotated[Path, typer.Option(help="The threshold file.")] = Path("threshold.json"),
    overwrite: Overwrite = False,
    json_lines: Json = False,
) -> None:
    """Set a threshold on images that the network knows, for `qualms score --threshold`; or say what
    a file holds.

    Without labels it is set by --coverage. With labels (a folder for each class, or those of a .npz
    file) it can be set by --risk: "at most 1 % wrong among the accepted, at confidence 95 %".
    Examples:

        qualms threshold val/ --model timm:resnet18 --coverage 0.95 --out t.json

        qualms threshold val/ --model timm:resnet18 --risk 0.01 --confidence 0.95 --out t.json

        qualms threshold t.json
    """
    if Path(images).suffix.lower() == ".json" and not Path(images).is_dir():
        _show(images, Threshold.load(images), json_lines)
        return
    if model is None:
        raise QualmsError("--model is missing; name the network that the threshold is for.")
    _check(coverage, risk, confidence)
    wanted = parse_methods(method, dataset_name(images, given.root) or "")
    if len(wanted) > 1:
        raise QualmsError(
            f"a threshold is for one method, and --method names {len(wanted)}; choose one."
        )
    require_place(out, overwrite)
    prepared = prepare_run(images, model, wanted, given)
    found = prepared.read(images)
    if risk is not None and found.labels is None:
        raise QualmsError(
            f"{found.source or images} has no labels, which --risk needs; sort the images into a folder for each "
            "class, or set the threshold by --coverage."
        )
    labels = None if risk is None else prepared.network.relabel(found).labels
    scorer, scored = prepared.score_reference(found)
    (scores,) = scored.scores.values()
    right = None if labels is None else scored.prediction.cpu() == labels
    if risk is None or right is None:
        made = Threshold.from_scores(
            scores, COVERAGE if coverage is None else coverage, provenance=scorer.provenance
        )
    else:
        sure = CONFIDENCE if confidence is None else confidence
        made = Threshold.from_labels(scores, right, risk, sure, provenance=scorer.provenance)
    for note in scored.notes.values():
        echo(note)
    with complete(out, found.rejected) as part:
        part.write_text(made.to_json() + "\n")
    accepted = made.accept(scores)
    if json_lines:
        typer.echo(json.dumps({**_content(made), "accepted": int(accepted.sum())}))
    else:
        wrong = "" if right is None else f", {int((~right & accepted.cpu()).sum())} of them wrong"
        typer.echo(
            f"{_promise(made)}. Of {len(found)} images of {found.source or images}, {int(accepted.sum())} are accepted"
            f"{wrong}: {next(iter(wanted))} is at most {made.value:.6g}. The file: {out}"
        )
    exit_if_rejected(found)


def _check(coverage: float | None, risk: float | None, confidence: float | None) -> None:
    if coverage is not None and risk is not None:
        raise QualmsError(
            "--coverage and --risk are two ways to set a threshold; give one of them."
        )
    if confidence is not None and risk is None:
        raise QualmsError("--confidence says how certain a risk is to hold; give --risk with it.")
    for option, share in (("coverage", coverage), ("risk", risk), ("confidence", confidence)):
        if share is not None and not (0 < share < 1 or (option == "coverage" and share == 1)):
            raise QualmsError(f"--{option} is {share:g}; it is a share, above 0 and below 1.")


def _show(path: str, found: Threshold, json_lines: bool) -> None:
    if json_lines:
        typer.echo(json.dumps(_content(found)))
        return
    lines = [f"{path}: inputs whose score is at most {found.value:.6g} are accepted."]
    lines.append(f"{_promise(found)}; set on {found.samples} scores.")
    if found.reference:
        low, middle, high = (found.reference[i] for i in (0, len(found.reference) // 2, -1))
        lines.append(f"These go from {low:.6g} to {high:.6g}, with the median {middle:.6g}.")
    if found.provenance is None:
        lines.append("It does not say which method and network made them: use it with those alone.")
    else:
        how = {name: value for name, value in asdict(found.provenance).items() if value is not None}
        lines.append("It is refused for scores that are made otherwise than by:")
        lines += [f"  {name}: {value}" for name, value in how.items()]
    typer.echo("\n".join(lines))


def _promise(found: Threshold) -> str:
    """What the rule means, in words."""
    kind, *numbers = found.rule.replace(" at confidence", "").split()
    try:
        shares = [f"{100 * float(number):g} %" for number in numbers]
    except ValueError:
        shares = []
    if kind == "coverage" and len(shares) == 1:
        return f"At least {shares[0]} of inputs like these are accepted"
    if kind == "risk" and len(shares) == 2:
        return f"At most {shares[0]} wrong among the accepted, at confidence {shares[1]}"
    if kind == "risk" and len(shares) == 1:
        return f"At most {shares[0]} wrong among the accepted of the inputs that it was set on"
    return f"Its rule is: {found.rule}"


def _content(found: Threshold) -> dict[str, object]:
    """For other programs; without the scores that it was set on, which are many."""
    every = {**asdict(found), "value": found.value if math.isfinite(found.value) else None}
    return {name: value for name, value in every.items() if name != "reference"}
