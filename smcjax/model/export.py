"""Writing a decoder as an ordinary Hugging Face directory that transformers and vLLM read."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from smcjax.model.checkpoint import Stack, tensor_names
from smcjax.model.config import ModelConfig
from smcjax.model.params import Params, param_shapes

_DTYPES = {"float32": ("F32", np.float32), "bfloat16": ("BF16", ml_dtypes.bfloat16), "float16": ("F16", np.float16)}
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json that describes `config`; `config_from_hf` reads it back to an equal value.

    Rope and dtype are written in both spellings, so that transformers 4 and 5 agree on the model. Raises ValueError
    for a combination of biases and norms that none of the four model classes has.
    """
    layer = config.layers[0]
    attention_bias = layer.qkv_bias and layer.o_bias
    if (layer.o_bias and not layer.qkv_bias) or (layer.qk_norm and layer.qkv_bias != layer.o_bias):
        raise ValueError(
            f"qkv_bias={layer.qkv_bias}, o_bias={layer.o_bias}, qk_norm={layer.qk_norm} is no Hugging Face model "
            "class; set the two biases alike"
        )
    if layer.mlp_bias and (layer.qk_norm or layer.qkv_bias != layer.o_bias):
        raise ValueError("mlp_bias=True exists in Llama alone; set qk_norm=False and the two attention biases alike")
    if layer.qk_norm:
        architecture = "Qwen3ForCausalLM"
    elif layer.qkv_bias and not layer.o_bias:
        architecture = "Qwen2ForCausalLM"
    elif config.hidden_size % config.num_heads and not attention_bias and not layer.mlp_bias:
        architecture = "MistralForCausalLM"  # transformers refuses this shape in Llama
    else:
        architecture = "LlamaForCausalLM"

    rope: dict[str, Any] = {"rope_type": "default"}
    if layer.rope.scaling is not None:
        rope = {"rope_type": "llama3", **dataclasses.asdict(layer.rope.scaling)}
    eos = config.eos_token_ids
    written: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {**rope, "rope_theta": layer.rope.theta},
        "rope_theta": layer.rope.theta,
        "rope_scaling": rope if layer.rope.scaling is not None else None,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
    }
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        written["attention_bias"] = attention_bias
    if architecture == "LlamaForCausalLM":
        written["mlp_bias"] = layer.mlp_bias
    if architecture == "MistralForCausalLM":
        written["sliding_window"] = None
    return written


def save_checkpoint(
    config: ModelConfig, params: Params, directory: str | os.PathLike[str], dtype: str = "bfloat16"
) -> None:
    """Write config.json, generation_config.json and model.safetensors into `directory`, made if need be.

    Weights are cast to `dtype` ("bfloat16", "float32" or "float16") and written one matrix at a time. The weights
    file appears under its name only when complete. Raises ValueError where `params` are not those of `config`.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but weights are written as one of {', '.join(_DTYPES)}; choose one")
    written = hf_config(dataclasses.replace(config, dtype=dtype))
    shapes = jax.tree.leaves(param_shapes(config, dtype))
    stacks, leaves = jax.tree.leaves(tensor_names(config)), jax.tree.leaves(params)
    if [leaf.shape for leaf in leaves] != [shape.shape for shape in shapes]:
        raise ValueError("the shapes of params are not those that config calls for; pass the two that belong together")

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / "model.safetensors.partial"
    _write_safetensors(partial, stacks, leaves, dtype)
    os.replace(partial, directory / "model.safetensors")
    _write_json(directory / "config.json", written)
    generation = {key: written[key] for key in ("bos_token_id", "eos_token_id") if written[key] is not None}
    _write_json(directory / "generation_config.json", generation)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, stacks: list[Stack], leaves: list[jax.Array], dtype: str) -> None:
    """Header first, which needs shapes only; then each matrix, whose parts lie one after the other as they must."""
    code, numpy_dtype = _DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for this entry
    end = 0
    for stack, leaf in zip(stacks, leaves, strict=True):
        for name, rows in stack.parts:
            shape = (rows, *leaf.shape[1:])
            begin, end = end, end + int(np.prod(shape)) * np.dtype(numpy_dtype).itemsize
            header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for leaf in leaves:
            file.write(np.ascontiguousarray(np.asarray(leaf).astype(numpy_dtype)).tobytes())
