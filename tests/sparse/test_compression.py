"""φ in bfloat16 is φ in float32 of the same weights, at the sizes of an 8B model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from smcjax.pallas.sparse.compress import COMPRESSIONS, compress, compression_shapes

ROWS, KV_HEADS, DIM, SIZE = 2, 2, 128, 32


def inputs(phi: str) -> tuple[dict[str, jax.Array], jax.Array]:
    shapes = compression_shapes(phi, KV_HEADS, DIM, SIZE)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    weights = {
        name: (jax.random.normal(key, shape) / shape[-1] ** 0.5).astype(jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return weights, jax.random.normal(jax.random.key(1), (ROWS, 1, SIZE, KV_HEADS, DIM))


@pytest.mark.parametrize("phi", COMPRESSIONS)
def test_bfloat16_weights_give_what_the_same_in_float32_give(phi: str) -> None:
    weights, stored = inputs(phi)
    wide = {name: array.astype(jnp.float32) for name, array in weights.items()}
    want = compress(phi, wide, "k", stored)
    got = compress(phi, weights, "k", stored)
    assert got.dtype == jnp.float32
    assert float(jnp.abs(got - want).max() / jnp.abs(want).max()) < 2e-5


@pytest.mark.parametrize("phi", COMPRESSIONS)
def test_control_stored_numbers_that_are_rounded_once_are_seen(phi: str) -> None:
    weights, stored = inputs(phi)
    wide = {name: array.astype(jnp.float32) for name, array in weights.items()}
    want = compress(phi, wide, "k", stored)
    got = compress(phi, weights, "k", stored.astype(jnp.bfloat16).astype(jnp.float32))
    assert float(jnp.abs(got - want).max() / jnp.abs(want).max()) > 2e-4


def test_no_rounding_that_xla_may_leave_out() -> None:
    """On GPUs XLA drops conversions to bfloat16 and back. Control: the rest of a number that is rounded by them."""

    def comes_back(function: Callable[..., jax.Array], *arguments: Any) -> bool:
        conversions = [
            one for one in jax.make_jaxpr(function)(*arguments).eqns if one.primitive.name == "convert_element_type"
        ]
        narrow = {one.outvars[0] for one in conversions if one.params["new_dtype"] == jnp.bfloat16}
        return any(one.invars[0] in narrow for one in conversions)

    for phi in COMPRESSIONS:
        weights, stored = inputs(phi)
        assert not comes_back(lambda weights, stored, phi=phi: compress(phi, weights, "k", stored), weights, stored)
    assert comes_back(lambda x: x - x.astype(jnp.bfloat16).astype(jnp.float32), stored)
