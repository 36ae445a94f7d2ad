"""Classifiers' directories: scores against transformers' recorded ones and a float64 decoder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from smcjax.errors import CheckpointError
from smcjax.model.decoder import forward
from smcjax.model.files.classifier import is_classifier, load_classifier
from tests.model.hf_oracle import make_config, oracle_logits, random_weights, write_directory

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
    recorded = RECORDED[family]
    raw, weights = make_classifier(family, len(recorded[45]))
    write_directory(tmp_path, raw, weights)
    assert is_classifier(tmp_path)
    config, params, score = load_classifier(tmp_path, "float32")
    for length, wanted in recorded.items():
        tokens = np.random.default_rng(length).integers(3, 96, length)
        found = np.asarray(score) @ np.asarray(_forward(config, params, tokens[None].astype(np.int32)))[0, -1]
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
