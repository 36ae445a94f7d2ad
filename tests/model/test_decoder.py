"""Each part of a layer's spec changes the forward by a law of its own."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.model import LayerSpec, ModelConfig, Params, decoder, forward, logits
from smcjax.model.attention import Full, SlidingWindow
from smcjax.model.decoder import gated
from smcjax.model.params import FOLDED, init_params
from smcjax.model.quantize import quantize_params
from smcjax.pallas import Norm, PendingNorm
from smcjax.quantization import FLOAT8
from tests.helpers import noisy_params, tiny_config

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (1, 16), np.int32))
_logits = jax.jit(logits, static_argnums=0)


def outputs(config: ModelConfig, params: Params | None = None, tokens: jax.Array = TOKENS) -> np.ndarray:
    return np.asarray(_logits(config, noisy_params(config) if params is None else params, tokens)[0])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("window", [1, 3, 5])
def test_a_window_bounds_what_a_token_sees(window: int, layers: int) -> None:
    """Behind L layers the last token depends on L·(w − 1) tokens before its own, and on no other."""
    config = tiny_config(11, attention=SlidingWindow(window), num_layers=layers)
    reach = 15 - layers * (window - 1)

    def last(changed: int) -> np.ndarray:
        return outputs(config, tokens=TOKENS.at[0, changed].add(1) % 11)[-1]

    np.testing.assert_array_equal(last(reach - 1), outputs(config)[-1])
    assert np.abs(last(reach) - outputs(config)[-1]).max() > 1e-4, "control: the first that it sees"


def test_a_window_as_long_as_the_sequence_is_full_attention() -> None:
    window, full = (tiny_config(11, attention=kind) for kind in (SlidingWindow(16), Full()))
    np.testing.assert_array_equal(outputs(window), outputs(full))


def test_a_window_sees_at_least_its_own_position() -> None:
    with pytest.raises(ValueError, match=r"window must be at least 1, the query's own position, got 0\."):
        SlidingWindow(0)


@pytest.mark.parametrize("matrix", ["o", "down"])
def test_post_norms_take_the_scale_of_what_is_added(matrix: str) -> None:
    """A product that is normed may be as large as it will; control: without the norm it may not."""

    def changed(**spec: Any) -> float:
        config = tiny_config(11, **spec, rms_norm_eps=1e-12)
        params = noisy_params(config)
        layers = tuple(dataclasses.replace(layer, **{matrix: 8 * getattr(layer, matrix)}) for layer in params.layers)
        return float(np.abs(outputs(config, dataclasses.replace(params, layers=layers)) - outputs(config)).max())

    assert changed(post_norms=True) < 1e-4
    assert changed() > 1e-1


@pytest.mark.parametrize("norm", ["attn_norm", "mlp_norm"])
def test_an_absent_norm_is_no_folded_norm(norm: str, patch_programs: Any) -> None:
    """A folded norm still divides by the RMS, as one of ones does; where there is none, a product reads the stream."""
    config = tiny_config(11, embed_scale=3.0)
    params = noisy_params(config)

    @functools.cache
    def found(kind: str, pending: bool) -> np.ndarray:
        patch_programs(decoder, "_leaves_pending", lambda *_: pending)
        value = {"folded": FOLDED, "absent": None, "ones": jnp.ones(config.hidden_size)}[kind]
        layers = tuple(dataclasses.replace(layer, **{norm: value}) for layer in params.layers)
        forward = jax.jit(lambda params: logits(config, params, TOKENS))  # a trace of its own
        return np.asarray(forward(dataclasses.replace(params, layers=layers)))

    for pending in (False, True):
        np.testing.assert_allclose(found("folded", pending), found("ones", False), atol=1e-4)
        np.testing.assert_allclose(found("absent", pending), found("absent", False), atol=1e-4)
    assert np.abs(found("absent", False) - found("folded", False)).max() > 1e-2


@pytest.mark.parametrize("post_norms", [False, True])
def test_without_norms_in_front_products_read_the_stream(post_norms: bool) -> None:
    """One layer of one head, whose single token attends to itself: x + post(o · v(x)), then x + post(MLP(x))."""
    config = tiny_config(11, num_layers=1, num_heads=1, pre_norms=False, post_norms=post_norms, embed_scale=2.0)
    params = noisy_params(config)
    layer = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params.layers[0])
    assert (layer.attn_norm, layer.mlp_norm) == (None, None)

    def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x**2).mean() + config.rms_norm_eps)

    def post(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return normed(x, weight) if post_norms else x

    for token in range(3):
        x = 2 * np.asarray(params.embed[token], np.float64)
        x = x + post(layer.o @ layer.qkv[-config.head_dim :] @ x, layer.attn_post_norm)
        gate, up = np.split(layer.gate_up @ x, 2)
        x = x + post(layer.down @ (gate / (1 + np.exp(-gate)) * up), layer.mlp_post_norm)
        want = np.asarray(params.unembed, np.float64) @ normed(x, np.asarray(params.final_norm, np.float64))
        np.testing.assert_allclose(outputs(config, params, jnp.array([[token]]))[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_embeddings_are_scaled_by_a_number_of_their_dtype(dtype: Any) -> None:
    config = tiny_config(11, embed_scale=math.sqrt(640))
    params = init_params(config, jax.random.key(0), dtype)
    by_hand = dataclasses.replace(params, embed=params.embed * jnp.asarray(math.sqrt(640), dtype))
    plain = dataclasses.replace(config, embed_scale=1.0)
    # Operation by operation: within one program XLA may keep more digits of a product that is added to.
    np.testing.assert_array_equal(logits(config, params, TOKENS), logits(plain, by_hand, TOKENS))
    assert (logits(config, params, TOKENS) != logits(plain, params, TOKENS)).any(), "control"


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gelu_is_made_in_float32_and_rounded_once(dtype: Any) -> None:
    gate = jnp.linspace(-6, 6, 401).astype(dtype)
    got = gated(jnp.concatenate([gate, jnp.ones_like(gate)]), None, "gelu_tanh")
    assert got.dtype == dtype
    want = jnp.asarray(gelu_tanh(np.asarray(gate, np.float64)), jnp.float32).astype(dtype)
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_product_that_lacks_its_norm_is_divided_before_the_activation(activation: str) -> None:
    x, gate_up = (jax.random.normal(jax.random.key(i), (3, width)) for i, width in enumerate((8, 24)))
    pending = PendingNorm(x, 1e-6)
    got, want = gated(gate_up, pending, activation), gated(pending.divide(gate_up), None, activation)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert np.abs(got - gated(gate_up, None, activation)).max() > 1e-2, "control"


@pytest.mark.parametrize("also", ["nothing", "post norms", "a bias"])
def test_products_that_norm_what_they_round_change_nothing(also: str, patch_programs: Any) -> None:
    """As where a kernel rounds: float8 products read the stream, which the products before them have added to."""
    config = tiny_config(11)
    scales = jax.random.uniform(jax.random.key(1), (2, config.hidden_size), minval=0.5, maxval=2.0)

    def with_norms(layer: Any) -> Any:
        more: dict[str, Any] = {"attn_norm": scales[0], "mlp_norm": scales[1]}
        if also == "post norms":
            more |= {"attn_post_norm": scales[1], "mlp_post_norm": scales[0]}
        if also == "a bias":
            more |= {"qkv_bias": jnp.ones(layer.qkv.shape[0])}
        return dataclasses.replace(layer, **more)

    params = noisy_params(config)
    params = dataclasses.replace(params, layers=tuple(map(with_norms, params.layers)))
    params = quantize_params(params, FLOAT8)

    def outputs() -> np.ndarray:
        return np.asarray(jax.jit(lambda params: logits(config, params, TOKENS))(params))  # a trace of its own

    want = outputs()
    patch_programs(decoder, "norms_itself", lambda weight, x: True)
    np.testing.assert_allclose(outputs(), want, rtol=1e-5, atol=1e-5)
    patch_programs(decoder, "Norm", lambda weight, eps: Norm(None, eps))
    assert np.abs(outputs() - want).max() > 1e-2, "control"


def test_norms_in_float32_leave_activations_in_the_models_dtype() -> None:
    """A bfloat16 model whose norms are float32 gives what the float32 model gives, to bfloat16's rounding."""
    gemma = LayerSpec(SlidingWindow(5), qk_norm="head", post_norms=True, activation="gelu_tanh")
    config = tiny_config(11, layers=(gemma,), float32_norms=True, embed_scale=2.0)
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16", "float32"}
    hidden = forward(config, params, TOKENS)
    assert hidden.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    np.testing.assert_allclose(np.asarray(hidden, np.float32), forward(config, wide, TOKENS), atol=0.1)


def test_bytes_of_kv_follow_from_the_kinds_of_attention() -> None:
    local = LayerSpec(SlidingWindow(3))
    config = tiny_config(11, layers=(local, LayerSpec()), num_layers=5, num_heads=4, num_kv_heads=2, head_dim=8)
    assert config.page_bytes(1) == 5 * 2 * 2 * 8 * 4
    assert dataclasses.replace(config, dtype="bfloat16").page_bytes(1) == 5 * 2 * 2 * 8 * 2
