"""The sum of a sparse layer's branches, of segments that a launch has left: merge and gates in one kernel (Hopper).

    out_h = Σ_b sigmoid(w_hb · x + bias_hb) · merge of the segments of branch b

A block has four heads of a query. One warpgroup merges the segments of all branches side by side (`grouped_merge.py`),
another makes the gates of what `gates.py` has left of their products, since both wait for memory. Between a launch that
merges and one that weighs lay the branches' outputs, written and read, and the time between launches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from smcjax.pallas.attention.shared_merge import UNIT, units_of
from smcjax.pallas.dispatch import Kernel, runs_mosaic
from smcjax.pallas.layer.norm import PendingNorm
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.compat import pl, plgpu, store
from smcjax.pallas.mosaic.thread_dot import COLUMNS
from smcjax.pallas.mosaic.threads import WARPS, Threads
from smcjax.pallas.mosaic.wgmma import Ref
from smcjax.pallas.sparse.gates import (
    Parts,
    Products,
    asked_logit,
    gate_products,
    gated_sum,
    inverse_rms,
    sigmoid,
    supports_gated_sum,
)
from smcjax.pallas.sparse.grouped_attention_kernel import Shape
from smcjax.pallas.sparse.grouped_merge import Segments, Unmerged, merged, of_refs, place_of, row_layout
from smcjax.pallas.sparse.grouped_shares import Tuning


def _gates(
    t: Threads,
    sums: Ref,  # [N, splits, H · branches] f32 GMEM
    bias: Ref,  # [H · branches] bf16 GMEM
    gates: Ref,  # [branches, 4] f32 SMEM
    squares: Ref,  # [4] f32 SMEM
    *refs: Any,  # x [N, E] bf16 GMEM, where it lacks its norm; the token, its first head
    splits: int,
    rows: int,  # H · branches
    branches: int,
    eps: float,
) -> None:
    """Leaves the gates of four heads of a token."""
    *x, token, head = refs
    index = t.minimum(t.index, UNIT * branches - 1)
    logit = asked_logit(t, sums, bias, token, head * branches + index, splits, rows)
    scale = inverse_rms(t, x[0], squares, token, splits * COLUMNS, eps) if x else None
    t.store(gates, index % branches * UNIT + index // branches, sigmoid(t, logit, scale))


def _weigh(
    *refs: Ref,  # the segments' arrays, then in GMEM products [N, splits, H · branches] f32, bias [H · branches] bf16,
    # branches that are parts already [N, H, D] f32, x [N, E] bf16 where it lacks its norm, and the result [N, H, D]
    gates_smem: Ref,  # [branches, 4] f32
    squares_smem: Ref,  # [4] f32
    made: Ref,  # barrier of the gates
    shape: Shape,
    tuning: Tuning,
    of_segments: Sequence[int],  # the places of the segments' branches among all
    of_parts: Sequence[int],  # of parts
    eps: float | None,
    interpret: bool,
) -> None:
    """Writes four heads of a query."""
    segments, (products, bias, *others, out) = of_refs(refs, shape, tuning)
    parts, x = others[: len(of_parts)], others[len(of_parts) :]
    group, of_set, unit, warpgroup = (lax.axis_index(name) for name in ("group", "set", "unit", "warpgroup"))
    place, layout = place_of(shape, group, of_set, unit * UNIT), row_layout(out.shape[-1])
    heads = pl.ds(place.head, UNIT)

    @pl.when(place.is_there & (warpgroup == 1))
    def _make_gates() -> None:
        _, splits, rows = products.shape
        sizes = {"splits": splits, "rows": rows, "branches": gates_smem.shape[0], "eps": eps or 0.0}
        operands = (products, bias, gates_smem, squares_smem, *x, place.query, place.head)
        threads.run(functools.partial(_gates, **sizes), *operands, interpret=interpret)
        plgpu.barrier_arrive(made)

    @pl.when(place.is_there & (warpgroup == 0))
    def _merge() -> None:
        outputs = {
            b: plgpu.load(part.at[place.query, heads], layout=layout, optimized=False)
            for b, part in zip(of_parts, parts, strict=True)
        }
        found = merged(segments, group, of_set, unit * UNIT, range(len(of_segments)))
        outputs |= {b: output for b, (output, _) in zip(of_segments, found, strict=True)}
        plgpu.barrier_wait(made)
        terms = []
        for b, output in sorted(outputs.items()):
            gate = plgpu.load(gates_smem.at[b], layout=layout.reduce(1), optimized=False)
            terms.append(lax.broadcast_in_dim(gate, output.shape, [0]) * output)
        store(out.at[place.query, heads], functools.reduce(jnp.add, terms).astype(out.dtype))


def gated_merge_mosaic(
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
    """Computes `gated_sum` by the kernel, of segments; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    shape, x = parts[0].shape, x.reshape(-1, x.shape[2])
    if products is None:
        products = gate_products(x, gate, interpret=interpret)
    places = {one.branch: place for place, one in enumerate(unmerged) if one is not None}
    (segments, *_) = (one.segments for one in unmerged if one is not None)
    others = {b: part.reshape(-1, *shape[2:]) for b, part in enumerate(parts) if b not in places.values()}
    arrays = (x, products, bias, tuple(others.values()), segments)
    of = {"of_segments": tuple(places[b] for b in range(len(places))), "of_parts": tuple(others)}
    eps = None if pending is None else pending.eps
    return _gated_merge(*arrays, **of, eps=eps, interpret=interpret).reshape(shape)


@functools.partial(jax.jit, static_argnames=("of_segments", "of_parts", "eps", "interpret"))
def _gated_merge(
    x: Float[Array, "N E"],
    products: Products,
    bias: Float[Array, "H branches"],
    parts: tuple[Float[Array, "N H D"], ...],
    segments: Segments,
    *,
    of_segments: tuple[int, ...],
    of_parts: tuple[int, ...],
    eps: float | None,  # of the norm that x lacks; None: none
    interpret: Any,
) -> Float[Array, "N H D"]:
    """The launch. A jit of its own, so that a model's layers trace and lower the kernel once."""
    (heads, branches), dim, shape = bias.shape, segments.parts.shape[-1], segments.shape
    kernel = functools.partial(_weigh, of_segments=of_segments, of_parts=of_parts, eps=eps)
    weighed: jax.Array = plgpu.kernel(
        functools.partial(kernel, shape=shape, tuning=segments.tuning, interpret=interpret is not None),
        out_type=jax.ShapeDtypeStruct((len(x), heads, dim), x.dtype),
        grid=(segments.numbers[0].shape[0], shape.sets, units_of(shape.rows)),
        grid_names=("group", "set", "unit"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types={
            "gates_smem": plgpu.SMEM((branches, UNIT), jnp.float32),
            "squares_smem": plgpu.SMEM((WARPS,), jnp.float32),
            "made": plgpu.Barrier(),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="gated_merge",
    )(*segments.arrays, products, bias.reshape(-1), *parts, *([] if eps is None else [x]))
    return weighed


def _supports(
    x: jax.Array,
    gate: jax.Array,
    bias: jax.Array,
    parts: Parts,
    pending: PendingNorm | None = None,
    products: Products | None = None,
    unmerged: Sequence[Unmerged | None] = (),
) -> bool:
    there = [one for one in unmerged if one is not None]
    if not there or sorted(one.branch for one in there) != list(range(len(there[0].segments.numbers))):
        return False
    alike = all(one.segments.shape == there[0].segments.shape for one in there)
    return alike and supports_gated_sum(x, gate, bias, parts)


gated_sum.register(Kernel(runs_mosaic, gated_merge_mosaic, _supports), first=True)
