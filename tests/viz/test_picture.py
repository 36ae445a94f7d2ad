"""Pictures of benchmarks: whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from smcjax.viz.charts import draw_acceptance
from smcjax.viz.picture import write_figure


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_what_was_there_stays_until_the_new_one_is_whole(tmp_path: Path, ending: str) -> None:
    class Broken(Figure):
        def savefig(self, fname: Any, **options: Any) -> None:
            fname.write(b"half")
            raise MemoryError

    path = tmp_path / f"a.{ending}"
    path.write_text("before")
    with pytest.raises(MemoryError):
        write_figure(Broken(), path)
    assert path.read_text() == "before"
    write_figure(Figure(), path)
    assert len(path.read_bytes()) > 300
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.svg cannot be written"):
        draw_acceptance([], tmp_path / "missing" / "x.svg")
