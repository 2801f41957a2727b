"""Numbers in, Plotly figures out, as plain values for the page's JSON.

Each figure comes with a sentence that sums it up. Colours are names of the style sheet's, `var(--known)`: the page puts
in their values, for light and for dark.
"""

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from qualms.metrics import auroc, lift_curve, raulc, roc, selective_risk
from qualms.report.content import Content
from qualms.report.numbers import Curve, Judged, LayerShares, WithInterval, bins, thinned

Figure = dict[str, Any]
COLOURS = 6  # of unknown groups, in the style sheet; further groups differ by dashes
DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "star")
LONGEST = 28  # letters of a name in a drawing, so that there is room for the drawing
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def auroc_dots(content: Content, judged: Sequence[Judged]) -> tuple[Figure, str]:
    """AUROC of every method against each unknown group, with intervals."""
    series = {g.name: [j.auroc[i] for j in judged] for i, g in enumerate(content.unknown)}
    best = judged[0]
    summary = f"{best.method} tells known from unknown best: AUROC {percent(best.mean_auroc or 0)}"
    summary += " on average; the dotted line is chance." if len(series) > 1 else "; the dotted line is chance."
    return _dots([j.method for j in judged], series, 100.0, "AUROC, %", 50.0, first=1), summary


def raulc_dots(content: Content, judged: Sequence[Judged]) -> tuple[Figure, str]:
    """rAULC of every method that has one, with intervals."""
    there = [(j.method, j.raulc) for j in judged if j.raulc is not None]
    name, best = max(there, key=lambda pair: pair[1].value)
    figure = _dots([m for m, _ in there], {content.known.name: [v for _, v in there]}, 1.0, "rAULC", 0.0, first=0)
    summary = f"{name} is the best at being certain where the network is right: rAULC {best.value:.3f}; "
    return figure, summary + "the dotted line is chance."


def _dots(
    methods: list[str], series: dict[str, list[WithInterval]], scale: float, title: str, chance: float, first: int
) -> Figure:
    figure = go.Figure()
    places = np.arange(len(methods))[::-1]  # the first method on top
    for i, (name, values) in enumerate(series.items()):
        high = [_number(scale * (m.high - m.value)) for m in values]
        low = [_number(scale * (m.value - m.low)) for m in values]
        apart = 0.24 * (i - (len(series) - 1) / 2) / max(1, (len(series) - 1) / 2)
        figure.add_scatter(
            x=[_number(scale * m.value) for m in values],
            y=(places - apart).round(3).tolist(),
            error_x={"type": "data", "array": high, "arrayminus": low, "thickness": 1.5, "width": 3},
            mode="markers",
            marker={"color": colour(i + first), "size": 9, "symbol": MARKERS[i % len(MARKERS)]},
            name=safe(name),
            text=[safe(m, 200) for m in methods],
            hovertemplate="%{text}: %{x}",
        )
    figure.add_vline(chance, line={"color": "var(--muted)", "width": 1, "dash": "dot"})
    figure.update_yaxes(
        tickvals=places.tolist(),
        ticktext=[safe(m, 200) for m in methods],
        range=[-0.6, len(methods) - 0.4],
        automargin=True,
        showgrid=False,
        ticklabelstandoff=6,
    )
    figure.update_xaxes(title_text=title, automargin=True)
    return _finished(figure, height=120 + 34 * len(methods), legend=len(series) > 1)


def histogram(content: Content, method: str) -> tuple[Figure, str]:
    """Scores of all groups, and the line that the slider moves."""
    scores = [group.scores[method] for group in content.groups]
    found = bins(scores)
    figure = go.Figure()
    for i, (group, values) in enumerate(zip(content.groups, scores, strict=True)):
        shares = found.shares(values)
        figure.add_scatter(
            x=rounded(found.edges),
            y=rounded(100 * np.append(shares, shares[-1])),
            line={"color": colour(i), "width": 2, "shape": "hv", "dash": _dash(i)},
            fill="tozeroy",
            fillcolor=f"{colour(i)[:-1]}-soft)",
            mode="lines",
            name=safe(group.name),
            hovertemplate="from score %{x:.3g}: %{y:.1f} %",
        )
    kind = "log" if found.logarithmic else "linear"
    figure.update_xaxes(title_text="score (higher: less certain)", type=kind, automargin=True)
    if found.logarithmic:
        decades = math.log10(found.edges[-1] / found.edges[0])
        figure.update_xaxes(dtick="D2" if decades < 3 else math.ceil(decades / 8), exponentformat="power", tickangle=0)
    figure.update_yaxes(title_text="share of the images, %", rangemode="tozero")
    # The line stays inside the drawing, also where a threshold is beyond it.
    figure.add_shape(
        type="line", x0=0, x1=0, y0=0, y1=1, yref="paper", line={"color": "var(--text)", "width": 2, "dash": "dash"}
    )
    halves = ", ".join(f"{g.name} {np.median(v):.3g}" for g, v in zip(content.groups, scores, strict=True))
    drawn = _finished(figure, height=340)
    drawn["range"] = [float(found.edges[0]), float(found.edges[-1])]
    return drawn, f"Median scores: {halves}."


def roc_curves(content: Content, method: str) -> tuple[Figure, str]:
    """How many unknown images are flagged, against how many known ones."""
    figure = go.Figure()
    figure.add_scatter(x=[0, 100], y=[0, 100], line=_thin(), mode="lines", name="chance", hoverinfo="skip")
    said = []
    for i, group in enumerate(content.unknown, 1):
        scores = content.known.scores[method], group.scores[method]
        x, y = thinned(*roc(*scores))
        figure.add_scatter(
            x=rounded(100 * x),
            y=rounded(100 * y),
            line={"color": colour(i), "width": 2.5, "dash": _dash(i)},
            mode="lines",
            name=safe(group.name),
            hovertemplate="%{y:.1f} % flagged, with %{x:.1f} % of the known",
        )
        said.append(f"{group.name} {percent(auroc(*scores))}")
    figure.update_xaxes(title_text="known images flagged, %", range=[-1, 101])
    figure.update_yaxes(title_text="unknown images flagged, %", range=[-1, 101])
    return _finished(figure, height=360), f"Area under the curve (AUROC): {', '.join(said)}."


def lift(content: Content, method: str) -> tuple[Figure, str]:
    """Accuracy of the most certain known images, in units of the accuracy of all."""
    correct, scores = content.known.correct, content.known.scores[method]
    assert correct is not None
    figure = go.Figure()
    share = 100 * np.arange(1, len(scores) + 1) / len(scores)
    lines = [
        ("ideal order", lift_curve(~correct, correct), _thin()),
        (method, lift_curve(scores, correct), {"color": colour(0), "width": 2.5}),
    ]
    for name, curve, line in lines:
        x, y = thinned(share, curve)
        figure.add_scatter(x=rounded(x), y=rounded(y), line=line, mode="lines", name=safe(name))
    figure.update_traces(hovertemplate="most certain %{x:.1f} %: lift %{y:.3f}")
    figure.update_xaxes(title_text="known images accepted, %", range=[-1, 101])
    figure.update_yaxes(title_text="accuracy / overall accuracy")
    half, whole = (1 - selective_risk(scores, correct, coverage) for coverage in (0.5, 1.0))
    said = f"Of the most certain half {percent(half)} are right, of all {percent(whole)}"
    end = f"; rAULC {raulc(scores, correct):.3f}." if 0 < whole < 1 else "; where all are right there is no rAULC."
    return _finished(figure, height=360), said + end


def layer_map(names: Sequence[str], part: LayerShares, top: float) -> tuple[Figure, str]:
    """LayerContributions by inputs; the page puts the inputs in the chosen method's order."""
    # Indexes on the axis, names as its labels: two layers of one name stay two rows.
    figure = go.Figure(
        go.Heatmap(
            z=[rounded(100 * layer, 3) for layer in part.shares.T],
            zmin=0,
            zmax=_number(100 * top),
            colorscale="Cividis",
            colorbar={"title": {"text": "%"}, "thickness": 12, "outlinewidth": 0},
            hovertemplate="%{y}: %{z} % of input %{x}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="inputs, from certain to uncertain", showgrid=False, showticklabels=False, ticks="")
    few = range(0, len(names), math.ceil(len(names) / 24))
    figure.update_yaxes(
        tickvals=list(few),
        ticktext=[safe(names[i]) for i in few],
        autorange="reversed",
        automargin=True,
        showgrid=False,
    )
    first, *others = np.argsort(-part.mean, kind="stable")[:2]
    said = f"In {part.group} most comes from layer {names[first]} ({percent(part.mean[first])} on average)"
    said += f", then from {names[others[0]]} ({percent(part.mean[others[0]])})." if others else "."
    return _finished(figure, height=150 + min(420, max(120, 24 * len(names))), legend=False), said


def learning(curves: Sequence[Curve], title: str, best: str) -> tuple[Figure, str]:
    """A measure over the number of labels, a line for each method; bars from the least to the most over the seeds."""
    scale = 100 if best == "highest" else 1
    figure = go.Figure()
    for i, curve in enumerate(curves):
        bars = [
            [_number(scale * (high - mean)) for high, mean in zip(curve.high, curve.mean, strict=True)],
            [_number(scale * (mean - low)) for low, mean in zip(curve.low, curve.mean, strict=True)],
        ]
        figure.add_scatter(
            x=curve.labelled,
            y=rounded(scale * np.array(curve.mean)),
            error_y={"type": "data", "array": bars[0], "arrayminus": bars[1], "thickness": 1, "width": 2},
            mode="lines+markers",
            line={"color": colour(i), "width": 2, "dash": _dash(i)},
            marker={"symbol": MARKERS[i % len(MARKERS)], "size": 7},
            name=safe(curve.method),
        )
    figure.update_traces(hovertemplate="%{x} labels: %{y}")
    figure.update_xaxes(title_text="labelled images")
    figure.update_yaxes(title_text=title)
    chosen = (max if best == "highest" else min)(curves, key=lambda curve: curve.mean[-1])
    last = percent(chosen.mean[-1]) if best == "highest" else f"{chosen.mean[-1]:.3f}"
    return _finished(figure, height=360), f"After {chosen.labelled[-1]} labels {chosen.method} is {best}: {last}."


def colour(i: int) -> str:
    """Of the known images (0) and of the unknown groups."""
    return "var(--known)" if i == 0 else f"var(--group-{(i - 1) % COLOURS + 1})"


def _dash(i: int) -> str:
    return DASHES[i % len(DASHES)]


def _thin() -> dict[str, Any]:
    return {"color": "var(--muted)", "width": 1.5, "dash": "dot"}


def safe(name: str, most: int = LONGEST) -> str:
    """A name that Plotly shows as it is, where it would read tags as markup; a long one is cut."""
    return html.escape(name if len(name) <= most else f"{name[: most - 1]}…", quote=False)


def percent(share: float) -> str:
    """With one decimal; the sign stays on the line of the number."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def rounded(values: np.ndarray, digits: int = 5) -> list[float]:
    """As many significant digits as a drawing can show."""
    return [float(f"{v:.{digits}g}") for v in values]


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _finished(figure: go.Figure, height: int, legend: bool = True) -> Figure:
    """With the page's look, as plain values."""
    axis = {
        "gridcolor": "var(--line)",
        "linecolor": "var(--muted)",
        "zeroline": False,
        "showline": True,
        "title": {"standoff": 10, "font": {"size": 13}},
        "fixedrange": True,  # so that a finger on a plot scrolls the page
    }
    figure.update_xaxes(axis)
    figure.update_yaxes(axis)
    figure.update_layout(
        height=height,
        showlegend=legend,
        margin={"l": 56, "r": 16, "t": 16, "b": 52},
        font={"family": FONT, "size": 13, "color": "var(--text)"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel={"bgcolor": "var(--surface)", "bordercolor": "var(--line)", "namelength": 40},
        # A legend that can be clicked but not reached by keyboard would be half a control.
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "itemclick": False,
            "itemdoubleclick": False,
        },
    )
    drawn = figure.to_plotly_json()
    drawn["layout"].pop("template", None)
    return {"data": [*drawn["data"]], "layout": drawn["layout"]}
