"""A report's content in, one HTML file out: all that it needs is inside, and it asks the network for nothing."""

import base64
from collections.abc import Iterable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from qualms.errors import QualmsError
from qualms.report.content import Content
from qualms.report.gallery import Picture, pictures, png
from qualms.report.numbers import Judged, LearningMeasure, WithInterval, at_a_glance, layer_shares, learning_curves
from qualms.version import __version__

COVERAGE = 95  # where the slider stands first, in percent of the known images
DIAGRAMS = {
    "histogram": "Scores of known and unknown images",
    "roc": "ROC curves",
    "lift": "Lift curve",
}
LEARNING: dict[LearningMeasure, tuple[str, str]] = {  # the axis, and which end of it is best
    "accuracy": ("accuracy, %", "highest"),
    "nll": ("negative log-likelihood", "lowest"),
}


def write_page(content: Content, path: str | Path, *, resamples: int = 1000) -> Path:
    """Write the report as one HTML file; `resamples` is how many each interval is made from."""
    for package in ("jinja2", "plotly", "PIL"):
        if find_spec(package) is None:
            raise QualmsError(f"the report page needs {package}; pip install 'qualms[app]'")
    path = Path(path)
    text = _html(content, at_a_glance(content, resamples))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise QualmsError(f"{path} cannot be written ({error.strerror}); choose another place.") from None
    return path


def _html(content: Content, judged: list[Judged]) -> str:
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    parts = {name: (files(__package__) / name).read_text("utf-8") for name in ("page.css", "page.js")}
    fixed = _fixed(content, judged)
    data = _data(content, judged, fixed)
    return environment.from_string((files(__package__) / "page.html.jinja").read_text("utf-8")).render(
        title=content.title,
        about=content.about,
        groups=[_told(content, i) for i in range(len(content.groups))],
        head=_head(content, judged),
        rows=[_cells(content, j) for j in judged],
        methods=[j.method for j in judged],
        coverage=COVERAGE,
        diagrams={key: title for key, title in DIAGRAMS.items() if key in data["methods"][0]["figures"]},
        fixed=fixed,
        labelled=content.known.correct is not None,
        data=data,
        css=parts["page.css"],
        js=parts["page.js"],
        plotly=get_plotlyjs(),
        version=__version__,
    )


def _told(content: Content, i: int) -> dict[str, str]:
    group = content.groups[i]
    right = None if i or group.correct is None else group.correct.mean()
    words = f"{len(group.images)} {'unknown' if i else 'known'} images"
    return {
        "name": group.name,
        "words": words if right is None else f"{words}, {100 * right:.1f}\N{NO-BREAK SPACE}% predicted right",
    }


def _head(content: Content, judged: list[Judged]) -> list[dict[str, str]]:
    """The columns after the methods' names, and what they mean."""
    head = []
    if len(content.unknown) > 1:
        head.append({"of": "mean", "text": "AUROC, %", "why": "over the unknown groups"})
    for group in content.unknown:
        head.append({"of": group.name, "text": "AUROC, %", "why": "with its 95 % interval; 50 is chance"})
        head.append({"of": group.name, "text": "AUPR, %", "why": "unknown images as the positive class"})
    if any(j.raulc is not None for j in judged):
        head.append(
            {
                "of": content.known.name,
                "text": "rAULC",
                "why": "with its 95 % interval; 1 is the ideal order, 0 is chance",
            }
        )
    if content.costs:
        head.append({"of": "cost", "text": "forward passes", "why": "over the images"})
    return head


def _cells(content: Content, judged: Judged) -> list[dict[str, Any]]:
    """A row's cells: what is shown, and what is sorted by."""
    cells: list[dict[str, Any]] = []
    if len(content.unknown) > 1 and judged.mean_auroc is not None:
        cells.append({"text": f"{100 * judged.mean_auroc:.1f}", "range": "", "key": judged.mean_auroc})
    for area, precision in zip(judged.auroc, judged.aupr, strict=True):
        cells.append({"text": f"{100 * area.value:.1f}", "range": _range(area, 100.0, 1), "key": area.value})
        cells.append({"text": f"{100 * precision:.1f}", "range": "", "key": precision})
    if judged.raulc is not None:
        cells.append(
            {"text": f"{judged.raulc.value:.3f}", "range": _range(judged.raulc, 1.0, 3), "key": judged.raulc.value}
        )
    if content.costs:
        cost = "" if judged.cost is None else judged.cost
        cells.append({"text": cost if isinstance(cost, str) else f"{cost:g}", "range": "", "key": cost})
    return cells


def _range(measured: WithInterval, scale: float, digits: int) -> str:
    if not np.isfinite(measured.low):
        return ""
    return f"[{scale * measured.low:.{digits}f}, {scale * measured.high:.{digits}f}]"


def _fixed(content: Content, judged: list[Judged]) -> dict[str, list[dict[str, Any]]]:
    """The figures that no choice of a method changes but in the order of inputs, by section."""
    from qualms.report import figures

    glance, learning, layers = [], [], []
    if content.unknown:
        glance.append(_named("AUROC against each unknown group", *figures.auroc_dots(content, judged)))
    if any(j.raulc is not None for j in judged):
        glance.append(_named("Certain where it is right: rAULC", *figures.raulc_dots(content, judged)))
    for measure, (title, best) in LEARNING.items():
        for data, curves in learning_curves(content.cycles, measure).items():
            if curves:
                learning.append(_named(f"{data}: {title}", *figures.learning(curves, title, best)))
    if content.layers is not None:
        found = layer_shares(content, content.layers)
        top = max(float(part.shares.max()) for part in found) or 1.0
        for part in found:
            drawn = _named(part.group, *figures.layer_map(content.layers.names, part, top))
            layers.append({**drawn, "orders": [part.orders[j.method] for j in judged]})
    return {"glance": glance, "layers": layers, "learning": learning}


def _named(title: str, figure: dict[str, Any], summary: str) -> dict[str, Any]:
    return {"title": title, "figure": figure, "summary": summary}


def _diagrams(content: Content, method: str) -> dict[str, dict[str, Any]]:
    from qualms.report import figures

    found = {"histogram": figures.histogram(content, method)}
    if content.unknown:
        found["roc"] = figures.roc_curves(content, method)
    if content.known.correct is not None and content.known.correct.any():
        found["lift"] = figures.lift(content, method)
    return {key: {"figure": figure, "summary": summary} for key, (figure, summary) in found.items()}


def _data(content: Content, judged: list[Judged], fixed: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the page's script reads."""
    addresses: dict[str, str] = {}
    methods = []
    for method in (j.method for j in judged):
        known = content.known.scores[method]
        order = np.argsort(known, kind="stable")
        correct = content.known.correct
        methods.append(
            {
                "name": method,
                "figures": _diagrams(content, method),
                "scores": [packed(np.sort(group.scores[method])) for group in content.groups],
                "correct": None if correct is None else packed(correct[order].astype(np.uint8)),
                "gallery": [
                    [_shown(content, i, shown, addresses) for shown in both]
                    for i, both in enumerate(pictures(content, method))
                ],
            }
        )
    names = [group.name for group in content.groups]
    return {"groups": names, "methods": methods, "images": addresses, "fixed": fixed}


def _shown(content: Content, group: int, shown: Iterable[Picture], addresses: dict[str, str]) -> list[dict[str, Any]]:
    """Captions, with the images among `addresses`, where each is only once."""
    found = []
    for picture in shown:
        key = f"{group}/{picture.index}"
        if key not in addresses:
            addresses[key] = png(content.groups[group].images, picture.index)
        said = {"image": key, "alt": picture.alt, "predicted": picture.predicted, "label": picture.label}
        found.append({**said, "right": picture.right, "score": picture.score})
    return found


def packed(values: np.ndarray) -> dict[str, str]:
    """An array without a digit lost: half as long where single precision holds every value exactly."""
    if values.dtype == np.uint8:
        kind = "u1"
    else:
        values = values.astype(np.float64)
        with np.errstate(over="ignore"):  # what single precision cannot hold is not equal, and kept in double
            kind = "f4" if (values.astype(np.float32) == values).all() else "f8"
    return {"kind": kind, "bytes": base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()}
