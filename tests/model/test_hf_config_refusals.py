"""A config.json is refused by a sentence that names the key and shows its value, for any value at all."""

from __future__ import annotations

from typing import Any

import pytest
from hf_oracle import FAMILY, make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from smcjax.model.files.export import written_config
from smcjax.model.files.hf_config import config_from_hf
from tests.model.files.test_hf_config import LLAMA3, check_sentence

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
REFUSED: list[tuple[str, dict[str, Any], str, Any]] = [
    # model type, change, key that the message names, value that it shows
    ("llama", {"architectures": ["GPT2LMHeadModel"]}, "architectures", ["GPT2LMHeadModel"]),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures", "Sequence"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "architectures", "LlamaForCausalLM"),
    ("llama", {"architectures": [["LlamaForCausalLM"]]}, "architectures", "LlamaForCausalLM"),
    ("llama", {"architectures": None, "model_type": "gemma"}, "model_type", "gemma"),
    ("llama", {"model_type": "mistral"}, "model_type", "mistral"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type", "linear"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type", "dynamic"),
    ("qwen2", {"rope_scaling": YARN}, "rope_scaling.rope_type", "yarn"),
    ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e4}}, "rope_parameters.rope_type", "yarn"),
    ("llama", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling.type", "longrope"),
    ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope_scaling.type", "mrope"),
    ("llama", {"rope_scaling": {**LLAMA3, "type": "yarn"}}, "rope_scaling.type", "yarn"),
    ("llama", {"rope_scaling": {**LLAMA3, "beta_fast": 32}}, "rope_scaling.beta_fast", 32),
    ("llama", {"rope_scaling": {**LLAMA3, "factor": 0.5}}, "rope_scaling.factor", 0.5),
    ("llama", {"rope_scaling": {**LLAMA3, "factor": None}}, "rope_scaling.factor", None),
    ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor", 1.0),
    ("llama", {"rope_scaling": "llama3"}, "rope_scaling", "llama3"),
    ("llama", {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "rope_scaling", "llama3"),
    ("llama", {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta", 5e5),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention", 1e4),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", 0.5),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor", 0.5),
    ("llama", {"rope_theta": float("nan")}, "rope_theta", "nan"),
    ("llama", {"rope_theta": "10000"}, "rope_theta", "10000"),
    ("llama", {"rope_theta": 10**400}, "rope_theta", 1),
    ("llama", {"hidden_act": "gelu"}, "hidden_act", "gelu"),
    ("llama", {"quantization_config": {"quant_method": "aqlm", "bits": 4}}, "quantization_config", "aqlm"),
    ("llama", {"is_causal": False}, "is_causal", False),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder", True),
    ("llama", {"logits_scaling": 8.0}, "logits_scaling", 8.0),
    ("llama", {"use_qk_norm": True}, "use_qk_norm", True),
    ("llama", {"attention_chunk_size": 8192}, "attention_chunk_size", 8192),
    ("llama", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config", 8),
    ("llama", {"sliding_window": 128}, "sliding_window", 128),
    ("qwen2", {"attention_bias": True}, "attention_bias", True),
    ("mistral", {"sliding_window": 0}, "sliding_window", 0),
    ("mistral", {"sliding_window": 64, "layer_types": ["full_attention"] * 2}, "layer_types", "full_attention"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8.0}, "sliding_window", 8.0),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": -1, "sliding_window": 8}, "max_window_layers", -1),
    ("qwen3", {"layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types", "chunked_attention"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding_attention"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types", ["full_attention"]),
    ("gemma3_text", {"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures", "Conditional"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping", 30.0),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", 50.0),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention", True),
    ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation", "silu"),
    ("gemma3_text", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "sliding_window", None),
    ("gemma3_text", {"rope_scaling": LLAMA3}, "rope_scaling.rope_type", "llama3"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta", 1e6),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}, "rope_local_base_freq": 6.0},
        "rope_local_base_freq",
        5.0,
    ),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", 0),
    ("olmo2", {"hidden_act": "gelu"}, "hidden_act", "gelu"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv", 8.0),
    ("olmo2", {"sliding_window": 64}, "sliding_window", 64),
    ("olmo2", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types", "sliding_attention"),
    ("olmo2", {"rope_scaling": YARN}, "rope_scaling.rope_type", "yarn"),
    ("olmo2", {"architectures": ["Olmo3ForCausalLM"]}, "architectures", "Olmo3ForCausalLM"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads", 3),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads", 0),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1}, "hidden_size", 32),
    ("llama", {"head_dim": 7}, "head_dim", 7),
    ("qwen3", {"head_dim": None}, "head_dim", None),
    ("llama", {"hidden_size": "32"}, "hidden_size", "32"),
    ("llama", {"hidden_size": None}, "hidden_size", None),
    ("llama", {"vocab_size": True}, "vocab_size", True),
    ("llama", {"intermediate_size": 48.0}, "intermediate_size", 48.0),
    ("llama", {"num_hidden_layers": -1}, "num_hidden_layers", -1),
    ("llama", {"max_position_embeddings": 0}, "max_position_embeddings", 0),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps", 0),
    ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps", "1e-6"),
    ("llama", {"tie_word_embeddings": "true"}, "tie_word_embeddings", "true"),
    ("llama", {"attention_bias": 1}, "attention_bias", 1),
    ("llama", {"eos_token_id": 96}, "eos_token_id", 96),
    ("llama", {"eos_token_id": [2, -1]}, "eos_token_id", -1),
    ("llama", {"eos_token_id": "2"}, "eos_token_id", "2"),
    ("llama", {"eos_token_id": [True]}, "eos_token_id", True),
    ("llama", {"bos_token_id": [1, 2]}, "bos_token_id", [1, 2]),
    ("llama", {"dtype": "int8"}, "dtype", "int8"),
    ("llama", {"torch_dtype": ["float32"]}, "torch_dtype", ["float32"]),
]


@pytest.mark.parametrize(("model_type", "change", "key", "value"), REFUSED)
def test_refusals_name_key_and_value(model_type: str, change: dict[str, Any], key: str, value: Any) -> None:
    raw = make_config(model_type)
    config_from_hf({**raw, "sliding_window": None})  # without the change it is a good config
    with pytest.raises(ValueError, match=key.replace(".", r"\.")) as caught:
        config_from_hf({**raw, **change})
    assert str(value) in str(caught.value)
    check_sentence(str(caught.value))


def test_refusals_of_the_generation_config() -> None:
    with pytest.raises(ValueError, match=r"eos_token_id is 900 in generation_config\.json"):
        config_from_hf(make_config("llama"), {"eos_token_id": 900})
    with pytest.raises(ValueError, match="generation config must be a JSON object"):
        config_from_hf(make_config("llama"), [2])
    with pytest.raises(ValueError, match="config must be a JSON object, but it is a list"):
        config_from_hf([])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "silu", "float32", "default", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), inner),
    max_leaves=4,
)
KEYS = sorted({*written_config(config_from_hf(make_config("qwen3")))[1], *(next(iter(case[1])) for case in REFUSED)})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FAMILY)), st.sampled_from(KEYS), JSON)
def test_any_value_is_read_or_refused_with_a_value_error(model_type: str, key: str, value: Any) -> None:
    try:
        config = config_from_hf({**make_config(model_type), "sliding_window": None, key: value})
    except ValueError as error:
        check_sentence(str(error))
    else:
        assert hash(config) == hash(config_from_hf(written_config(config)[1]))
