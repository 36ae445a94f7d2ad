"""Compressed tokens made of stored keys and values and written to their pages, in one launch: Mosaic GPU (Hopper).

    x_r = stored_r + position_r,  r < l                keys first rotated back by their own positions
    hidden = silu(W₁ · vec(x) + b₁)                    φ = "mlp", by key-value head
    pages[home] = rotate(W₂ · hidden + b₂)             keys alone rotated; φ = "linear": W · vec(x) in the place of both

A forward bears few tokens, so that what takes time is W₁: [D, l·D] of each head. A cluster of up to eight blocks has
one head's keys or values of up to eight tokens, and each of its warpgroups 256 columns of W₁ at a time. Rows stream
through shared memory from the first instruction on, while each warp gathers some of the tokens and leaves them in
shared memory for the others. A lane holds eight numbers of every token and eight of a row, and 16 sums over 32 lanes
are made by exchanging halves. Behind a barrier of the cluster each block adds up the parts of another token, does the
rest of φ and writes. Clusters none of whose tokens is born do nothing, and what is not born is not written.

Interpreted, it is the same program: copies are made at once, and the cluster's barrier is Pallas' own.

Numbers are f32, and weights are multiplied as they are. XLA's way is `smcjax.model.nsa_births`, which is the reference.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from smcjax.pallas import simt
from smcjax.pallas.few_products import COLUMNS, row_products, together_of
from smcjax.pallas.simt import WARP, WARPGROUP, WARPS, Ref, Threads, Word

MOST_BIRTHS = 16  # of a launch: as many as it has been tried with
MOST_BLOCKS = 8  # of a cluster: as many as every GPU that has clusters takes
WARPGROUPS = 2  # of a block, at most
RESULTS = 16  # whose terms a lane holds at once: with 32 one block would fill a multiprocessor's registers
STAGES = 16  # rows of weights that a warp has in shared memory, or on their way there
LINE = 16  # numbers of bfloat16 that the L2 fetches at once
KINDS = ("mlp", "linear")

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

    @property
    def blocks(self) -> int:
        """Blocks of a cluster, which have a product's parts between them."""
        return next(count for count in range(MOST_BLOCKS, 0, -1) if self.splits % count == 0)

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block, which take its parts side by side."""
        return math.gcd(WARPGROUPS, self.splits // self.blocks)

    @property
    def turns(self) -> int:
        """Parts of a warpgroup, one after the other."""
        return self.splits // (self.blocks * self.warpgroups)


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
    pool: Ref,  # [P, B, Hkv, D] bf16 GMEM, as all that does not say SMEM
    position: Ref,  # [Hkv, l, D] bf16
    weights: Ref,  # [Hkv, D, l·D] bf16
    covered: Ref,  # [N, l] int32
    *refs: Ref,  # where keys are rotated back: cosines, sines [N, l, D/2] f32; parts [N, Hkv, l·D/256, D] f32; SMEM:
    # rows [stages · 1,024] bf16, vectors [together · 256] f32
    first: Word,
    head: Word,
    split: Word,
    together: int,
    sizes: Sizes,
) -> None:
    """Leaves what 256 columns of one head's weights make of `together` tokens, the `first` and those behind it."""
    *turned, parts, rows, vectors = refs
    (number, size, heads, dim), splits, half = sizes, sizes.splits, sizes.dim // 2
    lane, warp, of_warp = t.index % WARP, t.index // WARP, dim // WARPS
    begin = head * dim * (size * dim) + split * COLUMNS + lane * 8

    def copy(stage: int, index: Word) -> None:
        t.copy8(rows, (t.index + stage * WARPGROUP) * 8, weights, begin + index * (size * dim))

    for stage in range(STAGES):
        copy(stage, warp * of_warp + stage)
        t.group_copies()

    at, d = split * (COLUMNS // dim) + lane * 8 // dim, lane * 8 % dim
    added = t.load8(position, (head * size + at) * dim + d)
    for i in range(0, together, WARPS):
        one = t.minimum(warp + i, together - 1)
        place = t.minimum(one + first, number - 1) * size + at
        source = (t.load(covered, place) * heads + head) * dim
        x = t.load8(pool, source + d)
        if turned:
            other = t.load8(pool, source + (d + half) % dim)
            place = place * half + d % half
            cos, sin = (t.load4(ref, place) + t.load4(ref, place + 4) for ref in turned)
            sin = [t.where(d < half, angle, t.constant(0.0) - angle) for angle in sin]
            x = [t.multiply_add(b, s, a * c) for a, b, c, s in zip(x, other, cos, sin, strict=True)]
        x = [a + b for a, b in zip(x, added, strict=True)]
        for part in (0, 4):
            t.store4(vectors, one * COLUMNS + lane * 8 + part, x[part : part + 4])
    t.synchronize()
    begins = [lane * 8 + i * COLUMNS for i in range(together)]
    tokens = [t.load4(vectors, begin) + t.load4(vectors, begin + 4) for begin in begins]
    turn = itertools.count()

    def row(index: Word) -> list[Word]:
        # The stage of the last row but one is free: that row has been multiplied.
        number = next(turn)
        t.wait_for_copies(STAGES - 3)
        found: list[Word] = t.load8(rows, (t.index + number % STAGES * WARPGROUP) * 8)
        if 2 <= number < of_warp - STAGES + 2:
            copy((number - 2) % STAGES, index + (STAGES - 2))
        t.group_copies()
        return found

    for which, output, total, is_one in row_products(t, tokens, row, dim, ahead=1, together=RESULTS):
        token = first + which
        place = ((token * heads + head) * splits + split) * dim + output
        t.store(parts, place, total, only=(token < number) & is_one)


def _prefetch(t: Threads, weights: Ref, head: Word, worker: Word, sizes: Sizes) -> None:
    """Asks for one worker's share of a head's W₂ [Hkv, D, D], so that it is in the L2 when parts are."""
    lines, workers = sizes.dim * sizes.dim // LINE, sizes.blocks * sizes.warpgroups
    for turn in range(-(-lines // (workers * WARPGROUP))):
        line = (worker + turn * workers) * WARPGROUP + t.index
        t.prefetch(weights, (head * lines + t.minimum(line, lines - 1)) * LINE, only=line < lines)


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
    turned = [t.load(ref, birth * half + output % half) for ref in angles]
    if mlp:
        # Loads do not pass stores: what does not wait for the parts comes first.
        bias, weights, out_bias = mlp
        added, out_added = t.load(bias, head * dim + output), t.load(out_bias, head * dim + output)
        rows = [t.load8(weights, (head * dim + output) * dim + i) for i in range(0, dim, 8)]
    begin = (birth * heads + head) * (splits * dim) + output
    x = functools.reduce(lambda a, b: a + b, [t.load(parts, begin + split * dim) for split in range(splits)])
    if mlp:
        x = x + added
        t.store(hidden, output, x / (t.exp(t.constant(0.0) - x) + 1.0))
        t.synchronize()
        x = out_added
        for i, row in enumerate(rows):
            inputs = t.load4(hidden, t.constant(8 * i)) + t.load4(hidden, t.constant(8 * i + 4))
            for a, b in zip(inputs, row, strict=True):
                x = t.multiply_add(a, b, x)
    if angles:
        t.store(made, output, x)
        t.synchronize()
        other = t.load(made, (output + half) % dim)
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
    together = together_of(number)
    chunks = -(-number // together)
    is_born = births.is_born.astype(jnp.int32)
    any_born = jnp.pad(is_born, (0, chunks * together - number)).reshape(chunks, together).max(axis=1)
    first = "" if phi == "linear" else "_in"
    matrices = [(weights[f"position_{of}"], weights[f"phi_{of}{first}"]) for of in "kv"]
    turned, begins = births.turned or (), births.begins or ()
    grid = ("chunk", "of", "head")
    names = () if phi == "linear" else ("in_bias", "out", "out_bias")
    mlps = [[weights[f"phi_{of}_{name}"] for name in names] for of in "kv"]
    operands = [*stored, *(x[0] for x in matrices), *(x[1] for x in matrices), births.covered, *turned, *begins]
    operands += [*mlps[0], *mlps[1], births.home, is_born, any_born]

    def body(*refs: Ref, rows: Ref, vectors: Ref, hidden: Ref, made: Ref, barrier: Ref | None = None) -> None:
        taken = iter(refs)

        def take(number: int) -> list[Ref]:
            return list(itertools.islice(taken, number))

        pools, positions, firsts, (covered,), turned_refs = take(2), take(2), take(2), take(1), take(len(turned))
        angles, mlp_refs = take(len(begins)), [take(len(names)), take(len(names))]
        home, is_born, any_born, *pages, k_parts, v_parts = taken
        chunk, of, head, block, warpgroup = (lax.axis_index(name) for name in (*grid, "block", "warpgroup"))
        for which, parts in enumerate((k_parts, v_parts)):
            back, onward = (turned_refs, angles) if which == 0 else ([], [])

            def multiplies(t: Threads, *args: Any) -> None:
                *refs, first, head, worker = args
                if phi == "mlp":
                    *refs, out = refs
                    _prefetch(t, out, head, worker, sizes)
                for turn in range(sizes.turns):
                    if turn > 0:
                        t.synchronize()  # before other vectors take the place of the last ones
                    place = {"first": first, "head": head, "split": worker * sizes.turns + turn}
                    _multiply(t, *refs, **place, together=together, sizes=sizes)
                t.synchronize_cluster(barrier)

            def concludes(t: Threads, *args: Any, rotates: bool = len(onward) > 0) -> None:
                *refs, birth, head, at = args
                _conclude(t, *refs, birth=birth, head=head, home=at, rotates=rotates, sizes=sizes)
                t.synchronize()  # before the next birth's numbers take the place of this one's

            factors = (pools[which], positions[which], firsts[which], covered, *back, parts)
            factors += (rows.at[warpgroup], vectors.at[warpgroup], *mlp_refs[which][1:2])
            rest = (parts, pages[which], *mlp_refs[which], *onward, hidden, made)

            # All blocks of a cluster come here or none does.
            @pl.when(jnp.logical_and(any_born[chunk] > 0, of == which))
            def _go(
                multiplies: Any = multiplies, concludes: Any = concludes, factors: Any = factors, rest: Any = rest
            ) -> None:
                mine = []
                for place in range(0, together, sizes.blocks):
                    birth = chunk * together + place + block
                    there = (warpgroup == 0) & (place + block < together) & (birth < number)
                    birth = jnp.minimum(birth, number - 1)
                    mine.append((there & (is_born[birth] > 0), birth, home[birth]))
                worker = block * sizes.warpgroups + warpgroup
                simt.run(multiplies, *factors, chunk * together, head, worker, interpret=inside)
                for there, birth, at in mine:

                    @pl.when(there)
                    def _write(birth: Any = birth, at: Any = at) -> None:
                        simt.run(concludes, *rest, birth, head, at, interpret=inside)

    part = jax.ShapeDtypeStruct((number, heads, sizes.splits, dim), jnp.float32)
    scratch: dict[str, Any] = {
        "rows": plgpu.SMEM((sizes.warpgroups, STAGES * WARPGROUP * 8), jnp.bfloat16),
        "vectors": plgpu.SMEM((sizes.warpgroups, together * COLUMNS), jnp.float32),
    }
    scratch |= {name: plgpu.SMEM((dim,), jnp.float32) for name in ("hidden", "made")}
    if inside:
        scratch["barrier"] = plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=sizes.warpgroups)
    # References, so that the kernel's results are its operands' buffers.
    refs = [jax.new_ref(pool) for pool in compressed]
    plgpu.kernel(
        body,
        out_type=(part, part),
        grid=(chunks, 2, heads),
        grid_names=grid,
        cluster=(sizes.blocks,),
        cluster_names=("block",),
        num_threads=sizes.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=simt.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="compress",
    )(*operands, *refs)
    keys, values = (jax.freeze(ref) for ref in refs)
    return keys, values
