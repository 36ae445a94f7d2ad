"""Where a cycle goes: its kernels as one stacked bar, an SVG.

The text is written here rather than by Matplotlib, whose SVGs differ by version, so that a test can compare files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from smcjax.viz.picture import FONTS, INK, colour_of

WIDTH, BAR, LINE, TOP = 720, 44, 20, 30
# A kernel belongs to the first part whose phase and name fit; the last takes all others.
PARTS = (
    ("draft steps", "propose", r"decode_step"),
    ("the verify's products", "verify", r"nvjet|gemm|few_rows|product|cutlass|sampled_head"),
    ("the verify's attention", "verify", r"attention"),
    ("the verify's rest: rotary, KV, SwiGLU, norms", "verify", r""),
    ("sampling, weights, resampling, pages, tokens", "", r""),
)


def parts_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Microseconds and launches a cycle of each part, from the rows that `profile_cycle.py --save` writes."""
    found = {name: (0.0, 0.0) for name, _, _ in PARTS}
    for row in rows:
        name = next(
            name for name, phase, kernel in PARTS if phase in ("", row["phase"]) and re.search(kernel, row["kernel"])
        )
        microseconds, launches = found[name]
        found[name] = (microseconds + row["microseconds"], launches + row["launches"])
    return found


def draw_cycle(rows: Sequence[Mapping[str, Any]]) -> str:
    """The picture's text: a bar of all parts in turn, and a line a part with its time, share and launches."""
    parts = parts_of(rows)
    total = sum(microseconds for microseconds, _ in parts.values())
    height = TOP + BAR + 16 + LINE * len(parts)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="{FONTS}" '
        f'font-size="14" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="0" y="18">{total:,.0f} µs of kernels a cycle</text>',
    ]
    at = 0.0
    for number, (name, (microseconds, launches)) in enumerate(parts.items()):
        width, colour = WIDTH * microseconds / total, colour_of(number)
        said = f"{name}: {microseconds:,.0f} µs, {100 * microseconds / total:.1f}%, {launches:.0f} launches"
        y = TOP + BAR + 16 + LINE * number
        drawn += [
            f'<rect x="{at:.1f}" y="{TOP}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<rect x="0" y="{y}" width="12" height="12" fill="{colour}"/>',
            f'<text x="20" y="{y + 11}">{escape(said)}</text>',
        ]
        at += width
    return "\n".join([*drawn, "</svg>", ""])
