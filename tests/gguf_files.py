"""GGUF files that tests write with the package gguf: tiny models from Hugging Face tensors, and vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

DATA = Path(__file__).parent / "data" / "real_model"
_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OLMO = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Writing = Callable[[gguf.GGUFWriter], Any]


def _permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter lays them: halves of a head's width become neighbours."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    """One tensor in that type; vectors in float32, as converters write them."""
    if values.ndim == 1:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def as_stored(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The values that survive being written in that type."""
    if values.ndim == 1:
        return values
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)


def add_architecture(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The metadata of a config.json."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for name in ("bos", "eos"):
        if config.get(f"{name}_token_id") is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", config[f"{name}_token_id"])


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *more: Writing,
    architecture: str | None = None,
    tensors_a_shard: int = 0,
) -> Path:
    """The file of a Llama-like model given as config.json and Hugging Face tensors; `more` may add to it.

    With `tensors_a_shard` the model is split as llama.cpp splits one; the path of the first shard is returned.
    """
    architecture = architecture or {"mistral": "llama", "gemma3_text": "gemma3"}.get(
        config["model_type"], config["model_type"]
    )
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_shard)
    add_architecture(writer, config)
    modules = {**_MODULES, **{"gemma3": _GEMMA, "olmo2": _OLMO}.get(architecture, {})}
    for name, values in weights.items():
        if architecture == "gemma3" and "norm" in name:
            values = values + np.float32(1)
        module, suffix = name.rsplit(".", 1)
        if module in _OTHERS:
            add_tensor(writer, f"{_OTHERS[module]}.{suffix}", values, kind)
            continue
        layer, module = module.removeprefix("model.layers.").split(".", 1)
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(module)
        if heads is not None and architecture in ("llama", "mistral"):
            values = _permuted(values, config[heads])
        add_tensor(writer, f"blk.{layer}.{modules[module]}.{suffix}", np.ascontiguousarray(values), kind)
    for add in more:
        add(writer)
    return _written(writer, path)


def write_vocabulary(path: Path, *add: Writing) -> Path:
    """A file with no tensors, and the metadata that `add` brings."""
    writer = gguf.GGUFWriter(path, "llama")
    for each in add:
        each(writer)
    return _written(writer, path)


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shards = writer.format_shard_names(path)
    return path if len(shards) == 1 else shards[0]
