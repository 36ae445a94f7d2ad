"""Compressed tokens made of l stored keys and values each, by key-value head, and written to their pages.

    x_r = stored_r + position_r,  r < l                keys first rotated back by their own positions
    hidden = silu(W₁ · vec(x) + b₁)                    φ = "mlp", by key-value head
    pages[home] = rotate(W₂ · hidden + b₂)             keys alone rotated; φ = "linear": W · vec(x) in the place of both

vec lists the l vectors one after the other. Keys and values have weights of their own.

The kernels (Mosaic GPU, Hopper) are one launch. A forward completes few tokens, so loads of W₁, [D, l·D], take the
time. A cluster of up to eight blocks has one head's keys or values of up to eight tokens, and each block a part of
the columns of W₁. Rows stream through shared memory from the first instruction on, while each lane gathers numbers of
one token, and the tensor core multiplies what has come (`mosaic/tile_products.py`). Behind a barrier of the cluster
each block adds up the parts of another token, does the rest of φ and writes. A cluster without a complete
token reads and writes nothing, and incomplete tokens are not written.

Products are in f32. With weights of bfloat16 an f32 factor is two of bfloat16, its rounding and the rest's, so that
tensor cores multiply what is stored: its first 16 bits count, where the result keeps 8. The reference does
the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smcjax.pallas.cache.rotate_and_write import rotate
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.compat import pl, plgpu
from smcjax.pallas.mosaic.thread_tiles import prefetch
from smcjax.pallas.mosaic.threads import WARP, WARPGROUP, WARPS, Ref, Threads, Word
from smcjax.pallas.mosaic.tile_products import (
    CHUNK,
    NEAR,
    ROWS,
    STAGE,
    VECTORS,
    Factor,
    Stages,
    factor,
    own_columns,
    own_vector,
    tile_products,
)

MAX_UPDATES = 16  # of a launch: as many as it has been tried with
COMPRESSIONS = ("mlp", "linear")
MAX_CLUSTER_BLOCKS = 8  # of a cluster: as many as every GPU that has clusters takes
MIN_COLUMNS = CHUNK * WARPS  # of a block
STAGES = 4  # at most: two blocks find room on a multiprocessor
SECTOR = 16  # numbers of bfloat16 that the L2 asks for at once
PADDING = 4  # words behind a vector's sums, so that lanes store to other banks

Pair = tuple[jax.Array, jax.Array]
Angles = tuple[Float[Array, "*tokens half"], Float[Array, "*tokens half"]]  # cosines and sines, f32


class CompressionUpdate(NamedTuple):
    """N tokens that a forward may complete; equal in all layers of one rotation, so XLA computes them once."""

    covered: Int[Array, "N l"]  # page · B + slot of each position that a token stands for
    home: Int[Array, " N"]  # page · B/d + slot of the token itself
    is_complete: Bool[Array, " N"]  # incomplete tokens are not written
    turned: Angles | None  # of covered positions [N, l], where stored keys are rotated and are to be rotated back
    begins: Angles  # [N], by which made keys are rotated


# ---------------------------------------------------------------------------------------------------------- reference


def compression_shapes(phi: str, kv_heads: int, dim: int, size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of `compress`, by name; `size` is l. The MLP's hidden size is the head's."""
    shapes: dict[str, tuple[int, ...]] = {}
    for of in "kv":
        shapes[f"position_{of}"] = (kv_heads, size, dim)
        if phi == "linear":
            shapes[f"phi_{of}"] = (kv_heads, dim, size * dim)
        if phi == "mlp":
            shapes |= {f"phi_{of}_in": (kv_heads, dim, size * dim), f"phi_{of}_in_bias": (kv_heads, dim)}
            shapes |= {f"phi_{of}_out": (kv_heads, dim, dim), f"phi_{of}_out_bias": (kv_heads, dim)}
    return shapes


def compress(
    phi: str, weights: Mapping[str, jax.Array], of: str, stored: Float[Array, "R N l Hkv D"]
) -> Float[Array, "R N Hkv D"]:
    """Compressed keys (`of` is "k") or values ("v"), computed in f32 from stored ones of f32."""

    def weight(name: str) -> jax.Array:
        wide: jax.Array = weights[name].astype(jnp.float32)
        return wide

    def product(x: jax.Array, name: str) -> jax.Array:
        factor, terms = weights[name], "rnki,koi->rnko"
        if factor.dtype != jnp.bfloat16:
            return jnp.einsum(terms, x, weight(name), precision=jax.lax.Precision.HIGHEST)
        # A conversion to bfloat16 and back XLA drops on GPUs, so that nothing would be left for the second factor.
        rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        both = jnp.concatenate([rounded, x - rounded]).astype(factor.dtype)
        first, rest = jnp.split(jnp.einsum(terms, both, factor, preferred_element_type=jnp.float32), 2)
        return first + rest

    x = stored + jnp.moveaxis(weight(f"position_{of}"), 0, 1)[None, None]
    vec = jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], x.shape[3], -1)
    if phi == "linear":
        return product(vec, f"phi_{of}")
    hidden = jax.nn.silu(product(vec, f"phi_{of}_in") + weight(f"phi_{of}_in_bias")[None, None])
    return product(hidden, f"phi_{of}_out") + weight(f"phi_{of}_out_bias")[None, None]


def compressed(
    phi: str,
    weights: Mapping[str, jax.Array],
    keys: Float[Array, "R N l Hkv D"],
    values: Float[Array, "R N l Hkv D"],
    turned: Angles | None,
    begins: Angles,
) -> tuple[Float[Array, "R N Hkv D"], Float[Array, "R N Hkv D"]]:
    """Compressed keys and values, f32, of stored ones.

    Keys are rotated back by `turned` [R or 1, N·l], where it is there, and what is made of them by `begins`
    [R or 1, N].
    """
    rows = keys.shape[0]

    def over(angles: Angles) -> Angles:
        cos, sin = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in angles)
        return cos, sin

    keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
    if turned is not None:
        cos, sin = over(turned)
        keys = rotate(keys.reshape(rows, -1, *keys.shape[3:]), cos, -sin).reshape(keys.shape)
    return rotate(compress(phi, weights, "k", keys), *over(begins)), compress(phi, weights, "v", values)


def update_compressed_reference(
    phi: str, weights: Mapping[str, jax.Array], stored: Pair, compressed_pages: Pair, update: CompressionUpdate
) -> Pair:
    """Returns pages of compressed keys and values with the complete tokens written.

    Args:
        phi: one of `COMPRESSIONS`.
        weights: φ's, as `compression_shapes` names them.
        stored: pages of the keys and values that are compressed, [P, B, Hkv, D].
        compressed_pages: pages of compressed ones, [P, B/d, Hkv, D].
        update: the tokens, the positions that they stand for, and their places in pages.
    """
    keys, values = (pool.reshape(-1, *pool.shape[2:])[update.covered][None] for pool in stored)
    turned, begins = jax.tree.map(lambda x: x[None], (update.turned, update.begins))
    made = compressed(phi, weights, keys, values, turned, begins)

    def written(pages: jax.Array, new: jax.Array) -> jax.Array:
        slots = pages.reshape(-1, *pages.shape[2:])
        home = jnp.where(update.is_complete, update.home, len(slots))  # behind the last: nowhere
        return slots.at[home].set(new[0].astype(pages.dtype), mode="drop").reshape(pages.shape)

    k, v = map(written, compressed_pages, made)
    return k, v


# ------------------------------------------------------------------------------------------------------------- kernel


class Sizes(NamedTuple):
    """Sizes of a launch."""

    number: int  # N
    size: int  # l
    heads: int  # Hkv
    dim: int  # D

    @property
    def blocks(self) -> int:
        """Blocks of a cluster, which have the columns of W₁ between them."""
        return math.gcd(MAX_CLUSTER_BLOCKS, self.size * self.dim // MIN_COLUMNS)

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.size * self.dim // self.blocks

    @property
    def stages(self) -> int:
        """Units of `tile_products` that a block waits for together."""
        return min(STAGES, -(-self.dim // (NEAR * ROWS)) * -(-self.columns // (NEAR * MIN_COLUMNS)))


class Place(NamedTuple):
    """The work of a block: keys or values of one head and of some tokens, by a part of the columns of W₁."""

    first: Word  # of its cluster's tokens
    head: Word
    block: Word  # in its cluster


def _products(
    t: Threads,
    pool: Ref,  # [P, B, Hkv, D] bf16 GMEM, as all that follow
    position: Ref,  # [Hkv, l, D] bf16
    weights: Ref,  # [Hkv, D, l·D] bf16
    covered: Ref,  # [N, l] int32
    *refs: Ref,  # where keys are rotated back: cosines, sines [N, l, D/2] f32; SMEM: stages of `tile_products`
    place: Place,
    sizes: Sizes,
) -> list[list[Word]]:
    """Sums over a warp's columns of W₁ times eight tokens, as `tile_products` leaves them, for `_sum_up`.

    The tokens are the first of the cluster's and those behind it.
    """
    *turned, stages = refs
    (number, size, heads, dim), of_warp = sizes, sizes.columns // WARPS
    # The long side are rows of W₁ [D, l·D], the short one eight tokens. A lane has one token and eight columns of each
    # chunk; `runs` cut a warp's columns where another covered position begins.
    group, lane = own_vector(t), own_columns(t)
    token = t.minimum(place.first + group, number - 1) * size
    begin = place.block * sizes.columns + t.index // WARP * of_warp
    length = math.gcd(of_warp, dim)
    runs = [begin + start for start in range(0, of_warp, length)]  # each within one position
    sources = [t.load(covered, token + run // dim) for run in runs]
    origin = (place.head * dim + group * 4) * (size * dim) + begin + lane

    def offset(tile: int, half: int, chunk: int) -> int:
        # Of 32 rows a lane's four are neighbours, for whose sums it has one store a vector.
        return (tile // 2 * 32 + tile % 2 * 2 + half) * size * dim + chunk * CHUNK

    # Every load is asked for before any result is waited for: pages and W₁ come at the same time.
    def factors() -> list[Factor]:
        asked = []
        for run, source in zip(runs, sources, strict=True):
            at, ds = run // dim, [run % dim + (lane + chunk) for chunk in range(0, length, CHUNK)]
            stored, rotations = (source * heads + place.head) * dim, (token + at) * (dim // 2)
            numbers = _unturned(t, pool, turned, stored, rotations, ds, dim)
            asked.append((numbers, [t.load8(position, (place.head * size + at) * dim + d) for d in ds]))
        return [
            factor(t, [a + b for a, b in zip(x, more, strict=True)])
            for numbers, added in asked
            for x, more in zip(numbers(), added, strict=True)
        ]

    shape = {"tiles": dim // ROWS, "chunks": of_warp // CHUNK}
    return tile_products(t, weights, origin, offset, factors, **shape, stages=Stages(stages, sizes.stages))


def _unturned(
    t: Threads, pool: Ref, turned: Sequence[Ref], stored: Word, rotations: Word, ds: list[Word], dim: int
) -> Callable[[], list[list[Word]]]:
    """Asks for numbers of what is stored; the result waits for them, and rotates them back where they are to be.

    They are eight from each of `ds` on at `stored` in the pool; `rotations` is where their position's cosines and sines
    begin. Where `ds` are a lane's of a whole position, what they are rotated with is among them.
    """
    half, found = dim // 2, [t.load8(pool, stored + d) for d in ds]
    if not turned:
        return lambda: found
    is_whole = len(ds) * CHUNK == dim
    count = len(ds) // 2 if is_whole else len(ds)  # of angles, which are alike in both halves
    others = found[count:] + found[:count] if is_whole else [t.load8(pool, stored + (d + half) % dim) for d in ds]
    places = [rotations + d % half for d in ds[:count]]
    angles = [[t.load4(ref, place) + t.load4(ref, place + 4) for ref in turned] for place in places]

    def rotated() -> list[list[Word]]:
        result = []
        for i, (d, x, other) in enumerate(zip(ds, found, others, strict=True)):
            cos, sin = angles[i % count]
            signed = [t.where(d < half, one, t.constant(0.0) - one) for one in sin]
            result.append([t.multiply_add(b, s, a * c) for a, b, c, s in zip(x, other, cos, signed, strict=True)])
        return result

    return rotated


def _sum_up(t: Threads, made: list[list[Word]], parts: Ref, sums: Ref, place: Place, sizes: Sizes) -> None:
    """Adds up what the block's warps have made, in shared memory `sums`, and leaves it in `parts`."""
    number, _, heads, dim = sizes
    # sums [4 warps · 8 tokens, D], padded so that the lanes of a warp store to different banks.
    stride = dim + PADDING
    for tile in range(0, dim // ROWS, 2):
        for vector in range(2):
            line = t.index // WARP * VECTORS + t.index % 4 * 2 + vector
            four = [made[tile + i // 2][i % 2 * 2 + vector] for i in range(4)]
            t.store4(sums, line * stride + (own_vector(t) * 4 + tile * ROWS), four)
    # Each number below is a sum of what four warps have stored, always in the order of the warps.
    t.synchronize()
    for turn in range(VECTORS * dim // WARPGROUP):
        index = t.index + turn * WARPGROUP
        vector, output = index // dim, index % dim
        terms = [t.load(sums, (vector + VECTORS * i) * stride + output) for i in range(WARPS)]
        token = place.first + vector
        there = ((token * heads + place.head) * sizes.blocks + place.block) * dim + output
        t.store(parts, there, functools.reduce(lambda a, b: a + b, terms), only=token < number)


def _prefetch(t: Threads, bias: Ref, weights: Ref, out_bias: Ref, place: Place, sizes: Sizes) -> None:
    """Asks for the block's share of a head's W₂ and for both biases, so that they are in the L2 when parts are."""
    dim = sizes.dim
    for ref in (bias, out_bias):
        prefetch(t, ref, place.head * dim + t.index % dim)
    of_block = dim * dim // sizes.blocks
    for start in range(0, of_block, SECTOR * WARPGROUP):
        share = t.minimum(t.index * SECTOR + start, of_block - 1)
        prefetch(t, weights, place.head * (dim * dim) + place.block * of_block + share)


def _conclude(
    t: Threads,
    parts: Ref,  # [N, Hkv, blocks, D] f32 GMEM, as all but the last two
    pages: Ref,  # [P, B/d, Hkv, D] bf16
    is_complete: Ref,  # [N] int32
    homes: Ref,  # [N] int32
    *refs: Ref,  # of an MLP: b₁ [Hkv, D], W₂ [Hkv, D, D], b₂ [Hkv, D] bf16; where keys are rotated: cosines, sines
    # [N, D/2] f32; SMEM: [D] f32, [D] f32
    token: Word,
    head: Word,
    rotates: bool,
    sizes: Sizes,
    ready: Callable[[], None],
) -> None:
    """Makes one token's numbers of one head of their parts, and writes them if it is complete.

    All that does not wait for the parts is asked for first, then `ready` waits for them.
    """
    *others, hidden, made = refs
    angles, mlp = (others[-2:], others[:-2]) if rotates else ([], others)
    number, _, heads, dim = sizes
    half, output, at = dim // 2, t.index % dim, t.minimum(token, number - 1)
    opposite = (output + half) % dim
    there, home = t.load(is_complete, at) != 0, t.load(homes, at)
    turned = [t.load(ref, at * half + output % half) for ref in angles]
    begin = (at * heads + head) * (sizes.blocks * dim) + output

    # Parts of other blocks are read behind `ready` alone, block by block in one order, so the sum has the same bits.
    def total() -> Word:
        ready()
        terms = [t.load(parts, begin + block * dim) for block in range(sizes.blocks)]
        return functools.reduce(lambda a, b: a + b, terms)

    if mlp:
        bias, weights, out_bias = mlp
        added = t.load(bias, head * dim + output)
        out_added = [t.load(out_bias, head * dim + at) for at in (output, opposite)]
        of_warp = dim // WARPS
        first = t.index // WARP * of_warp + own_vector(t)
        at = (head * dim + first) * dim + own_columns(t)

        def offset(tile: int, half: int, chunk: int) -> int:
            return (tile * ROWS + half * (ROWS // 2)) * dim + chunk * CHUNK

        def factors() -> list[Factor]:
            x = total() + added
            t.store(hidden, output, threads.silu(t, x))
            # A lane multiplies numbers that other threads have made.
            t.synchronize()
            begins = [own_columns(t) + chunk * CHUNK for chunk in range(dim // CHUNK)]
            return [factor(t, t.load4(hidden, at) + t.load4(hidden, at + 4)) for at in begins]

        sums = tile_products(t, weights, at, offset, factors, tiles=of_warp // ROWS, chunks=dim // CHUNK)
        for tile, (upper, _, lower, _) in enumerate(sums):  # all vectors are the one
            t.store(made, first + tile * ROWS, upper)
            t.store(made, first + (tile * ROWS + ROWS // 2), lower)
        # The rotation needs the other half's number of the same place, which another thread has.
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
    t.store(pages, (home * heads + head) * dim + output, x, only=there & (token < number))


@functools.partial(jax.jit, static_argnames=("phi", "interpret"))
def update_compressed_mosaic(
    phi: str,
    weights: Mapping[str, jax.Array],
    stored: Pair,
    compressed_pages: Pair,
    update: CompressionUpdate,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "P per_page Hkv D"], Float[Array, "P per_page Hkv D"]]:
    """Computes `update_compressed` by the kernels, in place.

    A jit of its own, so that a model's layers trace and lower the kernels once. `interpret` is
    `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    number, size = update.covered.shape
    heads, dim = stored[0].shape[2:]
    sizes, inside = Sizes(number, size, heads, dim), interpret is not None
    chunks = -(-number // VECTORS)
    is_complete = update.is_complete.astype(jnp.int32)
    any_complete = jnp.pad(is_complete, (0, chunks * VECTORS - number)).reshape(chunks, VECTORS).max(axis=1)
    first = "" if phi == "linear" else "_in"
    names = () if phi == "linear" else ("in_bias", "out", "out_bias")
    turned = update.turned or ()
    # References, so that the kernel's results are its operands' buffers.
    pages = [jax.new_ref(pool) for pool in compressed_pages]
    targets = (is_complete, update.home)
    terms = []  # of keys and of values: what `_products` takes and what `_conclude` does
    for of, pool, page, back, onward in zip("kv", stored, pages, (turned, ()), (update.begins, ()), strict=True):
        factors = (pool, weights[f"position_{of}"], weights[f"phi_{of}{first}"], update.covered, *back)
        terms.append((factors, (page, *targets, *(weights[f"phi_{of}_{name}"] for name in names), *onward)))
    operands, tree = jax.tree.flatten(terms)

    def body(
        any_complete: Ref, *refs: Ref, stages: Ref, sums: Ref, hidden: Ref, made: Ref, barrier: Ref | None = None
    ) -> None:
        *inputs, k_parts, v_parts = refs
        chunk, of, head, block = (lax.axis_index(name) for name in ("chunk", "of", "head", "block"))
        there, memory = any_complete[chunk] > 0, (stages, sums, hidden, made)
        given = zip(jax.tree.unflatten(tree, inputs), (k_parts, v_parts), strict=True)
        for which, ((factors, rest), parts) in enumerate(given):

            def program(t: Threads, *args: Any, count: int = len(factors), rotates: bool = which == 0) -> None:
                *refs, stages, sums, hidden, made, first, head, block = args
                place, (parts, *rest) = Place(first, head, block), refs[count:]
                if phi == "mlp":
                    bias, out, out_bias = rest[3:6]
                    _prefetch(t, bias, out, out_bias, place, sizes)
                sums_of_warp = _products(t, *refs[:count], stages, place=place, sizes=sizes)

                def leave() -> None:
                    _sum_up(t, sums_of_warp, parts, sums, place, sizes)
                    threads.synchronize_cluster(t, barrier)

                for turn in range(0, min(VECTORS, number), sizes.blocks):
                    how = {"token": first + turn + block, "head": head, "rotates": rotates}
                    ready = leave if turn == 0 else t.synchronize  # before other numbers take the last ones' place
                    _conclude(t, parts, *rest, hidden, made, **how, sizes=sizes, ready=ready)

            # All blocks of a cluster come here or none does.
            @pl.when(jnp.logical_and(there, of == which))
            def _go(program: Any = program, given: tuple[Ref, ...] = (*factors, parts, *rest)) -> None:
                threads.run(program, *given, *memory, chunk * VECTORS, head, block, interpret=inside)

    part = jax.ShapeDtypeStruct((number, heads, sizes.blocks, dim), jnp.float32)
    scratch: dict[str, Any] = {"stages": plgpu.SMEM((sizes.stages * STAGE,), jnp.bfloat16)}
    scratch |= {"sums": plgpu.SMEM((WARPS * VECTORS * (dim + PADDING),), jnp.float32)}
    scratch |= {name: plgpu.SMEM((dim,), jnp.float32) for name in ("hidden", "made")}
    if inside:
        scratch["barrier"] = plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=1)
    plgpu.kernel(
        body,
        out_type=(part, part),
        grid=(chunks, 2, heads),
        grid_names=("chunk", "of", "head"),
        cluster=(sizes.blocks,),
        cluster_names=("block",),
        scratch_types=scratch,
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="compress",
    )(any_complete, *operands)
    keys, values = (jax.freeze(page) for page in pages)
    return keys, values


def supports_compression_update(
    phi: str, weights: Mapping[str, jax.Array], stored: Pair, compressed_pages: Pair, update: CompressionUpdate
) -> bool:
    """True if the kernels take the update: few tokens, φ a product, heads of 64 or 128, all arrays bfloat16."""
    if phi not in COMPRESSIONS or not 0 < update.covered.shape[0] <= MAX_UPDATES:
        return False
    _, size, dim = weights["position_k"].shape
    arrays = (*stored, *compressed_pages, *weights.values())
    return (
        dim in (64, 128)
        and size * dim % MIN_COLUMNS == 0
        and all(array.dtype == jnp.bfloat16 and array.size < 2**31 for array in arrays)
    )


update_compressed = Op(update_compressed_reference)
update_compressed.register(Kernel(runs_mosaic, update_compressed_mosaic, supports_compression_update))
