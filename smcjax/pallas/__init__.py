"""Hand-written GPU kernels (Pallas, Mosaic GPU, Hopper); each beside a plain reference and behind a wrapper."""

from smcjax.pallas.paged_attention import paged_attention_mosaic, supports

__all__ = ["paged_attention_mosaic", "supports"]
