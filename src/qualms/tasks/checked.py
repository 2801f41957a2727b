"""Whether what a file holds is a row: all its keys are there, and each value is of its kind."""

import sys
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qualms.tasks import rows

KINDS: dict[str, Any] = {
    "ood": rows.OodRow,
    "calibration": rows.CalibrationRow,
    "scores": rows.ScoresRow,
    "accuracy": rows.AccuracyRow,
    "cycle": rows.CycleRow,
    "pick": rows.PickRow,
    "runtime": rows.RuntimeRow,
    "tokens": rows.TokensRow,
    "text": rows.TextRow,
    "next-token": rows.NextTokenRow,
    "part": rows.PartRow,
}


def require_row(row: Any, whole: bool) -> None:
    """A ValueError if a value is of another kind than in a row of `KINDS`, or, of a `whole` row, a
    key is missing.

    Rows of kinds that are not there, such as that of the run, may hold anything.
    """
    kind = row.get("row") if isinstance(row, dict) else None
    if not isinstance(row, dict) or (whole and not isinstance(kind, str)):
        raise ValueError("no row")
    wanted = KINDS.get(kind) if isinstance(kind, str) else None
    if wanted is None:
        return
    hints = _hints(wanted)
    if not all(_is(value, hints[key]) for key, value in row.items() if key in hints):
        raise ValueError("values of other kinds")
    if whole and not wanted.__required_keys__ <= row.keys():
        raise ValueError("keys are missing")


@cache
def _hints(wanted: Any) -> dict[str, Any]:
    return get_type_hints(wanted)


def _is(value: Any, kind: Any) -> bool:
    made_of, inside = get_origin(kind), get_args(kind)
    if made_of is Literal:
        return value in inside
    if made_of in (Union, UnionType):
        return any(_is(value, one) for one in inside)
    if made_of is list:
        return isinstance(value, list) and all(_is(one, inside[0]) for one in value)
    if made_of is dict:
        return isinstance(value, dict) and all(_is(one, inside[1]) for one in value.values())
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return value is None if kind in (None, NoneType) else type(value) is kind
