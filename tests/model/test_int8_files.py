"""Checkpoints in int8: round trips bit by bit, files of others by the oracle, and every bad file in one sentence."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_oracle import make_config, oracle_logits, random_weights, write_directory
from safetensors.numpy import load_file, save_file

from smcjax.engine.load.loading import load_models, prepared
from smcjax.matmul import Quantized, is_packed, matrix
from smcjax.model import ModelConfig, Params, init_params, load_checkpoint, logits, save_checkpoint
from smcjax.model.config import LayerSpec
from smcjax.model.files import checkpoint
from smcjax.model.files.checkpoint import stored_quantization
from smcjax.model.files.hf_config import config_from_hf
from smcjax.model.params import param_shapes
from smcjax.model.quantize import quantize_params
from smcjax.quantization import restore
from smcjax.sparse.nsa import NSA
from tests.checkpoints import byte_config, refusal, write_model, write_shards, write_tokenizer

SPARSE = LayerSpec(attention=NSA(kernel_size=8, kernel_stride=4, block_size=8, num_blocks=4, window=8))
CONFIGS = {
    "llama": config_from_hf(make_config("llama", attention_bias=True, mlp_bias=True)),
    "qwen2, tied": config_from_hf(make_config("qwen2", tie_word_embeddings=True)),
    "gemma3": config_from_hf(make_config("gemma3_text", tie_word_embeddings=True)),
    "nsa": dataclasses.replace(config_from_hf(make_config("llama")), layers=(SPARSE,)),
}
Q_PROJ, K_PROJ = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
RAW = make_config("llama", num_hidden_layers=1)


def bfloat16_params(config: ModelConfig) -> Params:
    """Random weights in float32 that bfloat16 keeps, norms and biases away from 1 and 0."""
    keys = iter(jax.random.split(jax.random.key(1), 1000))

    def noisy(leaf: jax.Array) -> jax.Array:
        moved = leaf + 0.1 * jax.random.normal(next(keys), leaf.shape) if leaf.ndim == 1 else leaf
        return moved.astype(jnp.bfloat16).astype(jnp.float32)

    return jax.tree.map(noisy, init_params(config, jax.random.key(0)))


@pytest.mark.parametrize("name", ["llama", "gemma3", "nsa"])
def test_round_trips(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    params = bfloat16_params(config)
    in_memory = quantize_params(params)
    save_checkpoint(config, params, tmp_path, quantization="int8")
    assert stored_quantization(tmp_path)
    monkeypatch.setattr(checkpoint, "_ROWS", 10)  # matrices are read some rows at a time
    read, stored = load_checkpoint(tmp_path, "float32", quantization="int8")
    assert read == dataclasses.replace(config, dtype="float32")
    chex.assert_trees_all_equal(stored, in_memory, strict=True)
    chex.assert_trees_all_equal(quantize_params(stored), in_memory, strict=True)
    tokens = jax.random.randint(jax.random.key(2), (1, 24), 0, config.vocab_size)
    run = jax.jit(logits, static_argnums=0)
    of_stored = run(config, stored, tokens)
    np.testing.assert_array_equal(of_stored, run(config, in_memory, tokens))
    assert not np.array_equal(of_stored, run(config, params, tokens))

    for dtype in ("float32", "bfloat16"):
        leaves = [
            matrix(leaf).rows(slice(None), out=jnp.float32).astype(shape.dtype)
            for leaf, shape in zip(
                jax.tree.leaves(in_memory, is_leaf=is_packed), jax.tree.leaves(param_shapes(config, dtype)), strict=True
            )
        ]
        multiplied_out = jax.tree.unflatten(jax.tree.structure(params), leaves)
        chex.assert_trees_all_equal(load_checkpoint(tmp_path, dtype)[1], multiplied_out, strict=True)

    save_checkpoint(config, stored, tmp_path / "again", quantization="int8")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / file).read_bytes()


def test_what_is_written(tmp_path: Path) -> None:
    config = CONFIGS["nsa"]
    params = bfloat16_params(config)
    save_checkpoint(config, params, tmp_path, quantization="int8")
    tensors = load_file(tmp_path / "model.safetensors")
    in_int8 = {name for name, value in tensors.items() if value.dtype == np.int8}
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.split(".")[-2] for name in in_int8} == {*projections, "lm_head"}
    assert len(in_int8) == len(projections) * config.num_layers + 1
    for name, value in tensors.items():
        if name.endswith("_scale"):
            assert name.removesuffix("_scale") in in_int8
            assert (value.dtype, value.shape) == (np.float32, (tensors[name.removesuffix("_scale")].shape[0], 1))
        elif name not in in_int8:
            assert value.dtype == ml_dtypes.bfloat16
    k = np.asarray(params.layers[0].qkv)[32:80]
    scale = np.abs(k).max(axis=1, keepdims=True) / np.float32(127)
    np.testing.assert_allclose(tensors[K_PROJ + "_scale"], scale, rtol=1e-6)
    np.testing.assert_array_equal(tensors[K_PROJ], np.round(k / tensors[K_PROJ + "_scale"]))

    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (written["quant_method"], written["format"], written["ignore"]) == (
        "compressed-tensors",
        "int-quantized",
        [],
    )
    [group] = written["config_groups"].values()
    assert (group["format"], group["targets"]) == ("int-quantized", ["Linear"])
    assert group["input_activations"] is None
    assert group["weights"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }

    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    sizes = {"F32": 4, "BF16": 2, "I8": 1}
    starts = [(e["data_offsets"][0], sizes[e["dtype"]]) for name, e in header.items() if name != "__metadata__"]
    assert all(start % size == 0 for start, size in starts)


def scheme(**changes: Any) -> dict[str, Any]:
    """A quantization_config as its public writer has it."""
    weights = {
        **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8},
        **{"observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "int"},
        **{"scale_dtype": None, "zp_dtype": None},
    }
    group = {
        **{"format": "int-quantized", "input_activations": None, "output_activations": None},
        **{"targets": ["Linear"], "weights": {**weights, **changes.pop("weights", {})}},
    }
    return {
        "config_groups": {"group_0": {**group, **changes.pop("group", {})}},
        **{"format": "int-quantized", "global_compression_ratio": None, "ignore": ["lm_head"], "kv_cache_scheme": None},
        **{"quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {}},
        **{"transform_config": {}, "version": "0.12.2"},
        **changes,
    }


def write_foreign(directory: Path, kept: tuple[str, ...] = ("lm_head", "k_proj")) -> dict[str, np.ndarray]:
    """A directory of another writer, with random int8 and bfloat16 scales; the weights that it means, in float32."""
    rng = np.random.default_rng(3)
    stored: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    for name, value in random_weights(RAW).items():
        if value.ndim == 2 and not any(part in name for part in ("embed", *kept)):
            numbers = rng.integers(-128, 128, value.shape, np.int8)
            scale = rng.uniform(1e-3, 3e-3, (len(value), 1)).astype(ml_dtypes.bfloat16)
            stored[name], stored[name + "_scale"] = numbers, scale
            meant[name] = numbers.astype(np.float32) * scale.astype(np.float32)
        else:
            stored[name] = value
            meant[name] = value
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**RAW, "quantization_config": scheme()}))
    save_file(stored, directory / "model.safetensors")
    return meant


def test_files_of_another_writer(tmp_path: Path) -> None:
    """Fused matrices of which some parts are int8: the stored numbers stay, the others are rounded by row."""
    meant = write_foreign(tmp_path)
    config, params = load_checkpoint(tmp_path, "float32")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 9).tolist()
    expected = oracle_logits(RAW, meant, tokens)
    found = np.asarray(logits(config, params, jnp.asarray(tokens)[None]))[0]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    wrong = {**meant, Q_PROJ: meant[Q_PROJ][::-1]}
    assert np.abs(oracle_logits(RAW, wrong, tokens) - expected).max() > 1e-2 * np.abs(expected).max()

    plain = quantize_params(params)
    kept = load_checkpoint(tmp_path, "float32", quantization="int8")[1]
    qkv, tensors = kept.layers[0].qkv, load_file(tmp_path / "model.safetensors")
    assert isinstance(qkv, Quantized)
    np.testing.assert_array_equal(restore(qkv.values)[:32], tensors[Q_PROJ])
    np.testing.assert_array_equal(qkv.scale[:32, None], tensors[Q_PROJ + "_scale"].astype(np.float32))
    np.testing.assert_array_equal(qkv.values[32:48], plain.layers[0].qkv.values[32:48])
    np.testing.assert_array_equal(qkv.scale[32:48], plain.layers[0].qkv.scale[32:48])
    assert not np.array_equal(qkv.values[:32], plain.layers[0].qkv.values[:32])  # rounded again, they are others
    assert is_packed(kept.lm_head)
    chex.assert_trees_all_equal(
        dataclasses.replace(kept, layers=()), dataclasses.replace(plain, layers=()), strict=True
    )

    write_shards(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    chex.assert_trees_all_equal(load_checkpoint(tmp_path, "float32", quantization="int8")[1], kept, strict=True)


def test_activations_in_eight_bits_are_computed_in_the_weights_dtype(tmp_path: Path) -> None:
    """A W8A8 file's statements on activations, static scales and zero points included, change no weight."""
    write_foreign(tmp_path)
    _, plain = load_checkpoint(tmp_path, "float32", quantization="int8")
    stored = load_file(tmp_path / "model.safetensors")
    of_activations = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": False}
    config = {**RAW, "quantization_config": scheme(group={"input_activations": of_activations})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prefix = Q_PROJ.removesuffix("weight")
    scales = {prefix + "input_scale": np.ones(1, np.float32), prefix + "input_zero_point": np.zeros(1, np.int8)}
    save_file({**stored, **scales}, tmp_path / "model.safetensors")
    chex.assert_trees_all_equal(load_checkpoint(tmp_path, "float32", quantization="int8")[1], plain, strict=True)


def test_a_tied_head_in_int8_beside_its_embedding(tmp_path: Path) -> None:
    """Two equal matrices are one, by their scales as well as by their numbers."""
    config = CONFIGS["qwen2, tied"]
    save_checkpoint(config, bfloat16_params(config), tmp_path, quantization="int8")
    tensors = load_file(tmp_path / "model.safetensors")
    embed, scale = (tensors["model.embed_tokens.weight" + suffix] for suffix in ("", "_scale"))
    for own_scale, tied in ((scale, True), (2 * scale, False)):
        save_file(
            {**tensors, "lm_head.weight": embed, "lm_head.weight_scale": own_scale}, tmp_path / "model.safetensors"
        )
        assert load_checkpoint(tmp_path)[0].tie_embeddings == tied


def test_an_engine_keeps_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target with its padding cut off, from the stored numbers; a draft beside that is stored as ever."""
    config = byte_config(272, tie_embeddings=True)
    params = bfloat16_params(config)
    save_checkpoint(config, params, tmp_path / "target", quantization="int8")
    write_tokenizer(tmp_path / "target")
    draft = write_model(tmp_path / "draft", 264, 2)
    seen: dict[str, int] = {}
    monkeypatch.setattr("smcjax.engine.load.loading.require_room_for_weights", lambda weights, *_: seen.update(weights))
    monkeypatch.setattr("smcjax.engine.run.memory.on_cpu", lambda: False)
    sizes = []
    for quantization in ("int8", None):
        models = load_models(tmp_path / "target", draft, needs_draft=True, dtype="bfloat16", quantization=quantization)
        sizes.append(seen["model"])
        embed = models.target_params.embed
        assert embed.shape == (264, 16)
        assert is_packed(embed) == (quantization == "int8")
        if is_packed(embed):
            whole = quantize_params(params).embed
            np.testing.assert_array_equal(embed.values, whole.values[:264])
            np.testing.assert_array_equal(embed.scale, whole.scale[:264])
            prepared_params = prepared(models.target_params, models.target, "xla")
            np.testing.assert_array_equal(prepared_params.embed, matrix(whole).rows(slice(264), out=jnp.float32))
    assert sizes[0] < 0.7 * sizes[1]
    assert models.draft_params is not None
    assert not is_packed(models.draft_params.layers[0].qkv)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_foreign(tmp_path)
    return tmp_path


Tensors = dict[str, np.ndarray]
SCALE = Q_PROJ + "_scale"


def put(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def with_scale(value: float) -> Callable[[Tensors], Tensors]:
    def change(scale: np.ndarray) -> np.ndarray:
        scale[5] = value
        return scale

    return put(SCALE, change)


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


NORM = "model.norm.weight"
BAD: dict[str, tuple[Callable[[Tensors], Tensors], list[str]]] = {
    "no scale": (without(SCALE), [repr(Q_PROJ), repr(SCALE), "are missing"]),
    "scales [out]": (put(SCALE, lambda scale: scale[:, 0]), [repr(SCALE), "is [32] instead of [32, 1]"]),
    "one scale": (put(SCALE, lambda scale: scale[:1]), [repr(SCALE), "is [1, 1] instead of [32, 1]"]),
    "scales by group": (put(SCALE, lambda scale: np.tile(scale, 2)), ["is [32, 2] instead of [32, 1]"]),
    "NaN": (with_scale(np.nan), [repr(SCALE), "has nan for row 5"]),
    "infinite": (with_scale(np.inf), ["has inf for row 5"]),
    "zero": (with_scale(0.0), ["has 0.0 for row 5"]),
    "negative": (with_scale(-0.5), ["has -0.5 for row 5"]),
    "scales of int8": (put(SCALE, lambda scale: np.ones(scale.shape, np.int8)), ["dtype I8"]),
    "scales of int32": (put(SCALE, lambda scale: np.ones(scale.shape, np.int32)), [repr(SCALE), "dtype I32"]),
    "a scale of a float matrix": (put(Q_PROJ, lambda matrix: matrix.astype(np.float32)), ["unexpected", SCALE]),
    "a zero point": (
        lambda tensors: {**tensors, Q_PROJ + "_zero_point": np.zeros((32, 1), np.float32)},
        ["unexpected", "zero_point"],
    ),
    "a norm": (put(NORM, lambda norm: np.ones(norm.shape, np.int8)), [repr(NORM), "only matrices"]),
    "another shape": (
        lambda tensors: {**tensors, Q_PROJ: tensors[Q_PROJ][:-1], SCALE: tensors[SCALE][:-1]},
        ["of another shape", "[31, 32] instead of [32, 32]"],
    ),
    "unsigned": (put(Q_PROJ, lambda matrix: matrix.astype(np.uint8)), ["unexpected", SCALE]),
    "none in int8": (
        lambda tensors: {
            name: value.astype(np.float32) for name, value in tensors.items() if not name.endswith("_scale")
        },
        ["config.json has a quantization_config for int8", "no tensor of dtype I8"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, model: Path) -> None:
    damage, words = BAD[name]
    path = model / "model.safetensors"
    save_file({key: np.ascontiguousarray(value) for key, value in damage(load_file(path)).items()}, path)
    for quantization in (None, "int8"):
        refusal(model, *words, quantization=quantization)


def test_int8_without_a_config(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(RAW))
    refusal(model, "has dtype I8 and config.json has no quantization_config")


OTHER: list[tuple[dict[str, Any], str]] = [
    # a quantization_config, what the message says first
    ({"quant_method": "aqlm", "bits": 4}, "quantization_config.quant_method is 'aqlm'"),
    ({"bits": 8}, "quantization_config.quant_method is None"),
    (scheme(format="marlin-24"), "quantization_config.format is 'marlin-24'"),
    (scheme(format=None), "quantization_config.format is None"),
    (scheme(config_groups={}), "quantization_config.config_groups is {}"),
    (scheme(config_groups=[1]), "quantization_config.config_groups is [1]"),
    (scheme(config_groups={"a": 3}), "quantization_config.config_groups.a is 3"),
    (scheme(kv_cache_scheme={"num_bits": 8}), "quantization_config.kv_cache_scheme is {'num_bits': 8}"),
    (scheme(sparsity_config={"format": "sparse-24-bitmask"}), "quantization_config.sparsity_config is"),
    (scheme(unheard_of=1), "quantization_config.unheard_of is 1"),
    (scheme(group={"format": "pack-quantized"}), "config_groups.group_0.format is 'pack-quantized'"),
    (scheme(group={"targets": ["re:.*q_proj"]}), "config_groups.group_0.targets is ['re:.*q_proj']"),
    (scheme(group={"targets": []}), "config_groups.group_0.targets is []"),
    (scheme(group={"output_activations": {"num_bits": 8}}), "config_groups.group_0.output_activations is {'num_bits'"),
    (scheme(group={"weights": None}), "config_groups.group_0.weights.num_bits is None"),
    (scheme(weights={"num_bits": 4}), "weights.num_bits is 4"),
    (scheme(weights={"num_bits": 8.0}), "weights.num_bits is 8.0"),
    (scheme(weights={"type": "float"}), "weights.type is 'float'"),
    (scheme(weights={"symmetric": False}), "weights.symmetric is False"),
    (scheme(weights={"strategy": "tensor"}), "weights.strategy is 'tensor'"),
    (scheme(weights={"dynamic": True}), "weights.dynamic is True"),
    (scheme(weights={"group_size": 128}), "weights.group_size is 128"),
    (scheme(weights={"actorder": "group"}), "weights.actorder is 'group'"),
]


@pytest.mark.parametrize(("found", "words"), OTHER, ids=[words for _, words in OTHER])
def test_other_schemes_are_refused_by_what_is_found(found: dict[str, Any], words: str) -> None:
    assert config_from_hf({**RAW, "quantization_config": scheme()}) == config_from_hf(RAW)
    with pytest.raises(ValueError, match="in the model's config, but ") as caught:
        config_from_hf({**RAW, "quantization_config": found})
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_what_cannot_be_written(tmp_path: Path) -> None:
    config = config_from_hf(RAW)
    params = bfloat16_params(config)
    with pytest.raises(ValueError, match=r"^quantization must be 'int8', 'float8' or None .*, got 'int4'"):
        save_checkpoint(config, params, tmp_path, quantization="int4")
    with pytest.raises(ValueError, match="params hold int8 matrices and quantization is None; pass 'int8'"):
        save_checkpoint(config, quantize_params(params), tmp_path)
    for value in (np.nan, -np.inf):
        broken = dataclasses.replace(params, lm_head=params.unembed.at[3, 4].set(value))
        with pytest.raises(ValueError, match=r"hold a NaN, an infinity .* in lm_head\.weight"):
            save_checkpoint(config, broken, tmp_path, quantization="int8")
    packed = quantize_params(params)
    assert packed.lm_head is not None
    zero = dataclasses.replace(packed.lm_head, scale=packed.lm_head.scale.at[0].set(0.0))
    with pytest.raises(ValueError, match=r"a scale that is not positive in lm_head\.weight"):
        save_checkpoint(config, dataclasses.replace(packed, lm_head=zero), tmp_path, quantization="int8")
    assert not list(tmp_path.iterdir())


def test_a_file_in_float_is_rounded_when_it_is_loaded(tmp_path: Path) -> None:
    write_directory(tmp_path, RAW, random_weights(RAW))
    assert not stored_quantization(tmp_path)
    chex.assert_trees_all_equal(
        load_checkpoint(tmp_path, quantization="int8")[1], quantize_params(load_checkpoint(tmp_path)[1]), strict=True
    )
