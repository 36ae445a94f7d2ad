"""Norms folded into products, and left pending: the same function of the tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.decoding.drafts.next_token import norms_of
from smcjax.model import decoder
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import logits
from smcjax.model.files.export import save_checkpoint
from smcjax.model.folding import fold_for_kernels, fold_norms
from smcjax.model.params import FOLDED, Params, init_params
from smcjax.model.quantize import quantize_params
from smcjax.pallas import implementations
from smcjax.sparse.nsa import NSA
from tests.helpers import tiny_config

VARIANTS: list[dict[str, Any]] = [
    *({}, {"qk_norm": "head", "qkv_bias": True}, {"mlp_bias": True, "o_bias": True}),
    {"post_norms": True, "o_bias": True, "activation": "gelu_tanh"},
    {"attention": NSA(kernel_size=2, kernel_stride=1, block_size=2, num_blocks=3)},
]


def random_norms(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """Weights of which norms and biases are random too."""
    params = init_params(config, jax.random.key(0), dtype)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape, dtype) if leaf.ndim == 1 else leaf
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, moved)


@pytest.fixture(params=VARIANTS, ids=str)
def model(request: pytest.FixtureRequest) -> tuple[ModelConfig, Params, jax.Array]:
    config = tiny_config(23, **request.param)
    return config, random_norms(config), jax.random.randint(jax.random.key(2), (2, 7), 0, 23)


def test_folded_norms_give_the_same_logits(model: tuple[ModelConfig, Params, jax.Array]) -> None:
    config, params, tokens = model
    got, want = logits(config, fold_norms(params, config), tokens), logits(config, params, tokens)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


def test_pending_norms_give_the_same_logits(model: tuple[ModelConfig, Params, jax.Array], patch_programs: Any) -> None:
    """The way that kernels go, with plain versions in their place. Negative control: a wrong norm is seen."""
    config, params, tokens = model
    want = np.asarray(logits(config, params, tokens))
    asked = []
    swiglu = decoder.swiglu

    def heard(*args: Any, **how: Any) -> jax.Array:
        asked.append(args)
        return swiglu(*args, **how)

    patch_programs(decoder, "_leaves_pending", lambda *_: True)
    patch_programs(decoder, "swiglu", heard)
    folded = fold_norms(params, config)
    np.testing.assert_allclose(logits(config, folded, tokens), want, rtol=1e-4, atol=1e-5)
    by_kernel = not config.layer(0).mlp_bias and config.layer(0).activation == "silu"
    assert len(asked) == by_kernel * config.num_layers
    layer = dataclasses.replace(folded.layers[1], gate_up=params.layers[1].gate_up, qkv=params.layers[1].qkv)
    wrong = dataclasses.replace(folded, layers=(folded.layers[0], layer))
    assert not np.allclose(logits(config, wrong, tokens), want, rtol=1e-4, atol=1e-5)


def test_what_is_folded() -> None:
    config, with_bias = tiny_config(), tiny_config(qkv_bias=True)
    plain, biased = (fold_norms(random_norms(one), one).layers[0] for one in (config, with_bias))
    assert plain.attn_norm == FOLDED
    assert plain.mlp_norm == FOLDED
    assert isinstance(biased.attn_norm, jax.Array)
    assert biased.mlp_norm == FOLDED
    quantized = fold_norms(quantize_params(random_norms(config)), config)
    assert all(isinstance(norm, jax.Array) for layer in quantized.layers for norm in (layer.attn_norm, layer.mlp_norm))
    twice = fold_norms(fold_norms(random_norms(config), config), config)
    chex.assert_trees_all_equal(twice, fold_norms(random_norms(config), config))
    bare = tiny_config(pre_norms=False, post_norms=True)
    chex.assert_trees_all_equal(fold_norms(random_norms(bare), bare), random_norms(bare))
    own = tiny_config(attention=NSA())
    params = random_norms(own)
    layer = fold_norms(params, own).layers[0]
    assert layer.attn_norm == FOLDED
    assert params.layers[0].attention is not None
    assert layer.attention is not None
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), params.layers[0].attention, layer.attention)
    assert {name for name, is_other in changed.items() if is_other} == {"gate"}


def test_consumed_matrices_are_freed() -> None:
    params = random_norms(tiny_config())
    fold_norms(params, tiny_config(), consume=True)
    assert params.layers[0].qkv.is_deleted()
    assert params.layers[1].gate_up.is_deleted()
    assert not params.layers[0].o.is_deleted()


def test_folding_is_for_kernels() -> None:
    half, full = (random_norms(tiny_config(), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    with implementations("xla"):
        assert fold_for_kernels(half, tiny_config()) is half
    with implementations("mosaic"):
        assert fold_for_kernels(full, tiny_config()) is full
        assert fold_for_kernels(half, tiny_config()).layers[0].attn_norm == FOLDED


def test_the_persistent_step_multiplies_by_one_where_a_norm_is_folded() -> None:
    params = random_norms(tiny_config())
    norms = norms_of(fold_norms(params, tiny_config()))
    assert norms.shape == norms_of(params).shape
    np.testing.assert_array_equal(norms[:-1], 1)
    np.testing.assert_array_equal(norms[-1], params.final_norm)


def test_folded_weights_are_not_saved_as_a_checkpoint(tmp_path: Any) -> None:
    config = tiny_config()
    with pytest.raises(ValueError, match="shapes of params"):
        save_checkpoint(config, fold_norms(random_norms(config), config), tmp_path)
