"""Branches weighed by gates where their segments are merged: what the merge and the sum behind it make."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.dispatch import implementations
from smcjax.pallas.layer.norm import PendingNorm
from smcjax.pallas.sparse.gated_merge import gated_merge_mosaic
from smcjax.pallas.sparse.gates import gated_sum, gated_sum_reference
from smcjax.pallas.sparse.grouped_attention_kernel import Shape
from smcjax.pallas.sparse.grouped_merge import Segments, Unmerged
from smcjax.pallas.sparse.grouped_shares import Tuning

INTERPRET = plgpu.InterpretGPUParams()
BRANCHES, EMPTY = 3, 2 * -1e30


class Case(NamedTuple):
    """Shapes of a launch that has left segments."""

    requests: int = 2
    queries: int = 5  # of a request
    size: int = 3  # of a group
    sets: int = 2
    group_heads: int = 4
    dim: int = 64
    width: int = 512
    tuning: Tuning = Tuning(blocks=60, subs=2, stages=2)
    together: int = 1
    most: int = 5  # segments of a line

    @property
    def shape(self) -> Shape:
        groups = -(-self.queries // self.size)
        sizes = (self.size, self.group_heads, self.sets, groups, self.queries)
        return Shape(*sizes, units=(64,) * BRANCHES, scale=1.0, together=self.together)


class Drawn(NamedTuple):
    """Segments whose places that nobody has written hold NaN, and what they merge to."""

    segments: Segments
    parts: list[jax.Array]  # [R, M, H, D] f32, in the order of the segments' branches
    gates: tuple[jax.Array, jax.Array, jax.Array]  # x, weights, bias


def drawn(case: Case, seed: int = 0) -> Drawn:
    """Lines of 0 to `case.most` segments, of rows some of which have seen nothing; the first pair has no segment."""
    rng, shape, dim, tuning = np.random.default_rng(seed), case.shape, case.dim, case.tuning
    groups, subs = case.requests * shape.groups, tuning.subs
    lines = groups * case.sets * BRANCHES * shape.lines
    parts = np.full((lines + tuning.blocks, subs, 64, dim), np.nan, np.float16)
    lse = np.full((lines + tuning.blocks, subs, 64), np.nan, np.float32)
    notes, number = rng.integers(0, 99, (lines, 2)).astype(np.int32), np.zeros((BRANCHES, groups, case.sets), np.int32)
    out = np.zeros((BRANCHES, groups, case.sets, shape.width, dim))
    block = 0
    for pair, branch in np.ndindex(groups * case.sets, BRANCHES):
        group, of_set = divmod(pair, case.sets)
        segments = 0 if pair == 0 else int(rng.integers(0, case.most + 1))
        number[branch, group, of_set] = 3 * segments
        for which in range(shape.lines if segments else 0):
            line = (pair * BRANCHES + branch) * shape.lines + which
            notes[line] = block, segments
            here = slice(line + block, line + block + segments)
            block += segments - 1  # which may have the next line's first one too
            parts[here] = rng.standard_normal((segments, subs, 64, dim))
            nothing, found = rng.random(lse[here].shape) < 0.3, 9 * rng.standard_normal(lse[here].shape)
            lse[here] = np.where(nothing, EMPTY, found)
            parts[here][lse[here] == EMPTY] = 0
            for tile in range(case.together):
                of = slice(None) if case.together == 1 else slice(tile, tile + 1)
                weights = np.where(lse[here, of] == EMPTY, 0, np.exp2(lse[here, of].astype(float)))[..., None]
                mass = weights.sum((0, 1))
                at = (which * case.together + tile) * 64
                total = (weights * parts[here, of]).sum((0, 1)) / np.where(mass > 0, mass, 1)
                out[branch, group, of_set, at : at + 64] = total
    out = out[..., : shape.rows, :].reshape(BRANCHES, case.requests, shape.groups, case.sets, case.size, -1, dim)
    out = np.moveaxis(out, 3, 4).reshape(BRANCHES, case.requests, -1, case.sets * case.group_heads, dim)
    assert block < tuning.blocks
    numbers = tuple(jnp.asarray(one) for one in number)
    segments = Segments(jnp.asarray(parts), jnp.asarray(lse), jnp.asarray(notes), numbers, shape, tuning)

    def normal(*size: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size) * scale, jnp.bfloat16)

    heads = case.sets * case.group_heads
    weights = normal(heads, BRANCHES, case.width, scale=2 * case.width**-0.5), normal(heads, BRANCHES)
    merged = [jnp.asarray(one[:, : case.queries], jnp.float32) for one in out]
    return Drawn(segments, merged, (normal(case.requests, case.queries, case.width), *weights))


def expected(d: Drawn, parts: list[jax.Array], eps: float | None) -> jax.Array:
    """The reference in f32, of these parts."""
    x, gate, bias = (one.astype(jnp.float32) for one in d.gates)
    pending = None if eps is None else PendingNorm(x, eps)
    return gated_sum_reference(x, gate, bias, tuple(parts), pending)


def is_rounded(got: jax.Array, want: jax.Array) -> bool:
    """True where bfloat16 numbers are those of f32, rounded once."""
    return bool(jnp.all(jnp.abs(got.astype(jnp.float32) - want) <= jnp.abs(want) * 2**-8 + 2e-4))


def weighed(d: Drawn, order: tuple[int, ...], whole: tuple[int, ...], eps: float | None, interpret: Any) -> jax.Array:
    """By the kernel: part `place` of the sum is branch `order[place]`, given as a part where that is in `whole`."""
    pending = None if eps is None else PendingNorm(d.gates[0], eps)
    unwritten = jnp.full_like(d.parts[0], jnp.nan)  # what nobody reads
    parts = tuple(d.parts[b] if b in whole else unwritten for b in order)
    left = [b for b in range(BRANCHES) if b not in whole]
    shape = d.segments.shape._replace(units=(64,) * len(left))
    line = np.arange(len(d.segments.notes)).reshape(-1, BRANCHES, shape.lines)
    # The segments as a launch of the other branches alone would leave them: notes count from a line's own place on.
    own = line[:, left].reshape(-1)
    notes = d.segments.notes[own] + jnp.asarray(own - np.arange(len(own)))[:, None] * jnp.asarray([[1, 0]])
    segments = Segments(
        d.segments.parts, d.segments.lse, notes, tuple(d.segments.numbers[b] for b in left), shape, d.segments.tuning
    )
    unmerged = tuple(None if b in whole else Unmerged(segments, left.index(b)) for b in order)
    return gated_merge_mosaic(*d.gates, parts, pending, None, unmerged, interpret=interpret)


@pytest.mark.parametrize("interpret", [INTERPRET, pytest.param(None, marks=pytest.mark.gpu)], ids=["", "gpu"])
@pytest.mark.parametrize(("whole", "eps"), [((), None), ((2,), 0.5)], ids=["all, normed", "two, pending"])
def test_segments_are_merged_and_weighed(whole: tuple[int, ...], eps: float | None, interpret: Any) -> None:
    """A short last group, lines without segments and rows that have seen nothing. Controls: another order, no norm."""
    d, order = drawn(Case()), (2, 0, 1)
    got = weighed(d, order, whole, eps, interpret)
    assert got.dtype == jnp.bfloat16
    assert is_rounded(got, expected(d, [d.parts[b] for b in order], eps))
    assert not is_rounded(got, expected(d, d.parts, eps))
    assert not is_rounded(got, expected(d, [d.parts[b] for b in order], 0.7 if eps is None else None))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(requests=1, queries=20, size=20, tuning=Tuning(blocks=90, subs=2, stages=2), together=2, width=256),
        Case(requests=1, queries=3, sets=1, group_heads=8, dim=128, tuning=Tuning(blocks=40, subs=1, stages=1)),
    ],
    ids=["two tiles", "eight heads, one warpgroup, few lines"],
)
def test_shapes(case: Case) -> None:
    """Tiles of warpgroups' own, sets of more heads than a block has, and lines that are few beside blocks."""
    d = drawn(case, 1)
    assert is_rounded(weighed(d, (0, 1, 2), (), None, INTERPRET), expected(d, d.parts, None))


def test_is_chosen_for_segments_and_lowers_for_cuda() -> None:
    """At an 8B model's shapes two launches; segments of which some branch is missing go by their parts."""
    case = Case(8, 9, 9, 8, 4, 128, 4096, Tuning())
    shape, groups, lines = case.shape, 8, 8 * 8 * BRANCHES
    f16, f32, i32 = (
        functools.partial(lambda dtype, *size: jax.ShapeDtypeStruct(size, dtype), dtype)
        for dtype in (jnp.float16, jnp.float32, jnp.int32)
    )
    place = (lines + case.tuning.blocks, case.tuning.subs, 64)
    numbers = tuple(i32(groups, 8) for _ in range(BRANCHES))
    segments = Segments(f16(*place, 128), f32(*place), i32(lines, 2), numbers, shape, case.tuning)
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    gates = bf16((8, 9, 4096)), bf16((32, BRANCHES, 4096)), bf16((32, BRANCHES))
    parts = tuple(f32(8, 9, 32, 128) for _ in range(BRANCHES))

    def weigh(x: Any, gate: Any, bias: Any, parts: Any, unmerged: Any) -> jax.Array:
        return gated_sum(x, gate, bias, parts, PendingNorm(x, 1e-5), None, unmerged)

    whole = tuple(Unmerged(segments, b) for b in range(BRANCHES))
    with implementations("mosaic"):
        for unmerged, name in ((whole, "gated_merge_mosaic"), ((None, *whole[1:]), "gated_sum_mosaic")):
            kernel = gated_sum.kernel_for(*gates, parts, PendingNorm(gates[0], 1e-5), None, unmerged)
            assert kernel is not None
            assert getattr(kernel.run, "__name__", "") == name
        text = jax.jit(weigh).trace(*gates, parts, whole).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2
