"""README's test command runs the first case of each test, and leaves out slow ones."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.first_cases import first_cases


@dataclasses.dataclass(frozen=True)
class Item:
    nodeid: str
    marker: str = ""

    def get_closest_marker(self, name: str) -> bool:
        return name == self.marker


ITEMS = [
    Item("a.py::one[1]"),
    Item("a.py::one[2]"),
    Item("a.py::two"),
    Item("b.py::one[x[y]]"),
    Item("b.py::slow[1]", "slow"),
    Item("b.py::slow[2]"),
]


@pytest.mark.parametrize(
    ("items", "expected"),
    [(ITEMS, ["a.py::one[1]", "a.py::two", "b.py::one[x[y]]"]), (ITEMS[::-1], ["b.py::slow[2]", "b.py::one[x[y]]"])],
)
def test_the_first_case_of_each_test_but_slow_ones(items: list[Any], expected: list[str]) -> None:
    assert [item.nodeid for item in first_cases(items)][: len(expected)] == expected


@pytest.mark.slow
def test_all_cases_of_a_named_file() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-n", "1", __file__, "-k", "test_the_first_case"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "2 passed" in done.stdout
