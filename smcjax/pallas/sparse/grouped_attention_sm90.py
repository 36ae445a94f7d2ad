"""Attention of query groups to their tasks by Mosaic GPU kernels (Hopper). Their reference: `grouped_attention.py`.

What a launch computes is in `grouped_attention_kernel.py`; here are the arguments that kernels take and what is read
from their results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smcjax.pallas.attention.prefix_shared import HALF, padded
from smcjax.pallas.attention.reference import divisor_of
from smcjax.pallas.attention.shared_merge import units_of
from smcjax.pallas.dispatch import Kernel, runs_mosaic
from smcjax.pallas.mosaic.compat import plgpu
from smcjax.pallas.mosaic.wgmma import QUERIES, swizzled
from smcjax.pallas.sparse.grouped_attention import (
    CHUNK,
    Branch,
    Part,
    Tasks,
    grouped_attention,
    grouped_branches,
    grouped_scores,
)
from smcjax.pallas.sparse.grouped_attention_kernel import Refs, Shape, attend
from smcjax.pallas.sparse.grouped_merge import Segments, Unmerged, by_pair, merge, result_types
from smcjax.pallas.sparse.grouped_shares import LOADERS, MAX_PAIRS, Tuning, default_tuning, scratch_words
from smcjax.pallas.sparse.query_groups import QueryGroups

MAX_TILES = 8  # of 64 queries, of a group and set

Found = tuple[tuple[Part, ...], jax.Array | None, jax.Array | None]  # by branch; the only one's scores, products


def supports(
    *,
    size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    unit: int,
    dtype: Any,
) -> bool:
    """True for groups of C = `size` queries that the kernels take; `page_size` and `unit` of every branch."""
    of_set = padded(num_heads // num_kv_heads)
    return (
        jnp.dtype(dtype) == jnp.bfloat16
        and head_dim in (64, 128)
        and of_set <= QUERIES
        and unit % 8 == 0
        and CHUNK % unit == 0
        and page_size % unit == 0
        and 1 <= size * of_set <= MAX_TILES * QUERIES
    )


def grouped_attention_mosaic(
    q: Float[Array, "R M H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    tasks: Tasks,
    groups: QueryGroups,
    low: Int[Array, "R M"],
    high: Int[Array, "R M"],
    *,
    unit: int,
    scale: float | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Part:
    """Computes `grouped_attention` by the kernels; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    branch = Branch(key_pages, value_pages, tasks, low, high)
    (part,) = grouped_branches_mosaic(
        q, (branch,), groups, units=(unit,), scale=scale, tuning=tuning, interpret=interpret
    )
    return part


def grouped_scores_mosaic(
    q: Float[Array, "R M H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    tasks: Tasks,
    groups: QueryGroups,
    low: Int[Array, "R M"],
    high: Int[Array, "R M"],
    *,
    unit: int,
    slots: int,
    scale: float | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Part, Float[Array, "R M H slots"], Float[Array, "groups S rows slots"]]:
    """Computes `grouped_scores` by the kernels; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    (part,), scores, products = _by_kernels(
        q,
        (Branch(key_pages, value_pages, tasks, low, high),),
        groups,
        units=(unit,),
        scale=scale,
        tuning=tuning,
        interpret=interpret,
        slots=slots,
    )
    assert scores is not None
    assert products is not None
    return part, scores, products


def grouped_branches_mosaic(
    q: Float[Array, "R M H D"],
    branches: tuple[Branch, ...],
    groups: QueryGroups,
    *,
    units: tuple[int, ...],
    scale: float | None = None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Part, ...]:
    """Attention of the same queries to each branch, of tasks of `units` slots, in one launch and one that merges.

    All branches have as many sets. `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    options = {"units": units, "scale": scale, "tuning": tuning, "interpret": interpret}
    return _by_kernels(q, branches, groups, **options)[0]


@functools.partial(jax.jit, static_argnames=("groups", "units", "scale", "tuning", "interpret", "slots"))
def _by_kernels(
    q: jax.Array,
    branches: tuple[Branch, ...],
    groups: QueryGroups,
    *,
    units: tuple[int, ...],
    scale: float | None,
    tuning: Tuning | None,
    interpret: Any,
    slots: int | None = None,
) -> Found:
    """Returns the branches' parts and, if it has so many `slots`, the only branch's scores and products.

    A jit of its own, so that a model's layers trace and lower the kernels once.
    """
    requests, queries, heads, dim = q.shape
    sets = branches[0].tasks.unit.shape[2]
    if not _supports_branches(q, branches, groups, units=units):
        pages = [list(branch.key_pages.shape) for branch in branches]
        raise ValueError(
            f"no kernel for q {q.dtype}{list(q.shape)} in groups of {groups.size} over pages {pages} in units {units}"
        )
    options = {"units": units, "scale": scale, "tuning": tuning, "interpret": interpret, "slots": slots}
    again = functools.partial(_by_kernels, groups=groups, **options)
    if requests > 1 and requests * groups.number * sets > MAX_PAIRS:
        return _in_halves(again, q, branches)
    of_set = heads // sets
    if lacking := padded(of_set) - of_set:
        return _with_heads_added(again, q, branches, sets, lacking)

    tuning = tuning or default_tuning(dim)
    shape = Shape(
        queries=groups.size,
        group_heads=of_set,
        sets=sets,
        groups=groups.number,
        of_request=queries,
        units=units,
        scale=math.log2(math.e) / divisor_of(scale, dim),
        together=tuning.subs if groups.size * of_set > QUERIES else 1,
    )
    all_groups = requests * groups.number
    order = np.asarray(groups.order)
    reordered = bool((order != np.arange(queries)).any())
    by_order = (q[:, order] if reordered else q).reshape(-1, heads, dim)
    if interpret:  # which, unlike the copy engine, gives no zeros for what lies behind the last query
        by_order = jnp.pad(by_order, ((0, groups.size + tuning.subs * QUERIES), (0, 0), (0, 0)))
    operands = [
        x.reshape(all_groups, *x.shape[2:]) if x.ndim > 2 and i > 1 else x
        for branch in branches
        for i, x in enumerate(_operands(branch, groups, shape))
    ]
    pairs, lines = all_groups * sets, all_groups * sets * len(branches) * shape.lines
    place = (lines + tuning.blocks, tuning.subs, QUERIES)
    kept = [] if slots is None else [(all_groups, sets, shape.tiles * QUERIES, slots)]
    shares, sums, notes, *products = plgpu.kernel(
        functools.partial(attend, tuning=tuning, shape=shape, interpret=bool(interpret)),
        out_type=[
            jax.ShapeDtypeStruct((*place, dim), jnp.float16),
            jax.ShapeDtypeStruct(place, jnp.float32),
            jax.ShapeDtypeStruct((lines, 2), jnp.int32),
            *(jax.ShapeDtypeStruct(shape, jnp.float16) for shape in kept),
        ],
        grid=(tuning.blocks,),
        grid_names=("block",),
        num_threads=tuning.subs + LOADERS,
        thread_name="warpgroup",
        scratch_types=_scratch(tuning, shape, pairs, dim, q.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="grouped_attention",
    )(by_order, *operands)
    numbers = operands[Refs._fields.index("number") :: len(Refs._fields)]
    segments = Segments(shares, sums, notes, tuple(numbers), shape, tuning)
    results = plgpu.kernel(
        functools.partial(merge, shape=shape, tuning=tuning),
        out_type=result_types(shape, requests, dim),
        grid=(all_groups, sets, units_of(shape.rows), len(branches)),
        grid_names=("group", "set", "unit", "branch"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="grouped_attention_merge",
    )(*segments.arrays)

    def by_query(x: jax.Array, *, own: bool = by_pair(shape)) -> jax.Array:
        """[R, M, H, …] of a branch's results."""
        if not own:
            x = x[:, :, : shape.rows].reshape(requests, groups.number, sets, groups.size, of_set, *x.shape[3:])
            x = jnp.moveaxis(x, 2, 3).reshape(requests, -1, heads, *x.shape[5:])[:, :queries]
        x = x.reshape(requests, queries, heads, *x.shape[2 if own else 3 :])
        return x[:, np.argsort(order)] if reordered else x

    parts = tuple(Part(by_query(out), by_query(lse)) for out, lse in zip(results[::2], results[1::2], strict=True))
    if not products:
        if by_pair(shape) and not reordered:
            parts = tuple(part._replace(unmerged=Unmerged(segments, b)) for b, part in enumerate(parts))
        return parts, None, None
    scores = by_query(products[0], own=False).astype(jnp.float32) / divisor_of(scale, dim)
    return parts, scores, products[0]


def _in_halves(again: Callable[..., Found], q: jax.Array, branches: tuple[Branch, ...]) -> Found:
    """Attends by two launches, each for half of the requests."""
    half = q.shape[0] // 2
    found = [
        again(q[of], tuple(_requests(branch, of) for branch in branches))
        for of in (slice(0, half), slice(half, q.shape[0]))
    ]
    found = [(tuple(part._replace(unmerged=None) for part in parts), s, p) for parts, s, p in found]
    return jax.tree.map(lambda *both: jnp.concatenate(both), *found)


def _with_heads_added(
    again: Callable[..., Found], q: jax.Array, branches: tuple[Branch, ...], sets: int, lacking: int
) -> Found:
    """Attends with so many heads of zeros beside those of each set, [R, M, H, D], and cuts them off the results."""
    requests, queries, heads, dim = q.shape
    by_set = jnp.pad(q.reshape(requests, queries, sets, -1, dim), ((0, 0),) * 3 + ((0, lacking), (0, 0)))
    parts, scores, products = again(by_set.reshape(requests, queries, -1, dim), branches)

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:2], sets, -1, *x.shape[3:])[:, :, :, :-lacking]
        return x.reshape(*x.shape[:2], heads, *x.shape[4:])

    own = tuple(Part(cut(part.out), cut(part.lse)) for part in parts)
    return own, None if scores is None else cut(scores), products


def _scratch(tuning: Tuning, shape: Shape, pairs: int, dim: int, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of `attend`: a warpgroup's queries and results, the ring of chunks, the share."""
    halves, of_set = (tuning.subs, dim // HALF), shape.group_heads
    return {
        "warpgroup_smem": plgpu.RefUnion(
            plgpu.SMEM((*halves, QUERIES // of_set, of_set, HALF), dtype, transforms=swizzled()[1:]),
            plgpu.SMEM((*halves, QUERIES, HALF), dtype, transforms=swizzled()),
            plgpu.SMEM((tuning.subs, QUERIES, dim), jnp.float16, transforms=swizzled()),
        ),
        "ring_and_share_smem": plgpu.RefUnion(
            plgpu.SMEM((2 * tuning.stages, CHUNK, dim), dtype, transforms=swizzled()),
            plgpu.SMEM((scratch_words(pairs),), jnp.int32),
        ),
        "q_ready": plgpu.Barrier(num_arrivals=dim // HALF, num_barriers=tuning.subs),
        "ready": plgpu.Barrier(num_arrivals=CHUNK // min(shape.units), num_barriers=2 * tuning.stages),
        "used": plgpu.Barrier(num_arrivals=shape.together, num_barriers=2 * tuning.stages),
        "share_read": plgpu.Barrier(num_arrivals=tuning.subs + LOADERS),
    }


def _requests(branch: Branch, of: slice) -> Branch:
    """The part of a branch that is these requests'."""
    return branch._replace(tasks=Tasks(*(x[of] for x in branch.tasks)), low=branch.low[of], high=branch.high[of])


def _operands(branch: Branch, groups: QueryGroups, shape: Shape) -> Refs:
    """A branch as the kernel reads it, by request and group."""
    tasks, present = branch.tasks, groups.present
    low, high = groups.split(branch.low), groups.split(branch.high)  # [R, g, C]
    count = jnp.broadcast_to(present.sum(axis=1), low.shape[:2])
    inner = jnp.stack([jnp.max(low, axis=2), jnp.min(high, axis=2), count], axis=2)
    lacking = shape.width - shape.rows

    def by_row(x: jax.Array, nothing: int) -> jax.Array:
        rows = jnp.repeat(jnp.where(present, x, nothing), shape.group_heads, axis=2)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, lacking)), constant_values=nothing)

    bounds = jnp.stack([by_row(low, 0), by_row(high, -1)], axis=2)
    queries = tasks.queries.reshape(*tasks.unit.shape[:3], -1)
    arrays = (tasks.unit, tasks.place, queries, tasks.number, bounds, inner)
    return Refs(branch.key_pages, branch.value_pages, *(x.astype(jnp.int32) for x in arrays))


def _supports_branches(
    q: jax.Array, branches: tuple[Branch, ...], groups: QueryGroups, *, units: tuple[int, ...], **options: Any
) -> bool:
    sets = branches[0].tasks.unit.shape[2]

    def is_supported(branch: Branch, unit: int) -> bool:
        _, page_size, kv_heads, _ = branch.key_pages.shape
        alike = q.dtype == branch.key_pages.dtype == branch.value_pages.dtype
        alike = alike and branch.key_pages.shape == branch.value_pages.shape
        alike = alike and branch.tasks.unit.shape[2] == sets == kv_heads
        return alike and supports(
            size=groups.size,
            num_heads=q.shape[2],
            num_kv_heads=kv_heads,
            head_dim=q.shape[3],
            page_size=page_size,
            unit=unit,
            dtype=q.dtype,
        )

    return groups.number * sets <= MAX_PAIRS and all(map(is_supported, branches, units))


def _supports(
    q: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    tasks: Tasks,
    groups: QueryGroups,
    low: jax.Array,
    high: jax.Array,
    *,
    unit: int,
    **options: Any,
) -> bool:
    return _supports_branches(q, (Branch(key_pages, value_pages, tasks, low, high),), groups, units=(unit,))


grouped_scores.register(Kernel(runs_mosaic, grouped_scores_mosaic, _supports))
grouped_attention.register(Kernel(runs_mosaic, grouped_attention_mosaic, _supports))
grouped_branches.register(Kernel(runs_mosaic, grouped_branches_mosaic, _supports_branches))
