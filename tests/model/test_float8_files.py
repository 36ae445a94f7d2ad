"""Checkpoints in float8 as their public formats describe them, by the NumPy oracle, and bad ones in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_oracle import make_config, oracle_logits, random_weights
from safetensors.numpy import save_file

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.matmul import is_packed, matrix
from smcjax.model import ModelConfig, init_params, load_checkpoint, logits, save_checkpoint
from smcjax.model.files.checkpoint import stored_quantization
from smcjax.model.files.hf_config import config_from_hf
from smcjax.model.quantize import quantize_matrix, quantize_params
from smcjax.quantization import FLOAT8 as FLOAT8_KIND
from tests.checkpoints import refusal

RAW = make_config("qwen3", num_hidden_layers=1, hidden_size=40, intermediate_size=56)
BLOCK = [16, 24]  # which divides neither side of most matrices
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
FLOAT8 = ml_dtypes.float8_e4m3fn


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors as its public writer has it, with dynamic activations."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **weights}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]},
        **{"config_groups": {"group_0": group}, "kv_cache_scheme": None, "quantization_status": "compressed"},
    }


FINE: dict[str, Any] = {
    **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": BLOCK},
    "modules_to_not_convert": ["lm_head"],
}
SCHEMES: dict[str, tuple[dict[str, Any], str, tuple[int, int] | None]] = {
    # its config, the suffix of scales, and rows and columns that have one (0: all); None: one number without a shape
    "compressed-tensors by row": (compressed("channel"), "_scale", (1, 0)),
    "compressed-tensors by matrix": (compressed("tensor"), "_scale", (0, 0)),
    "compressed-tensors by block": (compressed("block", block_structure=BLOCK), "_scale", (16, 24)),
    "fp8 by block": (FINE, "_scale_inv", (16, 24)),
    "fp8 by matrix": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", None),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "_scale", (1, 0)),
}


def write(directory: Path, name: str, **changes: np.ndarray | None) -> dict[str, np.ndarray]:
    """A directory in a scheme, with random numbers and scales; the weights that it means, in float32."""
    config, suffix, block = SCHEMES[name]
    rng = np.random.default_rng(3)
    stored: dict[str, Any] = {}
    meant: dict[str, np.ndarray] = {}
    for key, value in random_weights(RAW).items():
        if value.ndim != 2 or "embed" in key or "lm_head" in key:
            stored[key] = meant[key] = value
            continue
        numbers = rng.normal(0, 30, value.shape).astype(FLOAT8)
        high, wide = (size or length for size, length in zip(block or (0, 0), value.shape, strict=True))
        scale = rng.uniform(1e-3, 3e-3, (-(-len(value) // high), -(-value.shape[1] // wide))).astype(np.float32)
        of_rows = np.repeat(np.repeat(scale, high, axis=0), wide, axis=1)
        meant[key] = numbers.astype(np.float32) * of_rows[: value.shape[0], : value.shape[1]]
        stored[key], stored[key + suffix] = numbers, scale if block else np.array(scale[0, 0])
        if block is None:
            stored[key.replace("weight", "input_scale")] = np.full(1, 0.5, np.float32)
    stored = {key: value for key, value in {**stored, **changes}.items() if value is not None}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**RAW, "quantization_config": config}))
    save_file(stored, directory / "model.safetensors")
    return meant


@pytest.mark.parametrize("name", SCHEMES)
def test_files_mean_what_their_format_says(name: str, tmp_path: Path) -> None:
    meant = write(tmp_path, name)
    config, params = load_checkpoint(tmp_path, "float32")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 9).tolist()
    expected = oracle_logits(RAW, meant, tokens)
    found = np.asarray(logits(config, params, jnp.asarray(tokens)[None]))[0]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    wrong = {**meant, Q_PROJ: meant[Q_PROJ][::-1]}  # control
    assert np.abs(oracle_logits(RAW, wrong, tokens) - expected).max() > 1e-2 * np.abs(expected).max()
    stays = "block" not in name
    assert stored_quantization(tmp_path) == ("float8" if stays else None)
    _, stored = load_checkpoint(tmp_path, "float32", quantization="float8")
    qkv = stored.layers[0].qkv
    assert is_packed(qkv)
    parts = [meant[Q_PROJ.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
    whole = np.concatenate(parts)
    if stays:
        np.testing.assert_allclose(matrix(qkv).rows(slice(None)), whole, rtol=1e-6)
    else:  # blocks are multiplied out, and rounded by row
        chex.assert_trees_all_equal(qkv, quantize_matrix(jnp.asarray(whole, jnp.float32), FLOAT8_KIND))
    packed = load_checkpoint(tmp_path, "float32", quantization="int8")[1].layers[0].qkv
    np.testing.assert_allclose(matrix(packed).rows(slice(None)), whole, atol=0.501 * float(packed.scale.max()))


def test_what_is_written_in_float8_is_read_as_it_was(tmp_path: Path) -> None:
    """Bit by bit, through a file that says how its activations are to be rounded."""
    config = ModelConfig(32, 48, 64, 2, 4, 2, 16, 64)
    params = init_params(config, jax.random.key(0))
    rounded = quantize_params(params, FLOAT8_KIND)
    for given, name in ((params, "rounded here"), (rounded, "as it is")):
        save_checkpoint(config, given, tmp_path / name, dtype="float32", quantization="float8")
        _, read = load_checkpoint(tmp_path / name, "float32", quantization="float8")
        chex.assert_trees_all_equal(read, rounded)
    group = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert (group["weights"]["type"], group["input_activations"]["strategy"]) == ("float", "token")
    with pytest.raises(ValueError, match=r"^params hold float8 matrices and quantization is 'int8'; pass 'float8'"):
        save_checkpoint(config, rounded, tmp_path, quantization="int8")


@pytest.mark.parametrize(("name", "quantization"), [("fp8 by block", "int8"), ("compressed-tensors by row", "float8")])
def test_an_engine_runs_one(name: str, quantization: Literal["int8", "float8"], tmp_path: Path) -> None:
    write(tmp_path, name)
    with LLM(tmp_path, decoding=Autoregressive(), quantization=quantization, max_model_len=32, max_num_seqs=1) as llm:
        [out] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 4


SCALES = Q_PROJ + "_scale_inv"
BAD: dict[str, tuple[dict[str, np.ndarray | None], list[str]]] = {
    "no scale": ({SCALES: None}, [repr(Q_PROJ), repr(SCALES), "are missing"]),
    "of another block": ({SCALES: np.ones((4, 1), np.float32)}, ["is [4, 1] instead of [4, 2]"]),
    "zero": ({SCALES: np.zeros((4, 2), np.float32)}, ["has 0.0 for row 0"]),
    "NaN": ({Q_PROJ: np.full((64, 40), np.nan, np.float32).astype(FLOAT8)}, [repr(Q_PROJ), "has nan in row 0"]),
    "int8": ({Q_PROJ: np.ones((64, 40), np.int8)}, ["dtype I8", "F8_E4M3"]),
    "a norm": ({"model.norm.weight": np.ones(40, np.float32).astype(FLOAT8)}, ["only matrices"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, tmp_path: Path) -> None:
    changes, words = BAD[name]
    write(tmp_path, "fp8 by block", **changes)
    refusal(tmp_path, *words)


def test_float8_without_a_config(tmp_path: Path) -> None:
    write(tmp_path, "fp8 by block")
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    refusal(tmp_path, "has dtype F8_E4M3 and config.json has no quantization_config")


OTHER: list[tuple[dict[str, Any], str]] = [
    ({**FINE, "fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
    ({**FINE, "scale_fmt": "ue8m0"}, "quantization_config.scale_fmt is 'ue8m0'"),
    ({**FINE, "weight_block_size": [128]}, r"quantization_config.weight_block_size is \[128\]"),
    ({**FINE, "unheard_of": 1}, "quantization_config.unheard_of is 1"),
    (compressed("group", group_size=32), "weights.strategy is 'group'"),
    (compressed("channel", num_bits=4), "weights.num_bits is 4"),
    ({**compressed("channel"), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
]


@pytest.mark.parametrize(("found", "words"), OTHER, ids=[words for _, words in OTHER])
def test_other_schemes_are_refused_by_what_is_found(found: dict[str, Any], words: str) -> None:
    assert config_from_hf({**RAW, "quantization_config": FINE}) == config_from_hf(RAW)
    with pytest.raises(ValueError, match=words):
        config_from_hf({**RAW, "quantization_config": found})
