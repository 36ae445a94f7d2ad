"""Classifiers' directories and heads alone: scores by transformers and a float64 decoder, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from smcjax.errors import CheckpointError
from smcjax.model.decoder import forward
from smcjax.model.files.classifier import is_classifier, load_classifier, load_head
from smcjax.model.folding import fold_norms
from tests.model.hf_oracle import as_stored, make_config, oracle_logits, random_weights, write_directory

_forward = jax.jit(forward, static_argnums=0)
# Of `AutoModelForSequenceClassification` (transformers 5.24, torch 2.15), for `make_classifier`'s weights of seed 5 and
# the tokens `default_rng(length).integers(3, 96, length)`.
RECORDED: dict[str, dict[int, list[float]]] = {
    "llama": {1: [1.61031, -0.69159, -8.07461], 45: [-11.76176, 2.96162, -2.23843]},
    "qwen2": {7: [-4.35113, -5.3281], 45: [-1.99161, -2.08586]},
    "qwen3": {7: [-13.15878, 2.85231, -0.18261], 45: [5.9322, -4.51273, 1.5386]},
    "gemma3_text": {7: [-14.31817, 0.78402], 45: [1.39287, 3.39871]},
}


def make_classifier(
    family: str, labels: int, seed: int = 5, **changes: Any
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A small classifier: its config.json, and float32 tensors under transformers' names."""
    config = make_config(family, **changes)
    named = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    config["architectures"] = [named.replace("Gemma3For", "Gemma3TextFor")]
    weights = random_weights(config, seed)
    del weights["lm_head.weight"]
    weights["score.weight"] = np.random.default_rng(seed + 1).normal(size=(labels, 32)).astype(np.float32)
    return config, weights


def oracle_scores(config: dict[str, Any], weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Float64 scores [labels] behind the last token."""
    return oracle_logits(config, {**weights, "lm_head.weight": weights["score.weight"]}, tokens)[-1]


@pytest.mark.parametrize("family", RECORDED)
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Also where an engine has folded norms away: the last one, which a head expects, is never among them."""
    recorded = RECORDED[family]
    raw, weights = make_classifier(family, len(recorded[45]))
    write_directory(tmp_path, raw, weights)
    assert is_classifier(tmp_path)
    config, params, score = load_classifier(tmp_path, "float32")
    for decoder in (params, fold_norms(params, config)):
        for length, wanted in recorded.items():
            tokens = np.random.default_rng(length).integers(3, 96, length)
            found = np.asarray(score) @ np.asarray(_forward(config, decoder, tokens[None].astype(np.int32)))[0, -1]
            np.testing.assert_allclose(found, wanted, atol=2e-4)
            np.testing.assert_allclose(found, oracle_scores(raw, weights, tokens.tolist()), atol=2e-4)


def test_a_language_model_is_no_classifier(tmp_path: Path) -> None:
    raw = make_config("llama")
    write_directory(tmp_path, raw, random_weights(raw))
    assert not is_classifier(tmp_path)


def changed(directory: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> Path:
    write_directory(directory, config, weights)
    return directory


def test_what_is_no_whole_classifier_is_refused(tmp_path: Path) -> None:
    raw, weights = make_classifier("llama", 2)
    without = {name: value for name, value in weights.items() if name != "score.weight"}
    cases = [
        (raw, without, "has no tensor 'score.weight'"),
        (raw, {**without, "score.weight": np.ones((2, 31), np.float32)}, r"is \[2, 31\] instead of \[labels, 32\]"),
        (raw, {**weights, "score.bias": np.ones(2, np.float32)}, r"unexpected score\.bias"),
        (raw, {k: v for k, v in weights.items() if k != "model.norm.weight"}, r"missing model\.norm\.weight"),
        (
            {**raw, "model_type": "gpt2"},
            weights,
            "model_type is 'gpt2' in the model's config, but classifiers of these",
        ),
        ({**raw, "hidden_act": "gelu"}, weights, "only silu is implemented"),
        ({**raw, "num_hidden_layers": 4000}, weights, "calls for"),
    ]
    for number, (config, tensors, words) in enumerate(cases):
        with pytest.raises(CheckpointError, match=words):
            load_classifier(changed(tmp_path / str(number), config, tensors))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps([1]))
    assert not is_classifier(tmp_path / "broken")


def test_a_head_is_read_alone(tmp_path: Path) -> None:
    """`load_head` returns the stored numbers of a classifier, in a file or shards, and of TRL's head with its bias."""
    raw, weights = make_classifier("qwen2", 3)
    for dtype, shards in (("float32", 1), ("bfloat16", 3)):
        write_directory(tmp_path / dtype, raw, weights, dtype, shards)
        weight, bias = load_head(tmp_path / dtype)
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, as_stored(weights, dtype)["score.weight"])
        np.testing.assert_array_equal(bias, np.zeros(3))
    rng = np.random.default_rng(0)
    stored: list[np.ndarray] = [rng.normal(size=(1, 32)).astype(np.float16), rng.normal(size=1)]
    raw = make_config("llama")
    weights = {"v_head.summary.weight": stored[0], "v_head.summary.bias": stored[1], **random_weights(raw)}
    (tmp_path / "trl").mkdir()
    save_file(weights, tmp_path / "trl" / "model.safetensors")
    for found, value in zip(load_head(tmp_path / "trl"), stored, strict=True):
        np.testing.assert_array_equal(found, value.astype(np.float32))


class Danger:
    """Unpickled, it says so."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was executed",)


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    good = np.ones((2, 4), np.float32)
    cases: list[tuple[dict[str, np.ndarray], str]] = [
        (
            {"lm.head": good},
            "has neither 'score.weight', a classifier's head, nor 'v_head.summary.weight', a value head of",
        ),
        ({"score.weight": good[0]}, r"score\.weight is \[4\] instead of \[labels, E\]; use a config"),
        ({"score.weight": good[:0]}, r"score\.weight is \[0, 4\] instead"),
        ({"score.weight": good * np.nan}, "score.weight.* has nan in row 0"),
        ({"score.weight": good.astype(np.int8)}, "dtype I8"),
        ({"v_head.summary.weight": good, "v_head.summary.bias": good[0]}, r"bias is \[4\] instead of \[2\]; fetch"),
        ({"v_head.summary.weight": good, "v_head.summary.bias": good[:, 0] * np.inf}, "bias.* has inf in row 0"),
    ]
    for number, (tensors, words) in enumerate(cases):
        path = tmp_path / str(number)
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=words) as refusal:
            load_head(path)
        assert "\n" not in str(refusal.value)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Danger()))
    with pytest.raises(CheckpointError, match="holds pickled weights"):
        load_head(pickled)
    shutil.copy(pickled / "pytorch_model.bin", pickled / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not a complete safetensors file"):
        load_head(pickled)
    write_directory(tmp_path / "adapted", *make_classifier("llama", 1))
    (tmp_path / "adapted" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="an adapter, which is not applied; merge it"):
        load_head(tmp_path / "adapted")
