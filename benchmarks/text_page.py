"""The tables of docs/results.md about texts, from the rows of `text.py`."""

from typing import Any

Row = dict[str, Any]


def fill(rows: list[Row]) -> None:
    """Write the tables."""
