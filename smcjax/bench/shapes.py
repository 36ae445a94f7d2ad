"""Model shapes by name, for benchmarks on random weights: a cycle's speed does not depend on what the weights are."""

from __future__ import annotations

from smcjax.model.attention import AttentionKind
from smcjax.model.config import LayerSpec, ModelConfig, Rope, RopeScaling
from smcjax.model.files.hf_config import config_from_hf
from smcjax.sparse.nsa import NSA

ATTENTIONS: dict[str, AttentionKind] = {"nsa": NSA(), "nsa-shared": NSA(kv="shared")}  # instead of a shape's own


def _llama(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, head_dim: int = 128, factor: float = 8.0
) -> ModelConfig:
    """The shape of a Llama 3; the smallest, with heads of 64, has one matrix for embedding and head."""
    return ModelConfig(
        vocab_size=128_256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        layers=(LayerSpec(rope=Rope(500_000.0, RopeScaling(factor, 1.0, 4.0, 8192))),),
        tie_embeddings=head_dim == 64,
        dtype="bfloat16",
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
    )


def _published(architecture: str, heads: tuple[int, int], **sizes: int | float | bool) -> ModelConfig:
    """The shape that a config.json of these sizes says; `heads` are of queries and of keys and values."""
    names = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "torch_dtype": "bfloat16"}
    return config_from_hf({"architectures": [architecture], **names, **sizes})


def _gemma(hidden_size: int, intermediate_size: int, layers: int, heads: tuple[int, int], window: int) -> ModelConfig:
    """The shape of a Gemma 3, five of whose six layers attend within a window."""
    return _published(
        "Gemma3ForCausalLM",
        heads,
        vocab_size=262_144,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        sliding_window=window,
    )


def _qwen(hidden_size: int, intermediate_size: int, layers: int, heads: int, tied: bool) -> ModelConfig:
    """The shape of a Qwen 3."""
    return _published(
        "Qwen3ForCausalLM",
        (heads, 8),
        vocab_size=151_936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        max_position_embeddings=40_960,
        rope_theta=1e6,
        tie_word_embeddings=tied,
    )


SHAPES: dict[str, ModelConfig] = {
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, head_dim=64, factor=32.0),
    "llama-3.1-8b": _llama(4096, 14_336, 32, 32),
    "llama-3.1-70b": _llama(8192, 28_672, 80, 64),
    "llama-3.1-405b": _llama(16_384, 53_248, 126, 128),
    "gemma-3-270m": _gemma(640, 2048, 18, (4, 1), 512),
    "gemma-3-4b": _gemma(2560, 10_240, 34, (8, 4), 1024),
    "qwen3-0.6b": _qwen(1024, 3072, 28, 16, tied=True),
    "qwen3-32b": _qwen(5120, 25_600, 64, 64, tied=False),
    "tiny-draft": ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_embeddings=True,
    ),
    "tiny-target": ModelConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
    ),
}
