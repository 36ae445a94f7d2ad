"""Weights in float32 for CPUs: the same numbers, and logits as with the narrow ones."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from smcjax.matmul import is_packed
from smcjax.model import ModelConfig, init_params, logits
from smcjax.model.folding import widen_params
from smcjax.model.quantize import quantize_params

CONFIG = ModelConfig(512, 512, 768, 2, 8, 2, 64, 256)  # widths at which roundings differ


def test_bfloat16_weights_are_the_same_numbers() -> None:
    narrow = init_params(CONFIG, jax.random.key(0), jnp.bfloat16)
    values = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), narrow)
    chex.assert_trees_all_equal(widen_params(narrow), values, strict=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(narrow)), "memory is held twice for one array only"


def test_float32_weights_stay_where_they_are() -> None:
    params = init_params(CONFIG, jax.random.key(0))
    assert all(a is b for a, b in zip(jax.tree.leaves(widen_params(params)), jax.tree.leaves(params), strict=True))


def test_int8_weights_are_multiplied_out() -> None:
    params = init_params(CONFIG, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, CONFIG.vocab_size)
    plain = np.asarray(logits(CONFIG, params, tokens))
    quantised = quantize_params(params)
    expected = np.asarray(logits(CONFIG, quantised, tokens))
    wide = widen_params(quantised)
    assert not any(map(is_packed, jax.tree.leaves(wide, is_leaf=is_packed)))
    got = np.asarray(logits(CONFIG, wide, tokens))
    scale = np.abs(plain).max()
    np.testing.assert_allclose(got, expected, atol=2e-6 * scale)
    assert np.abs(plain - expected).max() > 1e-3 * scale, "control: int8 weights are other numbers"


def test_config_of_widened_models() -> None:
    from smcjax.engine.load.loading import Models

    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    models = Models(None, config, init_params(CONFIG, jax.random.key(0))).keeping("float32")
    assert models.target.page_bytes(4) == 2 * config.page_bytes(4)
