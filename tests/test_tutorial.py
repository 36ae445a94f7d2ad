"""The tutorial from scratch: its code runs in order, and what it computes agrees with what can be enumerated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from tests.test_docs import MAX_SENTENCE, VAGUE, sentences, words

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorials" / "smc-from-scratch.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
PROSE = "\n\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
SECTIONS = re.findall(r"^## \d+\. .*$", PROSE, re.MULTILINE)
MAX_WORDS, MAX_Z = 900, 4.0


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """Runs the code cell by cell, and returns its variables; `figures` are those that it drew."""
    before = mpl.get_backend()
    mpl.use("Agg")
    from matplotlib import pyplot

    found: dict[str, Any] = {}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), found)
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        figure.canvas.draw()
    found["figures"] = pyplot.get_fignums()
    yield found
    pyplot.close("all")
    mpl.use(before)


@pytest.mark.slow
def test_each_section_draws_a_figure(names: dict[str, Any]) -> None:
    assert len(SECTIONS) == 7
    assert len(names["figures"]) == len(SECTIONS)


@pytest.mark.slow
def test_evidence_agrees_with_enumeration(names: dict[str, Any]) -> None:
    """By a z-test, which sees an error of a tenth."""
    estimates = names["estimates"]
    error = estimates.std(ddof=1) / np.sqrt(len(estimates))
    assert abs(names["z"]) < MAX_Z
    assert np.isclose(names["z"], (estimates.mean() - names["exact"]) / error)
    assert abs(estimates.mean() - 1.1 * names["exact"]) / error > MAX_Z, "negative control"


@pytest.mark.slow
def test_own_steps_agree_with_the_package(names: dict[str, Any]) -> None:
    assert np.isclose(names["ess"], names["packaged"], rtol=1e-5)
    for counts in (names["own"], names["offspring"]):
        assert counts.sum() == names["N"]
        assert np.all(np.abs(counts - names["N"] * names["W"]) < 1 + 1e-4)
    for control, weights in names["controlled"].items():
        assert weights.min() >= control * (1 - 1e-4)
        assert abs(weights.mean() - 1) <= MAX_Z * weights.std(ddof=1) / np.sqrt(len(weights)) + 1e-5
    assert np.ptp(names["controlled"][1.0]) < 1e-4 < np.ptp(names["controlled"][0.1])


def test_prose_is_short() -> None:
    assert len(PROSE.split()) <= MAX_WORDS
    assert not [sentence for sentence in sentences(PROSE) if words(sentence) > MAX_SENTENCE]
    assert not VAGUE.findall(PROSE)


def test_no_output_is_stored() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS if cell["cell_type"] == "code")
