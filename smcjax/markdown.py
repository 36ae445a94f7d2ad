"""Tables in Markdown, as reports print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """A table without a line behind it; cells are anything that `str` shows."""
    return "\n".join([head(heads), *map(row, rows)])


def head(heads: Sequence[object]) -> str:
    """The two lines that a table begins with, for one whose rows are printed as they come."""
    return f"{row(heads)}\n{'|---' * len(heads)}|"


def row(cells: Iterable[object]) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"
