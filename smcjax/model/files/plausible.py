"""This module holds the range of every size and number of a model in config.json and in GGUF files.

Ranges end at several times what any model has, so that what lies outside is a mistake. Sizes within make trees and
shapes at once; whether the weights are of such a size is another question (`smcjax.model.files.checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_INT32 = (1 << 31) - 1  # of positions and token ids
_LARGEST = {  # the largest integer by key, Hugging Face's and GGUF's for one thing
    ("vocab_size", "draft_vocab_size"): 1 << 24,
    ("hidden_size", "target_hidden_size", "embedding_length"): 1 << 18,
    ("intermediate_size", "feed_forward_length"): 1 << 20,
    ("num_hidden_layers", "block_count"): 1 << 12,
    ("num_attention_heads", "attention.head_count"): 1 << 12,
    ("num_key_value_heads", "attention.head_count_kv"): 1 << 12,
    ("head_dim", "attention.key_length", "attention.value_length", "rope.dimension_count"): 1 << 14,
    ("query_pre_attn_scalar",): 1 << 14,
    ("max_position_embeddings", "original_max_position_embeddings", "context_length"): _INT32,
    ("sliding_window", "attention.sliding_window"): _INT32,  # may be larger than the positions are many
    ("sliding_window_pattern", "attention.sliding_window_pattern", "max_window_layers"): 1 << 12,
}
_RANGES = {
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"): (1e-15, 0.1),
    ("rope_theta", "rope_local_base_freq", "rope.freq_base", "rope.freq_base_swa"): (1.0, 1e12),
    ("factor", "rope.scaling.factor"): (1.0, 1e4),
    ("low_freq_factor", "high_freq_factor"): (1e-3, 1e4),
}
LARGEST = {key: most for keys, most in _LARGEST.items() for key in keys}
RANGES = {key: bounds for keys, bounds in _RANGES.items() for key in keys}
Refusal = Callable[[str, str], Exception]  # of a key, and why


def require_integer(key: str, value: Any, refusal: Refusal, least: int = 1) -> int:
    """`value`, an integer from `least` to the largest that `key` can have; raises what `refusal` makes otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST[key]:
        raise refusal(key, f"it must be an integer from {least} to {LARGEST[key]}")
    return value


def require_number(key: str, value: Any, refusal: Refusal) -> float:
    """`value`, a number in the range of `key`; raises what `refusal` makes otherwise."""
    least, most = RANGES[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise refusal(key, f"it must be a number from {least:g} to {most:g}")
    return float(value)
