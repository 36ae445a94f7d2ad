"""Genealogies against plain walks from node to node; pictures that parse, repeat bit for bit and never half exist."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import unicodedata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import matplotlib.style
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from smcjax.viz.draw import MAX_LABELLED_PARTICLES, _figure, draw, excerpt, normalise
from smcjax.viz.genealogy import DEAD, SHARED, descendants, families, finished_nodes, lineages
from smcjax.viz.picture import ANSWER, STYLE
from smcjax.viz.trace_file import TraceFile
from tests.traces import history, random_ancestors

SIZES = st.integers(0, 8), st.integers(1, 12), st.integers(0, 2**32)
SVG = "{http://www.w3.org/2000/svg}"

# ------------------------------------------------------------------------------------------------------ genealogy


def line(ancestors: np.ndarray, j: int) -> list[int]:
    """Rows of the line that ends in final particle j, from the start on."""
    rows = [j]
    for parents in ancestors[::-1]:
        rows.append(int(parents[rows[-1]]))
    return rows[::-1]


def heirs(ancestors: np.ndarray, t: int, row: int) -> list[int]:
    """The final particles that descend from node (t, row)."""
    return [j for j in range(ancestors.shape[1]) if line(ancestors, j)[t] == row]


@given(*SIZES)
def test_lineages_and_descendants(cycles: int, n: int, seed: int) -> None:
    _, ancestors = random_ancestors(cycles, n, seed)
    rows, counts = lineages(ancestors), descendants(ancestors)
    assert rows.shape == counts.shape == (cycles + 1, n)
    for j in range(n):
        assert rows[:, j].tolist() == line(ancestors, j)
        for t in range(cycles + 1):
            assert counts[t, j] == len(heirs(ancestors, t, j))
    assert (counts.sum(axis=1) == n).all()


@given(*SIZES, st.integers(1, 7))
def test_families(cycles: int, n: int, seed: int, most: int) -> None:
    _, ancestors = random_ancestors(cycles, n, seed)
    lines = [line(ancestors, j) for j in range(n)]
    survivors = [sorted({rows[t] for rows in lines}) for t in range(cycles + 1)]
    cut = max((t for t in range(cycles + 1) if len(survivors[t]) <= most), default=0)
    family = [survivors[cut].index(rows[cut]) % most for rows in lines]
    result = families(ancestors, most)
    assert result.shape == (cycles + 1, n)
    for t in range(cycles + 1):
        for row in range(n):
            found = {family[j] for j in heirs(ancestors, t, row)}
            assert result[t, row] == (DEAD if not found else found.pop() if len(found) == 1 else SHARED)


@given(*SIZES, st.integers(1, 4), st.booleans())
def test_finished_nodes(cycles: int, n: int, seed: int, gamma: int, failed: bool) -> None:
    """Who had ended, but before the first cycle, where only descendants tell; lengths of blocks say nothing."""
    made = history(cycles, n, seed=seed, gamma=gamma)
    trace = dataclasses.replace(made.trace, log_evidence=math.nan) if failed else made.trace
    finished = finished_nodes(trace)
    np.testing.assert_array_equal(finished[1:], made.ended[1:])
    if cycles:
        seen = [row for row in trace.ancestors[0] if made.ended[0, row]]
        np.testing.assert_array_equal(np.flatnonzero(finished[0]), np.unique(seen).astype(int))


def test_rows_that_a_first_cycle_does_not_advance_have_not_ended() -> None:
    """As in a pipelined decoder's, which only drafts; those that end with their first token have."""
    made = history(3, 4, seed=1, gamma=2).trace
    lengths, finished = made.lengths.copy(), made.finished.copy()
    lengths[0], finished[0] = 1, [True, False, False, False]
    found = finished_nodes(dataclasses.replace(made, lengths=lengths, finished=finished))
    assert np.flatnonzero(found[0]).tolist() == [made.ancestors[0, 0]]


# ------------------------------------------------------------------------------------------------------ weights


@given(
    st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=4),
)
def test_normalise(rows: list[list[float]]) -> None:
    result = normalise(np.array(rows, np.float32))
    assert result.shape == (len(rows), 3)
    for row, normalised in zip(rows, result, strict=True):
        finite = [x for x in row if math.isfinite(x)]
        for x, y in zip(row, normalised, strict=True):
            if math.isnan(x) or x == math.inf:
                assert math.isnan(y)
            elif x == -math.inf:
                assert y == -math.inf
            else:
                total = math.fsum(math.exp(min(other - x, 700.0)) for other in finite)
                if total < 1e300:
                    assert y == pytest.approx(-math.log(total), rel=1e-6, abs=1e-9)
        if finite:
            assert np.exp(normalised[np.isfinite(normalised)]).sum() == pytest.approx(1)
    np.testing.assert_array_equal(normalise(np.array(rows[0], np.float32)), result[0])


def test_normalise_nothing() -> None:
    assert normalise(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert normalise(np.full(3, -np.inf, np.float32)).tolist() == [-np.inf] * 3


# ------------------------------------------------------------------------------------------------------ text


def width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


@given(st.lists(st.text("abcé", min_size=1, max_size=8)), st.integers(8, 20), st.integers(1, 4))
def test_excerpt_of_words_fills_lines_greedily(words: list[str], columns: int, lines: int) -> None:
    wrapped: list[str] = []
    for word in words:
        if wrapped and len(wrapped[-1]) + 1 + len(word) <= columns:
            wrapped[-1] += f" {word}"
        else:
            wrapped.append(word)
    expected = wrapped[:lines]
    if len(wrapped) > lines:
        expected[-1] = expected[-1][: columns - 1].rstrip() + "…"
    assert excerpt("\n ".join(words), columns, lines) == expected


@given(
    st.text(st.characters() | st.sampled_from("漢字か a-\n\0\x1b\ud800\ufffe👩‍🚀")),
    st.integers(4, 20),
    st.integers(1, 4),
)
@settings(max_examples=200)
def test_excerpt_of_anything(text: str, columns: int, lines: int) -> None:
    result = excerpt(text, columns, lines)
    assert len(result) <= lines
    assert all(line and width(line) <= columns for line in result)
    ElementTree.fromstring("<a>" + "".join(result).replace("&", "").replace("<", "") + "</a>")  # no forbidden character
    letters = "".join(
        "\ufffd" if unicodedata.category(c) in ("Cc", "Cs", "Co", "Cn") else c for c in "".join(text.split())
    )
    shown = "".join("".join(result).split())
    assert shown == letters or (shown.endswith("…") and letters.startswith(shown[:-1]) and len(result) == lines)


# ------------------------------------------------------------------------------------------------------ pictures


def svg_texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def changed(trace: TraceFile, **changes: Any) -> TraceFile:
    return dataclasses.replace(trace, **changes)


HOSTILE = "<b>&amp; ]]> $x_1^2$ \\frac{} \x00\x1b\ud800\ufffe café 漢字 שלום 👩‍🚀 %s {}" + "w" * 300
BASE = history(4, 3, seed=2).trace
WITHOUT = np.full_like(BASE.log_weights, -np.inf)
TRACES = {
    "smallest": history(0, 1).trace,
    "no cycle": history(0, 5).trace,
    "one particle": history(6, 1, impossible=0.0).trace,
    "one cycle": history(1, 8).trace,
    "largest": history(60, 64, seed=3).trace,
    "long": history(130, 4, seed=4).trace,
    "hostile": history(3, 4, prompt=HOSTILE, text=HOSTILE).trace,
    "token ids": history(3, 4, prompt=None, text=None).trace,
    "blank": history(3, 4, prompt=" \n", text="").trace,
    "impossible": changed(BASE, log_weights=WITHOUT, final_log_weights=WITHOUT[0], log_evidence=-math.inf),
    "failed": changed(
        BASE,
        log_weights=np.array([[0, np.nan, np.inf]] * 4, np.float32),
        final_log_weights=np.full(3, np.nan, np.float32),
        ess=np.full(4, np.nan, np.float32),
        log_evidence=math.nan,
    ),
    "extreme": changed(
        BASE,
        log_weights=np.array([[3e38, -3e38, 0]] * 4, np.float32),
        final_log_weights=np.array([3e38, -3e38, 0], np.float32),
        lengths=np.full_like(BASE.lengths, 2**31 - 1),
        log_evidence=3e38,
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_svg(tmp_path: Path, name: str) -> None:
    trace, path = TRACES[name], tmp_path / "tree.svg"
    draw(trace, path)
    texts = svg_texts(path)
    assert any(f"N = {trace.n_particles} particle" in text and f"{trace.cycles} cycle" in text for text in texts)
    assert {"particle", "ESS", "cycle", "the answer"} <= set(texts)
    written = path.read_text()
    assert ANSWER.lower() in written.lower()
    assert "'DejaVu Sans', Verdana, system-ui, sans-serif" in written
    assert (ElementTree.fromstring(written).findtext(f"{SVG}title") or "").startswith(
        f"Genealogy of {trace.n_particles} particles"
    )
    if trace.texts is not None and trace.texts[trace.selected].strip():
        assert any(text.startswith(f"particle {trace.selected} answered") for text in texts)
    if trace.prompt == "a prompt":
        assert "“a prompt”" in texts
    assert os.listdir(tmp_path) == ["tree.svg"]


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_the_legend_covers_no_text(seed: int) -> None:
    """The narrowest picture, with every entry: no text is covered, none of the legend is cut off."""
    trace = history(10, 8, seed=seed).trace
    with matplotlib.style.context(["default", STYLE]):
        figure = _figure(trace)
        figure.draw_without_rendering()
        legend = figure.axes[0].get_legend()
        assert legend is not None
        box = Bbox.union([entry.get_window_extent() for entry in legend.get_texts()])
        beside = [text for text in figure.findobj(Text) if text not in legend.findobj(Text) and text.get_text()]
        assert len(legend.get_texts()) == 6
        assert "final weight" in {text.get_text() for text in beside}
        assert [
            text.get_text() for text in beside if text.get_visible() and box.overlaps(text.get_window_extent())
        ] == []
        assert figure.bbox.x1 >= box.x1


def final_weights(n: int) -> list[Text]:
    """The labels of the final weights of `n` particles, drawn."""
    with matplotlib.style.context(["default", STYLE]):
        figure = _figure(history(10, n, seed=1).trace)
        figure.draw_without_rendering()
        (final,) = [axes for axes in figure.axes if axes.get_xlabel() == "final weight"]
        return [text for text in final.texts if text.get_text()]


@pytest.mark.parametrize("n", [2, 8, 32, MAX_LABELLED_PARTICLES])
def test_every_final_weight_can_be_read(n: int) -> None:
    """Each is written, and none over another."""
    labels = final_weights(n)
    assert len(labels) == n
    assert all(text.get_text().endswith("%") for text in labels)
    boxes = sorted((text.get_window_extent() for text in labels), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(boxes))


def test_of_very_many_weights_the_largest_is_written() -> None:
    assert len(final_weights(MAX_LABELLED_PARTICLES + 1)) == 1


@pytest.mark.parametrize("name", ["smallest", "hostile"])
def test_png(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tree.PNG"
    draw(TRACES[name], path)
    picture = imread(path, format="png")
    assert min(picture.shape[:2]) > 400
    assert len(np.unique(picture[::9, ::9, 0])) > 10
    assert os.listdir(tmp_path) == ["tree.PNG"]


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_same_trace_gives_the_same_bytes(tmp_path: Path, ending: str) -> None:
    """Whatever the user's matplotlib looks like, which stays as it is."""
    trace, first, second = history(5, 6).trace, tmp_path / f"1.{ending}", tmp_path / f"2.{ending}"
    draw(trace, first)
    mine: Any = {
        "font.size": 30.0,
        "savefig.bbox": "tight",
        "axes.grid": True,
        "svg.hashsalt": None,
        "lines.linewidth": 9,
    }
    with mpl.rc_context(mine):
        before = dict(mpl.rcParams)
        draw(trace, second)
        assert dict(mpl.rcParams) == before
    assert first.read_bytes() == second.read_bytes()
    draw(history(5, 6, seed=1).trace, second)
    assert first.read_bytes() != second.read_bytes()


@pytest.mark.parametrize("name", ["tree.pdf", "tree", "tree.svg.gz", ".svg", "tree.svg ", "svg"])
def test_other_endings_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"is neither \.svg nor \.png; name .*\.$") as caught:
        draw(BASE, tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert os.listdir(tmp_path) == []
