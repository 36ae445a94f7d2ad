"""Compressed tokens made of stored keys and values and written to their pages, in two launches: Mosaic GPU (Hopper).

    x_r = stored_r + position_r,  r < l                keys first rotated back by their own positions
    hidden = silu(W₁ · vec(x) + b₁)                    φ = "mlp", by key-value head
    pages[home] = rotate(W₂ · hidden + b₂)             keys alone rotated; φ = "linear": W · vec(x) in the place of both

A forward bears few tokens, so that what takes time is W₁: [D, l·D] of each head. A block of 128 threads multiplies 256
columns of one head's with up to eight tokens by the tensor core (`tile_products.py`), and has asked for all of them
before it gathers the tokens. A second launch adds up the blocks' parts, token by token. Blocks whose tokens are not
born read and write nothing.

Tokens and hidden numbers are f32, and each is multiplied as two of bfloat16, so that its first 16 bits count; weights
are multiplied as they are. XLA's way, `smcjax.model.nsa_births`, does the same and is the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from smcjax.pallas import simt
from smcjax.pallas.simt import WARP, WARPGROUP, WARPS, Ref, Threads, Word, load_pairs
from smcjax.pallas.tile_products import (
    CHUNK,
    ROWS,
    VECTORS,
    Factor,
    factor,
    own_columns,
    own_vector,
    tile_products,
)

MOST_BIRTHS = 16  # of a launch: as many as it has been tried with
KINDS = ("mlp", "linear")
COLUMNS = 256  # of a block
AHEAD = 16  # pairs of rows that a lane asks for at once: all of a block's
PADDING = 4  # words behind a vector's sums, so that lanes store to other banks

Pair = tuple[jax.Array, jax.Array]
Angles = tuple[Float[Array, "*tokens half"], Float[Array, "*tokens half"]]  # cosines and sines, f32


class Births(NamedTuple):
    """N tokens that a forward may bear; the same numbers in every layer of equal rotation, so XLA has them once."""

    covered: Int[Array, "N l"]  # page · B + slot of each position that a token stands for
    home: Int[Array, " N"]  # page · B/d + slot of the token itself
    is_born: Bool[Array, " N"]  # what is not born is not written
    turned: Angles | None  # of covered positions [N, l], where stored keys are rotated and are to be rotated back
    begins: Angles | None  # [N], by which made keys are rotated


class Sizes(NamedTuple):
    """Sizes of a launch."""

    number: int  # N
    size: int  # l
    heads: int  # Hkv
    dim: int  # D

    @property
    def splits(self) -> int:
        """Parts of a product, of 256 columns each."""
        return self.size * self.dim // COLUMNS


def supports_births(phi: str, number: int, *, weights: Mapping[str, jax.Array], pools: tuple[jax.Array, ...]) -> bool:
    """True where the kernels take N = `number` births: φ a product, heads of 64 or 128, all arrays bfloat16.

    `pools` are pages of stored and of compressed keys and values.
    """
    if phi not in KINDS or not 0 < number <= MOST_BIRTHS:
        return False
    _, size, dim = weights["position_k"].shape
    arrays = (*pools, *weights.values())
    return (
        dim in (64, 128)
        and size * dim % COLUMNS == 0
        and all(array.dtype == jnp.bfloat16 and array.size < 2**31 for array in arrays)
    )


def _multiply(
    t: Threads,
    pool: Ref,  # [P, B, Hkv, D] bf16 GMEM, as all but the last
    position: Ref,  # [Hkv, l, D] bf16
    weights: Ref,  # [Hkv, D, l·D] bf16
    covered: Ref,  # [N, l] int32
    *refs: Ref,  # where keys are rotated back: cosines, sines [N, l, D/2] f32; parts [N, Hkv, l·D/256, D] f32; SMEM:
    # sums [4 · 8 · (D + 4)] f32
    first: Word,
    head: Word,
    split: Word,
    sizes: Sizes,
) -> None:
    """Leaves what 256 columns of one head's weights make of eight tokens, the `first` and those behind it."""
    *turned, parts, sums = refs
    (number, size, heads, dim), splits, stride = sizes, sizes.splits, sizes.dim + PADDING
    warp, group, lane = t.index // WARP, own_vector(t), own_columns(t)
    of_warp = COLUMNS // WARPS
    begin = split * COLUMNS + warp * of_warp
    at, d = begin // dim, begin % dim + lane  # all of a warp's columns are of one position
    place = t.minimum(first + group, number - 1) * size + at
    source = t.load(covered, place)
    origin = (head * dim + group * 4) * (size * dim) + begin + lane

    def row(tile: int, half: int, chunk: int) -> list[Word]:
        # Of 32 rows a lane's four are neighbours, for whose sums it has one store a vector.
        index = tile // 2 * 32 + tile % 2 * 2 + half
        return load_pairs(t, weights, origin + (index * size * dim + chunk * CHUNK))

    def factors() -> list[Factor]:
        stored, rotations = (source * heads + head) * dim, place * (dim // 2)
        ds = [d + chunk * CHUNK for chunk in range(of_warp // CHUNK)]
        found = [_unturned(t, pool, turned, stored, rotations, one, dim) for one in ds]
        added = [t.load8(position, (head * size + at) * dim + one) for one in ds]
        return [
            factor(t, [a + b for a, b in zip(x(), more, strict=True)]) for x, more in zip(found, added, strict=True)
        ]

    shape = {"tiles": dim // ROWS, "chunks": of_warp // CHUNK, "ahead": AHEAD}
    made = tile_products(t, row, factors, **shape)
    for tile in range(0, dim // ROWS, 2):
        for vector in range(2):
            line = warp * VECTORS + t.index % 4 * 2 + vector
            four = [made[tile + i // 2][i % 2 * 2 + vector] for i in range(4)]
            t.store4(sums, line * stride + (group * 4 + tile * ROWS), four)
    t.synchronize()
    for turn in range(VECTORS * dim // WARPGROUP):
        index = t.index + turn * WARPGROUP
        vector, output = index // dim, index % dim
        terms = [t.load(sums, (vector + VECTORS * i) * stride + output) for i in range(WARPS)]
        token = first + vector
        there = ((token * heads + head) * splits + split) * dim + output
        t.store(parts, there, functools.reduce(lambda a, b: a + b, terms), only=token < number)


def _unturned(
    t: Threads, pool: Ref, turned: Sequence[Ref], stored: Word, rotations: Word, d: Word, dim: int
) -> Callable[[], list[Word]]:
    """Asks for eight numbers of what is stored; the result waits for them, and rotates them back where they are to be.

    They are those from `d` on at `stored` in the pool; `rotations` is where their position's cosines and sines begin.
    """
    half, x = dim // 2, t.load8(pool, stored + d)
    if not turned:
        return lambda: x
    other = t.load8(pool, stored + (d + half) % dim)
    cos, sin = (t.load4(ref, rotations + d % half) + t.load4(ref, rotations + (d % half + 4)) for ref in turned)

    def rotated() -> list[Word]:
        signed = [t.where(d < half, one, t.constant(0.0) - one) for one in sin]
        return [t.multiply_add(b, s, a * c) for a, b, c, s in zip(x, other, cos, signed, strict=True)]

    return rotated


def _conclude(
    t: Threads,
    parts: Ref,  # [N, Hkv, splits, D] f32 GMEM, as all but the last two
    pages: Ref,  # [P, B/d, Hkv, D] bf16
    *refs: Ref,  # of an MLP: b₁ [Hkv, D], W₂ [Hkv, D, D], b₂ [Hkv, D] bf16; where keys are rotated: cosines, sines
    # [N, D/2] f32; SMEM: [D] f32, [D] f32
    birth: Word,
    head: Word,
    home: Word,
    rotates: bool,
    sizes: Sizes,
) -> None:
    """Makes one token's numbers of one head of their parts, and writes them."""
    *others, hidden, made = refs
    angles, mlp = (others[-2:], others[:-2]) if rotates else ([], others)
    heads, dim, splits, half = sizes.heads, sizes.dim, sizes.splits, sizes.dim // 2
    output = t.index % dim
    opposite = (output + half) % dim
    # All that does not wait for the parts is asked for first: loads do not pass stores.
    turned = [t.load(ref, birth * half + output % half) for ref in angles]
    begin = (birth * heads + head) * (splits * dim) + output

    def total() -> Word:
        return functools.reduce(lambda a, b: a + b, [t.load(parts, begin + split * dim) for split in range(splits)])

    if mlp:
        bias, weights, out_bias = mlp
        places = [head * dim + index for index in (output, opposite)]
        added, *out_added = t.load(bias, places[0]), *(t.load(out_bias, place) for place in places)
        of_warp = dim // WARPS
        first = t.index // WARP * of_warp + own_vector(t)

        def row(tile: int, half: int, chunk: int) -> list[Word]:
            index = first + (tile * ROWS + half * (ROWS // 2))
            return load_pairs(t, weights, (head * dim + index) * dim + (own_columns(t) + chunk * CHUNK))

        def factors() -> list[Factor]:
            x = total() + added
            t.store(hidden, output, x / (t.exp(t.constant(0.0) - x) + 1.0))
            t.synchronize()
            begins = [own_columns(t) + chunk * CHUNK for chunk in range(dim // CHUNK)]
            return [factor(t, t.load4(hidden, at) + t.load4(hidden, at + 4)) for at in begins]

        tiles, chunks = of_warp // ROWS, dim // CHUNK
        sums = tile_products(t, row, factors, tiles=tiles, chunks=chunks, ahead=tiles * chunks)
        for tile, (upper, _, lower, _) in enumerate(sums):  # all vectors are the one
            t.store(made, first + tile * ROWS, upper)
            t.store(made, first + (tile * ROWS + ROWS // 2), lower)
        t.synchronize()
        x, other = (t.load(made, at) + bias for at, bias in zip((output, opposite), out_added, strict=True))
    else:
        x = total()
        t.store(made, output, x)
        t.synchronize()
        other = t.load(made, opposite)
    if angles:
        cos, sin = turned
        x = x * cos + other * t.where(output < half, t.constant(0.0) - sin, sin)
    t.store(pages, (home * heads + head) * dim + output, x)


@functools.partial(jax.jit, static_argnames=("phi", "interpret"))
def bear(
    phi: str,
    weights: Mapping[str, jax.Array],
    stored: Pair,
    compressed: Pair,
    births: Births,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "P per_page Hkv D"], Float[Array, "P per_page Hkv D"]]:
    """Returns pages of compressed keys and values with the tokens that are born written, in place.

    For what `supports_births` accepts. A jit of its own, so that a model's layers trace and lower the kernels once.

    Args:
        phi: "mlp" or "linear".
        weights: φ's, as `smcjax.model.nsa_compression.compression_shapes` names them.
        stored: pages of the keys and values that are compressed, [P, B, Hkv, D].
        compressed: pages of compressed ones, [P, B/d, Hkv, D].
        births: what is born, of which, and where.
        interpret: `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    number, size = births.covered.shape
    heads, dim = stored[0].shape[2:]
    sizes, inside = Sizes(number, size, heads, dim), interpret is not None
    chunks = -(-number // VECTORS)
    is_born = births.is_born.astype(jnp.int32)
    any_born = jnp.pad(is_born, (0, chunks * VECTORS - number)).reshape(chunks, VECTORS).max(axis=1)
    first = "" if phi == "linear" else "_in"
    matrices = [(weights[f"position_{of}"], weights[f"phi_{of}{first}"]) for of in "kv"]
    turned = births.turned or ()

    def multiplies(*refs: Ref, sums: Ref) -> None:
        keys, values, k_position, v_position, k_weights, v_weights, covered, any_born, *turned, k_parts, v_parts = refs
        chunk, head, split, of = (lax.axis_index(name) for name in ("chunk", "head", "split", "of"))
        there = any_born[chunk] > 0
        for which, terms in enumerate(
            [
                (keys, k_position, k_weights, covered, *turned, k_parts),
                (values, v_position, v_weights, covered, v_parts),
            ]
        ):

            def program(t: Threads, *args: Any) -> None:
                *refs, first, head, split = args
                _multiply(t, *refs, first=first, head=head, split=split, sizes=sizes)

            @pl.when(jnp.logical_and(there, of == which))
            def _go(terms: tuple[Ref, ...] = terms) -> None:
                simt.run(program, *terms, sums, chunk * VECTORS, head, split, interpret=inside)

    part = jax.ShapeDtypeStruct((number, heads, sizes.splits, dim), jnp.float32)
    parts = plgpu.kernel(
        multiplies,
        out_type=(part, part),
        grid=(chunks, 2, heads, sizes.splits),
        grid_names=("chunk", "of", "head", "split"),
        scratch_types={"sums": plgpu.SMEM((WARPS * VECTORS * (dim + PADDING),), jnp.float32)},
        compiler_params=simt.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="compress",
    )(*stored, *(x[0] for x in matrices), *(x[1] for x in matrices), births.covered, any_born, *turned)

    begins = births.begins or ()
    names = () if phi == "linear" else ("in_bias", "out", "out_bias")
    mlps = [[weights[f"phi_{of}_{name}"] for name in names] for of in "kv"]

    def concludes(*refs: Ref, hidden: Ref, made: Ref) -> None:
        (k_parts, v_parts, is_born, home), refs = refs[:4], refs[4:]
        k_mlp, v_mlp, refs = refs[: len(names)], refs[len(names) : 2 * len(names)], refs[2 * len(names) :]
        *angles, keys, values = refs
        birth, head, of = (lax.axis_index(name) for name in ("birth", "head", "of"))
        at, there = home[birth], is_born[birth] > 0
        for which, terms in enumerate([(k_parts, keys, *k_mlp, *angles), (v_parts, values, *v_mlp)]):
            rotates = which == 0 and len(angles) > 0

            def program(t: Threads, *args: Any, rotates: bool = rotates) -> None:
                *refs, birth, head, at = args
                _conclude(t, *refs, birth=birth, head=head, home=at, rotates=rotates, sizes=sizes)

            @pl.when(jnp.logical_and(there, of == which))
            def _go(program: Any = program, terms: tuple[Ref, ...] = terms) -> None:
                simt.run(program, *terms, hidden, made, birth, head, at, interpret=inside)

    # References, so that the kernel's results are its operands' buffers.
    refs = [jax.new_ref(pool) for pool in compressed]
    plgpu.kernel(
        concludes,
        out_type=(),
        grid=(number, 2, heads),
        grid_names=("birth", "of", "head"),
        scratch_types={"hidden": plgpu.SMEM((dim,), jnp.float32), "made": plgpu.SMEM((dim,), jnp.float32)},
        compiler_params=simt.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="write_compressed",
    )(*parts, is_born, births.home, *mlps[0], *mlps[1], *begins, *refs)
    keys, values = (jax.freeze(ref) for ref in refs)
    return keys, values
