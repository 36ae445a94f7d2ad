"""Tiles of bfloat16 in programs of single threads (`threads.py`): copies, pairs of numbers, a warp's tensor core."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from smcjax.pallas.mosaic.compat import arith, ir, mu
from smcjax.pallas.mosaic.threads import (
    WARPGROUP,
    WARPS,
    Ref,
    Threads,
    Word,
    f32,
    i32,
    is_bfloat16,
    is_interpreted,
    word,
)


def load_pairs(t: Threads, ref: Ref, index: Word, offset: int = 0) -> list[Word]:
    """Eight numbers of bfloat16 as they are: four words of two, the lower first.

    They are those from `index` + `offset` on, a multiple of 8; addresses with one index have one register.
    """
    if is_interpreted(t):
        found = ref[...].reshape(-1)[index[:, None] + (jnp.arange(8)[None] + offset)]
        bits = lax.bitcast_convert_type(found, jnp.uint16)
        return [_joined(bits[:, i], bits[:, i + 1]) for i in range(0, 8, 2)]
    space, address = _beyond(t, ref, index, offset)
    load = f"ld.{space}.v4.b32 {{$0, $1, $2, $3}}, [$4];"
    found = mu.inline_ptx(load, address, result_types=[i32()] * 4, has_side_effects=True)
    return [word(value) for value in found]


def copy_pairs(t: Threads, to: Ref, place: Word, beyond: int, ref: Ref, index: Word, offset: int) -> None:
    """Begins to copy eight numbers of bfloat16 from `index` + `offset` in GMEM to `place` + `beyond` in SMEM."""
    if is_interpreted(t):
        eight = jnp.arange(8)[None]
        here, there = place[:, None] + (eight + beyond), index[:, None] + (eight + offset)
        to[...] = to[...].reshape(-1).at[here].set(ref[...].reshape(-1)[there]).reshape(to.shape)
        return
    addresses = _beyond(t, to, place, beyond)[1], _beyond(t, ref, index, offset)[1]
    mu.inline_ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", *addresses, has_side_effects=True)


def group_copies(t: Threads) -> None:
    """Makes a group of the copies that each thread has begun since its last one."""
    if not is_interpreted(t):
        mu.inline_ptx("cp.async.commit_group;", has_side_effects=True)


def wait_for_copies(t: Threads, most: int) -> None:
    """Waits until no more than `most` groups of a thread's are under way; it alone sees what they copied."""
    if not is_interpreted(t):
        mu.inline_ptx(f"cp.async.wait_group {most};", has_side_effects=True)


def prefetch(t: Threads, ref: Ref, index: Word) -> None:
    """Asks the L2 to have the 32 bytes of GMEM around an element, which a program will load later."""
    if not is_interpreted(t):
        mu.inline_ptx("prefetch.global.L2 [$0];", _beyond(t, ref, index, 0)[1], has_side_effects=True)


def split_pair(t: Threads, lower: Word, upper: Word) -> tuple[Word, Word]:
    """Two numbers of f32 as pairs of bfloat16: what they round to, and what is left of them, rounded too.

    Both together are the numbers to 2⁻¹⁷ of their size.
    """
    if is_interpreted(t):
        near = [lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) for x in (lower, upper)]
        rest = [x - rounded for x, rounded in zip((lower, upper), near, strict=True)]
        pairs = [[lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) for x in of] for of in (near, rest)]
        return _joined(*pairs[0]), _joined(*pairs[1])
    pack = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    pair = mu.inline_ptx(pack, upper.value, lower.value, result_types=i32())
    halves = arith.shli(pair, mu.c(16, i32())), arith.andi(pair, mu.c(-(1 << 16), i32()))
    rest = [x - word(arith.bitcast(f32(), half)) for x, half in zip((lower, upper), halves, strict=True)]
    return word(pair), word(mu.inline_ptx(pack, rest[1].value, rest[0].value, result_types=i32()))


def multiply_tile(t: Threads, a: list[Word], b: list[Word], sums: list[Word]) -> list[Word]:
    """`sums` and the product of a warp's 16 rows with its 8 vectors, 16 columns of bfloat16, by the tensor core.

    Lane 4·g + i has the columns 2i, 2i + 1 and then 2i + 8, 2i + 9 of row g and row g + 8 in turn (`a`, four words),
    of vector g (`b`, two words). Its sums are those of row g with vectors 2i and 2i + 1, then those of row g + 8.
    """
    if is_interpreted(t):
        rows, vectors = jnp.zeros((WARPS, 16, 16), jnp.float32), jnp.zeros((WARPS, 8, 16), jnp.float32)
        for i, pairs in enumerate(a):
            first, column = 8 * (i % 2), i // 2 * 8
            rows = rows.at[:, first : first + 8, column : column + 8].set(_numbers(pairs))
        for i, pairs in enumerate(b):
            vectors = vectors.at[:, :, 8 * i : 8 * i + 8].set(_numbers(pairs))
        made = jnp.einsum("wmk,wnk->wmn", rows, vectors, precision=lax.Precision.HIGHEST)
        halves = [made[:, first : first + 8].reshape(WARPGROUP, 2)[:, i] for first in (0, 8) for i in range(2)]
        return [so_far + one for so_far, one in zip(sums, halves, strict=True)]
    form = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    terms = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}"
    words = [one.value for one in (*a, *b, *sums)]
    found = mu.inline_ptx(f"{form} {terms};", *words, result_types=[f32()] * 4, has_side_effects=True)
    return [word(value) for value in found]


def _beyond(t: Threads, ref: Ref, index: Word, offset: int) -> tuple[str, ir.Value]:
    """State space and byte address of the number of bfloat16 at `index` + `offset`."""
    assert is_bfloat16(ref), "bfloat16 only"
    space, address, size = t.address_of(ref, index)
    return space, arith.addi(address, mu.c(offset * size, address.type))


def _joined(lower: jax.Array, upper: jax.Array) -> Word:
    """Words of two halves of 16 bits."""
    return lax.bitcast_convert_type(lower.astype(jnp.uint32) | upper.astype(jnp.uint32) << 16, jnp.int32)


def _numbers(pairs: Word) -> Float[Array, "4 8 8"]:
    """The numbers of bfloat16 in the words of each warp's lanes, four lanes a row, f32."""
    bits = lax.bitcast_convert_type(pairs, jnp.uint32)
    halves = jnp.stack([bits & 0xFFFF, bits >> 16], axis=-1).astype(jnp.uint16)
    return lax.bitcast_convert_type(halves, jnp.bfloat16).astype(jnp.float32).reshape(WARPS, 8, 8)
