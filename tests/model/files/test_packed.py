"""Packed checkpoints written from their formats' descriptions, number by number, and bad ones in one sentence."""

from __future__ import annotations

import json
import logging
import re
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_oracle import make_config, oracle_logits, random_weights
from safetensors.numpy import save_file

from smcjax.errors import CheckpointError
from smcjax.matmul import matrix
from smcjax.model import load_checkpoint, logits
from smcjax.model.files import checkpoint
from smcjax.model.files.checkpoint import stored_quantization
from smcjax.model.files.hf_config import config_from_hf
from smcjax.model.quantize import quantize_params
from smcjax.quantization import INT8, QUANTIZATIONS
from tests.checkpoints import refusal, write_shards

RAW = make_config("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=96)
GROUP = 16
Q_PROJ = "model.layers.0.self_attn.q_proj."
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the neighbours that a word holds, from its lowest bits on
Tensors = dict[str, np.ndarray]


class Scheme(NamedTuple):
    """A quantization_config and what it says, in plain words."""

    config: dict[str, Any]
    bits: int = 4
    group: int | None = GROUP
    permuted: bool = False
    zeros: bool = True
    stored_zero: int = 0  # is added to a zero when it is stored


def gptq(bits: int = 4, **changes: Any) -> dict[str, Any]:
    """A quantization_config as AutoGPTQ writes it."""
    config = {"bits": bits, "group_size": GROUP, "damp_percent": 0.01, "desc_act": False, "sym": False}
    return {**config, "quant_method": "gptq", "true_sequential": True, "model_file_base_name": "model", **changes}


def awq(**changes: Any) -> dict[str, Any]:
    """A quantization_config as AutoAWQ writes it."""
    config = {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True, "quant_method": "awq"}
    return {**config, "modules_to_not_convert": ["lm_head"], **changes}


def compressed(num_bits: int = 4, **changes: Any) -> dict[str, Any]:
    """A quantization_config as compressed-tensors writes it."""
    weights = {
        **{"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        **{"actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {}},
    }
    group = {"targets": ["Linear"], "weights": {**weights, **changes}, "input_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]},
        **{"config_groups": {"group_0": {**group, "output_activations": None}}, "kv_cache_scheme": None},
        **{"quantization_status": "compressed", "global_compression_ratio": None},
    }


# As transformers 5 writes AutoAWQ's, with the keys that it has from GPTQ's.
AWQ_5 = {
    **{"backend": "auto", "bits": 4, "format": "gemm", "version": "gemm", "group_size": GROUP, "zero_point": True},
    **{"act_group_aware": True, "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True},
    **{"damp_percent": 0.1, "dataset": None, "desc_act": False, "max_input_length": None, "meta": None, "sym": True},
    **{"model_seqlen": None, "modules_in_block_to_quantize": None, "modules_to_not_convert": ["lm_head"]},
    **{"module_name_preceding_first_block": None, "pad_token_id": None, "quant_method": "awq", "tokenizer": None},
    "true_sequential": True,
}
SCHEMES: dict[str, Scheme] = {
    "GPTQ": Scheme(gptq(), stored_zero=-1),
    "GPTQ, desc_act": Scheme(gptq(desc_act=True, static_groups=False), permuted=True, stored_zero=-1),
    "GPTQ, all inputs in one group": Scheme(gptq(group_size=-1), group=None, stored_zero=-1),
    "GPTQ, version 2": Scheme(gptq(checkpoint_format="gptq_v2", format="gptq_v2", meta={"quantizer": ["a:1"]})),
    "GPTQ, 8 bits": Scheme(gptq(8, checkpoint_format="gptq"), bits=8, stored_zero=-1),
    "GPTQ, 2 bits": Scheme(gptq(2), bits=2, stored_zero=-1),
    "AWQ": Scheme(awq()),
    "AWQ of transformers 5": Scheme(AWQ_5),
    "AWQ, all inputs in one group": Scheme(awq(group_size=-1, version="GEMM"), group=None),
    "pack-quantized": Scheme(compressed(), zeros=False),
    "pack-quantized, zero points": Scheme(compressed(symmetric=False)),
    "pack-quantized, permuted": Scheme(compressed(actorder="group"), permuted=True, zeros=False),
    "pack-quantized, 8 bits": Scheme(compressed(8), bits=8, zeros=False),
    "pack-quantized, by row": Scheme(
        compressed(strategy="channel", group_size=None, symmetric=False), group=None, zeros=True
    ),
}


def packed(numbers: np.ndarray, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Int32[words, other]: numbers along the first axis, n = 32 / bits of them a word, the last word filled with 0."""
    each = 32 // bits
    filled = np.zeros((-(-len(numbers) // each) * each, numbers.shape[1]), np.uint64)
    filled[: len(numbers)] = numbers
    words = np.zeros((len(filled) // each, numbers.shape[1]), np.uint64)
    for place in range(each):
        words |= filled[(order[place] if order else place) :: each] << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def write(directory: Path, name: str, changes: Callable[[Tensors], Tensors] = dict, **raw: Any) -> Tensors:
    """A directory in a scheme, with random numbers, zeros and scales; the weights that it means, in float32."""
    scheme, rng = SCHEMES[name], np.random.default_rng(3)
    bits, stored, meant = scheme.bits, dict[str, np.ndarray](), dict[str, np.ndarray]()
    config = {**RAW, **raw}
    for key, value in random_weights(config).items():
        if not key.endswith("_proj.weight"):
            stored[key] = meant[key] = value
            continue
        outputs, inputs = value.shape
        size = scheme.group or inputs
        group_of = np.arange(inputs) // size
        if scheme.permuted:
            group_of = rng.permutation(group_of)
        numbers = rng.integers(0, 1 << bits, (outputs, inputs))
        scale = (rng.uniform(0.5, 1.5, (outputs, inputs // size)) / (1 << bits)).astype(np.float16)
        zeros = rng.integers(1, 1 << bits, scale.shape) if scheme.zeros else np.full(scale.shape, 1 << (bits - 1))
        meant[key] = np.zeros(value.shape, np.float32)
        for at in range(inputs):
            difference = (numbers[:, at] - zeros[:, group_of[at]]).astype(np.float32)
            meant[key][:, at] = difference * scale[:, group_of[at]].astype(np.float32)
        stored |= {
            f"{key.removesuffix('weight')}{part}": tensor
            for part, tensor in tensors_of(name, numbers, zeros + scheme.stored_zero, scale, group_of).items()
        }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": scheme.config}))
    written = {key: np.ascontiguousarray(value) for key, value in changes(stored).items()}
    save_file(written, directory / "model.safetensors", {"format": "pt"})
    return meant


def tensors_of(name: str, numbers: np.ndarray, zeros: np.ndarray, scale: np.ndarray, group_of: np.ndarray) -> Tensors:
    """The tensors of one module, by their names behind the module's; numbers, zeros and scales have a row an output."""
    scheme = SCHEMES[name]
    if name.startswith("GPTQ"):
        return {
            "qweight": packed(numbers.T, scheme.bits),
            "qzeros": packed(zeros, scheme.bits).T,
            "scales": scale.T,
            "g_idx": group_of.astype(np.int32),
        }
    if name.startswith("AWQ"):
        return {
            "qweight": packed(numbers, 4, AWQ_ORDER).T,
            "qzeros": packed(zeros, 4, AWQ_ORDER).T,
            "scales": scale.T,
        }
    tensors = {
        "weight_packed": packed(numbers.T, scheme.bits).T,
        "weight_scale": scale,
        "weight_shape": np.array(numbers.shape, np.int64),
    }
    if scheme.zeros:
        tensors["weight_zero_point"] = packed(zeros, scheme.bits)
    if scheme.permuted:
        tensors["weight_g_idx"] = group_of.astype(np.int32)
    return tensors


@pytest.mark.parametrize("name", SCHEMES)
def test_files_mean_what_their_format_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, also of rows that begin and end within a word; control: another order of numbers is another model."""
    meant = write(tmp_path, name)
    assert stored_quantization(tmp_path) is None
    config, params = load_checkpoint(tmp_path, "float32")
    monkeypatch.setattr(checkpoint, "_ROWS", 10)
    chex.assert_trees_all_equal(load_checkpoint(tmp_path, "float32")[1], params, strict=True)
    layer, at = params.layers[0], "model.layers.0."
    for found, parts in (
        (layer.qkv, ("self_attn.q", "self_attn.k", "self_attn.v")),
        (layer.o, ("self_attn.o",)),
        (layer.gate_up, ("mlp.gate", "mlp.up")),
        (layer.down, ("mlp.down",)),
    ):
        np.testing.assert_array_equal(found, np.concatenate([meant[f"{at}{part}_proj.weight"] for part in parts]))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 9).tolist()
    expected = oracle_logits(RAW, meant, tokens)
    found = np.asarray(logits(config, params, jnp.asarray(tokens)[None]))[0]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    wrong = {**meant, Q_PROJ + "weight": meant[Q_PROJ + "weight"][::-1]}
    assert np.abs(oracle_logits(RAW, wrong, tokens) - expected).max() > 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize(("name", "quantization"), [("GPTQ, desc_act", "int8"), ("AWQ", "float8")])
def test_eight_bits_and_what_they_cost(
    name: str, quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The numbers of rounding the model in float32, and the error that NumPy finds, in one sentence."""
    meant = write(tmp_path, name)
    with caplog.at_level(logging.INFO, "smcjax"):
        _, plain = load_checkpoint(tmp_path, "float32")
        assert not caplog.records
        _, params = load_checkpoint(tmp_path, "float32", quantization=quantization)
    chex.assert_trees_all_equal(params, quantize_params(plain, QUANTIZATIONS[quantization]), strict=True)
    [line] = [record.getMessage() for record in caplog.records]
    said = re.fullmatch(
        rf"{re.escape(str(tmp_path))}: matrices in ([\w-]+ of 4 bits) are rounded to eight bits "
        rf"\({quantization}, a scale a row\); the error's root mean square is (\d\.\d\d)% of the weights'\.",
        line,
    )
    assert said is not None, line
    assert said[1] == f"{name.partition(',')[0]} of 4 bits"
    errors, squares = 0.0, 0.0
    for key, value in meant.items():
        if key.endswith("_proj.weight"):
            rounded = rounded_by_row(value.astype(np.float64), quantization)
            errors, squares = errors + ((rounded - value) ** 2).sum(), squares + (value.astype(np.float64) ** 2).sum()
    assert abs(float(said[2]) - 100 * np.sqrt(errors / squares)) < 0.006
    whole = np.asarray(matrix(params.layers[0].o).rows(slice(None)))
    o = meant["model.layers.0.self_attn.o_proj.weight"]
    step = np.abs(o).max(axis=1, keepdims=True) / (254 if quantization == "int8" else 28)  # half the widest
    assert np.all(np.abs(whole - o) <= 1.001 * step)
    assert np.any(np.abs(whole - o) > 0.5 * step)


def rounded_by_row(values: np.ndarray, quantization: str) -> np.ndarray:
    """By the definitions: int8 from -127 to 127, e4m3 with 448 its largest; the largest of a row is the largest."""
    largest = 127 if quantization == "int8" else 448
    scale = np.abs(values).max(axis=1, keepdims=True) / largest
    numbers = values / scale
    if quantization == "float8":  # four significant bits, and fixed steps of 2^-9 below 2^-6
        exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(numbers), 1e-30))), -6) - 3
        return np.round(numbers / 2**exponent) * 2**exponent * scale
    return np.round(numbers) * scale


def test_a_head_may_be_packed_and_inputs_end_within_a_word(tmp_path: Path) -> None:
    """compressed-tensors' rows of 30 inputs take four words of eight."""
    rng = np.random.default_rng(1)
    raw = {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}
    numbers = rng.integers(0, 16, (96, 30))
    scale = rng.uniform(0.01, 0.02, (96, 1)).astype(np.float32)

    def pack_head(stored: Tensors) -> Tensors:
        parts = {"packed": packed(numbers.T, 4).T, "scale": scale, "shape": np.array([96, 30], np.int64)}
        del stored["lm_head.weight"]
        return {**stored, **{f"lm_head.weight_{part}": value for part, value in parts.items()}}

    scheme = Scheme(compressed(strategy="channel", group_size=None), group=None, zeros=False)
    SCHEMES["odd"] = scheme
    try:
        write(tmp_path, "odd", pack_head, **raw)
    finally:
        del SCHEMES["odd"]
    head = load_checkpoint(tmp_path, "float32")[1].lm_head
    np.testing.assert_array_equal(head, (numbers - 8).astype(np.float32) * scale)


@pytest.mark.parametrize("name", ["GPTQ", "AWQ"])
def test_shards_may_part_a_matrix(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    whole = load_checkpoint(tmp_path, "float32")[1]
    write_shards(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    chex.assert_trees_all_equal(load_checkpoint(tmp_path, "float32")[1], whole, strict=True)


def test_biases_of_nothing_are_left_out(tmp_path: Path) -> None:
    """Early AutoGPTQ gave every packed matrix a bias; one that is not zero belongs to another model."""

    def with_bias(value: float, module: str = Q_PROJ) -> Callable[[Tensors], Tensors]:
        return lambda stored: {**stored, module + "bias": np.full(64, value, np.float16)}

    write(tmp_path, "GPTQ")
    plain = load_checkpoint(tmp_path, "float32")[1]
    write(tmp_path, "GPTQ", with_bias(0.0))
    chex.assert_trees_all_equal(load_checkpoint(tmp_path, "float32")[1], plain, strict=True)
    for bad in (with_bias(0.5), with_bias(0.0, "model.layers.0.input_layernorm.")):
        write(tmp_path, "GPTQ", bad)
        with pytest.raises(CheckpointError, match=r"unexpected .*bias"):
            load_checkpoint(tmp_path)


def test_a_copy_of_the_config_beside_it(tmp_path: Path) -> None:
    """AutoGPTQ and AutoAWQ leave one; without the config's own word it is refused, and so is another's always."""
    write(tmp_path, "GPTQ")
    (tmp_path / "quantize_config.json").write_text(json.dumps(gptq()))
    load_checkpoint(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds hf_quant_config"):
        load_checkpoint(tmp_path)
    (tmp_path / "hf_quant_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(CheckpointError, match=r"holds quantize_config\.json"):
        load_checkpoint(tmp_path)


def test_host_memory_is_that_of_one_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers take hardly more than two, and less than three times the largest matrix in float32.

    Control: a reader that keeps what it has read takes more the more layers there are.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 64}

    def peak(layers: int) -> int:
        write(tmp_path, "GPTQ, desc_act", num_hidden_layers=layers, **sizes)
        load_checkpoint(tmp_path, "float32", quantization="int8")  # compiles
        tracemalloc.start()
        params = load_checkpoint(tmp_path, "float32", quantization="int8")[1]
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(params.layers) == layers
        return most

    two, eight = peak(2), peak(8)
    largest = 4 * 2 * sizes["intermediate_size"] * sizes["hidden_size"]  # gate and up, which are one
    assert eight < 1.3 * two  # the lists of groups stay, a number each input
    assert eight < 3 * largest
    read, kept = checkpoint._read_quantized, list[np.ndarray]()

    def hoard(source: Any, parts: Any, *rest: Any) -> Any:
        parts = list(parts)
        kept.extend(source.rows(name)[:] for name, _ in parts)
        return read(source, parts, *rest)

    monkeypatch.setattr(checkpoint, "_read_quantized", hoard)
    assert peak(8) > 2 * eight


def test_layers_of_a_shape_share_programs(tmp_path: Path) -> None:
    """Control: a program made at each call is made again."""
    made: list[float] = []

    def count(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            made.append(duration)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        counts = []
        for layers in (1, 1, 3):
            write(tmp_path, "AWQ", num_hidden_layers=layers)
            made.clear()
            load_checkpoint(tmp_path, "float32", quantization="int8")
            counts.append(len(made))
        assert counts[1] == counts[2]
        made.clear()
        for _ in range(2):
            jax.jit(INT8.ordered)(np.zeros((4, 16), np.int8))
        assert len(made) == 2
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def float4(kind: str, **changes: Any) -> dict[str, Any]:
    """A quantization_config of four-bit floats as compressed-tensors writes it, activations in four bits too."""
    grouped = (
        {"strategy": "tensor_group", "group_size": 16} if kind == "nvfp4" else {"strategy": "group", "group_size": 32}
    )
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "actorder": None, **grouped}
    group = {
        **{"format": f"{kind}-pack-quantized", "input_activations": {**weights, "dynamic": "local"}},
        **{"output_activations": None, "targets": ["Linear"], "weights": {**weights, "observer": "minmax", **changes}},
    }
    return {
        **{"quant_method": "compressed-tensors", "format": f"{kind}-pack-quantized", "ignore": ["lm_head"]},
        **{"config_groups": {"group_0": group}, "quantization_status": "compressed"},
    }


E2M1 = {"0000": 0.0, "0001": 0.5, "0010": 1.0, "0011": 1.5, "0100": 2.0, "0101": 3.0, "0110": 4.0, "0111": 6.0}


def write_float4(directory: Path, kind: str, **changes: np.ndarray) -> Tensors:
    """A directory of four-bit floats, random bits and scales; the weights that it means, in float32."""
    rng, size = np.random.default_rng(5), 16 if kind == "nvfp4" else 32
    stored, meant = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for key, value in random_weights(RAW).items():
        if not key.endswith("_proj.weight"):
            stored[key] = meant[key] = value
            continue
        outputs, inputs = value.shape
        bits = rng.integers(0, 16, value.shape, np.uint8)
        numbers = np.vectorize(lambda b: E2M1[f"{b & 7:04b}"] * (-1 if b & 8 else 1))(bits)
        if kind == "nvfp4":
            scale = rng.uniform(1, 400, (outputs, inputs // size)).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{key}_global_scale"] = np.array([1500.0], np.float32)
            stored[key.replace("weight", "input_global_scale")] = np.ones(1, np.float32)
            wide = scale.astype(np.float32) / np.float32(1500)
        else:
            scale = rng.integers(118, 126, (outputs, inputs // size), np.uint8)
            wide = np.float32(2) ** (scale.astype(np.float32) - 127)
        stored[f"{key}_packed"] = (bits[:, ::2] + 16 * bits[:, 1::2]).astype(np.uint8)
        stored[f"{key}_scale"] = scale
        meant[key] = numbers.astype(np.float32) * np.repeat(wide, size, axis=1)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**RAW, "quantization_config": float4(kind)}))
    save_file({**stored, **changes}, directory / "model.safetensors")
    return meant


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_four_bit_floats_mean_what_their_format_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit by bit; control: halves of bytes in the other order are other weights."""
    meant = write_float4(tmp_path, kind)
    monkeypatch.setattr(checkpoint, "_ROWS", 10)
    params = load_checkpoint(tmp_path, "float32")[1]
    for found, part in ((params.layers[0].o, "self_attn.o"), (params.layers[0].down, "mlp.down")):
        wanted = meant[f"model.layers.0.{part}_proj.weight"]
        np.testing.assert_array_equal(found, wanted)
        swapped = wanted.reshape(len(wanted), -1, 2)[..., ::-1].reshape(wanted.shape)
        assert not np.array_equal(found, swapped)
    caplog.clear()
    rounded = load_checkpoint(tmp_path, "float32", quantization="float8")[1]
    chex.assert_trees_all_equal(rounded, quantize_params(params, QUANTIZATIONS["float8"]), strict=True)
    [line] = [record.getMessage() for record in caplog.records]
    assert f"matrices in {kind}-pack-quantized of 4 bits are rounded to eight bits (float8" in line


def test_bad_four_bit_floats(tmp_path: Path) -> None:
    name = Q_PROJ + "weight"
    nan = np.full((64, 2), 255, np.uint8)
    for kind, changes, words in (
        ("mxfp4", {f"{name}_scale": nan}, "has nan in row 0"),
        ("nvfp4", {f"{name}_global_scale": np.ones(2, np.float32)}, r"is \[2\] instead of \[1\]"),
        ("nvfp4", {f"{name}_global_scale": np.zeros(1, np.float32)}, "has (nan|inf|-inf) in row 0"),
        ("nvfp4", {f"{name}_packed": np.zeros((64, 32), np.int32)}, "has dtype I32, but only U8"),
        ("nvfp4", {f"{name}_scale": np.ones((64, 4), np.float32)}, "has dtype F32, but only F8_E4M3"),
    ):
        write_float4(tmp_path, kind, **changes)
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(tmp_path)


def change(part: str, to: Callable[[np.ndarray], np.ndarray] | None) -> Callable[[Tensors], Tensors]:
    def changed(stored: Tensors) -> Tensors:
        kept = {key: value for key, value in stored.items() if key != Q_PROJ + part}
        return kept if to is None else {**kept, Q_PROJ + part: to(stored[Q_PROJ + part])}

    return changed


BAD: dict[str, tuple[str, Callable[[Tensors], Tensors], list[str]]] = {
    "no scales": ("GPTQ", change("scales", None), [f"'{Q_PROJ}qweight'", "packed (GPTQ)", f"'{Q_PROJ}scales'"]),
    "no zeros": (
        "AWQ",
        change("qzeros", None),
        ["packed (AWQ)", "'model.layers.0.self_attn.q_proj.qzeros' is missing"],
    ),
    "no groups": ("GPTQ, desc_act", change("g_idx", None), [f"'{Q_PROJ}g_idx' is missing"]),
    "no shape": ("pack-quantized", change("weight_shape", None), [f"'{Q_PROJ}weight_shape' is missing"]),
    "a shape of three": (
        "pack-quantized",
        change("weight_shape", lambda shape: np.array([64, 64, 1])),
        ["is [64, 64, 1], which is the shape of no matrix"],
    ),
    "another shape": (
        "pack-quantized",
        change("weight_shape", lambda shape: np.array([64, 80])),
        ["weight_packed", "is [64, 8] instead of [64, 10]"],
    ),
    "groups of another size": ("GPTQ", change("scales", lambda s: s[:2]), ["is [2, 64] instead of [4, 64]", "4 bits"]),
    "zeros of another size": ("AWQ", change("qzeros", lambda z: z[:2]), ["is [2, 8] instead of [4, 8]", "16 inputs"]),
    "floats": ("GPTQ", change("qweight", lambda q: q.astype(np.float32)), ["has dtype F32, but only I32"]),
    "scales of integers": ("AWQ", change("scales", lambda s: s.astype(np.int32)), ["has dtype I32"]),
    "a group beyond all": ("GPTQ", change("g_idx", lambda g: g + 1), ["is no list of 64 numbers from 0 to 3"]),
    "too few groups": ("GPTQ", change("g_idx", lambda g: g[:-1]), ["is no list of 64 numbers from 0 to 3"]),
    "NaN": ("GPTQ", change("scales", lambda s: np.full_like(s, np.nan)), [f"'{Q_PROJ}weight'", "has nan in row 0"]),
    "a vector": ("AWQ", change("qweight", lambda q: q.reshape(-1)), ["is [512] instead of"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, tmp_path: Path) -> None:
    scheme, damage, words = BAD[name]
    write(tmp_path, scheme, damage)
    for quantization in (None, "int8"):
        refusal(tmp_path, *words, quantization=quantization)


def test_a_config_that_belongs_to_other_weights(tmp_path: Path) -> None:
    write(tmp_path, "GPTQ")
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "quantization_config": compressed()}))
    with pytest.raises(CheckpointError, match=r"for pack-quantized .* have no tensor NAME\.weight_packed"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(CheckpointError, match=r"unexpected .*g_idx"):
        load_checkpoint(tmp_path)


OTHER: list[tuple[dict[str, Any], str]] = [
    (gptq(3), "quantization_config.bits is 3"),
    (gptq(bits="4"), "quantization_config.bits is '4'"),
    (gptq(group_size=0), "quantization_config.group_size is 0"),
    (gptq(checkpoint_format="marlin"), "quantization_config.checkpoint_format is 'marlin'"),
    (gptq(is_marlin_format=True), "quantization_config.is_marlin_format is True"),
    (gptq(dynamic={"-:.*down.*": {}}), "quantization_config.dynamic is"),
    (gptq(pack_dtype="int16"), "quantization_config.pack_dtype is 'int16'"),
    (awq(bits=8), "quantization_config.bits is 8"),
    (awq(version="gemv"), "quantization_config.version is 'gemv'"),
    (awq(format="llm-awq"), "quantization_config.format is 'llm-awq'"),
    (awq(zero_point=False), "quantization_config.zero_point is False"),
    (compressed(3), "weights.num_bits is 3"),
    (compressed(type="float"), "weights.type is 'float'"),
    (compressed(strategy="tensor"), "weights.strategy is 'tensor'"),
    (compressed(group_size=None), "weights.group_size is None"),
    (compressed(actorder="backwards"), "weights.actorder is 'backwards'"),
    (float4("nvfp4", group_size=32), "weights.group_size is 32"),
    (float4("mxfp4", num_bits=8), "weights.num_bits is 8"),
    (float4("int3"), "quantization_config.format is 'int3-pack-quantized'"),
    ({"quant_method": "mxfp4"}, "quantization_config.quant_method is 'mxfp4'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantization_config.quant_method is 'bitsandbytes'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantization_config.quant_method is 'modelopt'"),
]


@pytest.mark.parametrize(("found", "words"), OTHER, ids=[words for _, words in OTHER])
def test_other_schemes_are_refused_by_name(found: dict[str, Any], words: str) -> None:
    assert config_from_hf({**RAW, "quantization_config": gptq()}) == config_from_hf(RAW)
    with pytest.raises(ValueError, match="in the model's config, but of quantised weights only") as caught:
        config_from_hf({**RAW, "quantization_config": found})
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_keys_of_later_variants_are_refused() -> None:
    for config in (gptq(unheard_of=1), awq(unheard_of=1), compressed(unheard_of=1)):
        with pytest.raises(ValueError, match=r"unheard_of is 1 in the model's config, but this decoder does not know"):
            config_from_hf({**RAW, "quantization_config": config})
