"""Options as public code spells them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from smcjax.model.nsa import NSA
from smcjax.model.nsa_layouts import nsa_of_layout

BLOCKS = {"kernel_size": 32, "kernel_stride": 32, "block_size": 32, "phi": "mean", "compressed_rope": "token"}


@pytest.mark.parametrize(
    ("layout", "options", "meant"),
    [
        (
            "fla",
            {"block_size": 32, "block_counts": 8, "window_size": 256},
            {**BLOCKS, "num_blocks": 8, "window": 256, "init_blocks": 0, "local_blocks": 1},
        ),
        ("XunhaoLai", {"topk": 8, "window_size": 255}, {"num_blocks": 8, "window": 256, "phi": "linear"}),
        ("XunhaoLai", {"compress_type": "weightedpool"}, {"window": 513, "phi": "weighted"}),
    ],
)
def test_layouts(layout: str, options: dict[str, Any], meant: dict[str, Any]) -> None:
    assert nsa_of_layout(layout, options) == NSA(kv="shared", **meant)


@pytest.mark.parametrize(
    ("layout", "options", "sentence"),
    [
        ("flash", {}, "layout must be one of fla, XunhaoLai, got 'flash'."),
        ("lucidrains", {}, "layout 'lucidrains' cannot be expressed: its queries do not see a compressed token"),
        ("fla", {"topk": 3}, "topk is no option of layout 'fla'; leave it out or use block_size, block_counts, "),
        ("XunhaoLai", {"compress_type": "max"}, "compress_type must be one of linear, weightedpool, avgpool, got"),
        ("fla", {"window_size": 0}, "window must be an integer from 1 to 1048576, got 0."),
        ("XunhaoLai", {"kernel_size": 40}, "kernel_size must be a multiple of kernel_stride = 16, got 40."),
    ],
)
def test_what_is_refused(layout: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        nsa_of_layout(layout, options)
