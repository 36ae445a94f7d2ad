"""int8 weights: the rounding by hand, the product against the matrix it stands for, and a decoder in int8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.bench.shapes import SHAPES
from smcjax.matmul import is_packed
from smcjax.model import init_params, logits
from smcjax.model.decoder import linear
from smcjax.model.params import init_leaves, param_shapes
from smcjax.model.quantize import quantize_leaves, quantize_matrix, quantize_params, streamed
from smcjax.quantization import FLOAT8, INT8, Quantization, check_quantization, restore


def test_rounding_by_hand() -> None:
    matrix = jnp.asarray([[1.27, -0.637, 0.004, 0.0], [0.0, 0.0, 0.0, 0.0], [-254.0, 127.0, 2.0, 4.0]])
    quantised = quantize_matrix(matrix)
    np.testing.assert_array_equal(quantised.values, [[127, -64, 0, 0], [0, 0, 0, 0], [-127, 64, 1, 2]])
    np.testing.assert_allclose(quantised.scale, [0.01, 1.0, 2.0], rtol=1e-6)
    assert quantised.values.dtype == jnp.int8
    np.testing.assert_allclose(quantised.rows(jnp.asarray([2, 0])), [[-254, 128, 2, 4], [1.27, -0.64, 0, 0]], rtol=1e-6)


def test_rounding_to_float8_by_hand() -> None:
    """e4m3 has four significant bits: 1.1 is 1.125 beside a largest number of 448; beyond that it would have NaN."""
    quantised = quantize_matrix(
        jnp.asarray([[448.0, 1.1, -17.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-4.48, 0.02, 0.0, 1e-9]]), FLOAT8
    )
    np.testing.assert_array_equal(
        np.asarray(quantised.values, np.float32), [[448, 1.125, -16, 0], [0, 0, 0, 0], [-448, 2, 0, 0]]
    )
    np.testing.assert_allclose(quantised.scale, [1.0, 1.0, 0.01], rtol=1e-6)
    assert quantised.values.dtype == jnp.float8_e4m3fn


def test_numbers_too_small_for_a_scale_are_zero() -> None:
    """Every scale is a positive number, which files in int8 rely on."""
    quantised = quantize_matrix(jnp.asarray([[1e-37, -1e-37], [1e-30, 0.0]]))
    assert (quantised.scale > 0).all()
    np.testing.assert_allclose(quantised.rows(jnp.arange(2)), [[1e-37, -1e-37], [1e-30, 0.0]], rtol=1e-6, atol=1e-36)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_rounded_matrix(dtype: Any, bias: bool) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 5, 64), dtype)
    weight = jax.random.normal(keys[1], (32, 64), dtype)
    b = jax.random.normal(keys[2], (32,), dtype) if bias else None
    quantised = quantize_matrix(weight)
    assert quantised.dtype == dtype
    assert quantised.shape == (32, 64)
    rounded = np.asarray(restore(quantised.values), np.float64) * np.asarray(quantised.scale, np.float64)[:, None]
    exact = np.asarray(x, np.float64) @ rounded.T + (0.0 if b is None else np.asarray(b, np.float64))
    y = linear(x, quantised, b)
    assert y.dtype == dtype
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-4  # bf16 rounds its result to 2⁻⁸, twice with a bias
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=tolerance, atol=tolerance)
    error = np.abs(rounded - np.asarray(weight, np.float64)).max(axis=1)
    assert (error <= 0.5001 * np.asarray(quantised.scale)).all()


@pytest.mark.parametrize(("kind", "shape"), [(INT8, "tiny-draft"), (FLOAT8, "tiny-target")], ids=str)  # tied and untied
def test_a_decoder_in_eight_bits(shape: str, kind: Quantization) -> None:
    config = SHAPES[shape]
    params = init_params(config, jax.random.key(1))
    quantised = quantize_params(params, kind)
    assert is_packed(quantised.unembed)
    assert is_packed(quantised.embed) == config.tie_embeddings
    assert quantised.embed.dtype == jnp.float32
    assert quantised.final_norm is params.final_norm
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, config.vocab_size)
    exact = np.asarray(logits(config, params, tokens))
    rounded = np.asarray(logits(config, quantised, tokens))
    assert not np.array_equal(exact, rounded)
    assert np.linalg.norm(rounded - exact) < (0.03 if kind == INT8 else 0.12) * np.linalg.norm(exact)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(quantised))
    assert held < (0.3 if config.tie_embeddings else 0.5) * sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_consumed_matrices_are_freed() -> None:
    params = init_params(SHAPES["tiny-target"], jax.random.key(1))
    quantised = quantize_params(params, consume=True)
    assert params.layers[0].qkv.is_deleted()
    assert not params.embed.is_deleted()  # still in use, only looked up
    assert not quantised.layers[0].attn_norm.is_deleted()


@pytest.mark.parametrize("consume", [True, False])
def test_matrices_are_rounded_one_by_one(consume: bool) -> None:
    """A matrix is gone before the next one is made; without `consume`, as a negative control, it is not."""
    config = SHAPES["tiny-target"]
    shapes, key = param_shapes(config, jnp.float32), jax.random.key(1)
    made: list[jax.Array] = []
    gone: list[bool] = []

    def leaves() -> Iterator[jax.Array]:
        for leaf, covered in zip(init_leaves(config, key, jnp.float32), streamed(shapes), strict=True):
            gone.append(all(array.is_deleted() for array in made))
            if covered:
                made.append(leaf)
            yield leaf

    quantised = quantize_leaves(shapes, leaves(), INT8, consume=consume)
    assert all(gone) == consume
    chex.assert_trees_all_equal(quantised, quantize_params(init_params(config, key)))


def test_what_is_refused() -> None:
    check_quantization("quantization", None)
    check_quantization("quantization", "int8")
    with pytest.raises(ValueError, match=r"^draft_quantization must be 'int8', 'float8' or None .*, got 'fp8'\.$"):
        check_quantization("draft_quantization", "fp8")
