"""README's test command runs the first case of each test, and leaves out slow ones."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
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


ARGS, PATHS = pytest.Config.ArgsSource.ARGS, pytest.Config.ArgsSource.TESTPATHS


@pytest.mark.parametrize(
    ("source", "marker", "keyword", "all_cases"),
    [(PATHS, "", "", False), (ARGS, "", "", True), (PATHS, "gpu", "", True), (PATHS, "", "law", True)],
)
def test_all_cases_of_what_is_named(source: Any, marker: str, keyword: str, all_cases: bool) -> None:
    option = SimpleNamespace(all=False, markexpr=marker, keyword=keyword)
    config: Any = SimpleNamespace(args_source=source, option=option)
    conftest.pytest_configure(config)
    assert option.all is all_cases
