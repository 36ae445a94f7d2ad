"""Directories of EAGLE-3 heads in the public layout: `LlamaForCausalLMEagle3` with fc, midlayer, norm, lm_head, d2t.

A head has its target's embedding and head where its files lack `embed_tokens.weight` and `lm_head.weight`. `d2t` has
for each of the draft's token ids i the target's, less i; `t2d` is true for the target's ids that are among them.

The residual streams that a head reads are those that enter the target's layers 2, L/2 and L − 3, unless the config
says otherwise, in one of two spellings: `eagle_aux_hidden_state_layer_ids` names layers by their inputs where it stands
by itself, as vLLM reads it, and by their outputs within `eagle_config`, as SGLang does.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from smcjax.errors import CheckpointError
from smcjax.model.config import ModelConfig
from smcjax.model.eagle import ATTENTION, EagleConfig, EagleParams, eagle_shapes
from smcjax.model.families.hf_keys import HFKeys
from smcjax.model.families.llama import plain_keys
from smcjax.model.files.checkpoint import (
    Stack,
    account_for_names,
    open_tensors,
    read_model_json,
    read_stack,
    weights_dtype,
)
from smcjax.model.files.hf_config import read_config
from smcjax.model.files.tensor_files import Source, TensorFile, refuse_companions

logger = logging.getLogger("smcjax")

ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_OWN = ("draft_vocab_size", "target_hidden_size", "eagle_config", _LAYERS)
_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers")  # left over from the target's config
_EMBED, _LM_HEAD, _D2T, _T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
_NAMES = {  # of tensors, without ".weight", by part of `EagleParams`
    "embed": "embed_tokens",
    "embed_norm": "midlayer.input_layernorm",
    "feature_norm": "midlayer.hidden_norm",
    **{part: f"midlayer.self_attn.{part}_proj" for part in "qkvo"},
    "mlp_norm": "midlayer.post_attention_layernorm",
    **{part: f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down")},
    "final_norm": "norm",
}


def is_eagle(directory: str | os.PathLike[str]) -> bool:
    """True for a directory whose config.json names an EAGLE-3 head."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        return False
    config = read_model_json(path)
    return isinstance(config, Mapping) and config.get("architectures") == [ARCHITECTURE]


def eagle_config(values: Mapping[str, Any], target: ModelConfig) -> EagleConfig:
    """The head that a parsed config.json describes, for `target`.

    Raises ValueError, naming key and value, for what does not go with the target or is not computed here.
    """
    keys = HFKeys(values)
    windows = _WINDOW if not keys.flag("use_sliding_window") else ()
    plain = {key: value for key, value in values.items() if key not in (*_OWN, *windows)}
    read = read_config({**plain, "architectures": ["LlamaForCausalLM"]})
    layer, spec = read.config, read.config.layer(0)
    if read.storage is not None:
        raise keys.refusal("quantization_config", "an EAGLE-3 head is read in floating point only; convert it")
    if layer.num_layers != 1:
        raise keys.refusal("num_hidden_layers", "an EAGLE-3 head has one layer; use such a head")
    if spec.qkv_bias or spec.o_bias or spec.mlp_bias:
        raise keys.refusal("attention_bias" if spec.qkv_bias else "mlp_bias", "EAGLE-3 heads are read without biases")
    if layer.vocab_size != target.vocab_size:
        raise keys.refusal("vocab_size", f"the target has {target.vocab_size} token ids; use the head made for it")
    hidden = keys.integer("target_hidden_size", layer.hidden_size)
    if hidden != target.hidden_size:
        name = "hidden_size" if keys.raw("target_hidden_size") is None else "target_hidden_size"
        raise keys.refusal(name, f"the target's hidden size is {target.hidden_size}; use the head made for it")
    draft_vocab_size = keys.integer("draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise keys.refusal("draft_vocab_size", f"the target has {layer.vocab_size} token ids; correct the config")
    layer = dataclasses.replace(layer, layers=(dataclasses.replace(spec, attention=ATTENTION),))
    return EagleConfig(layer, draft_vocab_size, hidden, _taps(keys, target))


def _taps(keys: HFKeys, target: ModelConfig) -> tuple[int, ...]:
    """The target's layers whose inputs are read."""
    name, count = _LAYERS, target.num_layers
    inner = keys.inner("eagle_config")
    if not inner.flag("use_aux_hidden_state", True):
        raise inner.refusal("use_aux_hidden_state", "an EAGLE-3 head reads three hidden states; use such a head")
    outputs = inner.raw(name)
    inner.refuse_unknown()
    given = keys.raw(name)
    if given is not None and outputs is not None:
        raise keys.refusal(name, "eagle_config names layers as well, by their outputs; keep one of the two")
    where = keys if outputs is None else inner
    if given is None and outputs is None:
        aux_layers = [2, count // 2, count - 3]
        if not 2 < count // 2 < count - 3:
            raise ValueError(
                f"{name} is None in the head's config, which means the inputs of layers 2, L/2 and L - 3, and the "
                f"target has L = {count} layers; name three layers there."
            )
        return tuple(aux_layers)
    ids, shift = (given, 0) if outputs is None else (outputs, 1)
    if not isinstance(ids, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise where.refusal(name, "it must hold three JSON integers")
    aux_layers = sorted(i + shift for i in ids)
    if len(set(aux_layers)) != 3 or len(aux_layers) != 3 or not 0 <= aux_layers[0] <= aux_layers[2] <= count:
        raise where.refusal(name, f"it must name three different layers of the target's {count}")
    return tuple(aux_layers)


def load_eagle_config(directory: str | os.PathLike[str], target: ModelConfig) -> EagleConfig:
    """`eagle_config` of a directory. Raises CheckpointError where its config.json cannot be used for `target`."""
    refuse_companions(Path(directory))
    try:
        return eagle_config(read_model_json(Path(directory) / "config.json"), target)
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from None


def load_eagle(
    directory: str | os.PathLike[str], target: ModelConfig, dtype: Any = None
) -> tuple[EagleConfig, EagleParams]:
    """The head of a directory in safetensors, weights on the default device in `dtype`, like `load_checkpoint`.

    Every tensor of the files is accounted for, else CheckpointError; d2t and t2d must name the same tokens.
    """
    path, kept = Path(directory), weights_dtype(dtype)
    config = load_eagle_config(path, target)
    config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, dtype=kept.name))
    files = open_tensors(path)
    ids = _token_ids(path, config, files)
    tensors = {name: file for name, file in files.items() if name not in (_D2T, _T2D)}
    own = {"embed": _EMBED in tensors, "lm_head": _LM_HEAD in tensors}
    lacking = [name for name, there in ((_EMBED, own["embed"]), (_LM_HEAD, own["lm_head"])) if not there]
    if lacking and config.layer.hidden_size != config.target_hidden_size:
        raise CheckpointError(
            f"{path} has no {lacking[0]}, and the target's has {config.target_hidden_size} columns where the head has "
            f"{config.layer.hidden_size}; use a head that has its own"
        )
    if not own["lm_head"] and config.prunes:
        raise CheckpointError(
            f"{path} has no {_LM_HEAD}, which a head of {config.draft_vocab_size} of the target's "
            f"{config.layer.vocab_size} token ids needs; fetch it again"
        )
    _say_what_is_not_said(path, config, lacking)
    shapes = eagle_shapes(config, kept, **own)
    stacks, tree = jax.tree.flatten(_names(config, **own))
    account_for_names(path, stacks, jax.tree.leaves(shapes), {}, tensors)
    source = Source(dict(tensors))
    leaves = [
        jax.block_until_ready(jax.device_put(read_stack(source, stack.parts, shape)))
        for stack, shape in zip(stacks, jax.tree.leaves(shapes), strict=True)
    ]
    params = jax.tree.unflatten(tree, leaves)
    if config.layer.tie_embeddings and own["embed"] and not own["lm_head"]:
        params = dataclasses.replace(params, lm_head=jnp.copy(params.embed))  # each array is freed by itself
    return config, dataclasses.replace(params, token_ids=None if ids is None else jnp.asarray(ids))


def _say_what_is_not_said(path: Path, config: EagleConfig, lacking: list[str]) -> None:
    """Logs what a head's files leave to the layout's defaults."""
    values = read_model_json(path / "config.json")
    if values.get(_LAYERS) is None and (values.get("eagle_config") or {}).get(_LAYERS) is None:
        logger.info("%s has no %s: the head reads the inputs of the layers %s.", path, _LAYERS, config.aux_layers)
    for name in lacking:
        tied = name == _LM_HEAD and config.layer.tie_embeddings and _EMBED not in lacking
        source = "its own embedding" if tied else "the target's"
        logger.info("%s has no %s: the head uses %s.", path, name, source)


def save_eagle(directory: str | os.PathLike[str], config: EagleConfig, params: EagleParams) -> None:
    """Writes a head in the public layout, in the weights' dtype; what is None is left to the target.

    Raises ValueError for a head with a map to the target's ids, which this does not write.
    """
    if params.token_ids is not None:
        raise ValueError("token_ids is an array and heads are written with the target's own ids; leave it None.")
    path, layer = Path(directory), config.layer
    path.mkdir(parents=True, exist_ok=True)
    names = _names(config, embed=params.embed is not None, lm_head=params.lm_head is not None)
    tensors = {}
    for stack, array in zip(jax.tree.leaves(names), jax.tree.leaves(params), strict=True):
        ends = np.cumsum([rows for _, rows in stack.parts])
        for (name, _), rows in zip(stack.parts, np.split(np.asarray(array), ends[:-1]), strict=True):
            tensors[name] = rows
    save_file(tensors, path / "model.safetensors")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "rms_norm_eps")
    values = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{name: getattr(layer, name) for name in sizes},
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(params.fc.dtype),
        **plain_keys(layer),
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
    }
    (path / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _names(config: EagleConfig, *, embed: bool, lm_head: bool) -> EagleParams:
    """A tree like `eagle_shapes` of the tensors that each array stacks."""
    layer = config.layer
    q, kv, f = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.intermediate_size
    fused = {"qkv": (("q", q), ("k", kv), ("v", kv)), "gate_up": (("gate", f), ("up", f))}

    def stack(path: Any, array: jax.ShapeDtypeStruct) -> Stack:
        field = path[-1].name
        parts = fused.get(field, ((field, array.shape[0]),))
        return Stack(tuple((f"{_NAMES.get(part, part)}.weight", rows) for part, rows in parts))

    shapes = eagle_shapes(config, "float32", embed=embed, lm_head=lm_head)
    found: EagleParams = jax.tree_util.tree_map_with_path(stack, shapes)
    return found


def _token_ids(path: Path, config: EagleConfig, files: Mapping[str, TensorFile]) -> np.ndarray | None:
    """The target's id of each of the draft's, Int32[Vd], checked; None where the two are the same."""
    size, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    if _D2T not in files:
        if config.prunes:
            raise CheckpointError(
                f"{path} has no {_D2T}, which says what the draft's {size} token ids are among the target's "
                f"{vocab_size}; fetch the head again"
            )
        return None

    def whole(name: str, length: int, *dtypes: str) -> np.ndarray:
        file = files[name]
        file.require(name, *dtypes)
        if file.shapes[name] != (length,):
            raise CheckpointError(
                f"{name} in {path} is {list(file.shapes[name])} instead of {[length]}; fetch the head again"
            )
        found: np.ndarray = file.handle.get_tensor(name)
        return found

    ids = np.arange(size) + whole(_D2T, size, "I64", "I32").astype(np.int64)
    outside, repeated = np.flatnonzero((ids < 0) | (ids >= vocab_size)), size - len(np.unique(ids))
    if outside.size:
        raise CheckpointError(
            f"{_D2T} in {path} makes the draft's token {outside[0]} the target's {ids[outside[0]]}, which has "
            f"{vocab_size} token ids; use the head made for it"
        )
    if repeated:
        raise CheckpointError(f"{_D2T} in {path} names {repeated} of the target's tokens twice; fetch the head again")
    if _T2D in files:
        known = np.flatnonzero(whole(_T2D, vocab_size, "BOOL"))
        if not np.array_equal(known, np.sort(ids)):
            raise CheckpointError(f"{_D2T} and {_T2D} in {path} name different tokens; fetch the head again")
    return None if np.array_equal(ids, np.arange(vocab_size)) else ids.astype(np.int32)
