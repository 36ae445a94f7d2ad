"""README's test command runs the first case of each test, and leaves out slow ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.first_cases import first_cases


@dataclasses.dataclass(frozen=True)
class Item:
    nodeid: str
    marker: str = ""

    def get_closest_marker(self, name: str) -> bool:
        return name == self.marker


def test_the_first_case_of_each_test_but_slow_ones() -> None:
    items: list[Any] = [
        Item("a.py::one[1]"),
        Item("a.py::one[2]"),
        Item("a.py::two"),
        Item("b.py::one[x[y]]"),
        Item("b.py::slow[1]", "slow"),
        Item("b.py::slow[2]"),
    ]
    assert [item.nodeid for item in first_cases(items)] == ["a.py::one[1]", "a.py::two", "b.py::one[x[y]]"]
