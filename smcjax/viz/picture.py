"""Pictures that are there as a whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure

from smcjax.viz.trace_file import write_atomically


def write_figure(figure: Figure, path: Path) -> None:
    """Draws to `path`, whose ending says in which format. Raises ValueError where it cannot be written."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.removeprefix("."))
    write_atomically(path, drawn.getvalue())
