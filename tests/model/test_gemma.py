"""Gemma 3, sliding windows and OLMo 2 against transformers and torch (scripts/goldens/make_gemma_goldens.py)."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from hf_oracle import oracle_logits, random_weights, write_directory

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.model import ModelConfig, Params, load_checkpoint, logits, save_checkpoint
from smcjax.model.files.hub import PACKAGED, packaged_model
from smcjax.tokenizer.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "gemma"
TINY = json.loads((DATA / "tiny.json").read_text())
GOLDEN = np.load(DATA / "tiny.npz")
_logits = jax.jit(logits, static_argnums=0)


@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    raw, tokens = TINY[name], GOLDEN["tokens"]
    weights = random_weights(raw)
    write_directory(tmp_path / "hf", raw, weights)
    config, params = load_checkpoint(tmp_path / "hf", "float32")
    with jax.default_matmul_precision("highest"):
        found = np.asarray(_logits(config, params, tokens[None]))[0]
    np.testing.assert_allclose(found[GOLDEN["positions"]], GOLDEN[name], rtol=0, atol=5e-5)
    np.testing.assert_allclose(found, oracle_logits(raw, weights, tokens.tolist()), rtol=0, atol=5e-5)

    # Written by us and read back: the same model, to the bit.
    save_checkpoint(config, params, tmp_path / "ours", dtype="float32")
    again_config, again = load_checkpoint(tmp_path / "ours", "float32")
    assert again_config == config
    chex.assert_trees_all_equal(again, params)


def test_norms_are_float32_whatever_the_dtype(tmp_path: Path) -> None:
    """1 + w, of which bfloat16 would keep two decimals."""
    raw = TINY["gemma3-pattern"]
    weights = random_weights(raw)
    write_directory(tmp_path, raw, weights, "bfloat16")
    params = load_checkpoint(tmp_path, "bfloat16")[1]
    assert params.layers[0].qkv.dtype == "bfloat16"
    stored = weights["model.layers.1.pre_feedforward_layernorm.weight"].astype(params.embed.dtype)
    np.testing.assert_array_equal(params.layers[1].mlp_norm, 1 + stored.astype(np.float32))


@pytest.fixture(scope="module")
def path() -> Path:
    """The file of the extra, 253 MB, which CI does not download."""
    try:
        for distribution in PACKAGED["gemma3-270m"].distributions:
            importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the extra gemma: uv run --extra gemma pytest")
    return packaged_model("gemma3-270m")


@pytest.fixture(scope="module")
def real(path: Path) -> tuple[ModelConfig, Params]:
    return load_checkpoint(path, "float32")


def test_the_real_models_logits_are_those_of_torch(real: tuple[ModelConfig, Params]) -> None:
    golden = np.load(DATA / "real.npz")
    with jax.default_matmul_precision("highest"):
        found = np.asarray(_logits(*real, golden["ids"][None]))[0].astype(np.float64)
    np.testing.assert_allclose(found[:, golden["columns"]], golden["logits"], rtol=0, atol=2e-4)
    largest = found.max(-1, keepdims=True)
    logsumexp = np.log(np.exp(found - largest).sum(-1)) + largest[:, 0]
    np.testing.assert_allclose(logsumexp, golden["logsumexp"], rtol=0, atol=2e-4)
    np.testing.assert_array_equal(found.argmax(-1), golden["argmax"])


def test_the_real_tokenizer_is_llama_cpps(path: Path) -> None:
    """Runs of spaces beyond the longest token, tags, control tokens and bytes among the texts."""
    golden = json.loads((DATA / "tokens.json").read_text())
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    assert [tokenizer.encode(text) for text in golden["texts"]] == [[2, *ids] for ids in golden["ids"]]
    for text in golden["texts"]:
        if not any(token in text for token in tokenizer.special_tokens) and "▁" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_real_models_configuration_is_the_files(real: tuple[ModelConfig, Params]) -> None:
    config = real[0]
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (18, 4, 1, 256)
    windows = [getattr(config.layer(index).attention, "window", None) for index in range(18)]
    assert windows == [*[512] * 5, None] * 3
    thetas = [config.layer(index).rope.theta for index in range(18)]
    assert thetas == [*[10_000.0] * 5, 1_000_000.0] * 3
    assert (config.bos_token_id, config.eos_token_ids) == (2, (1, 106))  # <eos>, and <end_of_turn> by its name


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), decoding=Autoregressive(), max_num_seqs=4, max_model_len=128) as llm:
        yield llm


def test_the_real_models_greedy_tokens_are_those_of_torch(llm: LLM) -> None:
    golden = np.load(DATA / "real.npz")
    prompts = [{"prompt_token_ids": golden[f"prompt{number}"].tolist()} for number in range(4)]
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert [list(output.token_ids) for output in outputs] == [golden[f"greedy{n}"].tolist() for n in range(4)]
    assert outputs[0].text.startswith(" Paris.")
