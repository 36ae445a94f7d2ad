"""An experiment: x·Wᵀ for few tokens as one Mosaic GPU kernel (Hopper), made to stream W. Reference: `lax.dot_general`.

Nothing uses it: cuBLASLt was faster wherever both were timed (dev/LOG.md). `bench_gemm.py` times it.

A block takes `rows` rows of W, or with `splits` its share of their K, and all tokens. One warpgroup fetches by TMA,
step by step, a tile of W and the same columns of x into a ring in shared memory; the others multiply. Rows of W are
the 64-side of the tensor-core products, tokens the other one:

    y[:, n:n + 64]ᵀ += W[n:n + 64, k:k + tile_k] · x[:, k:k + tile_k]ᵀ

Every block reads x again, out of the L2: many rows a block keep that traffic small beside the weights', and `share`
divides it, the blocks of a cluster fetching a part of x each for all. Where N is too small to occupy the GPU, `splits`
blocks share the rows' K. Either each writes its sums in f32 and XLA adds them up (`partials`), or the blocks are a
cluster, and send theirs to one block per range of tokens, through shared memory. Both add in a fixed order: the same
result every time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from smcjax.device import HOPPER

ROWS = 64  # the M of a warpgroup's matrix product
MAX_TOKENS = 256  # and the largest N
MAX_TOKENS_SWIGLU = 192  # with two products a thread

# A jax.Array in registers of a warpgroup, or a reference: Pallas gives kernels no better type.
Ref = Any

# ------------------------------------------------------------------------------------------------------------- kernel


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices of the kernel."""

    warpgroups: int = 4  # that multiply; one more fetches
    products: int = 1  # blocks of 64 rows a warpgroup
    tile_k: int = 64  # columns of W a step
    stages: int = 3  # depth of the ring, in steps
    splits: int = 1  # blocks that share the K of some rows: a cluster, or with `partials` independent
    partials: bool = False  # leave the sum over splits to XLA
    share: int = 1  # blocks of a cluster that fetch x for one another, each for other rows of W: 1, 2 or 4
    token_stages: int = 0  # depth of x's ring, if more than `stages`: what the blocks of a cluster may drift apart
    stagger: bool = True  # blocks start at different columns, so that they do not ask for the same lines at once
    early: bool = False  # fetch weights while the preceding kernel ends (programmatic dependent launch)

    @property
    def rows(self) -> int:
        """Rows of W a block."""
        return ROWS * self.products * self.warpgroups

    def fits_registers(self, tokens: int) -> bool:
        """Returns True if a thread's sums leave room for the rest; ptxas took at least 98 registers for 72 sums."""
        available = min(255, 512 // (self.warpgroups + 1) // 8 * 8)
        return self.products * tokens // 2 + 56 <= available

    def piece(self, tokens: int) -> int:
        """Tokens whose sums over a cluster one of its blocks computes."""
        return 8 * -(-tokens // (8 * self.splits))

    def store(self, tokens: int, itemsize: int) -> int:
        """Tokens, of M, that a warpgroup stores at a time."""
        if self.splits > 1 and not self.partials:
            return self.piece(tokens)
        chunk = tokens
        while chunk * itemsize > 320:
            chunk = 8 * -(-chunk // 16)
        return chunk

    @property
    def x_stages(self) -> int:
        return max(self.stages, self.token_stages)

    def padded(self, tokens: int) -> int:
        """Tokens that are fetched: groups of 8, as many for each block of a cluster."""
        return 8 * self.share * -(-tokens // (8 * self.share))

    def shared_memory(self, tokens: int, itemsize: int) -> int:
        """Bytes a block."""
        ring = (self.stages * self.rows + self.x_stages * self.padded(tokens)) * self.tile_k * 2
        out = self.store(tokens, itemsize) * self.warpgroups * ROWS * itemsize
        sums = self.rows * self.splits * self.piece(tokens) * 4 if self.splits > 1 and not self.partials else 0
        return ring + out + sums + 1024


def _kernel(
    x_ref: Ref,  # [M', K] GMEM, M' ≥ M
    w_ref: Ref,  # [N, K] GMEM
    out_ref: Ref,  # [M, N'] GMEM, or with partials f32 [splits, M, N']; N' = N/2 with swiglu
    *,
    w_smem: Ref,  # [stages, rows, tile_k] SMEM
    x_smem: Ref,  # [x_stages, M', tile_k] SMEM
    out_smem: Ref,  # [warpgroups, tokens of a store, 64] SMEM
    sum_smem: Ref = None,  # f32 [row blocks, splits, 64, tokens of a piece] SMEM, with clusters that split K only
    w_full: Ref,  # [stages] barriers
    w_empty: Ref,  # [stages] barriers
    x_full: Ref,  # [x_stages] barriers
    x_empty: Ref,  # [x_stages] barriers, of all blocks that share x
    summed: Ref = None,  # [row blocks] barriers
    tuning: Tuning,
    swiglu: bool,
) -> None:
    tokens, columns = out_ref.shape[-2], x_ref.shape[1]
    rows, tile_k, stages, products = tuning.rows, tuning.tile_k, tuning.stages, tuning.products
    share, x_stages = tuning.share, tuning.x_stages
    groups = w_ref.shape[0] // (rows * share)
    steps = columns // (tuning.splits * tile_k)
    first, split, peer = lax.axis_index("tile"), lax.axis_index("split"), lax.axis_index("peer")
    warpgroup = lax.axis_index("warpgroup")
    programs = lax.axis_size("tile")
    tiles = lax.div(groups - 1 - first, programs) + 1
    total = tiles * steps
    shift = lax.div(first * steps, programs) if tuning.stagger else 0

    def column_at(step: jax.Array) -> jax.Array:
        within = lax.rem(lax.rem(step, steps) + shift, steps)
        return pl.multiple_of((split * steps + within) * tile_k, tile_k)

    def tile_at(index: jax.Array) -> jax.Array:
        return (first + index * programs) * share + peer

    @pl.when(warpgroup == tuning.warpgroups)
    def _fetch() -> None:
        if tuning.early:
            plgpu.griddepcontrol_launch_dependents()

        def fetch_weights(step: jax.Array) -> None:
            slot = lax.rem(step, stages)
            tile, k = tile_at(lax.div(step, steps)), column_at(step)
            parts = 2 if swiglu else 1  # gate rows, then the up rows of the same columns
            height = rows // parts
            for part in range(parts):
                start = pl.multiple_of(tile * height + part * (w_ref.shape[0] // parts), ROWS)
                source = w_ref.at[pl.ds(start, height), pl.ds(k, tile_k)]
                plgpu.copy_gmem_to_smem(source, w_smem.at[slot, pl.ds(part * height, height)], w_full.at[slot])

        def fetch_tokens(step: jax.Array) -> None:
            slot = lax.rem(step, x_stages)
            axes = ("peer",) if share > 1 else None
            source = x_ref.at[:, pl.ds(column_at(step), tile_k)]
            plgpu.copy_gmem_to_smem(source, x_smem.at[slot], x_full.at[slot], collective_axes=axes)

        ahead = min(stages, steps)
        for i in range(ahead):
            fetch_weights(jnp.int32(i))
        if tuning.early:
            plgpu.griddepcontrol_wait()
        for i in range(ahead):
            fetch_tokens(jnp.int32(i))

        def fetch(step: jax.Array, _: None) -> None:
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(w_empty.at[lax.rem(step, stages)]))
            fetch_weights(step)
            pl.when(step >= x_stages)(lambda: plgpu.barrier_wait(x_empty.at[lax.rem(step, x_stages)]))
            fetch_tokens(step)

        lax.fori_loop(ahead, total, fetch, None)

    def multiply(index: jax.Array, _: None) -> None:
        """One tile: all its steps, then its store."""

        def block(j: int) -> jax.Array:
            """This warpgroup's j-th block of 64 rows within a tile."""
            return warpgroup + j * tuning.warpgroups

        def scope(*sums: Ref) -> tuple[jax.Array, ...]:
            def step(k: jax.Array, _: None) -> None:
                now = index * steps + k
                slot, x_slot = lax.rem(now, stages), lax.rem(now, x_stages)
                plgpu.barrier_wait(x_full.at[x_slot])
                plgpu.barrier_wait(w_full.at[slot])
                x = x_smem.at[x_slot, pl.ds(0, tokens)]
                for j in range(products):
                    w = w_smem.at[slot, pl.ds(pl.multiple_of(block(j) * ROWS, ROWS), ROWS)]
                    plgpu.wgmma(sums[j], w, x.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                pl.when(now + stages < total)(lambda: plgpu.barrier_arrive(w_empty.at[slot]))
                pl.when(now + x_stages < total)(lambda: plgpu.barrier_arrive(x_empty.at[x_slot]))

            lax.fori_loop(0, steps, step, None)
            return tuple(acc[...] for acc in sums)

        accs = pl.run_scoped(scope, *[plgpu.ACC((ROWS, tokens), jnp.float32)] * products)
        tile = tile_at(index)
        if swiglu:
            gate, up = accs
            place = pl.multiple_of(tile * (rows // 2) + warpgroup * ROWS, ROWS)
            store([(place, gate / (1.0 + jnp.exp(-gate)) * up)])
        elif sum_smem is None:
            store([(pl.multiple_of(tile * rows + block(j) * ROWS, ROWS), accs[j]) for j in range(products)])
        else:
            reduce([(pl.multiple_of(tile * rows + block(j) * ROWS, ROWS), accs[j]) for j in range(products)])

    def store(blocks: list[tuple[jax.Array, jax.Array]], start: Any = 0) -> None:
        """[64, tokens] each, to the columns of y that it names, from token `start` on."""
        staging = out_smem.at[warpgroup]
        chunk = staging.shape[0]
        target = out_ref.at[split] if tuning.partials else out_ref
        for place, acc in blocks:
            for token in range(0, acc.shape[1], chunk):
                token = min(token, acc.shape[1] - chunk)
                part = lax.slice(acc, (0, token), (ROWS, token + chunk)).astype(out_smem.dtype)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                staging.transpose((1, 0))[...] = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging, target.at[pl.ds(start + token, chunk), pl.ds(place, ROWS)])

    def reduce(blocks: list[tuple[jax.Array, jax.Array]]) -> None:
        """Sums over the cluster's blocks, each of which computes and stores those of some tokens."""
        piece = sum_smem.shape[-1]
        owners = -(-tokens // piece)
        for j, (_, acc) in enumerate(blocks):
            target = warpgroup + j * tuning.warpgroups
            for owner in range(owners):
                start = min(owner * piece, tokens - piece)
                part = lax.slice(acc, (0, start), (ROWS, start + piece))
                plgpu.async_store_smem(
                    part,
                    sum_smem.at[target, split],
                    summed.at[target],
                    cluster_idx=jnp.int32(owner),
                    cluster_dim="split",
                    optimized=False,
                )

        @pl.when(split < owners)
        def _own() -> None:
            results = []
            for j, (place, _) in enumerate(blocks):
                source = warpgroup + j * tuning.warpgroups
                plgpu.barrier_wait(summed.at[source])
                total_of = plgpu.layout_cast(sum_smem[source, 0], plgpu.Layout.WGMMA)
                for s in range(1, tuning.splits):
                    total_of = total_of + plgpu.layout_cast(sum_smem[source, s], plgpu.Layout.WGMMA)
                results.append((place, total_of))
            store(results, lax.min(split * piece, tokens - piece))

    @pl.when(warpgroup < tuning.warpgroups)
    def _multiply() -> None:
        lax.fori_loop(0, tiles, multiply, None)
        plgpu.wait_smem_to_gmem(0)


# ------------------------------------------------------------------------------------------------------------ wrapper


def supports(*, tokens: int, columns: int, rows: int, dtype: Any, swiglu: bool = False) -> bool:
    """Returns True if the kernel applies to x [tokens, columns] and W [rows, columns]."""
    parts, most = (2, MAX_TOKENS_SWIGLU) if swiglu else (1, MAX_TOKENS)
    return jnp.dtype(dtype) == jnp.bfloat16 and 0 < tokens <= most and columns % 64 == 0 and rows % (ROWS * parts) == 0


def default_tuning(*, tokens: int, columns: int, rows: int, swiglu: bool = False) -> Tuning:
    """The tuning whose busiest multiprocessor fetches least.

    Splits are summed by XLA: on an H200, [4096, 4096] at 144 tokens took 20.7 µs so, and 34.4 in clusters of 4 blocks,
    presumably since not all multiprocessors can be had in such clusters, and the last ones wait for a second turn.
    """
    sizes = {"tokens": tokens, "columns": columns, "rows": rows}
    choices = [
        Tuning(warpgroups=warpgroups, products=products, splits=splits, partials=splits > 1, stages=stages)
        for warpgroups in (4, 3, 2, 1)
        for products in ((2,) if swiglu else (1,))
        for splits in (1, 2, 4, 8)
        for stages in (4, 3, 2)
        if splits == 1 or rows // (ROWS * products * warpgroups) * splits <= HOPPER.multiprocessors
    ]
    choices = [tuning for tuning in choices if objection(tuning, **sizes, itemsize=4, swiglu=swiglu) is None]
    if not choices:
        raise ValueError(f"no tuning for x [{tokens}, {columns}] and W [{rows}, {columns}]")

    def cost(tuning: Tuning) -> tuple[float, int]:
        blocks = rows // tuning.rows * tuning.splits
        waves = -(-blocks // HOPPER.multiprocessors)
        fetched = columns // tuning.splits * (tuning.rows + tokens) * 2  # bytes a block
        summed = tuning.rows * tokens * 8 if tuning.partials else 0  # written and read again
        return waves * (fetched + summed), -tuning.stages

    return min(choices, key=cost)


def objection(tuning: Tuning, *, tokens: int, columns: int, rows: int, itemsize: int, swiglu: bool) -> str | None:
    """Why the tuning does not apply to these shapes, and results of that size, if it does not."""
    tokens = 8 * -(-tokens // 8)
    cluster = tuning.splits > 1 and not tuning.partials
    if rows % (tuning.rows * tuning.share):
        return f"{rows} rows of W are no multiple of {tuning.rows * tuning.share}"
    if columns % (tuning.splits * tuning.tile_k):
        return f"{columns} columns are no multiple of {tuning.splits} · {tuning.tile_k}"
    if tuning.rows > 256 and not swiglu:
        return f"{tuning.rows} rows are more than a copy takes"
    if tuning.share * (tuning.splits if cluster else 1) > 8:
        return "a cluster has at most 8 blocks"
    if cluster and rows // tuning.rows * tuning.splits > HOPPER.multiprocessors:
        return f"{rows // tuning.rows} clusters of {tuning.splits} do not run at the same time"
    if swiglu and (tuning.splits > 1 or tuning.products != 2):
        return "swiglu needs two products a warpgroup, and all of K in a block"
    if not tuning.fits_registers(tokens):
        return f"{tuning.products} · {tokens} / 2 sums a thread of {tuning.warpgroups + 1} warpgroups"
    if tuning.shared_memory(tokens, itemsize) > HOPPER.shared_memory:
        return f"{tuning.shared_memory(tokens, itemsize)} bytes of shared memory"
    return None


@functools.partial(jax.jit, static_argnames=("swiglu", "out_dtype", "tuning", "interpret"))
def stream_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"],
    *,
    swiglu: bool = False,
    out_dtype: Any = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "M N_out"]:
    """x·Wᵀ with f32 accumulation, [M, N], in `out_dtype` (bfloat16 or float32; by default x's).

    With `swiglu` W is [gate; up], and the result silu(x·gateᵀ) · (x·upᵀ), [M, N/2], rounded once. The sums' order
    depends on shapes and tuning only. `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU.

    A jit of its own, so that a model's layers trace and lower the kernel once.
    """
    tokens, columns = x.shape
    rows = w.shape[0]
    if not supports(tokens=tokens, columns=columns, rows=rows, dtype=x.dtype, swiglu=swiglu) or w.dtype != x.dtype:
        raise ValueError(f"no kernel for x {x.dtype}{list(x.shape)} and W {w.dtype}{list(w.shape)}")
    if tuning is None:
        tuning = default_tuning(tokens=tokens, columns=columns, rows=rows, swiglu=swiglu)
    if interpret and tuning.splits > 1:  # which knows no stores to another block's shared memory
        tuning = dataclasses.replace(tuning, partials=True)
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    partials = tuning.partials and tuning.splits > 1
    stored = jnp.dtype(jnp.float32) if partials else dtype
    groups_of_8 = 8 * -(-tokens // 8)
    x = jnp.pad(x, ((0, tuning.padded(tokens) - tokens), (0, 0)))
    reason = objection(tuning, tokens=tokens, columns=columns, rows=rows, itemsize=stored.itemsize, swiglu=swiglu)
    if reason:
        raise ValueError(f"{tuning}: {reason}")

    cluster = tuning.splits > 1 and not partials
    groups = rows // (tuning.rows * tuning.share)
    programs = min(groups, HOPPER.multiprocessors // (tuning.share * tuning.splits))
    outputs = rows // 2 if swiglu else rows
    shape = (tuning.splits, groups_of_8, outputs) if partials else (groups_of_8, outputs)

    tiling: Any = plgpu.TilingTransform  # their annotations call these two classes abstract
    swizzle: Any = plgpu.SwizzleTransform

    def swizzled(width: int, itemsize: int) -> tuple[Any, ...]:
        size = min(128, width * itemsize & -(width * itemsize))
        return (tiling((8, size // itemsize)), swizzle(size))

    ring = swizzled(tuning.tile_k, 2)
    scratch: dict[str, Any] = {
        "w_smem": plgpu.SMEM((tuning.stages, tuning.rows, tuning.tile_k), x.dtype, transforms=ring),
        "x_smem": plgpu.SMEM((tuning.x_stages, x.shape[0], tuning.tile_k), x.dtype, transforms=ring),
        "out_smem": plgpu.SMEM(
            (tuning.warpgroups, tuning.store(groups_of_8, stored.itemsize), ROWS),
            stored,
            transforms=swizzled(ROWS, stored.itemsize),
        ),
        "w_full": plgpu.Barrier(num_arrivals=2 if swiglu else 1, num_barriers=tuning.stages),
        "w_empty": plgpu.Barrier(num_arrivals=tuning.warpgroups, num_barriers=tuning.stages),
        "x_full": plgpu.Barrier(num_barriers=tuning.x_stages),
        "x_empty": plgpu.Barrier(num_arrivals=tuning.warpgroups, num_barriers=tuning.x_stages),
    }
    if tuning.share > 1:
        scratch["x_empty"] = plgpu.ClusterBarrier(
            collective_axes=("peer",), num_arrivals=tuning.warpgroups, num_barriers=tuning.x_stages
        )
    if cluster:
        blocks, piece = tuning.rows // ROWS, tuning.piece(groups_of_8)
        scratch["sum_smem"] = plgpu.SMEM(
            (blocks, tuning.splits, ROWS, piece), jnp.float32, transforms=swizzled(piece, 4)
        )
        scratch["summed"] = plgpu.Barrier(num_arrivals=tuning.splits, num_barriers=blocks)
    axes = {"tile": programs, "split": tuning.splits, "peer": tuning.share}
    within = [name for name, on in (("peer", tuning.share > 1 or cluster), ("split", cluster)) if on]  # a cluster
    mesh: dict[str, Any] = {
        "grid": tuple(size for name, size in axes.items() if name not in within),
        "grid_names": tuple(name for name in axes if name not in within),
    }
    if within:
        mesh |= {"cluster": tuple(axes[name] for name in within), "cluster_names": tuple(within)}
    y = plgpu.kernel(
        functools.partial(_kernel, tuning=dataclasses.replace(tuning, partials=partials), swiglu=swiglu),
        out_type=jax.ShapeDtypeStruct(shape, stored),
        num_threads=tuning.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="stream_matmul",
        **mesh,
    )(x, w)
    if partials:
        y = functools.reduce(jnp.add, [y[s] for s in range(tuning.splits)]).astype(dtype)
    return y[:tokens]
