"""Typed access to Hugging Face's config.json, and what families read of it alike: rotary embedding, local layers.

A key that no reader asks for is refused, unless its value says "off" (null, false, 0, empty): a later variant may hide
behind it. Keys that cannot change the logits (`_HARMLESS`) are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from smcjax.files import shortened
from smcjax.model.attention import AttentionKind, Full, SlidingWindow
from smcjax.model.config import LinearScaling, ModelConfig, Rope, RopeScaling
from smcjax.model.files.plausible import require_integer, require_number

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


def refusal(key: str, value: Any, reason: str) -> ValueError:
    return ValueError(f"{shortened(key)} is {shortened(repr(value))} in the model's config, but {reason}")


class HFKeys:
    """Typed access to a config that remembers what was asked for, so that the rest can be refused."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values, self.prefix = values, prefix
        self._seen: set[str] = set()

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it stands; `default` when absent or null."""
        self._seen.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        return key in self._values and self._values[key] is None

    def refusal(self, key: str, reason: str) -> ValueError:
        return refusal(self.prefix + key, self._values.get(key), reason)

    def _required(self, key: str, default: Any, wanted: str) -> Any:
        value = self.raw(key, default)
        if value is _REQUIRED:
            raise self.refusal(key, f"it is needed here; set it to {wanted}")
        return value

    def integer(self, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
        return require_integer(key, self._required(key, default, "an integer"), self.refusal, least)

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        return require_number(key, self._required(key, default, "a number"), self.refusal)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "it must be true or false")
        return value

    def inner(self, key: str) -> HFKeys:
        """Access to the object under `key`, empty where that is absent or null."""
        values = self.raw(key, {})
        if not isinstance(values, Mapping):
            raise self.refusal(key, "it must be a JSON object or null")
        return HFKeys(values, prefix=f"{self.prefix}{key}.")

    def __len__(self) -> int:
        return len(self._values)

    def refuse_unknown(self) -> None:
        for key, value in self._values.items():
            if key not in self._seen and key not in _HARMLESS and not key.startswith("_") and value:
                raise self.refusal(
                    key,
                    "this decoder does not know that key; remove it if the logits do not depend on it, "
                    "otherwise the model is not supported",
                )


def read_rope(
    keys: HFKeys,
    config: ModelConfig,
    objects: Iterable[HFKeys],
    *,
    theta: str = "rope_theta",
    default: float = 10_000.0,
    kinds: tuple[str, ...] = ("default", "llama3"),
) -> Rope:
    """Base and scaling of rotary embedding, from `objects` (rope_parameters, rope_scaling) and the key `theta`.

    A config may hold several spellings, as long as they say the same.
    """
    thetas: dict[str, float] = {}
    scalings = []
    if keys.raw(theta) is not None:
        thetas[theta] = keys.number(theta)
    for inner in objects:
        if inner:
            if inner.raw("rope_theta") is not None:
                thetas[f"{inner.prefix}rope_theta"] = inner.number("rope_theta")
            scalings.append(_rope_scaling(inner, config, kinds))
            inner.refuse_unknown()
    if len(set(thetas.values())) > 1:
        raise ValueError(f"the model's config gives {theta} twice and differently ({thetas}); keep the right one")
    if len(set(scalings)) > 1:
        raise keys.refusal("rope_scaling", "rope_parameters asks for another scaling; keep the right one")
    return Rope(next(iter(thetas.values()), default), next(iter(scalings), None))


def _rope_scaling(keys: HFKeys, config: ModelConfig, kinds: tuple[str, ...]) -> RopeScaling | LinearScaling | None:
    kind, old_kind = keys.raw("rope_type"), keys.raw("type")
    if kind is not None and old_kind is not None and kind != old_kind:
        raise keys.refusal("type", f"rope_type is {shortened(repr(kind))}; keep the right one")
    name = "rope_type" if kind is not None else "type"
    kind = kind if kind is not None else (old_kind if old_kind is not None else "default")
    if kind not in kinds:
        raise keys.refusal(
            name, f"only {' and '.join(map(repr, kinds))} are implemented; use a model without that scaling"
        )
    if keys.raw("partial_rotary_factor", 1) != 1:
        raise keys.refusal("partial_rotary_factor", "only full rotary embedding (1.0) is implemented")
    if kind == "default":
        return None
    factor = keys.number("factor")
    if kind == LinearScaling.rope_type:
        return LinearScaling(factor) if factor > 1 else None
    low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
    if low >= high:
        raise keys.refusal("high_freq_factor", f"it must be greater than low_freq_factor = {low}")
    return RopeScaling(
        factor, low, high, keys.integer("original_max_position_embeddings", config.max_position_embeddings)
    )


def written_rope(rope: Rope) -> dict[str, Any]:
    """Writes a rotary embedding as one object of rope_parameters, which `read_rope` reads back."""
    if rope.scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {"rope_type": rope.scaling.rope_type, **dataclasses.asdict(rope.scaling), "rope_theta": rope.theta}


def local_layers(keys: HFKeys, num_layers: int, default: Callable[[int], bool] | None) -> list[bool]:
    """The layers that attend within a window, by layer_types or, without, by `default` (None: there is no window)."""
    kinds = ["full_attention"] if default is None else ["full_attention", "sliding_attention"]
    layer_types = read_layer_types(keys, num_layers, kinds)
    if layer_types is None:
        return [default is not None and default(index) for index in range(num_layers)]
    return [kind == "sliding_attention" for kind in layer_types]


def read_layer_types(keys: HFKeys, num_layers: int, kinds: Sequence[str]) -> list[str] | None:
    """The kinds of all layers by the key layer_types, each one of `kinds`; None without."""
    layer_types = keys.raw("layer_types")
    if layer_types is None:
        return None
    if (
        not isinstance(layer_types, list | tuple)
        or len(layer_types) != num_layers
        or any(kind not in kinds for kind in layer_types)
    ):
        raise keys.refusal(
            "layer_types", f"only {' and '.join(kinds)} in all num_hidden_layers = {num_layers} layers is implemented"
        )
    return list(layer_types)


def windowed(window: int, max_positions: int, scale: float | None = None) -> AttentionKind:
    """Attention to `window` positions; full attention where no position of the model can feel that."""
    return SlidingWindow(window, scale) if window < max_positions else Full(scale)


def written_windows(config: ModelConfig) -> tuple[list[str], int | None]:
    """The layer_types of `config`, and the window of its first local layer."""
    kinds = [config.layer(index).attention for index in range(config.num_layers)]
    windows = [kind.window for kind in kinds if isinstance(kind, SlidingWindow)]
    types = ["sliding_attention" if isinstance(kind, SlidingWindow) else "full_attention" for kind in kinds]
    return types, next(iter(windows), None)
