"""Model shapes by name, for benchmarks on random weights: a cycle's speed does not depend on what the weights are."""

from __future__ import annotations

from smcjax.model.attention import AttentionKind
from smcjax.model.config import LayerSpec, ModelConfig, Rope, RopeScaling
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


SHAPES: dict[str, ModelConfig] = {
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, head_dim=64, factor=32.0),
    "llama-3.1-8b": _llama(4096, 14_336, 32, 32),
    "llama-3.1-70b": _llama(8192, 28_672, 80, 64),
    "llama-3.1-405b": _llama(16_384, 53_248, 126, 128),
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
