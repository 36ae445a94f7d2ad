"""Drafts made of their target by leaving layers out."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from smcjax.model import ModelConfig, drop_layers, init_params, logits

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)


def test_the_rest_computes_what_a_model_of_the_rest_computes() -> None:
    params = init_params(CONFIG, jax.random.key(0))
    config, dropped = drop_layers(CONFIG, params, (2, 0))
    assert config == dataclasses.replace(CONFIG, num_layers=2)
    rest = dataclasses.replace(params, layers=(params.layers[1], params.layers[3]))
    tokens = np.array([[1, 2, 3, 39]])
    np.testing.assert_array_equal(logits(config, dropped, tokens), logits(config, rest, tokens))
    assert len(params.layers) == 4
    assert drop_layers(CONFIG, params, ()) == (CONFIG, params)


@pytest.mark.parametrize(
    ("layers", "reason"),
    [((4,), "leave 4 out"), ((-1,), "leave -1 out"), ((1, 1), "twice"), (range(4), "at least one")],
)
def test_layers_that_cannot_be_dropped(layers: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        drop_layers(CONFIG, init_params(CONFIG, jax.random.key(0)), layers)
