"""Reading and writing directories: every name accounted for, every bad file answered with one sentence."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import huggingface_hub.constants
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_oracle import as_stored, make_config, random_weights, write_directory, write_tensors
from safetensors.numpy import load_file, save_file

from smcjax.errors import CheckpointError
from smcjax.model import init_params, load_checkpoint, save_checkpoint
from smcjax.model.files import checkpoint
from smcjax.model.files.checkpoint import load_config, resolve_model_path
from smcjax.model.files.hf_config import config_from_hf
from tests.checkpoints import refusal

RAW = make_config("llama", num_hidden_layers=1)
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


def test_dtypes_in_memory(tmp_path: Path) -> None:
    weights = random_weights(RAW)
    write_directory(tmp_path, RAW, weights)
    for dtype, expected in (
        (None, "float32"),
        ("auto", "float32"),
        ("bfloat16", "bfloat16"),
        (jnp.bfloat16, "bfloat16"),
    ):
        if dtype in (None, "auto") and jax.default_backend() != "cpu":
            expected = "bfloat16"
        config, params = load_checkpoint(tmp_path, dtype=dtype)
        assert config.dtype == expected
        assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {expected}
    bfloat16 = np.asarray(params.layers[0].qkv[32:48])
    np.testing.assert_array_equal(bfloat16.astype(np.float32), as_stored(weights, "bfloat16")[K_PROJ])
    for wrong in ("int8", "float16", 3, "half"):
        with pytest.raises(ValueError, match="dtype is"):
            load_checkpoint(tmp_path, dtype=wrong)


def test_weights_do_not_alias_the_file(tmp_path: Path) -> None:
    write_directory(tmp_path, RAW, random_weights(RAW))
    _, params = load_checkpoint(tmp_path, dtype="float32")
    before = jax.tree.map(np.array, params)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:  # in place: `save_checkpoint` puts another file there
        file.write(bytes(path.stat().st_size))
    chex.assert_trees_all_equal(before, params)


def test_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    weights = random_weights(RAW)
    write_directory(tmp_path, RAW, {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    load_checkpoint(tmp_path)


def test_tied_embeddings_beside_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {**RAW, "tie_word_embeddings": True}
    weights = random_weights(raw)
    embed = weights["model.embed_tokens.weight"]
    write_directory(tmp_path, raw, {**weights, "lm_head.weight": embed})
    config, params = load_checkpoint(tmp_path, dtype="float32")
    assert config.tie_embeddings
    assert params.lm_head is None

    # As in transformers 5, a head of its own is used, whatever the config says.
    write_directory(tmp_path, raw, {**weights, "lm_head.weight": embed + 1})
    config, params = load_checkpoint(tmp_path, dtype="float32")
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params.unembed, embed + 1)
    np.testing.assert_array_equal(params.embed, embed)
    monkeypatch.setattr(checkpoint, "_ROWS", 10)  # rows are compared some at a time
    other = embed.copy()
    other[-1] += 1
    write_directory(tmp_path, raw, {**weights, "lm_head.weight": other})
    assert not load_checkpoint(tmp_path, dtype="float32")[0].tie_embeddings

    # Nor does it matter under which of the two names the shared matrix was saved.
    head_only = {("lm_head.weight" if value is embed else name): value for name, value in weights.items()}
    write_directory(tmp_path, raw, head_only)
    config, params = load_checkpoint(tmp_path, dtype="float32")
    assert config.tie_embeddings
    np.testing.assert_array_equal(params.unembed, embed)


def test_names_and_shapes_are_accounted_for(tmp_path: Path) -> None:
    weights = random_weights(RAW)
    write_directory(tmp_path, RAW, {name: value for name, value in weights.items() if name != K_PROJ})
    assert "unexpected" not in refusal(tmp_path, "missing", K_PROJ)

    extra = {f"model.layers.{index}.mlp.up_proj.weight": np.ones((48, 32), np.float32) for index in range(1, 6)}
    write_directory(tmp_path, RAW, {**weights, **extra})
    assert "missing" not in refusal(tmp_path, "unexpected", "model.layers.1.mlp", "(5 in all)")

    write_directory(tmp_path, RAW, {**weights, K_PROJ: weights[K_PROJ][:-1]})
    refusal(tmp_path, "another shape", f"{K_PROJ} is [15, 32] instead of [16, 32]")

    write_directory(tmp_path, {**RAW, "attention_bias": True}, weights)
    refusal(tmp_path, "missing", "k_proj.bias", "(4 in all)")

    untied = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    write_directory(tmp_path, RAW, untied)
    refusal(tmp_path, "missing", "lm_head.weight")


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    weights = random_weights(RAW)
    write_directory(tmp_path, RAW, weights)
    save_file({**weights, K_PROJ: weights[K_PROJ].astype(np.int8)}, tmp_path / "model.safetensors")
    refusal(tmp_path, K_PROJ, "I8", "quantised")


def _edit(change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        (directory / name).write_bytes(change((directory / name).read_bytes()))

    return edit


def _unlink(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _only_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _directory_instead(name: str) -> Callable[[Path], None]:
    def replace(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return replace


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_unlink("config.json"), ["config.json", "does not exist"]),
        (_edit(lambda data: data[:-3], "config.json"), ["config.json", "not valid JSON"]),
        (_edit(lambda data: b"", "config.json"), ["config.json", "not valid JSON"]),
        (_edit(lambda data: b"\xff\xfe\x00", "config.json"), ["config.json", "not valid JSON"]),
        (_edit(lambda data: b"[" * 100_000, "config.json"), ["config.json", "not valid JSON"]),
        (_directory_instead("config.json"), ["config.json", "cannot be read"]),
        (_directory_instead("model.safetensors"), ["model.safetensors", "cannot be read"]),
        (_edit(lambda data: b"[1]", "config.json"), ["must be a JSON object"]),
        (_edit(lambda data: data.replace(b"silu", b"relu"), "config.json"), []),
        (_unlink("model.safetensors"), ["neither model.safetensors nor model.safetensors.index.json"]),
        (_only_pickle, ["pytorch_model.bin", "convert"]),
        (_edit(lambda data: b""), ["model.safetensors", "not a complete safetensors file"]),
        (_edit(lambda data: data[:5]), ["model.safetensors", "not a complete safetensors file"]),
        (_edit(lambda data: data[:-2]), ["model.safetensors", "not a complete safetensors file"]),
        (_edit(lambda data: data + b"\0"), ["model.safetensors", "not a complete safetensors file"]),
        (_edit(lambda data: data[:8] + b"[" + data[9:]), ["model.safetensors", "not a complete safetensors file"]),
        (_edit(lambda data: b"\xff" * 8 + data[8:]), ["model.safetensors", "not a complete safetensors file"]),
        (_edit(lambda data: data.replace(b'"F32"', b'"F3x"', 1)), ["model.safetensors", "not a complete"]),
    ],
)
def test_damaged_directories(damage: Callable[[Path], None], words: list[str], tmp_path: Path) -> None:
    write_directory(tmp_path, {**RAW, "hidden_act": "silu"}, random_weights(RAW))
    load_checkpoint(tmp_path)
    damage(tmp_path)
    refusal(tmp_path, *(words or ["hidden_act", "'relu'", str(tmp_path)]))


def test_damaged_generation_config(tmp_path: Path) -> None:
    write_directory(tmp_path, RAW, random_weights(RAW))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3]}')
    assert load_config(tmp_path).eos_token_ids == (2, 3)
    (tmp_path / "generation_config.json").write_text("{")
    refusal(tmp_path, "generation_config.json", "not valid JSON")


def test_damaged_shards(tmp_path: Path) -> None:
    weights = random_weights(RAW)
    write_directory(tmp_path, RAW, weights, shards=2)
    index_path, second = tmp_path / "model.safetensors.index.json", tmp_path / "model-00002-of-00002.safetensors"
    load_checkpoint(tmp_path)
    index: dict[str, Any] = json.loads(index_path.read_text())

    index_path.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], "extra": second.name}}))
    refusal(tmp_path, "disagree", "extra", second.name)
    fewer = {name: file for name, file in index["weight_map"].items() if name != K_PROJ}
    index_path.write_text(json.dumps({**index, "weight_map": fewer}))
    refusal(tmp_path, "disagree", K_PROJ)
    for broken in ({}, {"weight_map": {}}, {"weight_map": []}, []):
        index_path.write_text(json.dumps(broken))
        refusal(tmp_path, "index.json", "weight_map")
    for outside in ("../model.safetensors", "/etc/passwd", 3, ""):
        index_path.write_text(json.dumps({"weight_map": {K_PROJ: outside}}))
        refusal(tmp_path, "index.json", repr(outside))
    index_path.write_text(json.dumps(index))
    second.rename(tmp_path / "elsewhere")
    refusal(tmp_path, second.name, "missing")


def test_paths_that_are_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refusal(tmp_path / "file", "is a file")
    refusal(tmp_path / "nowhere", "does not exist")
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "empty", "config.json", "does not exist")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_no_permission(tmp_path: Path) -> None:
    write_directory(tmp_path, RAW, random_weights(RAW))
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).chmod(0)
        refusal(tmp_path, name, "cannot be read")


def test_hub_ids_come_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError,
        match="org/name is neither a file or directory nor, whole, in the hub's local cache, and HF_HUB_OFFLINE is",
    ):
        resolve_model_path("org/name")
    repo, commit = tmp_path / "models--org--name", "a" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    write_directory(repo / "snapshots" / commit, RAW, random_weights(RAW))
    assert resolve_model_path("org/name") == repo / "snapshots" / commit
    load_checkpoint("org/name")
    for bad in ("", "a/b/c", "../no such directory", "org/na me"):
        with pytest.raises(CheckpointError, match="pass a model directory, a GGUF file or a hub id"):
            resolve_model_path(bad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_written(dtype: str, tmp_path: Path) -> None:
    config = config_from_hf(make_config("qwen2", eos_token_id=[4, 2]))
    params = init_params(config, jax.random.key(1))
    save_checkpoint(config, params, tmp_path / "a" / "b", dtype=dtype)
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    tensors = load_file(tmp_path / "a" / "b" / "model.safetensors")
    assert {value.dtype.name for value in tensors.values()} == {dtype}
    numpy_dtype = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    expected = np.asarray(params.layers[1].qkv)[32:48].astype(numpy_dtype)
    np.testing.assert_array_equal(tensors["model.layers.1.self_attn.k_proj.weight"], expected)
    up = np.asarray(params.layers[0].gate_up)[48:].astype(numpy_dtype)
    np.testing.assert_array_equal(tensors["model.layers.0.mlp.up_proj.weight"], up)
    read, _ = load_checkpoint(tmp_path / "a" / "b", dtype="float32")
    assert read == dataclasses.replace(config, dtype="float32")


def test_weights_half_written_have_another_name(tmp_path: Path) -> None:
    config = config_from_hf(RAW)
    params = init_params(config, jax.random.key(0))
    save_checkpoint(config, params, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    params.final_norm.delete()  # which fails when its turn comes
    with pytest.raises(RuntimeError, match="deleted"):
        save_checkpoint(config, params, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert (tmp_path / "model.safetensors.partial").stat().st_size > 0


def test_what_cannot_be_written(tmp_path: Path) -> None:
    config = config_from_hf(RAW)
    params = init_params(config, jax.random.key(0))
    with pytest.raises(ValueError, match="dtype is 'int4'"):
        save_checkpoint(config, params, tmp_path, dtype="int4")
    with pytest.raises(ValueError, match="shapes of params"):
        save_checkpoint(dataclasses.replace(config, vocab_size=95), params, tmp_path)
    with pytest.raises(ValueError, match="shapes of params"):
        save_checkpoint(dataclasses.replace(config, tie_embeddings=True), params, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "raw",
    [
        make_config("llama", attention_bias=True, mlp_bias=True),
        make_config("llama", num_attention_heads=5, num_key_value_heads=1, head_dim=24),  # 32 % 5: written as Mistral
        make_config("qwen2"),
        make_config(
            "qwen3",
            attention_bias=True,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
    ids=lambda raw: raw["model_type"],
)
def test_transformers_understands_what_is_written(raw: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = config_from_hf(raw)
    save_checkpoint(config, init_params(config, jax.random.key(0)), tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert f"{type(theirs).__name__.removesuffix('Config')}ForCausalLM" == theirs.architectures[0]
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_key_value_heads", "head_dim", "eos_token_id"):
        ours = (2,) if key == "eos_token_id" else getattr(config, key.replace("num_key_value", "num_kv"))
        assert getattr(theirs, key) == (ours[0] if isinstance(ours, tuple) else ours)
    assert str(theirs.dtype).endswith("bfloat16")
    scaling = dataclasses.asdict(config.layer(0).rope.scaling) if config.layer(0).rope.scaling else {}
    kind = "llama3" if scaling else "default"
    assert theirs.rope_parameters == {"rope_type": kind, "rope_theta": config.layer(0).rope.theta, **scaling}
    for flag in ("attention_bias", "mlp_bias"):
        assert getattr(theirs, flag, False) == raw.get(flag, False)


def test_files_written_by_hand_agree(tmp_path: Path) -> None:
    """The writer of the tests is itself checked: what it writes as bfloat16 is bfloat16 on disk."""
    write_tensors(tmp_path / "x.safetensors", {"x": np.ones((2, 2), np.float32)}, "bfloat16")
    assert b'"BF16"' in (tmp_path / "x.safetensors").read_bytes()
