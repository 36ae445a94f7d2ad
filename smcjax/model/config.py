"""What a decoder of the Llama family is made of, as one frozen, hashable value.

A `ModelConfig` is static: it is closed over by jitted programs and never traced. It holds only what the forward
pass reads; `smcjax.model.hf_config` refuses by name whatever a Hugging Face config asks for beyond that.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretching of rotary positions ("llama3" in Hugging Face configs)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and variant of one decoder.

    Letters used in shapes: V `vocab_size`, E `hidden_size`, F `intermediate_size`, L `num_layers`, H `num_heads`,
    Hkv `num_kv_heads`, D `head_dim`. H is a multiple of Hkv (1 = multi-query, H = multi-head).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of one weight, and of one KV number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize
