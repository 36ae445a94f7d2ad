"""The static description of one decoder, as one frozen, hashable value.

A `ModelConfig` is closed over by jitted programs, never traced, and holds only what the forward pass reads; the
readers of config files refuse by name whatever a file asks for beyond that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from smcjax.kv import CacheSpec
from smcjax.model.attention import FULL, AttentionKind


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent stretching of rotary positions ("llama3" in Hugging Face configs)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: ClassVar[str] = "llama3"

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """The stretched angular steps per position.

        Llama 3 keeps wavelengths below `original/high_freq_factor`, divides those above `original/low_freq_factor` by
        `factor`, and blends linearly in original/wavelength between.
        """
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / self.factor)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Rotary positions divided by `factor` ("linear" in Hugging Face configs)."""

    factor: float
    rope_type: ClassVar[str] = "linear"

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """The stretched angular steps per position."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary embedding of one layer: its base and, where positions are stretched, how."""

    theta: float = 10_000.0
    scaling: RopeScaling | LinearScaling | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angular step per position of each rotary pair, float64 [D/2]."""
        half = head_dim // 2
        plain = self.theta ** (-np.arange(half, dtype=np.float64) / half)
        return plain if self.scaling is None else self.scaling.scaled(plain)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The variant of one decoder layer. The defaults are a Llama layer's.

    Attributes:
        attention: which keys a query sees, and by what its scores are scaled.
        rope: the rotary embedding of queries and keys.
        qkv_bias, o_bias, mlp_bias: whether those products have a bias.
        qk_norm: queries and keys are RMS-normed before they are rotated: every "head" by itself, or "all" heads of a
            token as one vector, each number with a weight of its own; None: they are not.
        pre_norms: whether attention and the MLP read the residual RMS-normed, or as it is.
        post_norms: whether attention's and the MLP's outputs are RMS-normed before they are added to the residual.
        activation: of the gated MLP, "silu" or "gelu_tanh".
    """

    attention: AttentionKind = FULL
    rope: Rope = Rope()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    pre_norms: bool = True
    post_norms: bool = False
    activation: str = "silu"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and variant of one decoder.

    Letters used in shapes: V `vocab_size`, E `hidden_size`, F `intermediate_size`, L `num_layers`, H `num_heads`,
    Hkv `num_kv_heads`, D `head_dim`. H is a multiple of Hkv (1 = multi-query, H = multi-head).

    `layers` is the pattern of the layers' variants, repeated as often as `num_layers` asks for: `layer(i)` is layer
    i's. `embed_scale` multiplies looked-up embeddings, rounded to the weights' dtype first.
    `float32_norms` keeps norms' weights in float32 whatever the dtype of the matrices, and so rounds a normed vector
    once, behind its weight, where other models round it before as well.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...] = (LayerSpec(),)
    rms_norm_eps: float = 1e-6
    embed_scale: float = 1.0
    float32_norms: bool = False
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def layer(self, index: int) -> LayerSpec:
        """The variant of layer `index`, counted from 0."""
        return self.layers[index % len(self.layers)]

    @property
    def selecting(self) -> dict[int, AttentionKind]:
        """The kinds of layers whose queries select blocks, by index."""
        kinds = {index: self.layer(index).attention for index in range(self.num_layers)}
        return {index: kind for index, kind in kinds.items() if kind.selects}

    @property
    def itemsize(self) -> int:
        """Bytes of one weight, and of one KV number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """The arrays that pages of each layer hold."""
        return tuple(self.layer(index).attention.cache(self) for index in range(self.num_layers))

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of `page_size` tokens, in all layers."""
        return sum(spec.page_bytes(page_size, self.itemsize) for spec in self.cache_specs)

    def with_layers(self, layers: Iterable[LayerSpec]) -> ModelConfig:
        """Returns the decoder with these layers, one spec a layer, kept as their shortest repeated pattern."""
        specs = tuple(layers)
        sizes = (size for size in range(1, len(specs)) if specs[size:] == specs[: len(specs) - size])
        return dataclasses.replace(self, num_layers=len(specs), layers=specs[: next(sizes, len(specs))])
