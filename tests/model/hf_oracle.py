"""A second opinion on the forward pass: plain NumPy in float64, from a raw config.json and Hugging Face tensor names.

Shares nothing with smcjax: one token row at a time, one head at a time, as the definitions read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_CODES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FAMILY = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def make_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A small config.json of one family."""
    config = {
        "architectures": [f"{FAMILY[model_type]}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    if model_type == "qwen3":
        config["head_dim"] = 16
    return {**config, **changes}


def _dimensions(config: dict[str, Any]) -> tuple[int, int, int, int, int]:
    e, h = config["hidden_size"], config["num_attention_heads"]
    return e, config["intermediate_size"], h, config["num_key_value_heads"], config.get("head_dim") or e // h


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors under Hugging Face names, norms and biases away from 1 and 0 so that a mix-up shows."""
    rng = np.random.default_rng(seed)
    e, f, h, hkv, d = _dimensions(config)
    family = config["model_type"]
    qkv_bias = family == "qwen2" or (family in ("llama", "qwen3") and config.get("attention_bias", False))
    o_bias = family in ("llama", "qwen3") and config.get("attention_bias", False)
    mlp_bias = family == "llama" and config.get("mlp_bias", False)
    weights: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, centre: float = 0.0, scale: float = 0.3) -> None:
        weights[name] = (centre + scale * rng.standard_normal(shape)).astype(np.float32)

    add("model.embed_tokens.weight", config["vocab_size"], e, scale=1.0)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", config["vocab_size"], e)
    add("model.norm.weight", e, centre=1.0)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        add(at + "input_layernorm.weight", e, centre=1.0)
        add(at + "post_attention_layernorm.weight", e, centre=1.0)
        for name, rows, columns, biased in (
            ("self_attn.q_proj", h * d, e, qkv_bias),
            ("self_attn.k_proj", hkv * d, e, qkv_bias),
            ("self_attn.v_proj", hkv * d, e, qkv_bias),
            ("self_attn.o_proj", e, h * d, o_bias),
            ("mlp.gate_proj", f, e, mlp_bias),
            ("mlp.up_proj", f, e, mlp_bias),
            ("mlp.down_proj", e, f, mlp_bias),
        ):
            add(f"{at}{name}.weight", rows, columns)
            if biased:
                add(f"{at}{name}.bias", rows)
        if family == "qwen3":
            add(at + "self_attn.q_norm.weight", d, centre=1.0)
            add(at + "self_attn.k_norm.weight", d, centre=1.0)
    return weights


def write_tensors(path: Path, weights: dict[str, np.ndarray], dtype: str) -> None:
    """One .safetensors file by the safetensors package's own writer."""
    save_file({name: value.astype(_CODES[dtype]) for name, value in weights.items()}, path, {"format": "pt"})


def write_directory(
    directory: Path, config: dict[str, Any], weights: dict[str, np.ndarray], dtype: str = "float32", shards: int = 1
) -> None:
    """A Hugging Face directory; tensors are dealt to the shards in turn, so that fused matrices straddle them."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_tensors(directory / "model.safetensors", weights, dtype)
        return
    files = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    weight_map = {name: files[number % shards] for number, name in enumerate(weights)}
    for file in files:
        write_tensors(directory / file, {name: weights[name] for name in weights if weight_map[name] == file}, dtype)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def as_stored(weights: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The values that survive being written as `dtype`."""
    return {name: value.astype(_CODES[dtype]).astype(np.float32) for name, value in weights.items()}


def _normalise(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def _inverse_frequencies(config: dict[str, Any], d: int) -> np.ndarray:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    frequencies = 1.0 / theta ** (np.arange(0, d, 2) / d)
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return frequencies
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    scaled = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            scaled.append(frequency)
        elif wavelength > original / low:
            scaled.append(frequency / rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / rope["factor"] + smooth * frequency)
    return np.array(scaled)


def _rotate(x: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """x [T, D]: x·cos + rotate_half(x)·sin, each angle used for both halves."""
    angles = np.arange(len(x))[:, None] * np.concatenate([frequencies, frequencies])
    half = x.shape[1] // 2
    turned = np.concatenate([-x[:, half:], x[:, :half]], axis=1)
    return x * np.cos(angles) + turned * np.sin(angles)


def oracle_logits(config: dict[str, Any], weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Float64 logits [T, V] of one sequence."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    _, _, h, hkv, d = _dimensions(config)
    eps, length = config["rms_norm_eps"], len(tokens)
    frequencies = _inverse_frequencies(config, d)

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    x = w["model.embed_tokens.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        y = _normalise(x, w[at + "input_layernorm.weight"], eps)
        q = project(y, at + "self_attn.q_proj").reshape(length, h, d)
        k = project(y, at + "self_attn.k_proj").reshape(length, hkv, d)
        v = project(y, at + "self_attn.v_proj").reshape(length, hkv, d)
        heads = []
        for head in range(h):
            qh, kh, vh = q[:, head], k[:, head * hkv // h], v[:, head * hkv // h]
            if config["model_type"] == "qwen3":
                qh = _normalise(qh, w[at + "self_attn.q_norm.weight"], eps)
                kh = _normalise(kh, w[at + "self_attn.k_norm.weight"], eps)
            scores = _rotate(qh, frequencies) @ _rotate(kh, frequencies).T / np.sqrt(d)
            scores[np.triu_indices(length, 1)] = -np.inf
            probabilities = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(probabilities / probabilities.sum(1, keepdims=True) @ vh)
        x = x + project(np.concatenate(heads, axis=1), at + "self_attn.o_proj")
        y = _normalise(x, w[at + "post_attention_layernorm.weight"], eps)
        gate, up = project(y, at + "mlp.gate_proj"), project(y, at + "mlp.up_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * up, at + "mlp.down_proj")
    x = _normalise(x, w["model.norm.weight"], eps)
    return x @ w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T
