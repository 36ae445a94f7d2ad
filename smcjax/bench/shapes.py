"""Model shapes by name, for benchmarks on random weights: a cycle's speed does not depend on what the weights are."""

from __future__ import annotations

from smcjax.model.attention import AttentionKind
from smcjax.model.config import LayerSpec, ModelConfig, Rope, RopeScaling
from smcjax.sparse.nsa import NSA

ATTENTIONS: dict[str, AttentionKind] = {"nsa": NSA(), "nsa-shared": NSA(kv="shared")}  # instead of a shape's own

SHAPES: dict[str, ModelConfig] = {
    "llama-3.2-1b": ModelConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        layers=(LayerSpec(rope=Rope(500_000.0, RopeScaling(32.0, 1.0, 4.0, 8192))),),
        tie_embeddings=True,
        dtype="bfloat16",
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
    ),
    "llama-3.1-8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        layers=(LayerSpec(rope=Rope(500_000.0, RopeScaling(8.0, 1.0, 4.0, 8192))),),
        dtype="bfloat16",
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
    ),
    "llama-3.1-70b": ModelConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        layers=(LayerSpec(rope=Rope(500_000.0, RopeScaling(8.0, 1.0, 4.0, 8192))),),
        dtype="bfloat16",
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
    ),
    "llama-3.1-405b": ModelConfig(
        vocab_size=128_256,
        hidden_size=16_384,
        intermediate_size=53_248,
        num_layers=126,
        num_heads=128,
        num_kv_heads=8,
        head_dim=128,
        layers=(LayerSpec(rope=Rope(500_000.0, RopeScaling(8.0, 1.0, 4.0, 8192))),),
        dtype="bfloat16",
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
    ),
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
