"""Hugging Face's config.json, read into `ModelConfig` (written: `smcjax.model.files.export`).

The model classes of `smcjax.model.families` are read, with the defaults that transformers gives an absent key. What a
config asks for and the decoder does not compute is refused by name, and so is a key that no reader here asks for
(`smcjax.model.families.hf_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from smcjax.model.config import ModelConfig
from smcjax.model.families import Family, families
from smcjax.model.families.hf_keys import HFKeys, refusal
from smcjax.model.files.hf_quantization import Packing, Storage, storage

# Spellings of transformers and torch; a config's dtype chooses nothing here, so one that says nothing is no fault.
_DTYPES = {
    **{name: name for name in ("float32", "bfloat16", "float16", "float64")},
    **{"auto": "float32", "float": "float32", "half": "float16", "double": "float64"},
}
_MAX_EOS_IDS = 1024


class ReadConfig(NamedTuple):
    """A parsed config.json: its family, the decoder, and how quantised matrices are stored (None: there are none)."""

    family: Family
    config: ModelConfig
    storage: Storage | Packing | None


def config_from_hf(config: Any, generation_config: Any = None) -> ModelConfig:
    """The configuration that a parsed config.json asks for, old or new spelling.

    Both arguments are what json.loads made of the files, unchecked; without a generation_config.json pass None.

    End-of-sequence ids are those of `config`, then those that only `generation_config` names; its sampling
    defaults are the request's business and are not read. Raises ValueError, naming key and value, for what is
    inconsistent and for whatever this decoder would not compute.
    """
    return read_config(config, generation_config).config


def read_config(config: Any, generation_config: Any = None) -> ReadConfig:
    """All that a parsed config.json says; `config` is that of `config_from_hf`."""
    if not isinstance(config, Mapping):
        raise ValueError(f"the model's config must be a JSON object, but it is a {type(config).__name__}")
    keys = HFKeys(config)
    stored = storage(keys)
    _refuse_unsupported(keys)
    family = _family(keys)

    vocab_size, hidden_size = keys.integer("vocab_size"), keys.integer("hidden_size")
    intermediate_size, num_layers = keys.integer("intermediate_size"), keys.integer("num_hidden_layers")
    max_positions = keys.integer("max_position_embeddings", family.max_position_embeddings)
    num_heads, num_kv_heads, head_dim = _heads(keys, family, hidden_size)
    bos = _token_ids("bos_token_id", keys, config, family.bos_token_id, vocab_size)
    if len(bos) > 1:
        raise keys.refusal("bos_token_id", "it must be one id or null")
    shape = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=keys.number("rms_norm_eps", family.rms_norm_eps),
        tie_embeddings=keys.flag("tie_word_embeddings", family.tie_embeddings),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_token_ids(keys, config, generation_config, family, vocab_size),
        dtype=_dtype(keys),
    )
    parsed = family.read(keys, shape)
    keys.refuse_unknown()
    return ReadConfig(family, parsed, stored)


def _family(keys: HFKeys) -> Family:
    """The family of the model class that `architectures` names, or else `model_type`; they must not disagree."""
    by_class = {family.architecture: family for family in families()}
    by_type = {family.model_type: family for family in families()}
    known = ", ".join(by_class)
    architectures, model_type = keys.raw("architectures"), keys.raw("model_type")
    if architectures is None:
        if not isinstance(model_type, str) or model_type not in by_type:
            raise keys.refusal("model_type", f"only these model classes are supported: {known}")
        return by_type[model_type]
    if not isinstance(architectures, list | tuple) or len(architectures) != 1 or str(architectures[0]) not in by_class:
        raise keys.refusal("architectures", f"only one of these is supported: {known}")
    family = by_class[architectures[0]]
    if model_type is not None and model_type != family.model_type:
        raise keys.refusal("model_type", f"architectures says {family.architecture}; make the two agree")
    return family


def _refuse_unsupported(keys: HFKeys) -> None:
    """Refuses keys that change the computation and have no counterpart in the decoder, whichever the family."""
    if keys.raw("partial_rotary_factor", 1) != 1:
        raise keys.refusal("partial_rotary_factor", "only full rotary embedding (1.0) is implemented")
    if keys.raw("is_causal", True) is not True:
        raise keys.refusal("is_causal", "only causal attention is implemented; use a decoder")
    for key in ("is_encoder_decoder", "add_cross_attention"):
        if keys.flag(key):
            raise keys.refusal(key, "only decoders without an encoder are implemented")


def _heads(keys: HFKeys, family: Family, hidden_size: int) -> tuple[int, int, int]:
    num_heads = keys.integer("num_attention_heads")
    # null asks for multi-head attention in all; an absent key does so in Llama alone.
    kv_default = num_heads if keys.is_null("num_key_value_heads") else family.num_kv_heads
    num_kv_heads = keys.integer("num_key_value_heads", kv_default if kv_default is not None else num_heads)
    if num_heads % num_kv_heads:
        raise refusal(
            "num_key_value_heads",
            num_kv_heads,
            f"it must divide num_attention_heads = {num_heads}; set it to the number that the checkpoint has",
        )
    head_dim_default = family.head_dim
    if head_dim_default is None:
        if keys.raw("head_dim") is None and hidden_size % num_heads:
            raise keys.refusal(
                "hidden_size", f"it is not a multiple of num_attention_heads = {num_heads}; set head_dim explicitly"
            )
        head_dim_default = hidden_size // num_heads
    elif keys.is_null("head_dim"):
        raise keys.refusal("head_dim", f"{family.model_type} needs an integer; set it")
    head_dim = keys.integer("head_dim", head_dim_default)
    if head_dim % 2:
        raise refusal("head_dim", head_dim, "rotary embedding turns pairs, so it must be even; correct the config")
    return num_heads, num_kv_heads, head_dim


def _token_ids(key: str, keys: HFKeys, values: Mapping[str, Any], default: int | None, vocab_size: int) -> list[int]:
    """One id, a list of ids or null under `key`; `default` where the key is absent."""
    keys.raw(key)
    if key not in values:
        return [] if default is None or default >= vocab_size else [default]
    value = values[key]
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if len(ids) > _MAX_EOS_IDS:
        raise refusal(key, value, f"it holds {len(ids)} ids and at most {_MAX_EOS_IDS} are taken; keep those meant")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise refusal(key, value, "it must hold JSON integers")
        if not 0 <= token < vocab_size:
            raise refusal(key, value, f"ids must lie in [0, vocab_size = {vocab_size}); correct or remove it")
    return ids


def _eos_token_ids(
    keys: HFKeys,
    config: Mapping[str, Any],
    generation_config: Any,
    family: Family,
    vocab_size: int,
) -> tuple[int, ...]:
    """The union, in order and without repeats. A family's default counts only where neither file names any."""
    if generation_config is None:
        generation_config = {}
    if not isinstance(generation_config, Mapping):
        raise ValueError(f"the generation config must be a JSON object, but it is a {type(generation_config).__name__}")
    default = None if "eos_token_id" in generation_config else family.eos_token_id
    ids = _token_ids("eos_token_id", keys, config, default, vocab_size)
    try:
        ids += _token_ids("eos_token_id", keys, generation_config, None, vocab_size)
    except ValueError as error:
        raise ValueError(str(error).replace("the model's config", "generation_config.json")) from None
    return tuple(dict.fromkeys(ids))


def _dtype(keys: HFKeys) -> str:
    """The dtype that the config announces; what the files hold is seen when they are read."""
    name = "dtype" if keys.raw("dtype") is not None else "torch_dtype"
    value = keys.raw(name, "float32")
    keys.raw("torch_dtype")
    short = value.removeprefix("torch.") if isinstance(value, str) else value
    if not isinstance(short, str) or short not in _DTYPES:
        raise keys.refusal(name, f"only {', '.join(_DTYPES)} are read; convert the checkpoint to one of them")
    return _DTYPES[short]
