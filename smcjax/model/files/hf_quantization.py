"""Hugging Face's quantization_config: how a directory stores matrices in eight bits, and which of those ways are read.

A matrix NAME [out, in] is stored in int8 or float8 (e4m3), and beside it its scales, one for each block of rows and
columns:

    W[o, i] = NAME[o, i] · scale[o // rows, i // columns]

| `quant_method` | numbers | scales | tensor of scales |
|---|---|---|---|
| compressed-tensors, "int-quantized" | int8 | a row | NAME_scale [out, 1] |
| compressed-tensors, "float-quantized" | float8 | a row, a matrix, or a block | NAME_scale [out, 1], [1] or as below |
| fp8 (as of DeepSeek and Qwen3) | float8 | a block or a matrix | NAME_scale_inv [⌈out/b⌉, ⌈in/b⌉], NAME_scale [1] |
| fbgemm_fp8 | float8 | a row | NAME_scale [out, 1] |

Which matrices are kept so is seen in the files. Activations are computed in the weights' dtype, whatever a config says
of theirs: that is nearer to the model before it was quantised. Matrices with a scale a row, or one, may stay so
(`quantization="int8"` or `"float8"`), and others are multiplied out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from smcjax.model.families.hf_keys import HFKeys
from smcjax.quantization import FLOAT8, INT8, Quantization

SCALE = "_scale"  # added to a tensor's name
_METHOD, _FORMAT, _FLOAT_FORMAT = "compressed-tensors", "int-quantized", "float-quantized"
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_NO_SAY = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # how scales were found; how files keep them
_READ = (
    "of quantised weights only int8 by channel of compressed-tensors (int-quantized) and float8 (float-quantized, fp8, "
    "fbgemm_fp8) are read, beside nothing else that is quantised; use such a checkpoint or the original one"
)


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a directory stores its quantised matrices.

    Attributes:
        kind: how their numbers were rounded.
        block: rows and columns that have one scale; None: all of the matrix's.
        suffix: is added to a matrix's name for that of its scales.
    """

    kind: Quantization
    block: tuple[int | None, int | None] = (1, None)
    suffix: str = SCALE

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The numbers of scales along the rows and columns of a matrix of this shape."""
        rows, columns = (
            1 if size is None else -(-length // size) for size, length in zip(self.block, shape, strict=True)
        )
        return rows, columns

    @property
    def stays(self) -> bool:
        """True where matrices may stay as they are stored: with a scale a row, or one."""
        rows, columns = self.block
        return columns is None and rows in (1, None)


def is_of_activations(name: str) -> bool:
    """True for tensors that say how activations were quantised, which are not read."""
    return name.endswith((".input_scale", ".input_scale_ub", ".input_zero_point"))


def storage(keys: HFKeys) -> Storage | None:
    """How a config says that matrices are stored, None for plain; raises ValueError for ways that are not read."""
    if keys.raw("compression_config"):
        raise keys.refusal("compression_config", _READ)
    if not keys.raw("quantization_config"):
        return None
    outer = keys.inner("quantization_config")
    method = outer.raw("quant_method")
    if method == "fp8":
        found = _fp8(outer)
    elif method == "fbgemm_fp8":
        _skip(outer, "activation_scale_ub", "modules_to_not_convert")
        found = Storage(FLOAT8)
    else:
        found = _compressed_tensors(outer)
    outer.refuse_unknown()
    return found


def _fp8(keys: HFKeys) -> Storage:
    """The storage of transformers' fine-grained float8; without blocks, that of one scale a matrix."""
    if keys.raw("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise keys.refusal("fmt", _READ)
    if keys.raw("scale_fmt") not in (None, "float"):
        raise keys.refusal("scale_fmt", _READ)
    _skip(keys, "activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize")
    if keys.raw("weight_block_size") is None:
        return Storage(FLOAT8, (None, None))
    return Storage(FLOAT8, _block(keys, "weight_block_size"), "_scale_inv")


def _compressed_tensors(outer: HFKeys) -> Storage:
    float8 = outer.raw("format") == _FLOAT_FORMAT
    kind = _FLOAT_FORMAT if float8 else _FORMAT
    _require(outer, {"quant_method": _METHOD, "format": kind})
    _refuse(outer, "kv_cache_scheme", "sparsity_config", "transform_config")
    _skip(outer, "ignore", "version", "quantization_status", "global_compression_ratio")
    groups = outer.inner("config_groups")
    if not groups:
        raise outer.refusal("config_groups", _READ)
    found = set()
    for name in outer.raw("config_groups"):
        group = groups.inner(name)
        targets = group.raw("targets")
        if not isinstance(targets, list) or not targets or any(kind not in ("Linear", "Embedding") for kind in targets):
            raise group.refusal("targets", _READ)
        _refuse(group, "output_activations")
        _skip(group, "input_activations")
        if group.raw("format", kind) != kind:
            raise group.refusal("format", _READ)
        found.add(_weights(group.inner("weights"), float8))
        group.refuse_unknown()
    if len(found) > 1:
        raise outer.refusal("config_groups", _READ)
    return found.pop()


def _weights(keys: HFKeys, float8: bool) -> Storage:
    """The storage that a group's "weights" say; int8 has a scale a row alone."""
    if not float8:
        _require(keys, _WEIGHTS)
        _refuse(keys, "block_structure")
        found = Storage(INT8)
    else:
        _require(keys, {**{key: _WEIGHTS[key] for key in _WEIGHTS if key != "strategy"}, "type": "float"})
        strategy = keys.raw("strategy")
        if strategy == "channel":
            found = Storage(FLOAT8)
        elif strategy == "tensor":
            found = Storage(FLOAT8, (None, None))
        elif strategy == "block":
            found = Storage(FLOAT8, _block(keys, "block_structure"))
        else:
            raise keys.refusal("strategy", _READ)
    _refuse(keys, "actorder", "group_size")
    _skip(keys, "block_structure", *_NO_SAY)
    keys.refuse_unknown()
    return found


def _block(keys: HFKeys, name: str) -> tuple[int, int]:
    """Rows and columns that have one scale."""
    found = keys.raw(name)
    if not isinstance(found, list) or len(found) != 2 or not all(type(size) is int and size > 0 for size in found):
        raise keys.refusal(name, _READ)
    return found[0], found[1]


def _require(keys: HFKeys, wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        found = keys.raw(key)
        if type(found) is not type(value) or found != value:
            raise keys.refusal(key, _READ)


def _refuse(keys: HFKeys, *names: str) -> None:
    for name in names:
        if keys.raw(name):
            raise keys.refusal(name, _READ)


def _skip(keys: HFKeys, *names: str) -> None:
    """Takes keys of which nothing depends here."""
    for name in names:
        keys.raw(name)


def written(kind: Quantization, *, tied: bool) -> dict[str, Any]:
    """The quantization_config of a decoder whose every matrix that a forward streams is stored in eight bits.

    `tied`: the embedding is the head's matrix, and is stored so under the embedding's name.
    """
    kept = _FORMAT if kind == INT8 else _FLOAT_FORMAT
    weights = _WEIGHTS if kind == INT8 else {**_WEIGHTS, "type": "float"}
    of_activations = {**weights, "strategy": "token", "dynamic": True} if kind.rounds_activations else None
    group = {
        "format": kept,  # without, compressed-tensors takes weights alone for another
        "targets": ["Linear", "Embedding"] if tied else ["Linear"],
        "weights": weights,
        "input_activations": of_activations,
        "output_activations": None,
    }
    return {
        "quant_method": _METHOD,
        "format": kept,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"] if tied else [],  # which is the embedding
    }
