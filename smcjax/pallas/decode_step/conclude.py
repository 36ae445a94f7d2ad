"""From one decode step to the next: each row's token, its log-probability and its embedding, in one small launch.

The blocks of a step (`kernel.py`) leave what they found among their own ids. Per row:

    token, logprob   from these candidates (`mosaic/gumbel_max.py`)
    x, x∘g           the token's embedding, where the next step begins, and that times its first norm's weight

One block a row. The reference is `conclude_reference`, which XLA makes two launches of; steps whose tokens are looked
up in int8 rows end by it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from smcjax.matmul import matrix
from smcjax.pallas.decode_step.shape import padded_tokens
from smcjax.pallas.mosaic.compat import pl, plgpu
from smcjax.pallas.mosaic.gumbel_max import NO_ID, Candidates, reduce_candidates
from smcjax.pallas.mosaic.wgmma import MASKED, Ref

VECTOR = 4  # candidates that each of 128 threads loads at once
WHOLE = 128 * VECTOR  # candidates come in multiples of these


class Embedded(NamedTuple):
    """The beginning of a step: the residual of M tokens, `padded_tokens` of them."""

    x: Float[Array, "M E"]
    xg: Float[Array, "M E"]  # times the first norm's weight


class Concluded(NamedTuple):
    """Tokens that a step draws, and where the next one begins."""

    token: Int[Array, " R"]
    logprob: Float[Array, " R"]
    following: Embedded  # the R tokens


def padded_candidates(count: int) -> int:
    """n for this many candidates."""
    return -(-count // WHOLE) * WHOLE


def embedded(embed: Any, norm: Float[Array, " E"], tokens: Int[Array, "*shape"]) -> Embedded:
    """The beginning of a step over these tokens, row by row; zeros beyond them. `embed` [V, E] as in `Weights`."""
    x = matrix(embed).rows(tokens.reshape(-1))
    x = jnp.pad(x, ((0, padded_tokens(x.shape[0]) - x.shape[0]), (0, 0)))
    return Embedded(x, (x.astype(jnp.float32) * norm.astype(jnp.float32)[None]).astype(x.dtype))


def conclude_reference(
    found: Candidates, embed: Any, norm: Float[Array, " E"], *, count: int, rows: int, columns: int
) -> Concluded:
    """Computes `conclude` by XLA."""
    token, logprob = reduce_candidates(Candidates(*(x[columns - 1 : rows * columns : columns, :count] for x in found)))
    return Concluded(token, logprob, embedded(embed, norm, token))


def _kernel(
    best_ref: Ref,  # [M, n] f32 GMEM, as all that follow
    ids_ref: Ref,  # [M, n] int32
    logit_ref: Ref,  # [M, n] f32
    top_ref: Ref,  # [M, n] f32
    mass_ref: Ref,  # [M, n] f32
    embed_ref: Ref,  # [V, E] bf16
    norms_ref: Ref,  # [norms, E] bf16
    token_ref: Ref,  # [R] int32
    logprob_ref: Ref,  # [R] f32
    x_ref: Ref,  # [M', E] bf16
    xg_ref: Ref,  # [M', E] bf16
    *,
    count: int,
    rows: int,
    columns: int,
) -> None:
    row = lax.axis_index("row")
    width, hidden = best_ref.shape[1], embed_ref.shape[1]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=VECTOR)
    of_hidden = plgpu.Layout.WG_STRIDED((hidden,), vec_size=math.gcd(8, hidden // 128))
    norm = plgpu.load(norms_ref.at[0], layout=of_hidden).astype(jnp.float32)

    @pl.when(row < rows)
    def _conclude() -> None:
        at = row * columns + columns - 1
        best, ids, logit, top, mass = (
            plgpu.load(ref.at[at], layout=layout) for ref in (best_ref, ids_ref, logit_ref, top_ref, mass_ref)
        )
        left = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout) < count
        best = jnp.where(left, best, -jnp.inf)
        first = left & (best == jnp.max(best))
        token = jnp.min(jnp.where(first, ids, NO_ID))
        # One of NaN only has no largest: an id that exists.
        token = lax.clamp(0, token, embed_ref.shape[0] - 1)
        x = plgpu.load(embed_ref.at[token], layout=of_hidden)
        chosen = jnp.max(jnp.where(first & (ids == token), logit, -jnp.inf))
        top = jnp.where(left, top, MASKED)
        most = jnp.max(top)
        total = jnp.sum(jnp.where(left, mass * jnp.exp(top - most), 0.0))
        token_ref[row] = token
        logprob_ref[row] = chosen - most - jnp.log(total)
        x_ref[row] = x
        xg_ref[row] = (x.astype(jnp.float32) * norm).astype(xg_ref.dtype)

    @pl.when(row >= rows)
    def _pad() -> None:
        zeros = plgpu.layout_cast(jnp.zeros((hidden,), x_ref.dtype), of_hidden)
        x_ref[row] = zeros
        xg_ref[row] = zeros


def conclude(
    found: Candidates,
    embed: Float[Array, "V E"],
    norms: Float[Array, "norms E"],
    *,
    count: int,
    rows: int,
    columns: int,
    interpret: Any = None,
) -> Concluded:
    """Draws each row's token from `count` candidates of its last column of T = `columns`, and embeds it.

    `norms[0]` is the first norm's weight. A log-probability is NaN where a logit is. `interpret` is
    `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    padded = padded_tokens(rows)
    out = jax.ShapeDtypeStruct((padded, embed.shape[1]), embed.dtype)
    token, logprob, x, xg = plgpu.kernel(
        functools.partial(_kernel, count=count, rows=rows, columns=columns),
        out_type=[
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            out,
            out,
        ],
        grid=(padded,),
        grid_names=("row",),
        interpret=interpret,
        kernel_name="conclude_step",
    )(*found, embed, norms)
    return Concluded(token, logprob, Embedded(x, xg))
