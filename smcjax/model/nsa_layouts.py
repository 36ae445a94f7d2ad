"""Options of Native Sparse Attention as public code spells them, read into `NSA` by the layout's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from smcjax.model.nsa import NSA

_POOLS = {"linear": "linear", "weightedpool": "weighted", "avgpool": "mean"}


def _fla(block_size: int = 64, block_counts: int = 16, window_size: int = 512) -> NSA:
    """Blocks are compressed tokens, means of rotated keys; the query's own block is the only one that is forced."""
    return NSA(
        kernel_size=block_size,
        kernel_stride=block_size,
        block_size=block_size,
        num_blocks=block_counts,
        window=window_size,
        init_blocks=0,
        local_blocks=1,
        phi="mean",
        kv="shared",
        compressed_rope="token",
    )


def _xunhaolai(
    compress_type: str = "linear",
    kernel_size: int = 32,
    kernel_stride: int = 16,
    block_size: int = 64,
    topk: int = 16,
    init_blocks: int = 1,
    local_blocks: int = 2,
    window_size: int = 512,
) -> NSA:
    """The window counts positions before the query's own. Only keys have vectors by position: those of values are 0."""
    if compress_type not in _POOLS:
        raise ValueError(f"compress_type must be one of {', '.join(_POOLS)}, got {compress_type!r}.")
    return NSA(
        kernel_size=kernel_size,
        kernel_stride=kernel_stride,
        block_size=block_size,
        num_blocks=topk,
        window=window_size + 1,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        phi=_POOLS[compress_type],
        kv="shared",
    )


LAYOUTS: dict[str, Callable[..., NSA]] = {"fla": _fla, "XunhaoLai": _xunhaolai}


def nsa_of_layout(layout: str, options: Mapping[str, Any]) -> NSA:
    """The attention that `layout` ("fla" or "XunhaoLai", whose options FSA has too) means by `options`.

    Raises ValueError, naming it, for a layout or an option that is unknown or cannot be expressed.
    """
    if layout == "lucidrains":
        raise ValueError(
            "layout 'lucidrains' cannot be expressed: its queries do not see a compressed token at its last position "
            "and see a memory token before all; train the model with another layout."
        )
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}.")
    read = LAYOUTS[layout]
    known = inspect.signature(read).parameters
    for name in options:
        if name not in known:
            raise ValueError(f"{name} is no option of layout {layout!r}; leave it out or use {', '.join(known)}.")
    return read(**options)
