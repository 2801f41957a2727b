"""`qualms threshold`: set the score up to which a prediction is accepted, or show one."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from qualms.cli.options import (
    MODEL,
    Json,
    Overwrite,
    parse_methods,
    with_options,
)
from qualms.cli.scoring_run import ScoreOptions, ScoringRun, prepare_run
from qualms.cli.status import echo, exit_if_incomplete
from qualms.cli.table_file import require_new_file, write_with_rejections
from qualms.data import Images, dataset_name
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT
from qualms.threshold import Threshold

# The defaults of --coverage and --confidence.
COVERAGE = 0.95
CONFIDENCE = 0.95


@with_options(ScoreOptions)
def threshold(
    options: ScoreOptions,
    images: Annotated[
        str,
        typer.Argument(
            help="Images that the network knows, as for `qualms score`; or a threshold file "
            "to show."
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", help=MODEL)] = None,
    method: Annotated[
        str, typer.Option("--method", "--methods", help="The method that decides what is accepted.")
    ] = DEFAULT,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="Accept this share of the images, from 0 to 1.", show_default=str(COVERAGE)
        ),
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(
            help="Accept at most this share of wrong predictions; needs labels, such as a folder "
            "per class."
        ),
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(help="Probability that --risk holds.", show_default=str(CONFIDENCE)),
    ] = None,
    out: Annotated[Path, typer.Option(help="Write the threshold to this file.")] = Path(
        "threshold.json"
    ),
    overwrite: Overwrite = False,
    json_lines: Json = False,
) -> None:
    """Set a threshold on images that the network knows, for `qualms score`; or show one.

    Without labels, set it by --coverage. With labels (a folder per class, or those of a .npz file),
    you can set it by --risk, such as "at most 1 % of accepted predictions are wrong, with 95 %
    confidence". Examples:

        qualms threshold val/ --model timm:resnet18 --coverage 0.95 --out t.json

        qualms threshold val/ --model timm:resnet18 --risk 0.01 --confidence 0.95 --out t.json

        qualms threshold t.json

    \f

    Args:
        options: The options that `threshold` shares with `score`.
        images: Images that the network knows, or a threshold file.
        model: The network.
        method: The method whose score decides.
        coverage: The share of the images that is accepted.
        risk: The share of the accepted that may be wrong.
        confidence: The probability with which the risk must hold.
        out: The threshold file.
        overwrite: Whether to replace an existing file.
        json_lines: Whether to print JSON.
    """
    if Path(images).suffix.lower() == ".json" and not Path(images).is_dir():
        _print_threshold(images, Threshold.load(images), json_lines)
        return
    if model is None:
        raise QualmsError("--model is missing; pass the network that the threshold is for.")
    _check_shares(coverage, risk, confidence)
    requested_method = _parse_method(method, dataset_name(images, options.root) or "")
    require_new_file(out, overwrite)
    run = prepare_run(images, model, requested_method, options)
    known_images = run.read(images)
    labels = None if risk is None else _require_labels(run, known_images, images)
    scorer, scored = run.score_reference(known_images)
    # `score_reference` scores by one method alone.
    (scores,) = scored.scores.values()
    is_correct = None if labels is None else scored.prediction.cpu() == labels
    if risk is None or is_correct is None:
        share = COVERAGE if coverage is None else coverage
        new_threshold = Threshold.from_scores(scores, share, provenance=scorer.provenance)
    else:
        probability = CONFIDENCE if confidence is None else confidence
        new_threshold = Threshold.from_labels(
            scores, is_correct, risk, probability, provenance=scorer.provenance
        )
    for note in scored.notes.values():
        echo(note)
    with write_with_rejections(out, known_images.rejected) as temp_path:
        temp_path.write_text(new_threshold.to_json() + "\n")
    is_accepted = new_threshold.accept(scores)
    num_accepted = int(is_accepted.sum())
    if json_lines:
        typer.echo(json.dumps({**_to_json_values(new_threshold), "accepted": num_accepted}))
    else:
        spec = next(iter(requested_method))
        wrong = ""
        if is_correct is not None:
            wrong = f", {int((~is_correct & is_accepted.cpu()).sum())} of them wrong"
        typer.echo(
            f"{_describe_guarantee(new_threshold)}. Of {len(known_images)} images of "
            f"{known_images.source or images}, {num_accepted} are accepted{wrong}: {spec} is "
            f"at most {new_threshold.value:.6g}. Saved to {out}"
        )
    exit_if_incomplete(len(known_images.rejected))


def _check_shares(coverage: float | None, risk: float | None, confidence: float | None) -> None:
    """Raise an error if the options contradict each other, or are not between 0 and 1.

    Args:
        coverage: The value of --coverage.
        risk: The value of --risk.
        confidence: The value of --confidence.
    """
    if coverage is not None and risk is not None:
        raise QualmsError(
            "--coverage and --risk are two ways to set a threshold; pass one of them."
        )
    if confidence is not None and risk is None:
        raise QualmsError("--confidence is the probability that a risk holds; pass --risk too.")
    for option, share in (("coverage", coverage), ("risk", risk), ("confidence", confidence)):
        if share is None or 0 < share < 1 or (option == "coverage" and share == 1):
            continue
        raise QualmsError(f"--{option} is {share:g}; pass a share above 0 and below 1.")


def _parse_method(text: str, dataset: str) -> dict[str, Method]:
    """Parse --method, or raise an error if it names several methods.

    Args:
        text: The value of --method.
        dataset: The dataset that decides the settings of the paper's methods.

    Returns:
        A dict of one method, by its spec.
    """
    methods = parse_methods(text, dataset)
    if len(methods) > 1:
        raise QualmsError(
            f"a threshold is for one method, but --method names {len(methods)}; choose one."
        )
    return methods


def _require_labels(run: ScoringRun, images: Images, name: str) -> Tensor | None:
    """Return the labels of n images as class indices of the network, [n].

    Raise an error if the images have no labels.

    Args:
        run: The network and the method.
        images: The images, which must have labels.
        name: The name of the images in the error.
    """
    if images.labels is None:
        raise QualmsError(
            f"{images.source or name} has no labels, which --risk needs; sort the images into a "
            "folder per class, or set the threshold by --coverage."
        )
    return run.network.relabel(images).labels


def _print_threshold(path: str, threshold: Threshold, json_lines: bool) -> None:
    """Print what a threshold file holds.

    Args:
        path: The file.
        threshold: The threshold in the file.
        json_lines: Whether to print the threshold as JSON.
    """
    if json_lines:
        typer.echo(json.dumps(_to_json_values(threshold)))
        return
    lines = [f"{path}: inputs whose score is at most {threshold.value:.6g} are accepted."]
    lines.append(f"{_describe_guarantee(threshold)}; set on {threshold.samples} scores.")
    # The reference scores are in ascending order.
    if threshold.reference:
        low, high = threshold.reference[0], threshold.reference[-1]
        median = threshold.reference[len(threshold.reference) // 2]
        lines.append(f"These range from {low:.6g} to {high:.6g}, with median {median:.6g}.")
    if threshold.provenance is None:
        lines.append(
            "It does not record its method and network; use it only with the ones that it was set "
            "for."
        )
    else:
        lines.append("It is valid only for scores computed with:")
        for name, value in asdict(threshold.provenance).items():
            if value is not None:
                lines.append(f"  {name}: {value}")
    typer.echo("\n".join(lines))


def _describe_guarantee(threshold: Threshold) -> str:
    """Return what the rule of a threshold guarantees, as a clause.

    For example `At least 95 % of inputs like these are accepted`.

    Args:
        threshold: The threshold, with a rule such as `coverage 0.95` or `risk 0.01`, or any other
            text.
    """
    # Of `risk 0.01 at confidence 0.95`, the words are `risk`, `0.01` and `0.95`.
    kind, *numbers = threshold.rule.replace(" at confidence", "").split()
    try:
        shares = [f"{100 * float(number):g} %" for number in numbers]
    # The rule is in the user's own words.
    except ValueError:
        shares = []
    if kind == "coverage" and len(shares) == 1:
        return f"At least {shares[0]} of inputs like these are accepted"
    if kind == "risk" and len(shares) == 2:
        return f"At most {shares[0]} of accepted predictions are wrong, with {shares[1]} confidence"
    if kind == "risk" and len(shares) == 1:
        return f"At most {shares[0]} of accepted predictions are wrong, on the calibration inputs"
    return f"The rule is: {threshold.rule}"


def _to_json_values(threshold: Threshold) -> dict[str, object]:
    """Return a threshold as a dict for JSON, without the scores that it was set on.

    The value of a threshold that accepts nothing is minus infinity, which JSON lacks; it becomes
    None.
    """
    content = asdict(threshold)
    del content["reference"]
    if not math.isfinite(threshold.value):
        content["value"] = None
    return content
