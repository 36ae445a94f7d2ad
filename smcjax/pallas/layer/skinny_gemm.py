"""x · Wᵀ of few rows, one launch that streams W once: Mosaic GPU (Hopper); Triton's kernels: `skinny_gemm_triton.py`.

    y = x · Wᵀ                                  + add_to, where that is given
    y = x · Wᵀ · of_x · of_w                    + add_to, of float8 numbers with a scale a row of x and one a row of W
    h = silu(x · gateᵀ / rms(x)) · (x · upᵀ / rms(x))          W = [gate; up], a norm that is pending; of both dtypes

Such a product takes as long as W's bytes do, so a launch should ask for them from its first moment to its last and
leave nothing to another one. A block has its own consecutive rows of W, as many as every other block, and passes over
their columns once:

    loader      sends for a tile of W and the same columns of x, step by step, through a ring in shared memory
    consumers   one or two, each with its own rows of W, multiply on the tensor cores, 64 rows of W on the long side and
                tokens on the short one, y[:, n:n + 64]ᵀ += W[n:n + 64, k:k + d] · x[:, k:k + d]ᵀ, d columns of
                128 bytes, and finish

Rows of x that are not there are read as zeros by the copy engine. Rows of W that are not a consumer's own fill up its
last 64; what comes of them is not stored. Mean squares of x are the diagonal of x · xᵀ, which is made on the way; of
float8 numbers they are in the scales of x.

Each block reads x, out of the L2: of many columns and few rows a block, a third of all that is read. Two blocks that
divide the columns and add up each other's sums, a cluster, were no faster, nor two that fetch x together (dev/LOG.md).
The order of a sum depends on shapes alone.

Tensor cores keep some 14 bits of a sum of float8 products. So each 128 of them make a sum of their own, which is added
to those before in float32. Of two consumers one multiplies while the other adds.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from smcjax.matmul import Dense, Quantized, matrix
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic, runs_triton, runs_triton_beside_mosaic
from smcjax.pallas.layer import skinny_gemm_triton as triton
from smcjax.pallas.layer.norm import Norm, inverse_rms_of
from smcjax.pallas.layer.skinny_gemm_tuning import (
    EIGHT,
    ROWS,
    Tuning,
    default_tuning,
    depth,
    objection,
    padded,
    tiles_of,
)
from smcjax.pallas.mosaic import l2_policy, threads
from smcjax.pallas.mosaic.compat import pl, plgpu, store
from smcjax.pallas.mosaic.threads import WARPGROUP, Threads, Word
from smcjax.pallas.mosaic.wgmma import Ref, product_of, swizzled, swizzled_int8
from smcjax.quantization import FLOAT8, Quantization

MAX_ROWS = 32  # of x: of 72 every block reads too much of it (dev/LOG.md)
MAX_FLOAT8_ROWS = 80  # of x, whose numbers take half as much

# ---------------------------------------------------------------------------------------------------------- reference


def product_reference(
    x: Float[Array, "*shape I"],
    w: Float[Array, "O I"],
    *,
    add_to: Float[Array, "*shape O"] | None = None,
    out: Any = None,
) -> Float[Array, "*shape O"]:
    """x · Wᵀ, accumulated in f32, in the dtype `out` (None: that of x); plus `add_to`, of that dtype."""
    return Dense(w)(x, add_to=add_to, out=out)


def swiglu_product_reference(x: Float[Array, "*shape I"], w: Any, norm: Norm | None) -> Float[Array, "*shape F"]:
    """silu(gate) · up of the normed x, gate above up in W, an array [2·F, I] or a matrix in eight bits a number."""
    gate, up = jnp.split(matrix(w)(x if norm is None else norm(x)), 2, axis=-1)
    return jax.nn.silu(gate) * up


def eight_bits_reference(
    x: Float[Array, "*shape I"],
    w: Quantized,
    *,
    norm: Norm | None = None,
    add_to: Float[Array, "*shape O"] | None = None,
    out: Any = None,
) -> Float[Array, "*shape O"]:
    """The normed x times Wᵀ, as `product_reference` has it, of a matrix in eight bits a number."""
    return w(x if norm is None else norm(x), add_to=add_to, out=out)


def rounded_reference(
    x: Float[Array, "*shape I"], kind: Quantization, norm: Norm | None = None
) -> tuple[Shaped[Array, "*shape I"], Float[Array, "*shape"]]:
    """Rounds each row of the normed x as `Quantization.round` does: numbers and scales.

    Numbers are those of x · weight; the scales have the rest of the norm.
    """
    if norm is None:
        return kind.round(x)
    wide = x.astype(jnp.float32)
    weighted = wide if norm.weight is None else wide * jnp.broadcast_to(norm.weight.astype(jnp.float32), x.shape)
    values, scale = kind.round(weighted)
    return values, scale * inverse_rms_of(x, norm.eps)


# ------------------------------------------------------------------------------------------------------------- kernel


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static facts of a launch. Rows of W, tiles, sums and results are those of one consumer."""

    rows: int  # of x
    outputs: int
    columns: int
    parts: int
    eps: float
    adds: bool
    scales: bool  # numbers are float8, with a scale a row of x and one a row of W
    tuning: Tuning

    @property
    def tokens(self) -> int:
        """Rows of x that are multiplied."""
        return padded(self.rows)

    @property
    def steps(self) -> int:
        """Tiles of a pass."""
        return self.columns // self.tuning.tile_k

    @property
    def tiles(self) -> tuple[int, ...]:
        """First rows of the tensor cores' tiles within one part."""
        return tiles_of(self.tuning.rows)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Part and first row of each tile, in the order of sums."""
        return [(part, tile) for part in range(self.parts) for tile in self.tiles]

    @property
    def step_rows(self) -> int:
        """Rows of W that a step has of all consumers and parts."""
        return self.tuning.block_rows * self.parts

    @property
    def depth(self) -> int:
        """Columns of one product."""
        return depth(1 if self.scales else 2)

    @property
    def subtiles(self) -> int:
        """Products along a step's columns."""
        return self.tuning.tile_k // self.depth

    @property
    def squares(self) -> bool:
        """True where x · xᵀ is made."""
        return self.parts == 2 and not self.scales

    @property
    def sum_rows(self) -> int:
        """Rows of a consumer's sums: 64 a tile, and 64 of x · xᵀ."""
        return (self.parts * len(self.tiles) + self.squares) * ROWS

    @property
    def quads(self) -> int:
        """Results by fours, those of a row of W of four neighbouring tokens."""
        return self.tuning.rows * self.tokens // 4


def _quads(t: Threads, sizes: _Sizes) -> Any:
    """(number, row of W, first token, whether it is one) of each of a thread's fours.

    Neighbouring threads have neighbouring rows of W, whose results lie side by side.
    """
    for begin in range(0, sizes.quads, WARPGROUP):
        number = t.index + begin
        is_one = number < sizes.quads
        number = t.minimum(number, sizes.quads - 1)
        yield number, number % sizes.tuning.rows, number // sizes.tuning.rows * 4, is_one


def _keep_added(t: Threads, add_to: Ref, added: Ref, first: Word, *, sizes: _Sizes) -> None:
    """Fetches what results are added to before there are any."""
    for number, row, token, is_one in _quads(t, sizes):
        places = [t.minimum(token + i, sizes.rows - 1) * sizes.outputs + (first + row) for i in range(4)]
        t.store4(added, number * 4, [t.load(add_to, place) for place in places], only=is_one)


def _finish(t: Threads, out: Ref, sums: Ref, *refs: Any, sizes: _Sizes) -> None:
    """Makes results of sums and stores them."""
    *others, first = refs
    tokens, height = sizes.tokens, sizes.tuning.rows
    # The warpgroup has written its accumulators to `sums`; a thread reads those of other threads from here on.
    t.synchronize()
    for number, row, token, is_one in _quads(t, sizes):
        # sums [64 · tiles, tokens]. The last tile begins early, so that its 64 rows end with the consumer's.
        tile = row // ROWS
        begin = t.minimum(tile * ROWS, max(0, height - ROWS))
        place = (tile * ROWS + row - begin) * tokens + token
        y = t.load4(sums, place)
        scales = [t.constant(1.0)] * 4
        part = len(sizes.tiles) * ROWS * tokens
        if sizes.scales:
            of_x, of_w = others[:2]
            scales = [t.load(of_x, t.minimum(token + i, sizes.rows - 1)) for i in range(4)]
            y = [value * t.load(of_w, first + row) * scale for value, scale in zip(y, scales, strict=True)]
        if sizes.squares:
            # Behind gate's and up's tiles is x · xᵀ, whose diagonal holds the sums of squares of each token.
            squares = [t.load(sums, (token + i) * tokens + (token + i) + 2 * part) for i in range(4)]
            scales = [t.inverse_root(square * (1.0 / sizes.columns) + sizes.eps) for square in squares]
            y = [gate * scale for gate, scale in zip(y, scales, strict=True)]
        if sizes.parts == 2:  # SwiGLU: up's tiles are behind gate's
            of_up = [up * scale for up, scale in zip(t.load4(sums, place + part), scales, strict=True)]
            if sizes.scales:
                of_up = [up * t.load(of_w, first + row + sizes.outputs) for up in of_up]
            y = [threads.silu(t, gate) * up for gate, up in zip(y, of_up, strict=True)]
        if sizes.adds:
            y = [a + b for a, b in zip(y, t.load4(others[-1], number * 4), strict=True)]
        # out [rows, outputs], one number a store: four neighbouring tokens lie `outputs` numbers apart.
        for i, value in enumerate(y):
            is_there = t.where(is_one, token + i, t.constant(sizes.rows)) < sizes.rows
            where = t.minimum(token + i, sizes.rows - 1) * sizes.outputs + (first + row)
            t.store(out, where, value, only=is_there)
    # The next pass writes `sums` and `added` again, so no thread may still read them.
    t.synchronize()


class _Body:
    """The kernel's body, static facts and references as attributes."""

    def __init__(self, sizes: _Sizes, interpret: bool) -> None:
        self.sizes, self.interpret = sizes, interpret

    def __call__(self, *refs: Ref, **scratch: Ref) -> None:
        self.x, self.w, *others, self.out = refs
        self.scales = others[:2] if self.sizes.scales else []
        self.add_to = others[-1] if self.sizes.adds else None
        self.s = scratch
        self.block = lax.axis_index("block")
        warpgroup = lax.axis_index("warpgroup")
        # One warpgroup only sends for tiles, others only multiply: neither waits for the other's instructions.
        pl.when(warpgroup == 0)(self._load)
        for consumer in range(self.sizes.tuning.consumers):
            pl.when(warpgroup == 1 + consumer)(functools.partial(self._consume, consumer))

    def _first(self, turn: Any) -> jax.Array:
        """The first result of a pass. The last block's last ones are perhaps some that it or others have, too."""
        tuning = self.sizes.tuning
        first = (self.block * tuning.passes + turn) * tuning.block_rows
        return pl.multiple_of(lax.min(first, self.sizes.outputs - tuning.block_rows), EIGHT)

    def _x_rows(self, slot: jax.Array, subtile: int, count: int) -> Any:
        """Rows of x's ring that have the columns of one product of a step."""
        return pl.ds(pl.multiple_of((slot * self.sizes.subtiles + subtile) * self.sizes.tokens, EIGHT), count)

    # The loader's warpgroup.

    def _load(self) -> None:
        sizes, tuning = self.sizes, self.sizes.tuning
        height = tuning.block_rows
        x_smem = self.s["x_smem"][0 if self.interpret else 1]

        def fetch(now: jax.Array, _: None) -> None:
            # Step `now` of all passes: its slot of the ring, its pass, its columns.
            slot, turn = lax.rem(now, tuning.stages), lax.div(now, sizes.steps)
            column = pl.multiple_of(lax.rem(now, sizes.steps) * tuning.tile_k, tuning.tile_k)
            full = self.s["full"].at[slot]
            # The first `stages` steps find their slots empty; later ones wait until all consumers have read theirs.
            pl.when(now >= tuning.stages)(lambda: plgpu.barrier_wait(self.s["empty"].at[slot]))
            # W [parts · outputs, columns]: the block's rows of each part, [height, tile_k], which no block reads again.
            for part in range(sizes.parts):
                row = pl.multiple_of(self._first(turn) + part * sizes.outputs, EIGHT)
                source = self.w.at[pl.ds(row, height), pl.ds(column, tuning.tile_k)]
                begin = slot * sizes.step_rows + part * height
                target = self.s["w_smem"].at[pl.ds(pl.multiple_of(begin, EIGHT), height)]
                l2_policy.load_to_leave(source, target, full, interpret=self.interpret)
            # x [rows, columns]: all its rows, 128 bytes a copy, the width that swizzled tiles have. Every copy of the
            # step arrives at the same barrier, which lets consumers pass when all have.
            for subtile in range(sizes.subtiles):
                # A beginning that is not known to be 0: rows behind the last one, which are zeros then, are asked for.
                columns = pl.ds(column + subtile * sizes.depth, sizes.depth)
                source = self.x.at[pl.ds(slot * 0, sizes.tokens), columns]
                plgpu.copy_gmem_to_smem(source, x_smem.at[self._x_rows(slot, subtile, sizes.tokens)], full)

        lax.fori_loop(0, sizes.steps * tuning.passes, fetch, None)

    # A consumer's warpgroup.

    def _consume(self, consumer: int) -> None:
        lax.fori_loop(0, self.sizes.tuning.passes, functools.partial(self._pass, consumer), None)

    def _w_rows(self, slot: jax.Array, consumer: int, part: int, tile: int) -> Any:
        """Rows of W's ring that are one tile of a consumer's."""
        tuning = self.sizes.tuning
        row = slot * self.sizes.step_rows + part * tuning.block_rows + consumer * tuning.rows + tile
        return pl.ds(pl.multiple_of(row, EIGHT), ROWS)

    def _pass(self, consumer: int, turn: jax.Array, _: None) -> None:
        sizes = self.sizes
        first = self._first(turn) + consumer * sizes.tuning.rows
        summed, added = self.s["sums"][consumer], self.s["added"][consumer] if sizes.adds else None
        # Fetched before the products, so that their latency hides this one.
        if sizes.adds:
            keep = functools.partial(_keep_added, sizes=sizes)
            threads.run(keep, self.add_to, added, first, interpret=self.interpret)
        # Accumulators live in registers, [64, tokens] each; threads that finish need other threads' numbers, so they
        # go through shared memory.
        if sizes.scales:
            sums = self._add_up(consumer, turn)
        else:
            shapes = [plgpu.ACC((ROWS, sizes.tokens), jnp.float32)] * (sizes.sum_rows // ROWS)
            sums = pl.run_scoped(functools.partial(self._accumulate, consumer, turn), *shapes)
        for number, tile in enumerate(sums):
            store(summed.at[pl.ds(number * ROWS, ROWS)], tile)
        others = [*self.scales, *([added] if sizes.adds else [])]
        finish = functools.partial(_finish, sizes=sizes)
        threads.run(finish, self.out, summed, *others, first, interpret=self.interpret)

    def _accumulate(self, consumer: int, turn: jax.Array, *accs: Ref) -> tuple[jax.Array, ...]:
        """The sums of a pass, tile by tile of each part of W, and behind them those of x · xᵀ."""
        sizes, tuning = self.sizes, self.sizes.tuning
        w_smem, x_smem = self.s["w_smem"], self.s["x_smem"][0]
        total = sizes.steps * tuning.passes

        def step(k: jax.Array, _: None) -> None:
            now = turn * sizes.steps + k
            slot = lax.rem(now, tuning.stages)
            plgpu.barrier_wait(self.s["full"].at[slot])
            for subtile in range(sizes.subtiles):
                # x [tokens, d] becomes the short side, [d, tokens]; W's tile [64, d] is the long one.
                x = x_smem.at[self._x_rows(slot, subtile, sizes.tokens)].transpose((1, 0))
                columns = pl.ds(subtile * sizes.depth, sizes.depth)
                for acc, (part, tile) in zip(accs, sizes.places, strict=False):
                    plgpu.wgmma(acc, w_smem.at[self._w_rows(slot, consumer, part, tile), columns], x)
                # x · xᵀ, for the norm: 64 rows from the ring, of which those behind x's own are not used.
                if sizes.squares:
                    plgpu.wgmma(accs[-1], x_smem.at[self._x_rows(slot, subtile, ROWS)], x)
            # The tensor cores read shared memory until this returns; only then is the slot the loader's. A slot that
            # no later step fills is not handed back: a barrier must not be left with an arrival.
            plgpu.wgmma_wait(0)
            pl.when(now + tuning.stages < total)(lambda: plgpu.barrier_arrive(self.s["empty"].at[slot]))

        lax.fori_loop(0, sizes.steps, step, None)
        return tuple(acc[...] for acc in accs)

    def _add_up(self, consumer: int, turn: jax.Array) -> tuple[jax.Array, ...]:
        """The sums of a pass over float8 numbers, tile by tile of each part of W."""
        sizes, tuning = self.sizes, self.sizes.tuning
        w_smem, x_smem = self.s["w_smem"], self.s["x_smem"][0]
        product, total = product_of(self.interpret), sizes.steps * tuning.passes

        def step(k: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            now = turn * sizes.steps + k
            slot = lax.rem(now, tuning.stages)
            plgpu.barrier_wait(self.s["full"].at[slot])
            for subtile in range(sizes.subtiles):
                columns = pl.ds(subtile * sizes.depth, sizes.depth)
                x = x_smem.at[self._x_rows(slot, subtile, sizes.tokens)].transpose((1, 0))
                rows = [self._w_rows(slot, consumer, part, tile) for part, tile in sizes.places]
                # [64, 128] · [128, tokens] from zero, done when `product` returns: then one addition in float32.
                sums = tuple(
                    so_far + product(None, (w_smem.at[own, columns], x)) for so_far, own in zip(sums, rows, strict=True)
                )
            # As in `_accumulate`: a slot that no later step fills is not handed back.
            pl.when(now + tuning.stages < total)(lambda: plgpu.barrier_arrive(self.s["empty"].at[slot]))
            return sums

        zeros = jnp.zeros((ROWS, sizes.tokens), jnp.float32)
        start = tuple(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA) for _ in sizes.places)
        found: tuple[jax.Array, ...] = lax.fori_loop(0, sizes.steps, step, start)
        return found


def _launch(
    x: jax.Array,
    w: jax.Array,
    scales: tuple[jax.Array, ...],
    add_to: jax.Array | None,
    out: Any,
    sizes: _Sizes,
    interpret: Any,
) -> jax.Array:
    """[rows, outputs] of x [rows, columns]."""
    tuning, tokens, interprets = sizes.tuning, sizes.tokens, interpret is not None
    spare = max(0, ROWS - tuning.rows)  # behind the last tile, where tiles are of fewer rows than are multiplied
    x_rows = tuning.stages * sizes.subtiles * tokens + (ROWS - tokens if sizes.squares else 0)
    transforms = swizzled_int8() if sizes.scales else swizzled()
    of_x = [plgpu.SMEM((x_rows, sizes.depth), x.dtype, transforms=how) for how in (transforms, transforms[1:])]
    copies = sizes.parts + sizes.subtiles
    scratch: dict[str, Any] = {
        "w_smem": plgpu.SMEM((tuning.stages * sizes.step_rows + spare, tuning.tile_k), w.dtype, transforms=transforms),
        "x_smem": plgpu.RefUnion(*of_x),
        "sums": [plgpu.SMEM((sizes.sum_rows, tokens), jnp.float32)] * tuning.consumers,
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=tuning.stages),
        "empty": plgpu.Barrier(num_arrivals=tuning.consumers, num_barriers=tuning.stages),
    }
    operands: list[Any] = [x, w, *scales]
    if sizes.adds:
        scratch["added"] = [plgpu.SMEM((tuning.rows, tokens), jnp.float32)] * tuning.consumers
        operands.append(add_to)
    return plgpu.kernel(
        _Body(sizes, interprets),
        out_type=jax.ShapeDtypeStruct((sizes.rows, sizes.outputs), out),
        grid=(tuning.blocks(sizes.outputs),),
        grid_names=("block",),
        num_threads=1 + tuning.consumers,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="few_rows" if sizes.parts == 1 else "few_rows_swiglu",
    )(*operands)


# ------------------------------------------------------------------------------------------------------------ wrapper


def _supports_sizes(x: jax.Array, w: Any, parts: int) -> bool:
    """True for bfloat16 x, and W in bfloat16 or float8, of sizes that a tuning has."""
    eight = isinstance(w, Quantized)
    fits = w.kind is FLOAT8 if eight else w.dtype == x.dtype
    if not fits or x.dtype != jnp.bfloat16 or len(w.shape) != 2 or w.shape[0] % parts:
        return False
    rows, columns = x.size // max(1, x.shape[-1]), x.shape[-1]
    most, size = (MAX_FLOAT8_ROWS, 1) if eight else (MAX_ROWS, 2)
    return 0 < rows <= most and _tuning_of(rows, w.shape[0] // parts, columns, parts, size) is not None


def _tuning_of(*sizes: int) -> Tuning | None:
    """Returns `default_tuning(*sizes)`; None where there is none."""
    try:
        return default_tuning(*sizes)
    except ValueError:
        return None


def _supports_result(x: jax.Array, add_to: jax.Array | None, out: Any) -> bool:
    result = jnp.dtype(x.dtype if out is None else out)
    return result in (jnp.bfloat16, jnp.float32) and (add_to is None or add_to.dtype == result)


def supports_product(x: jax.Array, w: jax.Array, *, add_to: jax.Array | None = None, out: Any = None) -> bool:
    """True for products that the kernel computes: bfloat16, up to `MAX_ROWS` of x, results in bfloat16 or float32."""
    return _supports_result(x, add_to, out) and _supports_sizes(x, w, 1)


def supports_float8(
    x: jax.Array, w: Quantized, *, norm: Norm | None = None, add_to: jax.Array | None = None, out: Any = None
) -> bool:
    """True for products of float8 that the kernel computes: up to `MAX_FLOAT8_ROWS` of x."""
    return _supports_result(x, add_to, out) and _supports_sizes(x, w, 1)


def supports_swiglu_product(x: jax.Array, w: Any, norm: Norm | None) -> bool:
    """True for products with SwiGLU that the kernel computes: bfloat16 by a norm without weights, or float8."""
    takes_norm = isinstance(w, Quantized) or (norm is not None and norm.weight is None)
    return takes_norm and _supports_sizes(x, w, 2)


@functools.partial(jax.jit, static_argnames=("out", "tuning", "interpret"))
def product_mosaic(
    x: Float[Array, "*shape I"],
    w: Float[Array, "O I"],
    *,
    add_to: Float[Array, "*shape O"] | None = None,
    out: Any = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "*shape O"]:
    """Computes `skinny_gemm` by the kernel, rounding once, `add_to` included.

    A jit of its own, so that a model's layers trace and lower the kernel once. `interpret` is
    `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    result = jnp.dtype(x.dtype if out is None else out)
    outputs = w.shape[0]
    flat = None if add_to is None else add_to.reshape(-1, outputs)
    return _run(x, w, (), flat, result, outputs, 1, 0.0, tuning, interpret)


@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def swiglu_product_mosaic(
    x: Float[Array, "*shape I"],
    w: Any,
    norm: Norm | None,
    *,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "*shape F"]:
    """Computes `skinny_gemm_swiglu` by the kernel, rounding once; a jit of its own like `product_mosaic`."""
    outputs = w.shape[0] // 2
    if not isinstance(w, Quantized):
        assert norm is not None
        return _run(x, w, (), None, x.dtype, outputs, 2, norm.eps, tuning, interpret)
    rounded, of_x = round_rows(x, w.kind, norm)
    return _run(rounded, w.values, (of_x.reshape(-1), w.scale), None, x.dtype, outputs, 2, 0.0, tuning, interpret)


@functools.partial(jax.jit, static_argnames=("out", "tuning", "interpret"))
def float8_mosaic(
    x: Float[Array, "*shape I"],
    w: Quantized,
    *,
    norm: Norm | None = None,
    add_to: Float[Array, "*shape O"] | None = None,
    out: Any = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "*shape O"]:
    """Computes `skinny_gemm_eight_bits` of float8 by the kernel; a jit of its own like `product_mosaic`."""
    rounded, of_x = round_rows(x, w.kind, norm)
    outputs, result = w.shape[0], jnp.dtype(x.dtype if out is None else out)
    flat = None if add_to is None else add_to.reshape(-1, outputs)
    scales = (of_x.reshape(-1), w.scale)
    return _run(rounded, w.values, scales, flat, result, outputs, 1, 0.0, tuning, interpret)


def _run(
    x: jax.Array,
    w: jax.Array,
    scales: tuple[jax.Array, ...],
    add_to: jax.Array | None,
    result: Any,
    outputs: int,
    parts: int,
    eps: float,
    tuning: Tuning | None,
    interpret: Any,
) -> jax.Array:
    *shape, columns = x.shape
    flat = x.reshape(-1, columns)
    rows, size = flat.shape[0], w.dtype.itemsize
    if tuning is None:
        tuning = default_tuning(rows, outputs, columns, parts, size)
    reason = objection(tuning, rows, outputs, columns, parts, size)
    if reason:
        raise ValueError(f"{tuning}: {reason}")
    sizes = _Sizes(rows, outputs, columns, parts, eps, add_to is not None, bool(scales), tuning)
    return _launch(flat, w, scales, add_to, result, sizes, interpret).reshape(*shape, outputs)


round_rows = Op(rounded_reference)
round_rows.register(Kernel(runs_triton_beside_mosaic, triton.round_triton, lambda x, kind, norm=None: kind is FLOAT8))
skinny_gemm = Op(product_reference)
skinny_gemm.register(Kernel(runs_mosaic, product_mosaic, supports_product))
skinny_gemm.register(Kernel(runs_triton, triton.product_triton, triton.supports_product))
skinny_gemm_swiglu = Op(swiglu_product_reference)
skinny_gemm_swiglu.register(Kernel(runs_mosaic, swiglu_product_mosaic, supports_swiglu_product))
skinny_gemm_eight_bits = Op(eight_bits_reference)
skinny_gemm_eight_bits.register(Kernel(runs_mosaic, float8_mosaic, supports_float8))
skinny_gemm_eight_bits.register(Kernel(runs_triton_beside_mosaic, triton.eight_bits_triton, triton.supports_eight_bits))
