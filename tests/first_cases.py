"""Which tests `pytest` runs where none is named."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def first_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The first case of each test function, but those that are marked `slow`."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    return [item for item in first.values() if not item.get_closest_marker("slow")]
