"""Hand-written GPU kernels (Pallas, Mosaic GPU, Hopper); each with a plain reference and behind a wrapper."""

from smcjax.pallas.attention import attention, paged_attention_reference
from smcjax.pallas.paged_attention import IMPLEMENTATIONS, paged_attention, paged_attention_mosaic, supports

__all__ = [
    "IMPLEMENTATIONS",
    "attention",
    "paged_attention",
    "paged_attention_mosaic",
    "paged_attention_reference",
    "supports",
]
