"""Hugging Face's quantization_config of the one scheme that is read and written: int8 weights by output row.

Its public name is compressed-tensors' format "int-quantized", here symmetric, by channel and of weights alone. A matrix
NAME [out, in] is stored in int8 and beside it NAME_scale [out, 1] in a float dtype:

    W[o, i] = NAME[o, i] · NAME_scale[o, 0]

Which matrices are kept so is seen in the files: other tensors are stored as ever.
"""

from __future__ import annotations

from typing import Any

from smcjax.model.hf_keys import HFKeys

SCALE = "_scale"  # added to a tensor's name
_METHOD, _FORMAT = "compressed-tensors", "int-quantized"
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_NO_SAY = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # how scales were found; how files keep them
_READ = (
    "of quantised weights only those of compressed-tensors' format int-quantized are read, in symmetric int8 by "
    "channel and beside nothing else that is quantised; use such a checkpoint or the original one"
)


def stores_int8(keys: HFKeys) -> bool:
    """True where a config says that matrices are stored in int8; raises ValueError for any other quantisation."""
    if keys.raw("compression_config"):
        raise keys.refusal("compression_config", _READ)
    if not keys.raw("quantization_config"):
        return False
    outer = keys.inner("quantization_config")
    _require(outer, {"quant_method": _METHOD, "format": _FORMAT})
    _refuse(outer, "kv_cache_scheme", "sparsity_config", "transform_config")
    for key in ("ignore", "version", "quantization_status", "global_compression_ratio"):
        outer.raw(key)  # the files say which matrices are stored in int8
    groups = outer.inner("config_groups")
    if not groups:
        raise outer.refusal("config_groups", _READ)
    for name in outer.raw("config_groups"):
        group = groups.inner(name)
        targets = group.raw("targets")
        if not isinstance(targets, list) or not targets or any(kind not in ("Linear", "Embedding") for kind in targets):
            raise group.refusal("targets", _READ)
        _refuse(group, "input_activations", "output_activations")
        if group.raw("format", _FORMAT) != _FORMAT:
            raise group.refusal("format", _READ)
        weights = group.inner("weights")
        _require(weights, _WEIGHTS)
        _refuse(weights, "actorder", "block_structure", "group_size")
        for key in _NO_SAY:
            weights.raw(key)
        for inner in (weights, group):
            inner.refuse_unknown()
    outer.refuse_unknown()
    return True


def _require(keys: HFKeys, wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        found = keys.raw(key)
        if type(found) is not type(value) or found != value:
            raise keys.refusal(key, _READ)


def _refuse(keys: HFKeys, *names: str) -> None:
    for name in names:
        if keys.raw(name):
            raise keys.refusal(name, _READ)


def written_int8(*, tied: bool) -> dict[str, Any]:
    """The quantization_config of a decoder whose every matrix that a forward streams is stored in int8.

    `tied`: the embedding is the head's matrix, and is stored in int8 under the embedding's name.
    """
    group = {
        "format": _FORMAT,  # without, compressed-tensors takes weights alone for another
        "targets": ["Linear", "Embedding"] if tied else ["Linear"],
        "weights": _WEIGHTS,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": _METHOD,
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"] if tied else [],  # which is the embedding
    }
