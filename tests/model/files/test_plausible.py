"""Every number of a config lies in a range, and so does every number that a published model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hf_oracle import make_config, random_weights

from smcjax.errors import CheckpointError
from smcjax.model.files.checkpoint import load_config
from smcjax.model.files.hf_config import config_from_hf
from smcjax.model.files.plausible import LARGEST, RANGES
from tests.gguf_files import write_gguf
from tests.model.files.test_hf_config import LLAMA3

PUBLISHED = {  # the least and the most
    "rms_norm_eps": (1e-8, 1e-3),
    "rope_theta": (1e3, 4.6e10),
    "rope_local_base_freq": (1e4, 1e6),
    "factor": (1.0, 1024.0),
    "low_freq_factor": (1.0, 4.0),
    "high_freq_factor": (1.0, 32.0),
    "vocab_size": (32, 1_000_000),
    "hidden_size": (64, 53_248),
    "intermediate_size": (128, 212_992),
    "num_hidden_layers": (1, 252),
    "num_attention_heads": (1, 256),
    "num_key_value_heads": (1, 256),
    "head_dim": (8, 576),
    "query_pre_attn_scalar": (64, 256),
    "max_position_embeddings": (256, 100_000_000),
}


@pytest.mark.parametrize("key", PUBLISHED)
def test_what_is_published_lies_well_within(key: str) -> None:
    least, most = PUBLISHED[key]
    bounds = RANGES.get(key) or (1, LARGEST[key])
    assert bounds[0] <= least
    assert most < bounds[1]


WRONG: list[tuple[str, dict[str, Any]]] = [
    *(("llama", {"rms_norm_eps": value}) for value in (1e300, 1.0, 1e-300, 1e-20)),
    *(("llama", {"rope_theta": value}) for value in (1e300, 1e13, 0.5, 1e-300)),
    *(("llama", {"rope_scaling": {**LLAMA3, "factor": value}}) for value in (1e300, 1e5, 0.99)),
    ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1e300}}),
    ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 1e-300}}),
    ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 10**12}}),
    ("gemma3_text", {"rope_local_base_freq": 1e300}),
    ("gemma3_text", {"query_pre_attn_scalar": 10**9}),
    ("gemma3_text", {"sliding_window_pattern": 10**9}),
    ("gemma3_text", {"sliding_window": 10**12}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 10**9}),
]


@pytest.mark.parametrize(("family", "change"), WRONG, ids=[f"{family}-{change}"[:60] for family, change in WRONG])
def test_what_no_model_has_is_refused(family: str, change: dict[str, Any]) -> None:
    raw = make_config(family)
    config_from_hf(raw)
    [(key, value)] = list(change.items())[-1:]
    if isinstance(value, dict):
        key = next(name for name in value if value[name] != LLAMA3.get(name))
    with pytest.raises(ValueError, match=rf"{key} is .*, but it must be an? (integer|number) from "):
        config_from_hf({**raw, **change})


@pytest.mark.parametrize("option", ["kernel_size", "block_size", "num_blocks", "window", "init_blocks"])
def test_options_of_sparse_attention_have_a_range_too(option: str) -> None:
    raw = {**make_config("llama"), "architectures": ["SmcjaxNSAForCausalLM"], "model_type": "smcjax_nsa"}
    config_from_hf(raw)
    with pytest.raises(ValueError, match=f"native_sparse_attention .*{option} must be an integer from [01] to 1048576"):
        config_from_hf({**raw, "native_sparse_attention": {option: 16 * 10**60}})


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("rms_norm_eps", 1e30, "layer_norm_rms_epsilon"),
        ("rms_norm_eps", 0.5, "layer_norm_rms_epsilon"),
        ("rope_theta", 1e30, "rope.freq_base"),
        ("rope_theta", 0.1, "rope.freq_base"),
        ("hidden_size", 1 << 20, "embedding_length"),
        ("intermediate_size", 1 << 30, "feed_forward_length"),
        ("head_dim", 1 << 30, "attention.key_length"),
        ("max_position_embeddings", (1 << 32) - 1, "context_length"),
    ],
)
def test_the_same_ranges_hold_in_gguf_files(name: str, value: Any, key: str, tmp_path: Path) -> None:
    raw = make_config("llama", intermediate_size=64)
    load_config(write_gguf(tmp_path / "m.gguf", raw, random_weights(raw)))
    path = write_gguf(tmp_path / "m.gguf", {**raw, name: value}, random_weights(raw), architecture="qwen2")
    with pytest.raises(CheckpointError, match=rf"{key} is .*, but it must be an? (integer|number) from "):
        load_config(path)


def test_a_directory_is_refused_by_its_name_and_the_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**make_config("llama"), "rms_norm_eps": 1e300}))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: rms_norm_eps is 1e\+300 in the model's config"):
        load_config(tmp_path)
