"""Hugging Face's quantization_config: how a directory stores quantised matrices, and which of those ways are read.

In eight bits a matrix NAME [out, in] is stored in int8 or float8 (e4m3), and beside it its scales, one for each block
of rows and columns:

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

The numbers of gptq, awq and compressed-tensors' "…pack-quantized" are packed (`smcjax.model.files.packed`), and always
multiplied out.
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
_PACKED_FORMAT, _PACKED_BITS = "pack-quantized", (2, 4, 8)
_FLOAT4_FORMATS: dict[str, dict[str, Any]] = {  # how their "weights" say that a group has one scale
    "nvfp4-pack-quantized": {"strategy": "tensor_group", "group_size": 16},
    "mxfp4-pack-quantized": {"strategy": "group", "group_size": 32},
}
_READ = (
    "of quantised weights only int8 by channel (int-quantized), float8 (float-quantized, fp8, fbgemm_fp8), 2, 4 or 8 "
    "bits (gptq, awq's gemm, pack-quantized) and float4 (nvfp4-, mxfp4-pack-quantized) are read, with nothing else "
    "quantised; use such a checkpoint or the original one"
)
# Keys of gptq and awq that say how numbers were found, or how another library computes with them.
_PROVENANCE = """
sym desc_act static_groups act_group_aware true_sequential damp_percent damp_auto_increment mse dataset tokenizer meta
quantizer model_name_or_path model_file_base_name model_seqlen block_name_to_quantize batch_size pad_token_id lm_head
module_name_preceding_first_block modules_in_block_to_quantize modules_to_not_convert max_input_length backend
cache_block_outputs use_cuda_fp16 use_exllama disable_exllama exllama_config do_fuse modules_to_fuse fuse_max_seq_len
parallel_packing offload_to_disk offload_to_disk_path hyb_act
"""


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
    def bits(self) -> int:
        """Bits of a number."""
        return 8

    @property
    def stays(self) -> bool:
        """True where matrices may stay as they are stored: with a scale a row, or one."""
        rows, columns = self.block
        return columns is None and rows in (1, None)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a directory packs its quantised matrices (`smcjax.model.files.packed`).

    Attributes:
        format: "GPTQ", "AWQ", or compressed-tensors' name.
        bits: of a number: 2, 4 or 8.
        group: how many inputs of a row have one scale; None: all.
        permuted: whether a tensor says which group each input belongs to. Otherwise neighbours belong together.
        zeros: whether tensors say which number is zero; without them it is the middle one.
        zero_offset: is added to each number of those tensors.
    """

    format: str
    bits: int
    group: int | None
    permuted: bool = False
    zeros: bool = True
    zero_offset: int = 0


def is_of_activations(name: str) -> bool:
    """True for tensors that say how activations were quantised, which are not read."""
    return name.endswith((".input_scale", ".input_scale_ub", ".input_zero_point", ".input_global_scale"))


def storage(keys: HFKeys) -> Storage | Packing | None:
    """How a config says that matrices are stored, None for plain; raises ValueError for ways that are not read."""
    if keys.raw("compression_config"):
        raise keys.refusal("compression_config", _READ)
    if not keys.raw("quantization_config"):
        return None
    outer = keys.inner("quantization_config")
    method = outer.raw("quant_method")
    found: Storage | Packing
    if method in ("gptq", "awq"):
        found = _gptq(outer) if method == "gptq" else _awq(outer)
        _skip(outer, *_PROVENANCE.split())
    elif method == "fp8":
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


def _gptq(keys: HFKeys) -> Packing:
    version = _version(keys, "gptq", "gptq_v2")
    bits = keys.raw("bits")
    if type(bits) is not int or bits not in _PACKED_BITS:
        raise keys.refusal("bits", _READ)
    permuted = keys.flag("desc_act")
    return Packing("GPTQ", bits, _group(keys), permuted, zero_offset=1 if version == "gptq" else 0)


def _awq(keys: HFKeys) -> Packing:
    _version(keys, "gemm")
    if keys.raw("bits", 4) != 4:
        raise keys.refusal("bits", _READ)
    if not keys.flag("zero_point", True):
        raise keys.refusal("zero_point", _READ)
    return Packing("AWQ", 4, _group(keys))


def _version(keys: HFKeys, *known: str) -> str:
    """The version of a format, the first of `known` where a config says none; whichever key names it."""
    found = known[0]
    for key in ("version", "format", "checkpoint_format"):
        value = keys.raw(key)
        if value is not None:
            found = value.lower() if isinstance(value, str) else ""
            if found not in known:
                raise keys.refusal(key, _READ)
    _refuse(keys, "dynamic", "is_marlin_format")
    if keys.raw("pack_dtype", "int32") != "int32":
        raise keys.refusal("pack_dtype", _READ)
    return found


def _group(keys: HFKeys) -> int | None:
    size = keys.raw("group_size", 128)
    if type(size) is not int or (size < 1 and size != -1):
        raise keys.refusal("group_size", _READ)
    return None if size == -1 else size


def _compressed_tensors(outer: HFKeys) -> Storage | Packing:
    kind = outer.raw("format")
    if kind not in (_FLOAT_FORMAT, _PACKED_FORMAT, *_FLOAT4_FORMATS):
        kind = _FORMAT
    _require(outer, {"quant_method": _METHOD, "format": kind})
    _refuse(outer, "kv_cache_scheme", "sparsity_config", "transform_config")
    _skip(outer, "ignore", "version", "quantization_status", "global_compression_ratio")
    groups = outer.inner("config_groups")
    if not groups:
        raise outer.refusal("config_groups", _READ)
    found: set[Storage | Packing] = set()
    for name in outer.raw("config_groups"):
        group = groups.inner(name)
        targets = group.raw("targets")
        if not isinstance(targets, list) or not targets or any(kind not in ("Linear", "Embedding") for kind in targets):
            raise group.refusal("targets", _READ)
        _refuse(group, "output_activations")
        _skip(group, "input_activations")
        if group.raw("format", kind) != kind:
            raise group.refusal("format", _READ)
        weights = group.inner("weights")
        if kind in _FLOAT4_FORMATS:
            found.add(_float4(weights, kind))
        else:
            found.add(_packed(weights) if kind == _PACKED_FORMAT else _weights(weights, kind == _FLOAT_FORMAT))
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


def _packed(keys: HFKeys) -> Packing:
    """The packing that a group's "weights" say."""
    _require(keys, {"type": "int", "dynamic": False})
    bits, strategy = keys.raw("num_bits"), keys.raw("strategy")
    if type(bits) is not int or bits not in _PACKED_BITS:
        raise keys.refusal("num_bits", _READ)
    if strategy not in ("group", "channel"):
        raise keys.refusal("strategy", _READ)
    order = keys.raw("actorder")
    if order not in (None, "weight", "static", "group", "dynamic"):
        raise keys.refusal("actorder", _READ)
    group = keys.raw("group_size") if strategy == "group" else None
    if strategy == "group" and (type(group) is not int or group < 1):
        raise keys.refusal("group_size", _READ)
    zeros = not keys.flag("symmetric", True)
    _refuse(keys, "block_structure")
    _skip(keys, "group_size", *_NO_SAY)
    keys.refuse_unknown()
    return Packing(_PACKED_FORMAT, bits, group, permuted=order in ("group", "dynamic"), zeros=zeros)


def _float4(keys: HFKeys, kind: str) -> Packing:
    """The packing of four-bit floats, after their "weights" have been found to be what the format's name says."""
    wanted = _FLOAT4_FORMATS[kind]
    _require(keys, {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, **wanted})
    _refuse(keys, "actorder", "block_structure")
    _skip(keys, *_NO_SAY)
    keys.refuse_unknown()
    return Packing(kind, 4, wanted["group_size"], zeros=False)


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
