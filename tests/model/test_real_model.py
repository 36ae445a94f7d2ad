"""A pretrained model from its own file against transformers and torch (scripts/goldens/make_real_model_goldens.py)."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from smcjax.model import ModelConfig, Params, drop_layers, load_checkpoint, logits
from smcjax.model.files.hub import packaged_model
from tests.gguf_files import DATA

GOLDEN = np.load(DATA / "goldens.npz")
_logits = jax.jit(logits, static_argnums=0)


@pytest.fixture(scope="module")
def real() -> tuple[ModelConfig, Params]:
    return load_checkpoint(packaged_model("smollm2"), "float32")


def test_the_configuration_is_the_files(real: tuple[ModelConfig, Params]) -> None:
    config = real[0]
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.layer(0).rope.theta, config.max_position_embeddings) == (100_000.0, 8192)
    assert config.tie_embeddings
    assert config.eos_token_ids == (2, 0)  # <|im_end|> by its key, <|endoftext|> by its name


def test_logits_are_those_of_torch(real: tuple[ModelConfig, Params]) -> None:
    """At every position: 512 columns, the logarithm of the sum over all, and the likeliest token."""
    with jax.default_matmul_precision("highest"):
        found = np.asarray(_logits(*real, GOLDEN["ids"][None]))[0].astype(np.float64)
    np.testing.assert_allclose(found[:, GOLDEN["columns"]], GOLDEN["logits"], rtol=0, atol=2e-4)
    largest = found.max(-1, keepdims=True)
    logsumexp = np.log(np.exp(found - largest).sum(-1)) + largest[:, 0]
    np.testing.assert_allclose(logsumexp, GOLDEN["logsumexp"], rtol=0, atol=2e-4)
    np.testing.assert_array_equal(found.argmax(-1), GOLDEN["argmax"])


def test_dropped_layers_leave_the_others_as_they_are(real: tuple[ModelConfig, Params]) -> None:
    config, params = drop_layers(*real, (3, 12))
    assert config.num_layers == len(params.layers) == 28
    assert params.embed is real[1].embed
    assert [id(layer) for layer in params.layers] == [id(real[1].layers[i]) for i in range(30) if i not in (3, 12)]
