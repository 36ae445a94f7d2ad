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
FAMILY = {
    **{"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3_text": "Gemma3"},
    "olmo2": "Olmo2",
}
_DEFAULT_NORMS = ("input_layernorm", "post_attention_layernorm")
_NORMS = {  # of a layer
    "gemma3_text": (*_DEFAULT_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


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
    if model_type in ("qwen3", "gemma3_text"):
        config["head_dim"] = 16
    if model_type == "gemma3_text":
        config |= {"query_pre_attn_scalar": 16, "rope_theta": 1e6, "sliding_window": 8}
        config["layer_types"] = ["full_attention"] * changes.get("num_hidden_layers", 2)
    return {**config, **changes}


def _dimensions(config: dict[str, Any]) -> tuple[int, int, int, int, int]:
    e, h = config["hidden_size"], config["num_attention_heads"]
    return e, config["intermediate_size"], h, config["num_key_value_heads"], config.get("head_dim") or e // h


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 tensors under Hugging Face names, norms and biases away from 1 and 0 so that a mix-up shows."""
    rng = np.random.default_rng(seed)
    e, f, h, hkv, d = _dimensions(config)
    family = config["model_type"]
    o_bias = config.get("attention_bias", False)
    qkv_bias = family == "qwen2" or o_bias
    gemma = family == "gemma3_text"
    mlp_bias = family == "llama" and config.get("mlp_bias", False)
    weights: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, centre: float = 0.0, scale: float = 0.3) -> None:
        weights[name] = (centre + scale * rng.standard_normal(shape)).astype(np.float32)

    add("model.embed_tokens.weight", config["vocab_size"], e, scale=1.0)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", config["vocab_size"], e)
    centre = 0.0 if gemma else 1.0  # Gemma's norms multiply by 1 + w
    add("model.norm.weight", e, centre=centre)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        for name in _NORMS.get(family, _DEFAULT_NORMS):
            add(f"{at}{name}.weight", e, centre=centre)
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
        if family in ("gemma3_text", "qwen3", "olmo2"):
            of_q, of_k = (h, hkv) if family == "olmo2" else (1, 1)
            add(at + "self_attn.q_norm.weight", of_q * d, centre=centre)
            add(at + "self_attn.k_norm.weight", of_k * d, centre=centre)
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


def _windows(config: dict[str, Any]) -> list[int | None]:
    """Every layer's, None where it attends to all."""
    layers, window, family = range(config["num_hidden_layers"]), config.get("sliding_window"), config["model_type"]
    if family == "mistral":
        return [window for _ in layers]
    first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else len(layers)
    types = config.get("layer_types") or [
        "sliding_attention" if ((index + 1) % 6 if family == "gemma3_text" else index >= first) else "full_attention"
        for index in layers
    ]
    return [window if kind == "sliding_attention" else None for kind in types]


def _inverse_frequencies(config: dict[str, Any], d: int, local: bool) -> np.ndarray:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in rope:
        rope = rope["sliding_attention" if local else "full_attention"]
    elif local and config["model_type"] == "gemma3_text":
        rope = {"rope_theta": config.get("rope_local_base_freq", 10000.0)}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    frequencies = 1.0 / theta ** (np.arange(0, d, 2) / d)
    if rope.get("rope_type") == "linear":
        return frequencies / rope["factor"]
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
    e, _, h, hkv, d = _dimensions(config)
    eps, length, family = config["rms_norm_eps"], len(tokens), config["model_type"]
    gemma, olmo = family == "gemma3_text", family == "olmo2"

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return _normalise(x, w[f"{name}.weight"] + (1.0 if gemma else 0.0), eps)

    x = w["model.embed_tokens.weight"][tokens] * (np.sqrt(e) if gemma else 1.0)
    behind, ahead = np.arange(length)[:, None] - np.arange(length), np.triu_indices(length, 1)
    for index, window in enumerate(_windows(config)):
        at = f"model.layers.{index}."
        frequencies = _inverse_frequencies(config, d, window is not None)
        y = x if olmo else norm(x, at + "input_layernorm")
        q, k, v = (project(y, f"{at}self_attn.{part}_proj") for part in "qkv")
        if olmo:
            q, k = norm(q, at + "self_attn.q_norm"), norm(k, at + "self_attn.k_norm")
        q, k, v = q.reshape(length, h, d), k.reshape(length, hkv, d), v.reshape(length, hkv, d)
        heads = []
        for head in range(h):
            qh, kh, vh = q[:, head], k[:, head * hkv // h], v[:, head * hkv // h]
            if gemma or family == "qwen3":
                qh, kh = norm(qh, at + "self_attn.q_norm"), norm(kh, at + "self_attn.k_norm")
            width = config["query_pre_attn_scalar"] if gemma else d
            scores = _rotate(qh, frequencies) @ _rotate(kh, frequencies).T / np.sqrt(width)
            scores[ahead] = -np.inf
            if window is not None:
                scores[behind >= window] = -np.inf
            probabilities = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(probabilities / probabilities.sum(1, keepdims=True) @ vh)
        attended = project(np.concatenate(heads, axis=1), at + "self_attn.o_proj")
        x = x + (norm(attended, at + "post_attention_layernorm") if gemma or olmo else attended)
        y = x if olmo else norm(x, at + ("pre_feedforward_layernorm" if gemma else "post_attention_layernorm"))
        gate, up = project(y, at + "mlp.gate_proj"), project(y, at + "mlp.up_proj")
        if gemma:
            active = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            active = gate / (1 + np.exp(-gate))
        y = project(active * up, at + "mlp.down_proj")
        x = x + (norm(y, at + "post_feedforward_layernorm") if gemma or olmo else y)
    x = norm(x, "model.norm")
    return x @ w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T
