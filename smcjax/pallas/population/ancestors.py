"""From the weights of many small populations to ESS and ancestors: one Mosaic GPU kernel (Hopper), a thread a group.

XLA makes a launch of each of the sums over N particles that follow each other. Here a thread holds its group's weights
in registers, and N² comparisons take the place of searches. The reference is `smcjax.smc.resampling.plan_resampling`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.compat import plgpu
from smcjax.pallas.mosaic.threads import WARPGROUP, Ref, Threads, Word

MAX_PARTICLES = 32


def _sum(words: list[Word]) -> Word:
    return functools.reduce(lambda a, b: a + b, words)


def _ancestors(
    t: Threads,
    log_weight: Ref,  # [G, N] f32 GMEM, as all that follow
    positions: Ref,  # [G, N] f32
    running: Ref,  # [G] int32
    ess: Ref,  # [G] f32
    resampled: Ref,  # [G] int32
    ancestors: Ref,  # [G, N] int32
    offspring: Ref,  # [G, N] int32
    log_mean: Ref,  # [G] f32
    block: Word,
    *,
    shape: tuple[int, int],
    below: float,
) -> None:
    groups, n = shape
    index = block * WARPGROUP + t.index
    there, group = index < groups, t.minimum(index, groups - 1)
    log_weights = [t.load(log_weight, group * n + i) for i in range(n)]
    points = [t.load(positions, group * n + i) for i in range(n)]
    goes = t.load(running, group)
    zero = t.constant(0)

    top = functools.reduce(lambda a, b: t.where(a < b, b, a), log_weights)
    top = t.where(top == -math.inf, 0.0, top)
    weights = [t.exp2((x - top) * math.log2(math.e)) for x in log_weights]
    total = _sum(weights)
    weights = [w / t.where(total == 0.0, 1.0, total) for w in weights]
    squares = _sum([w * w for w in weights])
    size = t.where(squares == 0.0, 0.0, t.constant(1.0) / t.where(squares == 0.0, 1.0, squares))
    needed = (goes != 0) & (size < below)

    # Offspring: how many points fall to each particle in the cumulative weights; a point beyond them to the last that
    # has any.
    cumulative, last, so_far = [], zero, t.constant(0.0)
    for i, w in enumerate(weights):
        so_far = so_far + w
        cumulative.append(so_far)
        last = t.where(w == 0.0, last, i)
    counts = [zero] * n
    for point in points:
        drawn = t.minimum(_sum([t.where(point < c, 0, t.constant(1)) for c in cumulative]), last)
        counts = [count + t.where(drawn == i, 1, zero) for i, count in enumerate(counts)]

    # A row without any takes the next surplus copy, in row order.
    surplus, copies, dead = zero, [], zero
    for count in counts:
        surplus = surplus + t.where(count < 1, 0, count - 1)
        copies.append(surplus)
    for i, count in enumerate(counts):
        source = _sum([t.where(dead < c, 0, t.constant(1)) for c in copies])
        ancestor = t.where(needed, t.where(count == 0, source, i), i)
        t.store(ancestors, group * n + i, ancestor, only=there)
        t.store(offspring, group * n + i, t.where(needed, count, t.constant(1)), only=there)
        dead = dead + t.where(count == 0, 1, zero)

    t.store(ess, group, size, only=there)
    t.store(resampled, group, needed, only=there)
    t.store(log_mean, group, t.log2(total) * math.log(2) + top - math.log(n), only=there)


def supports_ancestors(n: int, dtype: Any) -> bool:
    """True for populations of N = `n` that the kernel resamples."""
    return n <= MAX_PARTICLES and jnp.dtype(dtype) == jnp.float32


def ancestors_mosaic(
    log_weight: Float[Array, "G N"],
    positions: Float[Array, "G N"],
    running: Bool[Array, " G"],
    *,
    below: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """ESS [G], whether a group is resampled, its ancestors and offspring [G, N], and the log of its mean weight [G].

    A running group is resampled where its ESS is less than `below`; the others' rows are their own ancestors.
    `positions` are the points in [0, 1) that each fall to a particle. `interpret`: `plgpu.InterpretGPUParams()` to run
    on a CPU.
    """
    groups, n = log_weight.shape

    def kernel(*refs: Ref) -> None:
        program = functools.partial(_ancestors, shape=(groups, n), below=below)
        threads.run(program, *refs, lax.axis_index("block"), interpret=interpret is not None)

    ess, resampled, ancestors, offspring, log_mean = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((groups,), jnp.float32),
            jax.ShapeDtypeStruct((groups,), jnp.bool_),
            jax.ShapeDtypeStruct((groups, n), jnp.int32),
            jax.ShapeDtypeStruct((groups, n), jnp.int32),
            jax.ShapeDtypeStruct((groups,), jnp.float32),
        ],
        grid=(-(-groups // WARPGROUP),),
        grid_names=("block",),
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="ancestors",
    )(log_weight, positions, running.astype(jnp.int32))
    return ess, resampled, ancestors, offspring, log_mean
