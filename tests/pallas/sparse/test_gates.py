"""Gates and the sum that they weigh, by kernels: what XLA computes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.dispatch import implementations
from smcjax.pallas.layer.norm import PendingNorm
from smcjax.pallas.sparse.gates import gated_sum, gated_sum_mosaic, gated_sum_reference

INTERPRET = plgpu.InterpretGPUParams()
BRANCHES = 3


def drawn(rows: int, columns: int, heads: int, dim: int, width: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    parts = tuple(normal(rows, columns, heads, dim, dtype=jnp.float32) for _ in range(BRANCHES))
    gate = normal(heads, BRANCHES, width, scale=2 * width**-0.5)
    return normal(rows, columns, width), gate, normal(heads, BRANCHES), parts


def in_f32(
    x: jax.Array, gate: jax.Array, bias: jax.Array, parts: tuple[jax.Array, ...], eps: float | None = None
) -> jax.Array:
    """The reference, of x that lacks its norm where there is an `eps`."""
    wide = jnp.float32
    x = x.astype(wide)
    pending = None if eps is None else PendingNorm(x, eps)
    return gated_sum_reference(x, gate.astype(wide), bias.astype(wide), parts, pending)


def is_rounded(got: jax.Array, want: jax.Array) -> bool:
    """True where bfloat16 numbers are those of f32, rounded once."""
    return bool(jnp.all(jnp.abs(got.astype(jnp.float32) - want) <= jnp.abs(want) * 2**-8 + 1e-4))


def test_kernels_weigh_as_xla_does() -> None:
    """Kernels take more tokens and heads than a block has. Controls: other gates, another order of branches, roundings.

    The last are XLA's, of gates and outputs before it multiplies them.
    """
    x, gate, bias, parts = drawn(2, 5, 8, 128, 512)
    got = gated_sum_mosaic(x, gate, bias, parts, interpret=INTERPRET)
    assert got.dtype == jnp.bfloat16
    assert is_rounded(got, in_f32(x, gate, bias, parts))
    assert not is_rounded(gated_sum_reference(x, gate, bias, parts), in_f32(x, gate, bias, parts))
    assert not is_rounded(got, in_f32(jnp.roll(x, 1, axis=2), gate, bias, parts))
    assert not is_rounded(got, in_f32(x, gate, bias, parts[::-1]))


@pytest.mark.slow
def test_kernels_make_a_pending_norm() -> None:
    """Rows are of unlike length, and longer than what threads load at once. Controls: no norm, another's."""
    x, gate, bias, parts = drawn(2, 3, 8, 128, 1536)
    x = x * jnp.exp2(jnp.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1)).astype(x.dtype)
    eps = 0.5
    got = gated_sum_mosaic(x, gate, bias, parts, PendingNorm(x, eps), interpret=INTERPRET)
    assert is_rounded(got, in_f32(x, gate, bias, parts, eps))
    assert not is_rounded(got, in_f32(x, gate, bias, parts))
    assert not is_rounded(got, in_f32(x, gate, bias, parts, 4 * eps))


@pytest.mark.parametrize("rows", [1, 8])
def test_lowers_for_cuda(rows: int) -> None:
    """Two launches at an 8B model's shapes; more tokens than both are for go to XLA, as do parts of bfloat16."""
    shapes = jax.eval_shape(lambda: drawn(rows, 9, 32, 128, 4096))
    with implementations("mosaic"):
        traced = jax.jit(gated_sum).trace(*shapes)
        many = jax.eval_shape(lambda: drawn(15, 9, 32, 128, 4096))
        assert gated_sum.kernel_for(*many) is None
        x, gate, bias, parts = shapes
        rounded = tuple(jax.ShapeDtypeStruct(part.shape, jnp.bfloat16) for part in parts)
        assert gated_sum.kernel_for(x, gate, bias, rounded) is None
        assert gated_sum.kernel_for(x, gate, bias, parts, PendingNorm(x, 1e-5)) is not None
        normed = jax.jit(lambda x, *others: gated_sum(x, *others, pending=PendingNorm(x, 1e-5))).trace(*shapes)
    for one in (traced, normed):
        assert one.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("tokens", [(1, 1), (1, 9), (8, 9), (8, 16)])
def test_weighs_as_xla_does_on_a_gpu(tokens: tuple[int, int], eps: float | None) -> None:
    """At an 8B model's shapes."""
    x, *others = drawn(*tokens, 32, 128, 4096)
    assert gated_sum.kernel_for(x, *others) is not None
    pending = None if eps is None else PendingNorm(x, eps)
    got = jax.jit(functools.partial(gated_sum, pending=pending))(x, *others)
    assert is_rounded(got, jax.jit(in_f32, static_argnums=4)(x, *others, eps))
