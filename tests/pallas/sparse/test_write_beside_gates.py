"""Kernels side by side in one launch: the bits of those that are launched one after the other."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.kv import TRASH
from smcjax.pallas.cache.rotate_and_write import Copies, HeadNorms, Write, rotate_and_write_mosaic
from smcjax.pallas.dispatch import implementations
from smcjax.pallas.layer.norm import PendingNorm
from smcjax.pallas.mosaic.fuse_launches import Part, Place, launch
from smcjax.pallas.sparse.gates import gated_sum, gated_sum_mosaic
from smcjax.pallas.sparse.write_beside_gates import write_beside_gates, write_beside_gates_mosaic

INTERPRET = plgpu.InterpretGPUParams()
BRANCHES = 3


def drawn(
    rows: int,
    columns: int,
    heads: int,
    kv_heads: int,
    dim: int,
    width: int,
    *,
    page_size: int = 4,
    copies: bool = False,
) -> tuple[Any, ...]:
    """A layer's input, gates, what is to be written, whose norm is pending, and branches.

    If it copies, row 0 has a page copied and does not write its first token.
    """
    rng = np.random.default_rng(rows + columns)

    def normal(*shape: int, scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    x, gate = normal(rows, columns, width), normal(heads, BRANCHES, width, scale=width**-0.5)
    angles = jnp.asarray(100 * rng.random((rows, columns, dim // 2)), jnp.float32)
    slots = np.broadcast_to(np.arange(columns), (rows, columns))
    pool = 1 + rows * -(-columns // page_size) + 1
    pages = 1 + np.arange(rows)[:, None] + slots // page_size * rows
    made = None
    if copies:
        pages[0, 0], made = TRASH, Copies(*(jnp.asarray([page] + [TRASH] * (rows - 1)) for page in (1, pool - 1)))
    write = Write(
        normal(rows, columns, heads + 2 * kv_heads, dim),
        jnp.cos(angles),
        jnp.sin(angles),
        normal(pool, page_size, kv_heads, dim),
        normal(pool, page_size, kv_heads, dim),
        jnp.asarray(pages, jnp.int32),
        jnp.asarray(slots % page_size, jnp.int32),
        made,
        HeadNorms(normal(dim), 1 + normal(dim), 1e-6) if copies else None,
        PendingNorm(x, 1e-5),
    )
    parts = tuple(normal(rows, columns, heads, dim, dtype=jnp.float32) for _ in range(BRANCHES))
    return x, gate, normal(heads, BRANCHES), write, parts


def together(x: Any, gate: Any, bias: Any, write: Write, parts: Any, **how: Any) -> tuple[jax.Array, ...]:
    """Returns what is written, and the sum that products which are made beside it weigh at last."""
    written, products = write_beside_gates_mosaic(x, gate, write, **how)
    assert products is not None
    return *written, gated_sum_mosaic(x, gate, bias, parts, write.pending, products, **how)


def apart(x: Any, gate: Any, bias: Any, write: Write, parts: Any, **how: Any) -> tuple[jax.Array, ...]:
    return *rotate_and_write_mosaic(*write, **how), gated_sum_mosaic(x, gate, bias, parts, write.pending, **how)


def is_same(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> list[bool]:
    """For each array, true where it has the same bits but for the trash page's."""
    pairs = zip(a, b, (0, 1, 1, 0), strict=True)
    return [bool(jnp.array_equal(one[skip:], other[skip:])) for one, other, skip in pairs]


@pytest.mark.slow
def test_one_launch_writes_what_two_do() -> None:
    """Queries, keys, values, and the sum that gates weigh. Controls: another layer's input, another row's tokens."""
    x, gate, bias, write, parts = given = drawn(2, 3, 8, 4, 128, 1024, copies=True)
    want = apart(*given, interpret=INTERPRET)
    assert is_same(together(*given, interpret=INTERPRET), want) == [True] * 4
    assert not jnp.array_equal(want[1], write.key_pages)
    other = together(x[..., ::-1], gate, bias, write, parts, interpret=INTERPRET)
    assert is_same(other, want) == [True, True, True, False]
    moved = write._replace(qkv=write.qkv[:, ::-1])
    assert not any(is_same(together(x, gate, bias, moved, parts, interpret=INTERPRET), want)[:3])


def test_a_part_is_told_its_place() -> None:
    """Parts of unlike grids, one writing its own operand: each block is run once, at a place of its own grid."""

    def count(place: Place, step: Any, out: Any) -> None:
        out[place["a"], place["b"]] = 10 * place["a"] + place["b"] + step[0]

    def mark(place: Place, given: Any) -> None:
        given[place["c"]] = given[place["c"]] + 1

    ref = jax.new_ref(jnp.arange(4))
    first = Part(count, {"a": 2, "b": 3}, (jnp.asarray([100]),), (jax.ShapeDtypeStruct((2, 3), jnp.int32),))
    second = Part(mark, {"c": 3}, (ref,), ())
    want = np.asarray([[100, 101, 102], [110, 111, 112]])
    for parts in ([first, second], [second, first]):
        found = launch("both", *parts, interpret=INTERPRET)
        np.testing.assert_array_equal(found[parts.index(first)][0], want)
        assert found[parts.index(second)] == ()
    np.testing.assert_array_equal(jax.freeze(ref), [2, 3, 4, 3])  # of the last, no block is
    ((alone,),) = launch("alone", first, interpret=INTERPRET)
    np.testing.assert_array_equal(alone, want)
    ((turned,),) = launch("alone", first._replace(grid={"b": 3, "a": 2}), interpret=INTERPRET)
    np.testing.assert_array_equal(turned, want)


@pytest.mark.parametrize("rows", [1, 8])
def test_lowers_for_cuda(rows: int) -> None:
    """One launch at an 8B model's shapes. Two where a part does not fit: too many tokens, or an input in f32."""
    shapes = jax.eval_shape(lambda: drawn(rows, 9, 32, 8, 128, 4096, page_size=128))
    x, gate, _, write, _ = shapes
    write = write._replace(pending=None)

    def run(x: Any, gate: Any, write: Write) -> Any:
        return write_beside_gates(x, gate, write._replace(pending=PendingNorm(x, 1e-5)))

    with implementations("mosaic"):
        traced = jax.jit(run).trace(x, gate, write)
        assert write_beside_gates.kernel_for(jax.ShapeDtypeStruct(x.shape, jnp.float32), gate, write) is None
        wide = jax.ShapeDtypeStruct((15, *x.shape[1:]), x.dtype)
        assert write_beside_gates.kernel_for(wide, gate, write) is None
        odd = write._replace(qkv=jax.ShapeDtypeStruct(write.qkv.shape, jnp.float32))
        assert write_beside_gates.kernel_for(x, gate, odd) is None
    with implementations("xla"):
        assert write_beside_gates.kernel_for(x, gate, write) is None
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    assert "scatter" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("tokens", [(1, 1), (1, 9), (8, 9), (8, 16)])
def test_one_launch_writes_what_two_do_on_a_gpu(tokens: tuple[int, int], copies: bool) -> None:
    """At an 8B model's shapes, bit for bit."""
    given = drawn(*tokens, 32, 8, 128, 4096, page_size=16, copies=copies)
    x, gate, bias, write, parts = given
    fixed = {"norms": write.norms, "eps": 1e-5}

    @functools.partial(jax.jit, static_argnums=0)
    def run(way: Any, x: Any, write: Any) -> Any:
        norms = fixed["norms"]
        write = Write(*write, norms=norms, pending=PendingNorm(x, 1e-5))
        return way(x, gate, bias, write, parts)

    arrays = tuple(write)[:8]
    assert write_beside_gates.kernel_for(x, gate, write) is not None
    assert gated_sum.kernel_for(x, gate, bias, parts, write.pending) is not None
    want = run(apart, x, arrays)
    assert is_same(run(together, x, arrays), want) == [True] * 4
    assert is_same(run(together, x[..., ::-1], arrays), want)[3] is False
