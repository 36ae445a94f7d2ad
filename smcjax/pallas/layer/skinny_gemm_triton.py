"""x · Wᵀ of up to 288 rows by Triton kernels: wrappers, and how blocks divide the work.

W is bfloat16 or float32 as x is, int8 beside bfloat16, or float8 with x rounded to float8 as well. W's bytes bound the
time, so a tuning is a way to ask for them early and evenly: `Tuning`, from `TUNED` where it was measured, else by rule.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from smcjax.device import HOPPER, SHARED_MEMORY, this_device
from smcjax.matmul import Quantized
from smcjax.pallas.layer.norm import Norm
from smcjax.pallas.triton import launch as triton
from smcjax.quantization import Quantization

FLOAT8 = jnp.dtype("float8_e4m3fn")
MAX_ROWS = 288  # of x
MAX_TILE_ROWS = 144  # of x that a block multiplies
MIN_TILE = 16  # of tensor cores, along any axis
MIN_COLUMNS = 128  # of W
ROUNDED = 8192  # numbers of a row that a block rounds at once
FLOAT8_CAPABILITY = 89  # that multiplies eight bits by eight bits
# The rule for what was not measured.
IN_FLIGHT = 64 << 10  # bytes of W that the blocks of one multiprocessor ask for ahead
TILE_BYTES = 16 << 10  # of W a step
STAGES = 6  # at most
RESERVED = 2 << 10  # bytes of a block's shared memory that the compiler takes for itself
MOST_BESIDE_128 = 96  # rows of x that 128 rows of W are multiplied by: sums are kept in registers
SUMMED_INSIDE = 128  # products of float8 that Hopper's tensor cores add up in fewer bits than float32: all are 2% off


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices of the kernel.

    Attributes:
        outputs: rows of W a block.
        columns: of W a step.
        shares: blocks among which the columns of a row are divided.
        warps: a block.
        stages: steps that are fetched ahead, the one that is multiplied included.
    """

    outputs: int
    columns: int
    shares: int
    warps: int
    stages: int


# (rows of a tile, outputs, columns, dtype of W) by capability: what was fastest on an H200.
TUNED: dict[int, dict[tuple[int, int, int, str], Tuning]] = {
    90: {
        (80, 28672, 4096, "float8_e4m3fn"): Tuning(64, 128, 1, 4, 5),
        (80, 4096, 14336, "float8_e4m3fn"): Tuning(64, 128, 4, 4, 5),
        (80, 6144, 4096, "float8_e4m3fn"): Tuning(64, 128, 2, 4, 5),
        (80, 4096, 4096, "float8_e4m3fn"): Tuning(64, 128, 4, 4, 5),
        (80, 128256, 4096, "float8_e4m3fn"): Tuning(64, 128, 1, 4, 6),
        (80, 2048, 8192, "float8_e4m3fn"): Tuning(64, 256, 4, 8, 4),
        (80, 57344, 8192, "float8_e4m3fn"): Tuning(64, 128, 1, 4, 5),
        (80, 8192, 28672, "float8_e4m3fn"): Tuning(64, 128, 2, 4, 5),
        (80, 51200, 5120, "float8_e4m3fn"): Tuning(64, 128, 1, 4, 6),
        (80, 5120, 25600, "float8_e4m3fn"): Tuning(64, 128, 3, 4, 5),
        (80, 5120, 8192, "float8_e4m3fn"): Tuning(64, 128, 3, 4, 5),
        (80, 28672, 4096, "int8"): Tuning(128, 128, 1, 4, 3),
        (80, 4096, 14336, "int8"): Tuning(128, 128, 4, 8, 4),
        (80, 6144, 4096, "int8"): Tuning(128, 128, 4, 4, 3),
        (80, 4096, 4096, "int8"): Tuning(128, 128, 4, 8, 4),
        (80, 128256, 4096, "int8"): Tuning(128, 128, 1, 4, 3),
        (80, 28672, 4096, "bfloat16"): Tuning(64, 64, 1, 4, 3),
        (80, 4096, 14336, "bfloat16"): Tuning(64, 128, 2, 4, 5),
        (80, 6144, 4096, "bfloat16"): Tuning(64, 128, 1, 4, 4),
        (80, 4096, 4096, "bfloat16"): Tuning(64, 128, 2, 4, 4),
        (80, 128256, 4096, "bfloat16"): Tuning(128, 128, 1, 8, 4),
        (80, 2048, 8192, "bfloat16"): Tuning(64, 128, 4, 4, 4),
        (16, 28672, 4096, "float8_e4m3fn"): Tuning(32, 128, 1, 2, 4),
        (16, 4096, 14336, "float8_e4m3fn"): Tuning(32, 128, 4, 2, 6),
        (16, 6144, 4096, "float8_e4m3fn"): Tuning(32, 128, 2, 2, 6),
        (16, 4096, 4096, "float8_e4m3fn"): Tuning(32, 128, 3, 2, 6),
        (16, 128256, 4096, "float8_e4m3fn"): Tuning(32, 256, 1, 4, 4),
        (16, 16384, 2048, "float8_e4m3fn"): Tuning(32, 256, 1, 2, 3),
        (16, 2048, 8192, "float8_e4m3fn"): Tuning(16, 256, 4, 2, 6),
        (16, 3072, 2048, "float8_e4m3fn"): Tuning(64, 128, 4, 4, 6),
        (16, 28672, 4096, "int8"): Tuning(32, 128, 1, 4, 3),
        (16, 4096, 14336, "int8"): Tuning(32, 512, 2, 4, 3),
        (16, 6144, 4096, "int8"): Tuning(32, 256, 2, 4, 4),
        (16, 4096, 4096, "int8"): Tuning(32, 512, 1, 4, 4),
        (16, 128256, 4096, "int8"): Tuning(32, 256, 1, 4, 3),
        (16, 16384, 2048, "int8"): Tuning(32, 256, 1, 4, 3),
        (16, 2048, 8192, "int8"): Tuning(32, 256, 4, 4, 5),
        (16, 3072, 2048, "int8"): Tuning(32, 128, 4, 4, 5),
        (16, 28672, 4096, "bfloat16"): Tuning(32, 64, 1, 4, 3),
        (16, 4096, 14336, "bfloat16"): Tuning(64, 256, 2, 4, 4),
        (16, 6144, 4096, "bfloat16"): Tuning(32, 128, 2, 4, 4),
        (16, 4096, 4096, "bfloat16"): Tuning(32, 256, 1, 4, 4),
        (16, 128256, 4096, "bfloat16"): Tuning(128, 128, 1, 4, 4),
        (16, 16384, 2048, "bfloat16"): Tuning(64, 128, 1, 4, 4),
        (16, 2048, 8192, "bfloat16"): Tuning(64, 256, 4, 4, 4),
        (16, 3072, 2048, "bfloat16"): Tuning(32, 128, 4, 4, 4),
        (16, 2048, 2048, "bfloat16"): Tuning(32, 128, 2, 4, 6),
    }
}


def tile_rows(rows: int) -> tuple[int, int]:
    """Rows of x a block, as a power of two and 0 or another one, of which the fewest are none of x's."""
    tiles = -(-rows // MAX_TILE_ROWS)
    share = -(-rows // tiles)
    powers = (16, 32, 64, 128)
    ways = [(one, more) for one in powers for more in (0, *powers) if more < one and one + more >= share]
    return min(ways, key=lambda way: (sum(way), way[1]))


def shared_memory(tuning: Tuning, rows: int, w: Any, x: Any) -> int:
    """Bytes a block of what is fetched ahead."""
    per_column = tuning.outputs * jnp.dtype(w).itemsize + sum(tile_rows(rows)) * jnp.dtype(x).itemsize
    return tuning.stages * tuning.columns * per_column


def tuning_for(rows: int, outputs: int, columns: int, w: Any, x: Any) -> Tuning:
    """The tuning for x [rows, columns] of dtype `x` and W [outputs, columns] of dtype `w` on this GPU.

    By rule, tiles of W are 64 rows, or 128 of matrices that have them for all multiprocessors; few rows of x take
    fewer, down to 16, until all multiprocessors have a tile. Where many rows of x make such tiles dear, as every block
    reads x, columns are divided among blocks in place of rows. The blocks of a multiprocessor have `IN_FLIGHT` bytes
    of W on their way, as far as a block's shared memory goes.
    """
    capability, name = triton.target_capability(), jnp.dtype(w).name
    tuning = TUNED.get(capability, {}).get((sum(tile_rows(rows)), outputs, columns, name))
    return tuning or _by_rule(rows, outputs, columns, w, x, capability)


def _by_rule(rows: int, outputs: int, columns: int, w: Any, x: Any, capability: int) -> Tuning:
    multiprocessors = this_device().multiprocessors or HOPPER.multiprocessors
    size, sum_rows = jnp.dtype(w).itemsize, sum(tile_rows(rows))
    row_tiles = -(-rows // sum_rows)

    def blocks(height: int) -> int:
        return row_tiles * -(-outputs // height)

    beside = MOST_BESIDE_128 if jnp.dtype(x).itemsize > 1 else 32  # float8: 64 were faster of every matrix
    tallest = 128 if blocks(128) >= multiprocessors and sum_rows <= beside else 64
    lowest = 64 if sum_rows > 32 else MIN_TILE
    if size == 4:  # products without tensor cores, in registers
        tallest = lowest = MIN_TILE
    height = max(lowest, tallest)
    while height > lowest and blocks(height) < multiprocessors * 7 // 8:
        height //= 2
    wide = max(MIN_TILE, min(512, TILE_BYTES // height) // size)
    wide = min(wide, 128 // size) if size == 4 or sum_rows > 32 else wide
    steps = -(-columns // wide)
    shares = 1
    if blocks(height) < multiprocessors * 7 // 8:
        shares = max(1, min(-(-multiprocessors // blocks(height)), steps // 4, 8))
    per_multiprocessor = max(1, min(4, -(-blocks(height) * shares // multiprocessors)))
    ahead = -(-IN_FLIGHT // per_multiprocessor // (height * wide * size))
    tuning = Tuning(height, wide, shares, 8 if height * sum_rows > 64 * 80 else 4, 1)
    a_stage = shared_memory(tuning, rows, w, x)
    stages = min(max(3, ahead + 1), STAGES, max(1, (SHARED_MEMORY[f"sm{capability}"] - RESERVED) // a_stage))
    return dataclasses.replace(tuning, stages=stages)


def _supports_sizes(x: jax.Array, outputs: int) -> bool:
    rows, columns = x.size // max(1, x.shape[-1]), x.shape[-1]
    aligned = columns % MIN_TILE == 0 and columns >= MIN_COLUMNS and outputs >= MIN_TILE
    return aligned and 0 < rows <= MAX_ROWS and f"sm{triton.target_capability()}" in SHARED_MEMORY


def _supports_result(x: jax.Array, add_to: jax.Array | None, out: Any) -> bool:
    result = jnp.dtype(x.dtype if out is None else out)
    return result in (jnp.bfloat16, jnp.float32) and (add_to is None or add_to.dtype == result)


def supports_product(x: jax.Array, w: jax.Array, *, add_to: jax.Array | None = None, out: Any = None) -> bool:
    """True for products that the kernel computes: bfloat16 or float32, up to `MAX_ROWS` of x."""
    fits = x.dtype in (jnp.bfloat16, jnp.float32) and w.dtype == x.dtype and w.ndim == 2
    return fits and _supports_sizes(x, w.shape[0]) and _supports_result(x, add_to, out)


def supports_eight_bits(
    x: jax.Array, w: Quantized, *, norm: Norm | None = None, add_to: jax.Array | None = None, out: Any = None
) -> bool:
    """True for products that the kernel computes: bfloat16, up to `MAX_ROWS` of x, float8 where the GPU has it."""
    fits = x.dtype == jnp.bfloat16 and w.values.ndim == 2
    fits = fits and (norm is None or w.kind.rounds_activations)
    multiplies = not w.kind.rounds_activations or triton.target_capability() >= FLOAT8_CAPABILITY
    return fits and multiplies and _supports_sizes(x, w.shape[0]) and _supports_result(x, add_to, out)


def product_triton(
    x: Float[Array, "*shape I"],
    w: Float[Array, "O I"],
    *,
    add_to: Float[Array, "*shape O"] | None = None,
    out: Any = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "*shape O"]:
    """Computes `skinny_gemm` by the kernel, rounding once, `add_to` included."""
    return _product(x, w, None, None, add_to, x.dtype if out is None else out, tuning, interpret)


def eight_bits_triton(
    x: Float[Array, "*shape I"],
    w: Quantized,
    *,
    norm: Norm | None = None,
    add_to: Float[Array, "*shape O"] | None = None,
    out: Any = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "*shape O"]:
    """Computes `skinny_gemm_eight_bits` by the kernel, rounding once behind the sum, `add_to` included."""
    result = x.dtype if out is None else out
    rounded, of_x = x, None
    if w.kind.rounds_activations:
        rounded, of_x = round_triton(x, w.kind, norm, interpret=interpret)
    return _product(
        w.kind.ordered(rounded), w.values, of_x, w.scale, add_to, result, tuning, interpret
    )  # fmt: skip


def round_triton(
    x: Float[Array, "*shape I"], kind: Quantization, norm: Norm | None = None, *, interpret: Any = None
) -> tuple[Shaped[Array, "*shape I"], Float[Array, "*shape"]]:
    """Computes `round_rows`, of a kind whose numbers are not whole, in one launch."""
    from smcjax.pallas.layer.skinny_gemm_triton_kernel import rounded

    *shape, columns = x.shape
    rows, weight = x.size // columns, None if norm is None else norm.weight
    values, scale = triton.launch(
        rounded,
        *(x.reshape(rows, columns), x if weight is None else weight),  # what is not there is not read
        out=(jax.ShapeDtypeStruct((rows, columns), jnp.dtype(kind.dtype)), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        grid=(rows,),
        warps=8,
        stages=1,
        interpret=interpret,
        WIDTH=columns,
        BLOCK=min(ROUNDED, triton.power_of_two(columns)),
        LARGEST=kind.largest,
        WEIGHTED=weight is not None,
        EPS=None if norm is None else norm.eps,
    )
    return values.reshape(x.shape), scale.reshape(shape)


def _product(
    x: jax.Array,
    w: jax.Array,
    of_x: jax.Array | None,
    of_w: jax.Array | None,
    add_to: jax.Array | None,
    result: Any,
    tuning: Tuning | None,
    interpret: Any,
) -> jax.Array:
    from smcjax.pallas.layer.skinny_gemm_triton_kernel import skinny_product

    *shape, columns = x.shape
    rows, outputs = x.size // columns, w.shape[0]
    tuning = tuning or tuning_for(rows, outputs, columns, w.dtype, x.dtype)
    one, more = tile_rows(rows)
    flat = x.reshape(rows, columns)
    row_tiles, output_tiles = -(-rows // (one + more)), -(-outputs // tuning.outputs)
    # What is not there is not read: any array stands for it.
    others = [flat if array is None else array.reshape(-1) for array in (of_x, of_w, add_to)]
    limited = w.dtype == FLOAT8 and triton.target_capability() == HOPPER.capability
    is_shared = tuning.shares > 1
    y, _ = triton.launch(
        skinny_product,
        *(flat, w, *others, triton.arrivals(row_tiles * output_tiles) if is_shared else flat),
        out=(
            jax.ShapeDtypeStruct((rows, outputs), jnp.dtype(result)),
            jax.ShapeDtypeStruct((tuning.shares, rows, outputs) if is_shared else (1,), jnp.float32),
        ),
        grid=(row_tiles, output_tiles, tuning.shares),
        warps=tuning.warps,
        stages=tuning.stages,
        interpret=interpret,
        ROWS=rows,
        OUTPUTS=outputs,
        COLUMNS=columns,
        TILE_ROWS=one,
        MORE_ROWS=more,
        TILE_OUTPUTS=tuning.outputs,
        TILE_COLUMNS=tuning.columns,
        SHARES=tuning.shares,
        SCALES_X=of_x is not None,
        SCALES_W=of_w is not None,
        ADDS=add_to is not None,
        SUMMED_INSIDE=min(SUMMED_INSIDE, tuning.columns) if limited else None,
    )
    return y.reshape(*shape, outputs)
