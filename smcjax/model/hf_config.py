"""Hugging Face's config.json, read into `ModelConfig` (written: `smcjax.model.export`).

Four model classes are read: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM, with the
defaults that transformers gives an absent key. Whatever a config asks for and the decoder does not compute is refused
by name. So is a key that nobody here knows, unless its value says "off" (null, false, 0, empty): a later variant may
hide behind it. Keys that cannot change the logits (`_HARMLESS`) are ignored.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from smcjax.files import shortened
from smcjax.model.config import LayerSpec, ModelConfig, Rope, RopeScaling


@dataclasses.dataclass(frozen=True)
class _Family:
    """One model class: the name in `architectures`, and what transformers takes an absent key to mean."""

    model_type: str
    num_kv_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size / num_attention_heads
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_id: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", None, None, 2048, bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": _Family("mistral", 8, None, 131072, bos_token_id=1, eos_token_id=2),
    "Qwen2ForCausalLM": _Family("qwen2", 32, None, 32768),
    "Qwen3ForCausalLM": _Family("qwen3", 32, 128, 32768),
}
_MISTRAL_DEFAULT_WINDOW = 4096
# Spellings of transformers and torch; a config's dtype chooses nothing here, so one that says nothing is no fault.
_DTYPES = {
    **{name: name for name in ("float32", "bfloat16", "float16", "float64")},
    **{"auto": "float32", "float": "float32", "half": "float16", "double": "float64"},
}
# The largest that is taken for a size: several times what any model has, so that what is refused is a mistake. Sizes
# within make trees and shapes at once; whether the weights are of such a size is another question (`checkpoint`).
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
}
_MAX_INT = (1 << 31) - 1  # of positions and token ids, which are int32
_MAX_EOS_IDS = 1024

# Keys with no say in the logits of a forward pass: provenance, training, dropout (off at inference), the sampling
# defaults and tokenizer hints that older configs carry, and how (not what) another library computes.
_HARMLESS_NAMES = """
architectures auto_map model_type name_or_path transformers_version model_name license finetuning_task
task_specific_params tokenizer_class tokenizer_padding_side tokenizer_model_max_length model_max_length
max_sequence_length transformers.js_config unsloth_version unsloth_fixed is_llama_config
initializer_range initializer_factor pretraining_tp neftune_noise_alpha gradient_checkpointing
attention_dropout attn_dropout attn_pdrop hidden_dropout hidden_dropout_prob resid_pdrop resid_dropout
residual_dropout embd_pdrop embedding_dropout dropout classifier_dropout ffn_dropout
use_cache return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
output_logits tie_last_hidden_states chunk_size_feed_forward torchscript use_bfloat16 attn_implementation
experts_implementation use_flash_attn use_flash_attention use_flash_attention_2 cache_implementation
router_aux_loss_coef id2label label2id num_labels problem_type
pad_token_id sep_token_id cls_token_id unk_token_id mask_token_id decoder_start_token_id
bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id
forced_eos_token_id length_penalty max_length max_new_tokens min_length min_p no_repeat_ngram_size
num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind
target_lookbehind num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty
suppress_tokens temperature top_k top_p typical_p prefix
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
_REQUIRED = object()


def _refusal(key: str, value: Any, reason: str) -> ValueError:
    return ValueError(f"{shortened(key)} is {shortened(repr(value))} in the model's config, but {reason}")


class _Keys:
    """Typed access to a config that remembers what was asked for, so that the rest can be refused."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values, self._prefix = values, prefix
        self._seen: set[str] = set()

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it stands; `default` when absent or null."""
        self._seen.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        return key in self._values and self._values[key] is None

    def refusal(self, key: str, reason: str) -> ValueError:
        return _refusal(self._prefix + key, self._values.get(key), reason)

    def _required(self, key: str, default: Any, wanted: str) -> Any:
        value = self.raw(key, default)
        if value is _REQUIRED:
            raise self.refusal(key, f"it is needed here; set it to {wanted}")
        return value

    def integer(self, key: str, default: Any = _REQUIRED) -> int:
        value = self._required(key, default, "a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, "it must be a positive JSON integer")
        most = _LARGEST.get(key, _MAX_INT)
        if value > most:
            raise self.refusal(key, f"no model has more than {most} there; correct the config")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        value = self._required(key, default, "a positive number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.refusal(key, "it must be a finite positive JSON number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw(key, False)
        if not isinstance(value, bool):
            raise self.refusal(key, "it must be true or false")
        return value

    def refuse_unknown(self) -> None:
        for key, value in self._values.items():
            if key not in self._seen and key not in _HARMLESS and not key.startswith("_") and value:
                raise self.refusal(
                    key,
                    "this decoder does not know that key; remove it if the logits do not depend on it, "
                    "otherwise the model is not supported",
                )


def config_from_hf(config: Any, generation_config: Any = None) -> ModelConfig:
    """The configuration that a parsed config.json asks for, old or new spelling.

    Both arguments are what json.loads made of the files, unchecked; without a generation_config.json pass None.

    End-of-sequence ids are those of `config`, then those that only `generation_config` names; its sampling
    defaults are the request's business and are not read. Raises ValueError, naming key and value, for what is
    inconsistent and for whatever this decoder would not compute.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"the model's config must be a JSON object, but it is a {type(config).__name__}")
    keys = _Keys(config)
    _refuse_unsupported(keys)
    architecture = _architecture(keys)
    family = _FAMILIES[architecture]

    vocab_size, hidden_size = keys.integer("vocab_size"), keys.integer("hidden_size")
    intermediate_size, num_layers = keys.integer("intermediate_size"), keys.integer("num_hidden_layers")
    max_positions = keys.integer("max_position_embeddings", family.max_position_embeddings)
    num_heads, num_kv_heads, head_dim = _heads(keys, family, hidden_size)
    _refuse_local_attention(keys, family, num_layers, max_positions)
    attention_bias = keys.flag("attention_bias") if family.model_type in ("llama", "qwen3") else False
    layer = LayerSpec(
        rope=_rope(keys, max_positions),
        qkv_bias=attention_bias or family.model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=keys.flag("mlp_bias") if family.model_type == "llama" else False,
        qk_norm=family.model_type == "qwen3",
    )
    bos = _token_ids("bos_token_id", keys, config, family.bos_token_id, vocab_size)
    if len(bos) > 1:
        raise keys.refusal("bos_token_id", "it must be one id or null")
    parsed = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        layers=(layer,),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_token_ids(keys, config, generation_config, family, vocab_size),
        dtype=_dtype(keys),
    )
    keys.refuse_unknown()
    return parsed


def _architecture(keys: _Keys) -> str:
    """The model class, from `architectures`, or from `model_type` where that is absent; they must not disagree."""
    by_type = {family.model_type: name for name, family in _FAMILIES.items()}
    known = ", ".join(_FAMILIES)
    architectures, model_type = keys.raw("architectures"), keys.raw("model_type")
    if architectures is None:
        if not isinstance(model_type, str) or model_type not in by_type:
            raise keys.refusal("model_type", f"only these model classes are supported: {known}")
        return by_type[model_type]
    if not isinstance(architectures, list | tuple) or len(architectures) != 1 or str(architectures[0]) not in _FAMILIES:
        raise keys.refusal("architectures", f"only one of these is supported: {known}")
    name: str = architectures[0]
    if model_type is not None and model_type != _FAMILIES[name].model_type:
        raise keys.refusal("model_type", f"architectures says {name}; make the two agree")
    return name


def _refuse_unsupported(keys: _Keys) -> None:
    """What changes the computation and has no counterpart in the decoder, whichever the family."""
    if keys.raw("quantization_config") or keys.raw("compression_config"):
        key = "quantization_config" if keys.raw("quantization_config") else "compression_config"
        raise keys.refusal(key, "quantised weights are not read; use the original bfloat16 or float32 checkpoint")
    if keys.raw("hidden_act", "silu") not in ("silu", "swish"):
        raise keys.refusal("hidden_act", "only silu is implemented; use a model with that activation")
    if keys.raw("partial_rotary_factor", 1) != 1:
        raise keys.refusal("partial_rotary_factor", "only full rotary embedding (1.0) is implemented")
    if keys.raw("is_causal", True) is not True:
        raise keys.refusal("is_causal", "only causal attention is implemented; use a decoder")
    for key in ("is_encoder_decoder", "add_cross_attention"):
        if keys.flag(key):
            raise keys.refusal(key, "only decoders without an encoder are implemented")


def _heads(keys: _Keys, family: _Family, hidden_size: int) -> tuple[int, int, int]:
    num_heads = keys.integer("num_attention_heads")
    # null asks for multi-head attention in all four; an absent key does so in Llama alone.
    kv_default = num_heads if keys.is_null("num_key_value_heads") else family.num_kv_heads
    num_kv_heads = keys.integer("num_key_value_heads", kv_default if kv_default is not None else num_heads)
    if num_heads % num_kv_heads:
        raise _refusal(
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
        raise _refusal("head_dim", head_dim, "rotary embedding turns pairs, so it must be even; correct the config")
    return num_heads, num_kv_heads, head_dim


def _refuse_local_attention(keys: _Keys, family: _Family, num_layers: int, max_positions: int) -> None:
    """Sliding windows are refused where any position would feel them."""
    layer_types = keys.raw("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list | tuple)
        or len(layer_types) != num_layers
        or any(kind != "full_attention" for kind in layer_types)
    ):
        raise keys.refusal(
            "layer_types", f"only full_attention in all num_hidden_layers = {num_layers} layers is implemented"
        )
    if family.model_type.startswith("qwen"):
        if keys.flag("use_sliding_window"):
            raise keys.refusal("use_sliding_window", "only full attention is implemented; use a model without a window")
        keys.raw("sliding_window"), keys.raw("max_window_layers")  # without effect while use_sliding_window is false
    elif family.model_type == "mistral" and not keys.is_null("sliding_window"):
        window = keys.integer("sliding_window", _MISTRAL_DEFAULT_WINDOW)
        if window < max_positions:
            raise _refusal(
                "sliding_window",
                window,
                f"only full attention is implemented; for sequences of up to {window} tokens set "
                f"max_position_embeddings (now {max_positions}) to {window}",
            )


def _rope(keys: _Keys, max_positions: int) -> Rope:
    """Base and scaling of rotary embedding from `rope_parameters` or `rope_scaling` beside `rope_theta`.

    A config may hold both spellings, as long as they say the same.
    """
    thetas: dict[str, float] = {}
    scalings: dict[str, RopeScaling | None] = {}
    if keys.raw("rope_theta") is not None:
        thetas["rope_theta"] = keys.number("rope_theta")
    for name in ("rope_parameters", "rope_scaling"):
        values = keys.raw(name, {})
        if not isinstance(values, Mapping):
            raise keys.refusal(name, "it must be a JSON object or null")
        if values:
            inner = _Keys(values, prefix=f"{name}.")
            if inner.raw("rope_theta") is not None:
                thetas[f"{name}.rope_theta"] = inner.number("rope_theta")
            scalings[name] = _rope_scaling(inner, max_positions)
            inner.refuse_unknown()
    if len(set(thetas.values())) > 1:
        raise ValueError(f"the model's config gives rope_theta twice and differently ({thetas}); keep the right one")
    if len(set(scalings.values())) > 1:
        raise keys.refusal("rope_scaling", "rope_parameters asks for another scaling; keep the right one")
    return Rope(next(iter(thetas.values()), 10_000.0), next(iter(scalings.values()), None))


def _rope_scaling(keys: _Keys, max_positions: int) -> RopeScaling | None:
    """What one rope dict asks for: nothing ("default") or llama3."""
    kind, old_kind = keys.raw("rope_type"), keys.raw("type")
    if kind is not None and old_kind is not None and kind != old_kind:
        raise keys.refusal("type", f"rope_type is {shortened(repr(kind))}; keep the right one")
    name = "rope_type" if kind is not None else "type"
    kind = kind if kind is not None else (old_kind if old_kind is not None else "default")
    if kind not in ("default", "llama3"):
        raise keys.refusal(name, "only 'default' and 'llama3' are implemented; use a model without that scaling")
    if keys.raw("partial_rotary_factor", 1) != 1:
        raise keys.refusal("partial_rotary_factor", "only full rotary embedding (1.0) is implemented")
    if kind == "default":
        return None
    factor = keys.number("factor")
    if factor < 1:
        raise keys.refusal("factor", "it must be at least 1")
    low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
    if low >= high:
        raise keys.refusal("high_freq_factor", f"it must be greater than low_freq_factor = {low}")
    return RopeScaling(factor, low, high, keys.integer("original_max_position_embeddings", max_positions))


def _token_ids(key: str, keys: _Keys, values: Mapping[str, Any], default: int | None, vocab_size: int) -> list[int]:
    """One id, a list of ids or null under `key`; `default` where the key is absent."""
    keys.raw(key)
    if key not in values:
        return [] if default is None or default >= vocab_size else [default]
    value = values[key]
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if len(ids) > _MAX_EOS_IDS:
        raise _refusal(key, value, f"it holds {len(ids)} ids and at most {_MAX_EOS_IDS} are taken; keep those meant")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise _refusal(key, value, "it must hold JSON integers")
        if not 0 <= token < vocab_size:
            raise _refusal(key, value, f"ids must lie in [0, vocab_size = {vocab_size}); correct or remove it")
    return ids


def _eos_token_ids(
    keys: _Keys,
    config: Mapping[str, Any],
    generation_config: Any,
    family: _Family,
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


def _dtype(keys: _Keys) -> str:
    """The dtype that the config announces; what the files hold is seen when they are read."""
    name = "dtype" if keys.raw("dtype") is not None else "torch_dtype"
    value = keys.raw(name, "float32")
    keys.raw("torch_dtype")
    short = value.removeprefix("torch.") if isinstance(value, str) else value
    if not isinstance(short, str) or short not in _DTYPES:
        raise keys.refusal(name, f"only {', '.join(_DTYPES)} are read; convert the checkpoint to one of them")
    return _DTYPES[short]
