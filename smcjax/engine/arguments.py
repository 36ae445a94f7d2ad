"""Rules for the arguments of `LLM`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from smcjax.checks import FLAG, FLAG_OR_NONE, SHARE, Rule, either, is_whole, or_none, require, whole
from smcjax.device import on_cpu
from smcjax.engine.requests.sampling_params import MAX_SEED

MAX_PAGES = 1 << 30


def _are_layers(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(is_whole(layer, -math.inf) for layer in value)


def _are_pages(value: Any) -> bool:
    return value is None or is_whole(value, 2, MAX_PAGES) or (isinstance(value, float) and 0 < value <= 1)


_PATH = Rule(
    lambda value: isinstance(value, str | os.PathLike | None),
    "a model directory, a GGUF file or a hub id, or None for the bundled pair",
)
RULES = {
    **dict.fromkeys(("model", "draft_model"), _PATH),
    "draft_drop_layers": or_none(Rule(_are_layers, "numbers of layers such as (3, 12)")),
    "max_num_seqs": whole(1, 4096),
    "page_size": or_none(whole(1, 128), ""),
    "implementation": either("auto", "triton", "xla"),
    "seed": whole(0, MAX_SEED),
    "max_model_len": or_none(whole(2, 1 << 20), ""),
    "num_pages": Rule(_are_pages, f"a whole number from 2 to {MAX_PAGES}, or a share such as 0.5"),
    "enable_prefix_caching": FLAG,
    "admission": either("worst_case", "optimistic"),
    "compile_at_start": FLAG_OR_NONE,
    "gpu_memory_utilization": SHARE,
}
_DEVICES = {
    "tensor_parallel_size": whole(1, 1 << 10),
    "draft_tensor_parallel_size": or_none(whole(1, 1 << 10), ""),
}
# Arguments that say which models are loaded; those, and how devices hold them; and of an engine on any models.
OF_LOADING = (
    *("model", "draft_model", "draft_drop_layers", "quantization", "draft_quantization", "dtype", "implementation"),
)
OF_MODELS = (*OF_LOADING, "tensor_parallel_size", "draft_tensor_parallel_size")
OF_ENGINE = ("page_size", "num_pages", "max_num_seqs", "gpu_memory_utilization", "enable_prefix_caching", "admission")


def check_devices(size: object, of_draft: object) -> None:
    """Raises ValueError where the two models cannot be held by so many devices."""
    require({"tensor_parallel_size": size, "draft_tensor_parallel_size": of_draft}, _DEVICES)
    if of_draft not in (None, 1, size):
        raise ValueError(f"draft_tensor_parallel_size must be 1 or tensor_parallel_size = {size}, got {of_draft}.")


def compiles_at_start(requested: bool | None) -> bool:
    """True where all programs are compiled at once: as requested, and for None on a GPU alone."""
    return not on_cpu() if requested is None else requested
