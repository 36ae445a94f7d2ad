"""Rules for the arguments of `LLM`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from smcjax.checks import FLAG, FLAG_OR_NONE, SHARE, Rule, either, is_whole, or_none, require, whole
from smcjax.device import on_cpu
from smcjax.engine.requests.sampling_params import MAX_SEED


def _are_layers(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(is_whole(layer, -math.inf) for layer in value)


_PATH = Rule(
    lambda value: isinstance(value, str | os.PathLike | None),
    "a model directory, a GGUF file or a hub id, or None for the bundled pair",
)
_REVISION = or_none(Rule(lambda value: isinstance(value, str) and bool(value), "a branch, a tag or a commit"))
RULES = {
    **dict.fromkeys(("model", "draft_model"), _PATH),
    **dict.fromkeys(("revision", "draft_revision"), _REVISION),
    "draft_drop_layers": or_none(Rule(_are_layers, "numbers of layers such as (3, 12)")),
    "max_num_seqs": whole(1, 4096),
    "page_size": or_none(whole(1, 128), ""),
    "implementation": either("auto", "triton", "xla"),
    "seed": whole(0, MAX_SEED),
    "max_model_len": or_none(whole(2, 1 << 20), ""),
    "num_pages": or_none(whole(2, 1 << 30), ""),
    "enable_prefix_caching": FLAG,
    "admission": either("worst_case", "optimistic"),
    "compile_at_start": FLAG_OR_NONE,
    "separate_draft": FLAG,
    **dict.fromkeys(("gpu_memory_utilization", "kv_fraction"), SHARE),
}
_DEVICES = {
    "tensor_parallel_size": whole(1, 1 << 10),
    "draft_tensor_parallel_size": or_none(whole(1, 1 << 10), ""),
}
# Arguments that say which models are loaded; those, and how devices hold them; and of an engine on any models.
OF_LOADING = (
    *("model", "draft_model", "revision", "draft_revision", "draft_drop_layers", "quantization", "draft_quantization"),
    *("dtype", "implementation"),
)
OF_MODELS = (*OF_LOADING, "tensor_parallel_size", "draft_tensor_parallel_size", "separate_draft")
OF_ENGINE = ("page_size", "num_pages", "max_num_seqs", "gpu_memory_utilization", "enable_prefix_caching", "admission")


def check_devices(size: object, of_draft: object, separate_draft: object) -> None:
    """Raises ValueError where the two models cannot be held by so many devices."""
    if separate_draft and (size != 1 or of_draft is not None):
        name = "draft_tensor_parallel_size" if size == 1 else "tensor_parallel_size"
        raise ValueError(
            f"separate_draft is True and {name} is {of_draft if size == 1 else size}, but devices of their own have "
            "each model whole; leave one of them out."
        )
    require({"tensor_parallel_size": size, "draft_tensor_parallel_size": of_draft}, _DEVICES)
    if of_draft not in (None, 1, size):
        raise ValueError(f"draft_tensor_parallel_size must be 1 or tensor_parallel_size = {size}, got {of_draft}.")


def compiles_at_start(requested: bool | None) -> bool:
    """True where all programs are compiled at once: as requested, and for None on a GPU alone."""
    return not on_cpu() if requested is None else requested
