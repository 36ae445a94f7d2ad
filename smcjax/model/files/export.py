"""Writing a decoder as an ordinary Hugging Face directory that transformers and vLLM read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from smcjax.matmul import Quantized, is_packed
from smcjax.model.config import ModelConfig
from smcjax.model.families import Family, families
from smcjax.model.files.checkpoint import Stack, tensor_names
from smcjax.model.files.hf_config import config_from_hf
from smcjax.model.files.hf_quantization import SCALE, written
from smcjax.model.params import Params, param_shapes
from smcjax.model.quantize import quantize_matrix, streamed
from smcjax.quantization import QUANTIZATIONS, Quantization, check_quantization

_DTYPES = {"float32": ("F32", np.float32), "bfloat16": ("BF16", ml_dtypes.bfloat16), "float16": ("F16", np.float16)}


def written_config(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """Returns the first family that describes `config`, and its config.json, which `config_from_hf` reads as `config`.

    Dtype and most ropes are written in both spellings, so that transformers 4 and 5 agree on the model. Raises
    ValueError, naming what stands in the way, for a combination that no model class has.
    """
    config = config.with_layers(config.layer(index) for index in range(config.num_layers))
    nearest: list[tuple[str, Any, Any]] = []
    refusal = None
    for family in families():
        own = family.write(config)
        if own is None:
            continue
        written = {**_shared_keys(config, family), **own}
        try:
            differences = _differences(config, config_from_hf(written))
        except ValueError as error:
            refusal = refusal or error
            continue
        if not differences:
            return family, written
        if not nearest or len(differences) < len(nearest):
            nearest, name = differences, family.architecture
    if refusal is not None and len(nearest) != 1:
        raise refusal
    field, value, theirs = nearest[0]
    raise ValueError(
        f"{field} is {value}, but {name}, the nearest Hugging Face model class, has {theirs} there; set it to that"
    )


def _shared_keys(config: ModelConfig, family: Family) -> dict[str, Any]:
    eos = config.eos_token_ids
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
    }


def _differences(config: ModelConfig, read: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Fields of the two and of their layers that differ, each with both values."""
    pairs: list[tuple[Any, Any]] = [(config.layer(index), read.layer(index)) for index in range(config.num_layers)]
    found: dict[str, tuple[Any, Any]] = {}
    for ours, theirs in [*pairs, (config, read)]:
        for field in dataclasses.fields(ours):
            values = getattr(ours, field.name), getattr(theirs, field.name)
            if values[0] != values[1] and field.name != "layers":
                found.setdefault(field.name, values)
    return [(name, *values) for name, values in found.items()]


def save_checkpoint(
    config: ModelConfig,
    params: Params,
    directory: str | os.PathLike[str],
    dtype: str = "bfloat16",
    quantization: str | None = None,
) -> None:
    """Write config.json, generation_config.json and model.safetensors into `directory`, made if need be.

    Weights are cast to `dtype` ("bfloat16", "float32" or "float16") and written one matrix at a time. With
    `quantization` "int8" or "float8" the matrices that `quantize_params` covers are written as it makes them, with a
    float32 scale a row (`smcjax.model.files.hf_quantization`); those of `params` that are so already as they are.
    The weights file appears under its name only when complete.

    Raises ValueError where `params` are not those of `config`, hold matrices in eight bits of another kind than
    `quantization`, or a matrix to be quantised holds what is no finite number.
    """
    check_quantization("quantization", quantization)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but weights are written as one of {', '.join(_DTYPES)}; choose one")
    family, keys = written_config(dataclasses.replace(config, dtype=dtype))
    shapes = jax.tree.leaves(param_shapes(config, dtype))
    stacks = jax.tree.leaves(tensor_names(config, family.names, family.norm_offset))
    leaves = jax.tree.leaves(params, is_leaf=is_packed)
    if [leaf.shape for leaf in leaves] != [shape.shape for shape in shapes]:
        raise ValueError("the shapes of params are not those that config calls for; pass the two that belong together")
    kind = None if quantization is None else QUANTIZATIONS[quantization]
    for leaf in leaves:
        if isinstance(leaf, Quantized) and leaf.quantization != quantization:
            raise ValueError(
                f"params hold {leaf.quantization} matrices and quantization is {quantization!r}; pass "
                f"{leaf.quantization!r}, which writes them as they are"
            )
    kinds = [kind if covered else None for covered in streamed(params)]
    if kind is not None:
        keys["quantization_config"] = written(kind, tied=config.tie_embeddings)
        _require_numbers(stacks, leaves, kinds)

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / "model.safetensors.partial"
    _write_safetensors(partial, stacks, leaves, kinds, dtype)
    os.replace(partial, directory / "model.safetensors")
    _write_json(directory / "config.json", keys)
    generation = {key: keys[key] for key in ("bos_token_id", "eos_token_id") if keys[key] is not None}
    _write_json(directory / "generation_config.json", generation)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _require_numbers(stacks: list[Stack], leaves: list[Any], kinds: list[Quantization | None]) -> None:
    for stack, leaf, kind in zip(stacks, leaves, kinds, strict=True):
        numbers = leaf.scale if is_packed(leaf) else leaf
        if kind is not None and not (jnp.isfinite(numbers).all() and (not is_packed(leaf) or (numbers > 0).all())):
            raise ValueError(
                f"params hold a NaN, an infinity or a scale that is not positive in {stack.parts[0][0]} or what is "
                f"fused with it, which {kind.name} cannot keep; correct it, or leave quantization out"
            )


def _write_safetensors(
    path: Path, stacks: list[Stack], leaves: list[Any], kinds: list[Quantization | None], dtype: str
) -> None:
    """Header first, which needs shapes only; then each matrix, to the places of its parts.

    `kinds` says of each leaf in which eight bits it is stored, None for `dtype`. Tensors of wider
    dtypes come first, so that all are aligned.
    """
    code, numpy_dtype = _DTYPES[dtype]
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    for stack, leaf, kind in zip(stacks, leaves, kinds, strict=True):
        for name, rows in stack.parts:
            shape = (rows, *leaf.shape[1:])
            if kind is not None:
                entries += [(name, kind.stored, shape, 1), (name + SCALE, "F32", (rows, 1), 4)]
            else:
                entries.append((name, code, shape, np.dtype(numpy_dtype).itemsize))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for this entry
    end = 0
    for name, own_code, shape, itemsize in sorted(entries, key=lambda entry: -entry[-1]):
        begin, end = end, end + math.prod(shape) * itemsize
        header[name] = {"dtype": own_code, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    quantize = jax.jit(quantize_matrix, static_argnames="kind")
    with open(path, "wb") as file:

        def put(name: str, values: np.ndarray) -> None:
            file.seek(8 + len(encoded) + header[name]["data_offsets"][0])
            file.write(np.ascontiguousarray(values).tobytes())

        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for stack, leaf, kind in zip(stacks, leaves, kinds, strict=True):
            kept: dict[str, np.ndarray]  # what is added to the name of each part, and the rows of all of them
            if kind is not None:
                packed = leaf if is_packed(leaf) else quantize(leaf, kind=kind)
                kept = {"": np.asarray(kind.restored(packed.values)), SCALE: np.asarray(packed.scale)[:, None]}
            else:
                values = np.asarray(leaf)
                kept = {"": (values - np.float32(stack.offset) if stack.offset else values).astype(numpy_dtype)}
            for suffix, rows_of_all in kept.items():
                start = 0
                for name, rows in stack.parts:
                    put(name + suffix, rows_of_all[start : start + rows])
                    start += rows
