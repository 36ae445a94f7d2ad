"""Gates of a sparse layer's branches and the sum that they weigh, in two launches: Mosaic GPU kernels (Hopper).

    out_h = Σ_b sigmoid(w_hb · x + bias_hb) · part_bh          b: the branches, h: query heads

Products with x of a few tokens are parts of 256 columns each (`mosaic/thread_dot.py`), which the second launch adds up
for each token: all that is written in between, a 256th of the operands of the products. Where x lacks its norm, which
is then a factor of the logits, the second launch makes that too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from smcjax.device import product_precision
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic
from smcjax.pallas.layer.norm import PendingNorm
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.compat import plgpu
from smcjax.pallas.mosaic.fuse_launches import Part, Place, launch
from smcjax.pallas.mosaic.thread_dot import AHEAD, COLUMNS, row_products, together_of
from smcjax.pallas.mosaic.threads import WARP, WARPGROUP, WARPS, Ref, Threads, Word
from smcjax.pallas.sparse.grouped_merge import Unmerged

MAX_TOKENS = 128  # that it has been tried with
AT_ONCE = 8 * WARPGROUP  # numbers of a token, that a block of threads weighs
MAX_ROWS = AHEAD * WARPS  # of gates, that a block multiplies: a warp has no row to wait for behind its first ones

Parts = tuple[Float[Array, "R T H D"], ...]
Products = Float[Array, "N splits rows"]  # of 256 columns of N tokens' x each with the rows of all gates, f32


def gated_sum_reference(
    x: Float[Array, "R T E"],
    gate: Float[Array, "H branches E"],
    bias: Float[Array, "H branches"],
    parts: Parts,
    pending: PendingNorm | None = None,
    products: Products | None = None,
    unmerged: Sequence[Unmerged | None] = (),
) -> Float[Array, "R T H D"]:
    """The sum of branches' outputs, each times the sigmoid of a linear map of x; in x's dtype, gates in f32.

    x lacks its norm where that is `pending`, which is of x then. `products` are those of `products_part`, where they
    are there already: kernels need not make them. Nor do they need parts that `unmerged` has instead, one a part.
    """
    outputs = jnp.stack([part.astype(x.dtype) for part in parts], axis=3)
    return weighed_sum(sigmoid_gates(x, gate, bias, pending), outputs)


def sigmoid_gates(
    x: Float[Array, "R T E"],
    gate: Float[Array, "H branches E"],
    bias: Float[Array, "H branches"],
    pending: PendingNorm | None = None,
) -> Float[Array, "R T H branches"]:
    """Sigmoids of a linear map of x, f32; x lacks its norm where that is `pending`."""
    precision = product_precision(x.dtype)
    logits = jnp.einsum("rte,hbe->rthb", x, gate, precision=precision, preferred_element_type=jnp.float32)
    logits = logits if pending is None else pending.divide(logits)
    return jax.nn.sigmoid(logits + bias.astype(jnp.float32)[None, None])


def weighed_sum(
    gates: Float[Array, "R T H branches"], outputs: Float[Array, "R T H branches D"]
) -> Float[Array, "R T H D"]:
    """The sum of `outputs` times `gates`, in their dtype."""
    return jnp.sum(gates[..., None].astype(outputs.dtype) * outputs, axis=3)


def _multiply(
    t: Threads,
    x: Ref,  # [N, E] bf16 GMEM, as all that follow
    weights: Ref,  # [rows, E] bf16
    sums: Ref,  # [N, E/256, rows] f32
    first: Word,
    first_row: Word,
    split: Word,
    *,
    number: int,
    width: int,
    rows: int,
    of_block: int,
    together: int,
) -> None:
    """Leaves the products of 256 columns of `of_block` rows with some tokens, from the first row and token on."""
    # A lane has eight of the split's 256 columns, in every warp the same; warps divide the rows. Tokens stay in
    # registers for all rows. In place of a token behind the last one the last is read, and nothing is stored for it.
    column = split * COLUMNS + t.index % WARP * 8
    tokens = [t.load8(x, t.minimum(first + i, number - 1) * width + column) for i in range(together)]

    def row(index: Word) -> list[Word]:
        found: list[Word] = t.load8(weights, (first_row + index) * width + column)
        return found

    # Rows are streamed through registers and each [256] · [256] is summed over a warp, which leaves a result in one
    # lane or in several alike, one of which stores it. No barrier: warps share no result.
    for which, output, total, is_one in row_products(t, tokens, row, of_block):
        token = first + which
        place = (token * (width // COLUMNS) + split) * rows + first_row + output
        t.store(sums, place, total, only=(token < number) & is_one)


def _weigh(
    t: Threads,
    sums: Ref,  # [N, splits, H · branches] f32 GMEM, as all that does not say SMEM
    bias: Ref,  # [H · branches] bf16
    *refs: Ref,  # parts [N, H · D] f32, out [N, H · D] bf16; SMEM: gates [heads · branches] f32, squares [4] f32
    x: Ref | None,  # [N, E] bf16, where it lacks its norm
    token: Word,
    share: Word,
    splits: int,
    heads: int,
    dim: int,
    eps: float,
) -> None:
    """Writes 1,024 numbers of a token, those of a few heads."""
    *parts, out, gates, squares = refs
    # Phase 1: ask for all that comes from memory, before any of it is waited for. The first threads make a gate each,
    # for the heads of this share; the rest repeat the last gate, and store the same number in the same place.
    here, branches = AT_ONCE // dim, len(parts)
    index = t.minimum(t.index, here * branches - 1)
    logit = asked_logit(t, sums, bias, token, share * (here * branches) + index, splits, heads * branches)
    # [heads, D] of the share is [128 threads, 8 numbers]: since D is 64 or 128, a thread's eight are of one head.
    begin = token * (heads * dim) + share * AT_ONCE + t.index * 8
    found = [t.load4(part, begin) + t.load4(part, begin + 4) for part in parts]
    # Phase 2: gates, in shared memory. A norm that x lacks is one factor a token, made by all threads with a barrier.
    scale = None if x is None else inverse_rms(t, x, squares, token, splits * COLUMNS, eps)
    t.store(gates, index, sigmoid(t, logit, scale))
    # A thread weighs with gates that other threads have made.
    t.synchronize()
    # Phase 3: the sum over branches in their order, in f32, rounded once by the store.
    head, total = t.index * 8 // dim, [t.constant(0.0)] * 8
    for branch, numbers in enumerate(found):
        weight = t.load(gates, head * branches + branch)
        total = [t.multiply_add(one, weight, so_far) for one, so_far in zip(numbers, total, strict=True)]
    t.store8(out, begin, total)


class Logit(NamedTuple):
    """A gate's logit, of which loads are on their way: parts of its product, in which x may lack its norm; and bias."""

    terms: list[Word]
    bias: Word


def asked_logit(t: Threads, sums: Ref, bias: Ref, token: Word, row: Word, splits: int, rows: int) -> Logit:
    """Asks for the logit of one of the `rows` gates of a token; `sums` and `bias` as in `_weigh`."""
    return Logit([t.load(sums, (token * splits + i) * rows + row) for i in range(splits)], t.load(bias, row))


def sigmoid(t: Threads, logit: Logit, scale: Word | None) -> Word:
    """The gate; `scale` is what its product lacks (None: nothing)."""
    # The parts of 256 columns are added up in their order, so that a gate has the same bits in every launch. The norm
    # is a factor of the product alone, not of the bias.
    product = functools.reduce(lambda a, b: a + b, logit.terms)
    product = product if scale is None else product * scale
    return t.constant(1.0) / (t.exp(t.constant(0.0) - (product + logit.bias)) + 1.0)


def inverse_rms(t: Threads, x: Ref, squares: Ref, token: Word, width: int, eps: float) -> Word:
    """1/rms of a token's x [N, E], in all threads; `squares` [4] f32 SMEM."""
    # A thread has eight neighbours of each 1,024 numbers. A start behind the end is moved back onto the last eight,
    # which then count nothing.
    starts = [(t.index + i * WARPGROUP) * 8 for i in range(-(-width // AT_ONCE))]
    found = [t.load8(x, token * width + t.minimum(start, width - 8)) for start in starts]
    mine = t.constant(0.0)
    for start, numbers in zip(starts, found, strict=True):
        total = functools.reduce(lambda so_far, one: t.multiply_add(one, one, so_far), numbers, t.constant(0.0))
        mine = mine + t.where(start < width, total, t.constant(0.0))
    # Five exchanges leave the warp's sum in each of its lanes.
    for distance in (16, 8, 4, 2, 1):
        mine = mine + t.shuffle_xor(mine, distance)
    # The four warps' sums meet in shared memory, and every thread adds them up in one order.
    t.store(squares, t.index // WARP, mine, only=t.index % WARP == 0)
    t.synchronize()
    total = functools.reduce(lambda a, b: a + b, [t.load(squares, t.constant(warp)) for warp in range(WARPS)])
    return t.inverse_root(t.multiply_add(total, 1 / width, t.constant(eps)))


def products_part(x: Float[Array, "N E"], gate: Float[Array, "H branches E"], *, interpret: Any) -> Part:
    """The first launch's blocks, whose result are `Products`."""
    (number, width), (heads, branches, _), inside = x.shape, gate.shape, interpret is not None
    together, rows, splits = together_of(number), heads * branches, width // COLUMNS
    # A block has at most as many rows as its warps ask for at once, and all blocks have as many.
    of_block = math.gcd(rows, MAX_ROWS)
    sizes = {"number": number, "width": width, "rows": rows, "of_block": of_block, "together": together}
    multiply = functools.partial(_multiply, **sizes)

    def body(place: Place, x: Ref, weights: Ref, sums: Ref) -> None:
        first, first_row = place["chunk"] * together, place["rows"] * of_block
        threads.run(multiply, x, weights, sums, first, first_row, place["split"], interpret=inside)

    return Part(
        body,
        {"chunk": -(-number // together), "rows": rows // of_block, "split": splits},
        (x, gate.reshape(rows, width)),
        (jax.ShapeDtypeStruct((number, splits, rows), jnp.float32),),
    )


@functools.partial(jax.jit, static_argnames="interpret")
def gate_products(x: Float[Array, "N E"], gate: Float[Array, "H branches E"], *, interpret: Any) -> Products:
    """A jit of its own, so that a model's layers trace and lower the kernel once."""
    part = products_part(x, gate, interpret=interpret)
    ((products,),) = launch("gates", part, compiler_params=threads.compiler_params(), interpret=interpret)
    return products


def gated_sum_mosaic(
    x: Float[Array, "R T E"],
    gate: Float[Array, "H branches E"],
    bias: Float[Array, "H branches"],
    parts: Parts,
    pending: PendingNorm | None = None,
    products: Products | None = None,
    unmerged: Sequence[Unmerged | None] = (),
    *,
    interpret: Any = None,
) -> Float[Array, "R T H D"]:
    """Computes `gated_sum` by the kernels, of parts; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    flat, x = [part.reshape(-1, part.shape[2] * part.shape[3]) for part in parts], x.reshape(-1, x.shape[2])
    if products is None:
        products = gate_products(x, gate, interpret=interpret)
    how = {"dim": parts[0].shape[3], "eps": None if pending is None else pending.eps, "interpret": interpret}
    return _gated_sum(x, products, bias, flat, **how).reshape(parts[0].shape)


@functools.partial(jax.jit, static_argnames=("dim", "eps", "interpret"))
def _gated_sum(
    x: Float[Array, "N E"],
    products: Products,
    bias: Float[Array, "H branches"],
    parts: list[Float[Array, "N HD"]],
    *,
    dim: int,
    eps: float | None,  # of the norm that x lacks; None: none
    interpret: Any,
) -> Float[Array, "N HD"]:
    """The second launch. A jit of its own, so that a model's layers trace and lower the kernel once."""
    (number, splits, rows), (heads, branches), inside = products.shape, bias.shape, interpret is not None
    # x is an operand only where its norm is still to be made.
    normed = [] if eps is None else [x]

    def program(t: Threads, *args: Any) -> None:
        *refs, token, share = args
        source, refs = (refs[0], refs[1:]) if normed else (None, refs)
        sizes = {"splits": splits, "heads": heads, "dim": dim}
        _weigh(t, *refs, x=source, token=token, share=share, eps=eps or 0.0, **sizes)

    def weigh(*refs: Ref, gates: Ref, squares: Ref) -> None:
        threads.run(program, *refs, gates, squares, lax.axis_index("token"), lax.axis_index("share"), interpret=inside)

    weighed: jax.Array = plgpu.kernel(
        weigh,
        out_type=jax.ShapeDtypeStruct((number, heads * dim), x.dtype),
        grid=(number, heads * dim // AT_ONCE),
        grid_names=("token", "share"),
        scratch_types={
            "gates": plgpu.SMEM((AT_ONCE // dim * branches,), jnp.float32),
            "squares": plgpu.SMEM((WARPS,), jnp.float32),
        },
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="gated_sum",
    )(*normed, products, bias.reshape(rows), *parts)
    return weighed


def supports_products(x: jax.Array, gate: jax.Array, dim: int) -> bool:
    """True where the kernels take the products of x [R, T, E] with `gate` and heads of size `dim`."""
    heads, branches, width = gate.shape
    return (
        x.dtype == gate.dtype == jnp.bfloat16
        and 0 < x.shape[0] * x.shape[1] <= MAX_TOKENS
        and width % COLUMNS == 0
        and heads * branches % 4 == 0
        and dim in (64, 128)
        and heads * dim % AT_ONCE == 0
        and AT_ONCE // dim * branches <= WARPGROUP
    )


def supports_gated_sum(
    x: jax.Array,
    gate: jax.Array,
    bias: jax.Array,
    parts: Parts,
    pending: PendingNorm | None = None,
    products: Products | None = None,
    unmerged: Sequence[Unmerged | None] = (),
) -> bool:
    """True where the kernels take these arguments of `gated_sum`."""
    of_f32 = all(part.dtype == jnp.float32 for part in parts)
    return bias.dtype == jnp.bfloat16 and of_f32 and supports_products(x, gate, parts[0].shape[3])


gated_sum = Op(gated_sum_reference)
gated_sum.register(Kernel(runs_mosaic, gated_sum_mosaic, supports_gated_sum))
