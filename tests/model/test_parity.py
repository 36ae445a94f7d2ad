"""The forward pass against transformers' recorded logits and against an independent float64 decoder."""

from __future__ import annotations

import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from hf_oracle import as_stored, make_config, oracle_logits, random_weights, write_directory

from smcjax.model import load_checkpoint, logits, save_checkpoint

GOLDEN = Path(__file__).parent.parent / "data" / "hf_golden"
_logits = jax.jit(logits, static_argnums=0)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "llama-mha-llama3": make_config("llama", num_key_value_heads=4, rope_scaling=LLAMA3, rope_theta=5000.0),
    "llama-mqa-tied": make_config("llama", num_key_value_heads=1, tie_word_embeddings=True),
    "llama-biases": make_config("llama", attention_bias=True, mlp_bias=True),
    "llama-odd-sizes": make_config(
        "llama",
        vocab_size=101,
        hidden_size=37,
        intermediate_size=53,
        num_hidden_layers=1,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=24,
    ),
    "mistral": make_config("mistral", sliding_window=None, rope_theta=1e6),
    "qwen2-tied": make_config("qwen2", tie_word_embeddings=True, sliding_window=64, use_sliding_window=False),
    "qwen3-attention-bias": make_config(
        "qwen3", attention_bias=True, rope_parameters={**LLAMA3, "rope_theta": 777.0}, rope_theta=777.0
    ),
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
VARIANTS |= {
    "mistral-window": make_config("mistral", sliding_window=7),
    "qwen2-window": make_config(
        "qwen2", num_hidden_layers=3, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3-window": make_config(
        "qwen3",
        use_sliding_window=True,
        sliding_window=1,
        max_window_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3": make_config("gemma3_text", num_hidden_layers=7, layer_types=None, num_key_value_heads=1),
    "gemma3-linear-scale": make_config(
        "gemma3_text",
        layer_types=["full_attention", "sliding_attention"],
        rope_scaling=LINEAR,
        query_pre_attn_scalar=24,
        tie_word_embeddings=True,
    ),
}
VARIANTS |= {
    "olmo2": make_config("olmo2", rope_scaling=LLAMA3, rope_theta=777.0),
    "olmo2-bias-tied": make_config("olmo2", head_dim=12, attention_bias=True, tie_word_embeddings=True),
}
TOKENS = np.random.default_rng(7).integers(0, 96, 50).tolist()


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str) -> None:
    config, params = load_checkpoint(GOLDEN / name, dtype="float32")
    recorded, golden = json.loads((GOLDEN / name / "golden.json").read_text()), np.load(GOLDEN / name / "golden.npz")
    prompts, continuations = recorded["prompts"], recorded["greedy"]
    # Attention is causal: what follows a position does not touch it, so one padded batch answers for every length.
    # By induction the greedy run is reproduced if each of its tokens is the argmax given those before it.
    rows = [prompt + greedy for prompt, greedy in zip(prompts, continuations, strict=True)]
    batch = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens in zip(batch, rows, strict=True):
        row[: len(tokens)] = tokens
    got = np.asarray(_logits(config, params, batch))
    assert got.dtype == np.float32
    for index, (prompt, greedy) in enumerate(zip(prompts, continuations, strict=True)):
        assert np.abs(got[index, : len(prompt)] - golden[f"logits_{index}"]).max() <= 1e-3
        predictions = got[index].argmax(-1)[len(prompt) - 1 : len(prompt) + len(greedy) - 1]
        assert predictions.tolist() == greedy


def test_all_goldens_are_there() -> None:
    assert len(list(GOLDEN.glob("*/golden.npz"))) == 5


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_agree_with_the_oracle(name: str, tmp_path: Path) -> None:
    raw = VARIANTS[name]
    weights = random_weights(raw)
    write_directory(tmp_path / "hf", raw, weights)
    config, params = load_checkpoint(tmp_path / "hf", dtype="float32")
    expected = oracle_logits(raw, weights, TOKENS)
    np.testing.assert_allclose(_logits(config, params, np.array([TOKENS]))[0], expected, atol=2e-4, rtol=2e-4)

    # Written by us and read back: the same model, to the bit.
    save_checkpoint(config, params, tmp_path / "ours", dtype="float32")
    again_config, again = load_checkpoint(tmp_path / "ours", dtype="float32")
    assert again_config == config
    chex.assert_trees_all_equal(again, params)


@pytest.mark.parametrize(("dtype", "shards"), [("float64", 1), ("float32", 3), ("float16", 1), ("bfloat16", 3)])
def test_file_dtypes_and_shards(dtype: str, shards: int, tmp_path: Path) -> None:
    raw = make_config("qwen2")
    weights = random_weights(raw, seed=3)
    write_directory(tmp_path / "hf", raw, weights, dtype, shards)
    config, params = load_checkpoint(tmp_path / "hf", dtype="float32")
    expected = oracle_logits(raw, as_stored(weights, dtype), TOKENS)
    np.testing.assert_allclose(_logits(config, params, np.array([TOKENS]))[0], expected, atol=2e-4, rtol=2e-4)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    raw = make_config("llama")
    weights = random_weights(raw)
    write_directory(tmp_path / "hf", raw, weights)
    config, params = load_checkpoint(tmp_path / "hf", dtype="float32")
    weights["model.layers.1.self_attn.k_proj.weight"][3] *= 1.01
    difference = np.asarray(_logits(config, params, np.array([TOKENS]))[0]) - oracle_logits(raw, weights, TOKENS)
    assert np.abs(difference).max() > 2e-3
