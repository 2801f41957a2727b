"""The table that compares methods: its columns, its cells, and what they say in a sentence or two."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qualms.report.content import Content
from qualms.report.figures import percent
from qualms.report.numbers import Judged, Verdict, WithInterval
from qualms.report.roles import default_of, not_for_use

SHOWN = (
    3  # unknown groups that have a column at once; further ones are among the columns to ask for
)


@dataclass(frozen=True)
class Column:
    """A column after the method's name.

    `place` says when there is room for it: `first` always, `wide` on anything wider than a phone,
    `more` if asked for.
    """

    of: str
    text: str
    why: str
    place: str


@dataclass(frozen=True)
class Span:
    """What whiskers are drawn on: the intervals of the methods that are for use, but little of what
    is below chance.
    """

    low: float
    high: float
    chance: float

    def at(self, value: float) -> float:
        """In percent of the width; what lies beyond is put at the end."""
        return round(100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low))), 2)


def columns(content: Content, judged: Sequence[Judged]) -> list[Column]:
    """Those that these images and labels can fill."""
    groups, found = content.unknown, []
    if len(groups) > 1:
        found.append(
            Column(
                f"mean of {len(groups)}",
                "AUROC, %",
                "over the unknown groups; 50 is chance",
                "first",
            )
        )
    place = "first" if len(groups) == 1 else "wide" if len(groups) <= SHOWN else "more"
    for group in groups:
        found.append(Column(group.name, "AUROC, %", "with its 95 % interval; 50 is chance", place))
    for group in groups:
        found.append(Column(group.name, "AUPR, %", "unknown images as the positive class", "more"))
    if any(j.raulc is not None for j in judged):
        why = "with its 95 % interval; 1 is the ideal order, 0 is chance"
        found.append(Column(content.known.name, "rAULC", why, "more" if groups else "first"))
    if content.costs:
        numbers = all(isinstance(cost, int | float) for cost in content.costs.values())
        why = "time, where 1× is a forward pass" if numbers else "in forward passes"
        found.append(Column("", "cost", why, "first" if numbers else "more"))
    return found


def cells(content: Content, judged: Sequence[Judged], one: Judged) -> list[dict[str, Any]]:
    """A row: what is shown, what is sorted by, and where the dot and the whisker stand; in the
    order of `columns`.
    """
    unused = not_for_use(content)
    used = [j for j in judged if j.method not in unused]
    areas = _span([a for j in used for a in (j.mean_auroc, *j.auroc) if a is not None], 0.5)
    lifts = _span([j.raulc for j in used if j.raulc is not None], 0.0)
    found = []
    if len(content.unknown) > 1 and one.mean_auroc is not None:
        found.append(_with_interval(one.mean_auroc, 100, 1, areas))
    found += [_with_interval(area, 100, 1, areas) for area in one.auroc]
    found += [_plain(f"{100 * precision:.1f}", precision) for precision in one.aupr]
    if one.raulc is not None:
        found.append(_with_interval(one.raulc, 1, 3, lifts))
    if content.costs:
        cost = "" if one.cost is None else one.cost
        found.append(_plain(cost if isinstance(cost, str) else times(cost), cost))
    return found


def times(cost: int | float) -> str:
    """`56×`: how many forward passes a method takes as long as."""
    return f"{cost:.0f}×" if cost >= 9.95 else f"{cost:.1f}".removesuffix(".0") + "×"


def said(content: Content, judged: Sequence[Judged], found: Verdict) -> list[str]:
    """What the table shows, in sentences; nothing is called best that may be chance."""
    if found.highest is None:
        return [nothing_to_compare(content)]
    measure = (
        "rAULC" if not content.unknown else "mean AUROC" if len(content.unknown) > 1 else "AUROC"
    )
    digits, scale, chance = (1, 100, "50 %") if content.unknown else (3, 1, "0")
    main = {j.method: _said(j.main, scale, digits) for j in judged if j.main is not None}
    highest = found.highest.method
    if found.best is None:
        told = [
            f"No method does better than chance here: the highest {measure}, that of {highest}, is {main[highest]}"
        ]
        told[0] += f", and {chance} is chance."
    else:
        told = [f"{highest} has the highest {measure}, {main[highest]}."]
        if found.tied:
            one = "The interval of 1 other overlaps with it (tinted)."
            told.append(
                one
                if len(found.tied) == 1
                else f"The intervals of {len(found.tied)} others overlap with it (tinted)."
            )
    default = default_of(content)
    if default not in (None, highest) and default in main:
        told.append(f"The default, {default}, has {main[default]}.")
    return told


def nothing_to_compare(content: Content) -> str:
    """Why no method can be called better than another."""
    correct = content.known.correct
    start = (
        "These images cannot say which method is better: there are no unknown images to tell apart"
    )
    if correct is None:
        return f"{start}, and no labels that say which predictions are wrong."
    return f"{start}, and {'every' if correct.all() else 'no'} prediction is right."


def _said(main: WithInterval, scale: int, digits: int) -> str:
    value = percent(main.value) if scale == 100 else f"{main.value:.{digits}f}"
    return f"{value} {_range(main, scale, digits)}".strip()


def _range(measured: WithInterval, scale: int, digits: int) -> str:
    if not math.isfinite(measured.low):
        return ""
    return f"[{scale * measured.low:.{digits}f}, {scale * measured.high:.{digits}f}]"


def _span(measured: Sequence[WithInterval], chance: float) -> Span:
    ends = [end for m in measured for end in (m.low, m.value, m.high) if math.isfinite(end)] or [
        0.0,
        1.0,
    ]
    low, high = min(ends), max(ends)
    low = max(low, chance - 0.1 * abs(high - chance))
    room = 0.04 * (high - low) or 0.05
    return Span(low - room, high + room, chance)


def _plain(text: str, key: int | float | str) -> dict[str, Any]:
    return {"text": text, "key": key, "range": "", "whisker": None}


def _with_interval(measured: WithInterval, scale: int, digits: int, span: Span) -> dict[str, Any]:
    known = math.isfinite(measured.low)
    low, high = (measured.low, measured.high) if known else (measured.value, measured.value)
    whisker = {
        "low": span.at(low),
        "width": round(span.at(high) - span.at(low), 2),
        "at": span.at(measured.value),
    }
    whisker["chance"] = span.at(span.chance) if span.low < span.chance < span.high else -1
    return {
        "text": f"{scale * measured.value:.{digits}f}",
        "key": measured.value,
        "range": _range(measured, scale, digits),
        "whisker": whisker,
    }
