"""config.json → ModelConfig: what is understood, what is refused, and that nothing is dropped in silence."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hf_oracle import FAMILY, make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from smcjax.model import LayerSpec, ModelConfig, Rope, RopeScaling
from smcjax.model.attention import FULL, Full, SlidingWindow
from smcjax.model.config import LinearScaling
from smcjax.model.files.export import written_config
from smcjax.model.files.hf_config import config_from_hf
from tests.helpers import model_config


def check_sentence(message: str) -> None:
    assert "\n" not in message
    assert not message.endswith(".")
    assert len(message) < 400


def hf_config(config: ModelConfig) -> dict[str, Any]:
    return written_config(config)[1]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def test_a_llama_3_2_instruct_config() -> None:
    config = {
        **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
        **{"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu"},
        **{"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192},
        **{"max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32},
        **{"num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
        **{"rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
        **{"transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256},
    }
    generation = {"eos_token_id": [128009, 128001, 5], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    assert config_from_hf(config, generation) == ModelConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        layers=(LayerSpec(rope=Rope(500000.0, RopeScaling(32.0, 1.0, 4.0, 8192))),),
        tie_embeddings=True,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009, 5),
        dtype="bfloat16",
    )


def test_keys_of_published_configs_that_change_nothing() -> None:
    """Keys that no layer uses change nothing; control: biases of Llama's layers are another model."""
    unused: dict[str, dict[str, Any]] = {
        "qwen2": {"sliding_window": 32768, "max_window_layers": 24, "use_sliding_window": False, "use_mrope": False},
        "qwen3": {"sliding_window": None, "rope_scaling": None, "max_window_layers": 28, "attention_bias": False},
        "llama": {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": 1}},
    }
    for family, keys in unused.items():
        assert config_from_hf(make_config(family, **keys)) == config_from_hf(make_config(family))
    mistral = config_from_hf(make_config("mistral", sliding_window=None))
    assert config_from_hf(make_config("mistral", sliding_window=256)) == mistral  # = max_position_embeddings
    both = config_from_hf(make_config("llama", attention_bias=True, mlp_bias=True, hidden_act="swish"))
    assert (both.layer(0).qkv_bias, both.layer(0).o_bias, both.layer(0).mlp_bias) == (True, True, True)


def test_old_and_new_spelling_are_the_same_model() -> None:
    old = make_config("llama", rope_scaling=LLAMA3, rope_theta=5e5, torch_dtype="torch.bfloat16")
    new = make_config("llama", rope_parameters={**LLAMA3, "rope_theta": 5e5}, dtype="bfloat16")
    older = make_config("llama", rope_scaling={**LLAMA3, "type": "llama3"}, rope_theta=5e5, dtype="bfloat16")
    del new["rope_theta"], older["rope_scaling"]["rope_type"]
    parsed = config_from_hf(old)
    assert parsed.layer(0).rope.scaling is not None
    assert parsed == config_from_hf(new) == config_from_hf(older)
    assert parsed == config_from_hf({**old, **new})
    plain = config_from_hf(make_config("llama", rope_scaling={"type": "default"}))
    assert plain == config_from_hf(make_config("llama"))


@pytest.mark.parametrize("model_type", FAMILY)
def test_absent_keys_mean_what_transformers_takes_them_to_mean(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60_000, "hidden_size": 128, "intermediate_size": 8, "num_hidden_layers": 2}
    raw = {"model_type": model_type, "num_attention_heads": 32, **sizes}
    if model_type == "gemma3_text":
        raw["num_hidden_layers"] = sizes["num_hidden_layers"] = 7
    theirs = transformers.AutoConfig.for_model(**raw)
    ours = config_from_hf(raw)
    eos = theirs.eos_token_id
    assert (
        kinds(ours)
        == [
            theirs.sliding_window if kind == "sliding_attention" else None
            for kind in getattr(theirs, "layer_types", ["full_attention"] * ours.num_layers)
        ]
        or model_type == "mistral"
    )
    if model_type == "gemma3_text":
        ropes = [theirs.rope_parameters[kind]["rope_theta"] for kind in theirs.layer_types]
        assert [ours.layer(index).rope.theta for index in range(7)] == ropes
        variant = {"layers": ours.layers, "embed_scale": 128**0.5, "float32_norms": True}
    elif model_type == "olmo2":
        layer = LayerSpec(
            rope=Rope(theirs.rope_parameters["rope_theta"]), qk_norm="all", pre_norms=False, post_norms=True
        )
        variant = {"layers": (layer,), "float32_norms": True}
    else:
        variant = {
            "rope": Rope(theirs.rope_parameters["rope_theta"]),
            "qkv_bias": model_type == "qwen2",
            "qk_norm": "head" if model_type == "qwen3" else None,
            "attention": SlidingWindow(theirs.sliding_window) if model_type == "mistral" else FULL,
        }
    assert ours == model_config(
        **{key: sizes[key] for key in ("vocab_size", "hidden_size", "intermediate_size")},
        **variant,
        num_layers=sizes["num_hidden_layers"],
        num_heads=32,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", 128 // 32),
        max_position_embeddings=theirs.max_position_embeddings,
        rms_norm_eps=theirs.rms_norm_eps,
        tie_embeddings=theirs.tie_word_embeddings,
        bos_token_id=theirs.bos_token_id,
        eos_token_ids=() if eos is None else (eos,),
    )


def kinds(config: ModelConfig) -> list[int | None]:
    """Every layer's window, None for full attention."""
    return [getattr(config.layer(index).attention, "window", None) for index in range(config.num_layers)]


def test_windows_are_those_of_transformers() -> None:
    """Like in transformers 5, Mistral's layers all have windows, Qwen's from max_window_layers on or by layer_types."""
    assert kinds(config_from_hf(make_config("mistral", sliding_window=64))) == [64, 64]
    assert kinds(config_from_hf(make_config("mistral", max_position_embeddings=32768))) == [4096, 4096]  # by default
    for family in ("qwen2", "qwen3"):
        raw = make_config(family, num_hidden_layers=4, use_sliding_window=True, sliding_window=64)
        assert kinds(config_from_hf(raw)) == [None] * 4  # max_window_layers is 28 by default
        assert kinds(config_from_hf({**raw, "max_window_layers": 3})) == [None, None, None, 64]
        assert kinds(config_from_hf({**raw, "max_window_layers": 0})) == [64] * 4
        assert kinds(config_from_hf({**raw, "max_window_layers": 0, "sliding_window": 256})) == [None] * 4
        assert kinds(config_from_hf({**raw, "max_window_layers": 0, "sliding_window": None})) == [None] * 4
        types = ["sliding_attention", "full_attention"] * 2
        assert kinds(config_from_hf({**raw, "layer_types": types})) == [64, None, 64, None]
    transformers = pytest.importorskip("transformers")
    for raw in ({"max_window_layers": 2}, {"layer_types": ["sliding_attention"] + ["full_attention"] * 3}):
        raw = make_config("qwen3", num_hidden_layers=4, use_sliding_window=True, sliding_window=64, **raw)
        theirs = transformers.Qwen3Config(**raw)
        expected = [64 if kind == "sliding_attention" else None for kind in theirs.layer_types]
        assert kinds(config_from_hf(raw)) == expected


OLMO_2_1B = {
    **{"architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02},
    **{"intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 16},
    **{"num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 100277, "rms_norm_eps": 1e-06},
    **{"rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32"},
    **{"transformers_version": "4.47.0", "use_cache": False, "vocab_size": 100352},
}


def test_an_olmo_2_config() -> None:
    """The file of OLMo-2-0425-1B."""
    assert config_from_hf(OLMO_2_1B) == ModelConfig(
        vocab_size=100352,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        max_position_embeddings=4096,
        layers=(LayerSpec(rope=Rope(500000.0), qk_norm="all", pre_norms=False, post_norms=True),),
        rms_norm_eps=1e-6,
        float32_norms=True,
        eos_token_ids=(100257,),
    )


GEMMA_3_1B = {
    **{"architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
    **{"attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106]},
    **{"final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"},
    **{"hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768},
    **{"model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1},
    **{"pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000},
    **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144},
}


def test_a_gemma_3_config() -> None:
    local = LayerSpec(SlidingWindow(512), Rope(10_000.0), qk_norm="head", post_norms=True, activation="gelu_tanh")
    everywhere = dataclasses.replace(local, attention=FULL, rope=Rope(1_000_000.0))
    expected = ModelConfig(
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        layers=(*[local] * 5, everywhere),
        embed_scale=1152**0.5,
        float32_norms=True,
        tie_embeddings=True,
        bos_token_id=2,
        eos_token_ids=(1, 106),
        dtype="bfloat16",
    )
    assert config_from_hf(GEMMA_3_1B) == expected
    few = {key: GEMMA_3_1B[key] for key in ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size")}
    few |= {"vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4, "rope_scaling": LINEAR}
    parsed = config_from_hf(few)  # what is left out are its class's defaults
    assert parsed.layer(5).rope == Rope(1_000_000.0, LinearScaling(8.0))
    assert parsed.layer(4) == dataclasses.replace(local, attention=SlidingWindow(4096))
    new = {key: value for key, value in few.items() if key != "rope_scaling"}
    new["rope_parameters"] = {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert config_from_hf(new) == config_from_hf({**few, **new}) == parsed
    scaled = config_from_hf({**GEMMA_3_1B, "query_pre_attn_scalar": 168})
    assert scaled.layer(0).attention == SlidingWindow(512, 168**-0.5)
    assert scaled.layer(5).attention == Full(168**-0.5)


def test_null_num_key_value_heads_is_multi_head() -> None:
    for model_type in FAMILY:
        raw = make_config(model_type, num_key_value_heads=None, sliding_window=None)
        assert config_from_hf(raw).num_kv_heads == 4


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 2, 5], None, (5, 2)),
        (2, {"eos_token_id": [7, 2]}, (2, 7)),
        (None, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": None}, ()),
        (None, {}, ()),
        ("absent", {"eos_token_id": 7}, (7,)),
        ("absent", {}, (2,)),  # Llama's own default
    ],
)
def test_eos_ids(config_eos: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    raw = make_config("llama", eos_token_id=config_eos)
    if config_eos == "absent":
        del raw["eos_token_id"]
    assert config_from_hf(raw, generation).eos_token_ids == expected


@st.composite
def config_fields(draw: st.DrawFn) -> dict[str, Any]:
    num_kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    vocab_size = draw(st.integers(1, 300_000))
    ids = st.integers(0, vocab_size - 1)
    low = draw(st.floats(0.1, 10))
    kind = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
    bias = draw(st.booleans()) and kind != "mistral"
    return {
        "vocab_size": vocab_size,
        "hidden_size": draw(st.integers(1, 8192)),
        "intermediate_size": draw(st.integers(1, 8192)),
        "num_layers": draw(st.integers(1, 100)),
        "num_heads": num_kv_heads * group,
        "num_kv_heads": num_kv_heads,
        "head_dim": 2 * draw(st.integers(1, 128)),
        "max_position_embeddings": draw(st.integers(5000, 10**7)),
        "rms_norm_eps": draw(st.floats(1e-12, 0.1)),
        "rope": Rope(
            draw(st.floats(1, 1e12)),
            draw(
                st.none()
                | st.builds(
                    RopeScaling,
                    st.floats(1, 100),
                    st.just(low),
                    st.floats(low, 100, exclude_min=True),
                    st.integers(1, 10**6),
                )
            ),
        ),
        "tie_embeddings": draw(st.booleans()),
        "qkv_bias": bias or kind == "qwen2",
        "o_bias": bias and kind != "qwen2",
        "mlp_bias": draw(st.booleans()) and kind == "llama",
        "qk_norm": "head" if kind == "qwen3" else None,
        "bos_token_id": draw(st.none() | ids),
        "eos_token_ids": tuple(draw(st.lists(ids, max_size=4, unique=True))),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "attention": SlidingWindow(draw(st.integers(1, 4096))) if kind == "mistral" else FULL,
    }


@settings(max_examples=150, deadline=None)
@given(config_fields())
def test_a_config_survives_being_written(fields: dict[str, Any]) -> None:
    config = model_config(**fields)
    assert config_from_hf(json.loads(json.dumps(hf_config(config)))) == config


@st.composite
def local_layers(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json of a family in which every layer has a kind."""
    family = draw(st.sampled_from(["qwen2", "qwen3", "gemma3_text"]))
    layers = draw(st.integers(1, 9))
    types = draw(st.lists(st.sampled_from(["sliding_attention", "full_attention"]), min_size=layers, max_size=layers))
    raw = {"num_hidden_layers": layers, "layer_types": types, "sliding_window": draw(st.integers(1, 300))}
    if family != "gemma3_text":
        return make_config(family, use_sliding_window=True, **raw)
    rope = st.fixed_dictionaries(
        {"rope_type": st.just("linear"), "factor": st.floats(1, 64), "rope_theta": st.floats(1, 1e7)}
    )
    raw["rope_parameters"] = {"full_attention": draw(rope), "sliding_attention": draw(rope)}
    raw["query_pre_attn_scalar"] = draw(st.integers(1, 1024))
    made = make_config(family, attention_bias=draw(st.booleans()), **raw)
    del made["rope_theta"]
    return made


@settings(max_examples=150, deadline=None)
@given(local_layers())
def test_layers_of_several_kinds_survive_being_written(raw: dict[str, Any]) -> None:
    config = config_from_hf(raw)
    assert config_from_hf(json.loads(json.dumps(hf_config(config)))) == config


def test_what_no_model_class_has_is_not_written() -> None:
    config = config_from_hf(make_config("llama"))
    changes: list[dict[str, Any]] = [
        {"attention": SlidingWindow(8), "mlp_bias": True},
        {"attention": Full(0.5)},
        {"activation": "gelu_tanh"},
        {"post_norms": True},
        {"pre_norms": False},
        {"qk_norm": "all"},
        {"rope": Rope(1e4, LinearScaling(2.0))},
        {"o_bias": True},
        {"qk_norm": "head", "qkv_bias": True},
        {"qkv_bias": True, "mlp_bias": True},
    ]
    for change in changes:
        with pytest.raises(ValueError, match=r"set it to|use a model without") as caught:
            hf_config(dataclasses.replace(config, layers=(LayerSpec(**change),)))
        check_sentence(str(caught.value))
    with pytest.raises(ValueError, match=r"embed_scale is 2\.0, but LlamaForCausalLM"):
        hf_config(dataclasses.replace(config, embed_scale=2.0))
