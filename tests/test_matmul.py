"""The door from activations to weights: every kind of matrix computes x · Wᵀ of the rows that it looks up."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from smcjax.matmul import Dense, is_packed, matrix, product_dtypes
from smcjax.model.quantize import quantize_matrix
from smcjax.quantization import FLOAT8, QUANTIZATIONS, interleave, restore

KINDS: dict[str, Any] = {
    "dense": lambda weight: weight,
    **{kind.name: functools.partial(quantize_matrix, kind=kind) for kind in QUANTIZATIONS.values()},
}
BFLOAT16 = 2.0**-7  # relative, of a rounded sum to which something is added


@pytest.fixture
def operands() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (2, 3, 16), jnp.bfloat16), jax.random.normal(keys[1], (32, 16), jnp.bfloat16)


def close(got: jax.Array, want: Any, dtype: Any) -> None:
    assert got.dtype == dtype
    tolerance = BFLOAT16 if dtype == jnp.bfloat16 else 1e-5
    want = np.asarray(want, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)  # nearly each is a program of its own
@given(
    shape=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    sizes=st.tuples(st.integers(1, 9), st.sampled_from([5, 16, 48])),
    dtypes=st.tuples(*[st.sampled_from([jnp.bfloat16, jnp.float32])] * 2),
    seed=st.integers(0, 99),
)
def test_a_product_is_that_with_the_rows(
    kind: str, shape: tuple[int, ...], sizes: tuple[int, int], dtypes: tuple[Any, Any], seed: int
) -> None:
    """Alone, in a dtype that is asked for, and added to something; whatever the leading axes are."""
    (outputs, inputs), (dtype, out) = sizes, dtypes
    rng = np.random.default_rng(seed)
    x, weight = (
        jnp.asarray(rng.standard_normal(of, np.float32), dtype) for of in ((*shape, inputs), (outputs, inputs))
    )
    signs = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T  # the sum's, so that no terms cancel
    residual = jnp.asarray(np.copysign(rng.standard_normal((*shape, outputs)), signs), out)

    @jax.jit  # operations of each shape would be compiled one by one
    def products(x: jax.Array, residual: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
        weight = matrix(KINDS[kind](values))
        assert (weight.shape, weight.dtype) == ((outputs, inputs), dtype)
        wide = weight.rows(slice(None), out=jnp.float32)
        rounded, scale = FLOAT8.round(x)
        of_x = rounded.astype(jnp.float32) * scale[..., None]
        return wide, of_x, weight(x), weight(x, out=out), weight(x, add_to=residual, out=out)

    wide, of_x, plain, asked, added = products(x, residual, weight)
    seen = np.asarray(x, np.float64)
    if kind == "float8":  # what it multiplies is rounded too
        largest = np.abs(seen).max(axis=-1, keepdims=True, initial=0.0)
        assert (np.abs(of_x - seen) <= 2.0**-4 * np.abs(seen) + 2.0**-9 * largest / 448).all()
        seen = np.asarray(of_x, np.float64)
    exact = seen @ np.asarray(wide, np.float64).T
    close(plain, exact, dtype)
    close(asked, exact, out)
    close(added, np.asarray(residual, np.float64) + exact, out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rows_are_looked_up_in_the_dtype_of_the_matrix(kind: str, dtype: Any) -> None:
    weight = jax.random.normal(jax.random.key(1), (7, 32), dtype)
    ids = jnp.asarray([[3, 0], [6, 3]])
    kept = matrix(KINDS[kind](weight))
    rows = kept.rows(ids)
    assert (rows.shape, rows.dtype) == ((2, 2, 32), dtype)
    np.testing.assert_array_equal(rows, kept.rows(slice(None))[ids])
    largest = np.abs(np.asarray(weight, np.float64)).max(axis=1, keepdims=True)[ids]
    error = np.abs(np.asarray(rows, np.float64) - np.asarray(weight[ids], np.float64))
    allowed = {"dense": 0, "int8": 0.51 * largest / 127, "float8": 2.0**-4 * np.abs(rows) + 2.0**-9 * largest / 448}
    assert (error <= allowed[kind] + (kind != "dense") * 2.0**-8 * np.abs(rows)).all()


def test_a_packed_leaf_is_its_own_matrix(operands: tuple[jax.Array, jax.Array]) -> None:
    weight, packed = operands[1], quantize_matrix(operands[1])
    assert matrix(packed) is packed
    assert matrix(weight) == Dense(weight)
    assert [is_packed(leaf) for leaf in (weight, packed)] == [False, True]
    both = jax.tree.leaves({"a": weight, "b": packed}, is_leaf=is_packed)
    assert [leaf is kept for leaf, kept in zip(both, (weight, packed), strict=True)] == [True, True]


def test_the_dtypes_of_products_are_collected_where_they_are_traced(operands: tuple[jax.Array, jax.Array]) -> None:
    x, weight = operands
    wide, kept = weight.astype(jnp.float32), quantize_matrix(weight)

    def found(*weights: Any) -> set[str]:
        with product_dtypes() as dtypes:
            jax.eval_shape(lambda: [matrix(weight)(x.astype(matrix(weight).dtype)) for weight in weights])
        return dtypes

    assert found() == set()
    assert found(weight) == {"bfloat16"}
    assert found(weight, kept) == {"bfloat16", "int8"}
    assert found(wide) == {"float32"}
    with product_dtypes() as dtypes:
        matrix(kept).rows(jnp.asarray([1]))  # no product
    matrix(weight)(x)  # outside
    assert dtypes == set()


def test_float32_products_are_full_float32() -> None:
    x = jnp.ones((2, 16))
    jaxpr = jax.make_jaxpr(Dense(jnp.ones((32, 16))))(x)
    assert jaxpr.eqns[-1].params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


def test_the_order_by_hand() -> None:
    """Thread q finds its columns 2q, 2q + 1, 2q + 8, 2q + 9 in four bytes: the first, third, second and fourth."""
    stored = np.asarray(interleave(jnp.arange(32)))
    for block in (0, 16):
        words = stored[block : block + 16].reshape(4, 4)[[0, 2, 1, 3]] - block  # by thread
        for thread, word in enumerate(words):
            assert word[[0, 2, 1, 3]].tolist() == [2 * thread, 2 * thread + 1, 2 * thread + 8, 2 * thread + 9]


def test_it_is_undone_and_leaves_other_widths_alone() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 5, 48))
    np.testing.assert_array_equal(restore(interleave(x)), x)
    np.testing.assert_array_equal(interleave(restore(x)), x)
    assert not np.array_equal(interleave(x), x)
    odd = x[..., :20]
    np.testing.assert_array_equal(interleave(odd), odd)
