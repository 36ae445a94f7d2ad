"""Tables in Markdown."""

from __future__ import annotations

from smcjax.markdown import head, row, table


def test_a_table_is_its_head_and_its_rows() -> None:
    rows = [["a", 1], ["b", 2.5]]
    assert table(["", "n"], iter(rows)) == "|  | n |\n|---|---|\n| a | 1 |\n| b | 2.5 |"
    assert table(["", "n"], rows) == "\n".join([head(["", "n"]), *map(row, rows)])
