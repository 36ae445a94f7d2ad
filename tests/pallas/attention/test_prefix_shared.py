"""The kernels that read what rows share once: interpreted, against the plain version; and lowered for CUDA."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax import smc
from smcjax.model.config import ModelConfig
from smcjax.model.params import init_params
from smcjax.pallas.attention.paged_attention import paged_attention, plan_sharing
from smcjax.pallas.attention.prefix_plan import QUERIES, find_sharing
from smcjax.pallas.attention.prefix_shared import (
    padded,
    shared_attention_mosaic,
    supports,
    supports_plan,
)
from smcjax.pallas.attention.reference import paged_attention_reference
from smcjax.pallas.attention.shared_tuning import MAX_SHARES, Tuning, default_tuning, tiles_of
from smcjax.pallas.dispatch import active_implementation, implementations
from tests.helpers import Ask, batch, published

INTERPRET = plgpu.InterpretGPUParams()
Case = dict[str, jax.Array]

# As one program each: their single operations would be compiled one by one.
plan = jax.jit(find_sharing, static_argnames=("rows", "queries", "page_size", "chunk", "tiles"))
reference = jax.jit(paged_attention_reference, static_argnames=("window", "scale", "first"))


def case(
    lengths: list[int],
    shared: list[int],
    *,
    rows: int,
    columns: int = 1,
    kv_heads: int = 1,
    group: int = 4,
    page_size: int = 16,
    dim: int = 64,
) -> tuple[Case, Case]:
    """A family tree: row r names the first `shared[r]` pages of an earlier row of its group.

    With NaN in all slots not in use, and with zeros there; where a table names nothing it names the trash page.
    """
    rng = np.random.default_rng(len(lengths) + columns + page_size)
    count, width = len(lengths), -(-max(lengths) // page_size) + 2
    table = 1 + rng.permutation(count * width).reshape(count, width)
    for r in range(count):
        if r % rows:
            table[r, : shared[r]] = table[rng.integers(r - r % rows, r), : shared[r]]
    shape = (count * width + 1, page_size, kv_heads, dim)
    used = np.zeros(shape[:2], bool)
    for r, length in enumerate(lengths):
        slot = np.arange(length)
        used[table[r, slot // page_size], slot % page_size] = True
        table[r, -(-length // page_size) :] = 0
    positions = np.maximum(np.array(lengths)[:, None] - columns + np.arange(columns), 0)
    inputs = {
        "q": jnp.asarray(rng.normal(size=(count, columns, kv_heads * group, dim)), jnp.bfloat16),
        "block_table": jnp.asarray(table, jnp.int32),
        "positions": jnp.asarray(positions, jnp.int32),
        "lengths": jnp.asarray(lengths, jnp.int32),
    }
    k, v = (rng.normal(size=shape) for _ in range(2))
    mask = used[:, :, None, None]

    def pages(values: np.ndarray, fill: float) -> jax.Array:
        return jnp.asarray(np.where(mask, values, fill), jnp.bfloat16)

    poisoned, clean = ({**inputs, "key_pages": pages(k, fill), "value_pages": pages(v, fill)} for fill in (np.nan, 0.0))
    return poisoned, clean


def want(clean: Case, **how: Any) -> np.ndarray:
    """The plain version's attention in float32."""
    inputs = {name: np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else x for name, x in clean.items()}
    return np.asarray(reference(**inputs, **how))


def check(poisoned: Case, clean: Case, *, rows: int, tuning: Tuning, chunk: int = 64) -> None:
    """The kernels in bf16 on poisoned pages against the plain version in f32 on clean ones.

    Weights, values and output round to bf16, 2⁻⁹ each relative to the largest value: four such roundings at most.
    """
    inputs = dict(poisoned)
    table = inputs.pop("block_table")
    _, columns, heads, _ = inputs["q"].shape
    _, page_size, kv_heads, _ = inputs["key_pages"].shape
    lengths = inputs["lengths"]
    sharing = plan(
        table,
        lengths,
        np.maximum(np.asarray(lengths) - columns, 0),
        rows=rows,
        queries=columns * padded(heads // kv_heads),
        page_size=page_size,
        chunk=chunk,
        tiles=tuning.tiles,
    )
    got = shared_attention_mosaic(**inputs, sharing=sharing, tuning=tuning, interpret=INTERPRET)
    assert got.dtype == jnp.bfloat16
    got, expected = np.asarray(got, np.float32), want(clean)
    assert np.isfinite(got).all()
    live = np.asarray(lengths) > 0
    np.testing.assert_allclose(got[live], expected[live], rtol=0, atol=4 * 2**-9 * np.abs(expected[live]).max())


@pytest.mark.slow
def test_two_warpgroups_in_turn() -> None:
    """Two groups of unequal, finished and dead rows, two heads, shares, a ring that refills.

    Units of the merge are of one row's heads.
    """
    poisoned, clean = case([200, 210, 70, 0], [9, 12, 9, 3], rows=2, kv_heads=2)
    check(poisoned, clean, rows=2, tuning=Tuning(splits=(2,), subs=2, stages=2))


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "chunk", "group"), [(8, 64, 1), (192, 128, 4)])
def test_pages_and_chunks(page_size: int, chunk: int, group: int) -> None:
    """Pages smaller and larger than chunks; of one query head a key-value head, units of the merge are of four rows."""
    poisoned, clean = case([400, 410], [2, 2], rows=2, page_size=page_size, group=group)
    check(poisoned, clean, rows=2, tuning=Tuning(splits=(2,), subs=1, stages=2), chunk=chunk)


@pytest.mark.parametrize("tuning", [Tuning(splits=(2,), stages=1), Tuning(splits=(2,), subs=3, stages=3)])
def test_a_tuning_of_fewer_stages_or_more_turns_than_chunks_known_ahead(tuning: Tuning) -> None:
    poisoned, clean = case([40, 40], [0, 1], rows=2)
    with pytest.raises(ValueError, match="2 chunks are known before the others"):
        check(poisoned, clean, rows=2, tuning=tuning)


@pytest.mark.slow
def test_nothing_shared_and_more_shares_than_tasks() -> None:
    poisoned, clean = case([60, 70], [0, 0], rows=2)
    check(poisoned, clean, rows=2, tuning=Tuning(splits=(5,), subs=1, stages=2))


@pytest.mark.slow
def test_blocks_with_pieces_take_fewer_chunks() -> None:
    """Nine chunks and pieces for one chunk of three blocks."""
    poisoned, clean = case([620, 615], [38, 38], rows=2, columns=2)
    check(poisoned, clean, rows=2, tuning=Tuning(splits=(3,), subs=1, stages=2))


@pytest.mark.slow
def test_many_queries_of_single_rows() -> None:
    """A chunk of prompts: one that begins, one further on whose queries do not fill their tiles, one absent."""
    columns = 37
    poisoned, clean = case([columns, 150, 0], [0, 0, 0], rows=1, columns=columns)
    tuning = default_tuning(groups=3, queries=columns * 4, kv_heads=1, dim=64, chunk=64)
    assert (tuning.tiles, tuning.warpgroups) == (3, 3)
    check(poisoned, clean, rows=1, tuning=dataclasses.replace(tuning, splits=(2,)))


@pytest.mark.slow
def test_heads_that_do_not_fill_a_tile() -> None:
    """The kernel is right for 7 query heads per KV head, like in Qwen 2.5 7B; two tiles, rows at different columns."""
    poisoned, clean = case([150, 140], [9, 8], rows=2, columns=5, kv_heads=2, group=7, dim=128)
    check(poisoned, clean, rows=2, tuning=Tuning(splits=(2,), tiles=2, stages=2))


@pytest.mark.slow
def test_three_parts() -> None:
    """Seven tiles of one row's queries: two parts of three, and one of one."""
    poisoned, clean = case([230], [0], rows=1, columns=100)
    tuning = default_tuning(groups=1, queries=400, kv_heads=8, dim=64, chunk=64)
    assert tuning.last_tiles == 1
    check(poisoned, clean, rows=1, tuning=dataclasses.replace(tuning, splits=(1, 2, 1)))


def attention_of(
    *, R: int = 8, T: int = 1, H: int = 32, Hkv: int = 8, D: int = 128, N: int = 1, B: int = 16,
    window: int | None = None, dtype: Any = jnp.bfloat16,
) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:  # fmt: skip
    """A function that plans and attends, and shapes of its arguments: tables of 32,768 slots in pages of B."""
    struct = jax.ShapeDtypeStruct
    pages, vector = struct((65536 // B, B, Hkv, D), dtype), struct((R,), jnp.int32)
    table, positions = struct((R, 32768 // B), jnp.int32), struct((R, T), jnp.int32)
    arrays = (struct((R, T, H, D), dtype), pages, pages, table, positions, vector)

    def attend(q: Any, keys: Any, values: Any, table: Any, positions: Any, lengths: Any) -> jax.Array:
        shape = {"columns": T, "num_heads": H, "num_kv_heads": Hkv, "head_dim": D, "page_size": B, "dtype": dtype}
        plan = plan_sharing(table, lengths, lengths - 9, rows=N, window=window, **shape)
        return paged_attention(q, keys, values, table, positions, lengths, sharing=plan, window=window)

    return attend, arrays


@pytest.mark.parametrize(
    "shape",
    [
        {"R": 12, "N": 12, "T": 2, "D": 64, "B": 128},
        {"R": 1, "N": 1, "T": 512, "H": 64},
        {"R": 16, "N": 16, "T": 9, "H": 28, "Hkv": 4},
    ],
    ids=str,
)
def test_lowers_for_cuda(shape: dict[str, int]) -> None:
    """Plan and kernels through the wrappers: the real Mosaic lowering at the shapes of Llama 3, without a GPU."""
    attend, arrays = attention_of(**shape)
    with implementations("mosaic"):
        text = jax.jit(attend).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "shared_attention_merge" in text
    assert "L2::cache_hint" in text  # parts stay in the L2


LLAMA = {
    "rows": 8,
    "columns": 9,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "page_size": 16,
    "dtype": jnp.bfloat16,
}


def test_where_it_applies() -> None:
    assert supports(**LLAMA)
    assert supports(**{**LLAMA, "rows": 1, "columns": 512})
    assert supports(**{**LLAMA, "rows": 1, "columns": 512, "num_heads": 64})
    others: list[dict[str, Any]] = [
        {"rows": 0},
        {"rows": 32},
        {"columns": 129},
        {"num_heads": 12},
        {"num_heads": 8 * 65},
        {"head_dim": 96},
        {"page_size": 1},
        {"dtype": jnp.float32},
    ]
    assert not any(supports(**{**LLAMA, **other}) for other in others)


def test_plans_are_made_where_they_pay() -> None:
    """For wide tables and on request; a plan for T = 2 serves T = 1, one for another number of parts does not."""

    def plan(width: int, implementation: str = "mosaic", **other: int) -> Any:
        # Its shape only: nothing of a plan's making may run where there is no GPU.
        make = functools.partial(plan_sharing, **{**LLAMA, **other})
        rows = jax.ShapeDtypeStruct((8,), jnp.int32)
        with implementations(implementation):
            return jax.eval_shape(make, jax.ShapeDtypeStruct((8, width), jnp.int32), rows, rows)

    assert plan(64) is None
    assert plan(256, rows=1) is None
    assert plan(256, "xla") is None
    verify = plan(256)
    assert supports_plan(verify, columns=9, group=4)
    assert not supports_plan(verify, columns=1, group=4)
    draft = plan(256, columns=2, head_dim=64)
    assert draft is not None
    assert supports_plan(draft, columns=1, group=4)
    assert not supports_plan(draft, columns=9, group=4)
    for many in ({"columns": 17}, {"num_heads": 64}, {"columns": 128, "rows": 1}):  # that no other kernel takes
        assert plan(64, **many) is not None


@pytest.mark.parametrize(("dim", "groups", "chunk"), [*itertools.product((64, 128), (1, 2, 32), (64, 128))])
def test_default_tuning_fits(dim: int, groups: int, chunk: int) -> None:
    """Parts cover the queries, shared memory of a block is at most 224 KiB and a little, the GPU is filled once.

    Of more parts than that each has one share.
    """
    for queries in (8, 64, 128, 144, 256, 288, 400, 576, 1024, 1088, 2048, 4096):
        tuning = default_tuning(groups=groups, queries=queries, kv_heads=8, dim=dim, chunk=chunk)
        assert tuning.tiles == tiles_of(queries)
        assert len(tuning.splits) == -(-queries // (QUERIES * tuning.tiles)) == -(-queries // (QUERIES * 3))
        assert tuning.stages >= 2
        assert tuning.stages % tuning.subs == 0
        assert tuning.stages * 2 * chunk * dim * 2 + tuning.warpgroups * QUERIES * dim * 2 <= 224 * 1024
        if 8 * len(tuning.splits) > 132:
            assert set(tuning.splits) == {1}
        elif groups == 1:
            assert 120 <= 8 * sum(tuning.splits) <= 132


@pytest.mark.parametrize(("kv_heads", "shares"), [(1, MAX_SHARES), (2, MAX_SHARES), (4, 33), (8, 16)])
def test_shares_of_a_head_are_few_enough_to_merge(kv_heads: int, shares: int) -> None:
    for queries in (64, 288):
        tuning = default_tuning(groups=1, queries=queries, kv_heads=kv_heads, dim=128, chunk=64)
        assert sum(tuning.splits) == shares


@pytest.mark.slow
def test_a_cycle_reads_shared_pages_once() -> None:
    """Draft head, the loop of other drafts and verify."""

    def model(dim: int) -> ModelConfig:
        return ModelConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_layers=1,
            num_heads=4,
            num_kv_heads=1,
            head_dim=dim,
            max_position_embeddings=2048,
        )

    target, draft = model(128), model(64)
    program = smc.Program(published(4, 2), target, draft, 2048, implementation="mosaic")
    params = smc.PairParams(*(init_params(m, jax.random.key(0), jnp.bfloat16) for m in (target, draft)))
    prompts, requests = batch([Ask((1, 2, 3), 16)], 64, 2048)

    def cycle(params: smc.PairParams, prompts: jax.Array, requests: Any) -> tuple[smc.State, smc.Info]:
        return smc.step(program, params, smc.init(program, params, prompts, requests))

    with implementations("mosaic"):
        traced = jax.jit(cycle).trace(params, prompts, requests)
    assert str(traced.jaxpr).count("name=shared_attention_mosaic") == 3  # whose lowering the tests above see


TREE = ([1500, 1501, 1499, 1500, 700, 1500, 0, 64], [0, 90, 93, 40, 43, 85, 20, 3])  # with unequal and dead rows
PROMPTS = ([128], [128, 1500, 0, 256, 131, 1408])
SHAPES = [(1, 64, 4), (2, 64, 4), (9, 128, 4), (9, 64, 4), (1, 64, 1), (9, 128, 2), (5, 128, 8), (17, 128, 4)]
SHAPES += [(9, 128, 8), (9, 128, 7)]  # columns, head size, query heads of a key-value head
ON_A_GPU = [
    *((TREE[0] * groups, TREE[1] * groups, 8, *shape, 8) for groups in (1, 3) for shape in SHAPES),
    ([4137, 4139, 4140, 4141, 4100, 4137, 4137, 4144], [0, *[256] * 7], 8, 9, 128, 4, 8),  # more pieces, fewer chunks
    *((prompts, [0] * len(prompts), 1, 128, dim, 4, 8) for prompts in PROMPTS for dim in (64, 128)),
    *(([3000], [0], 1, 512, 128, group, 4) for group in (4, 7, 8)),  # a long chunk of a prompt
]


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "shared", "rows", "columns", "dim", "group", "kv_heads"), ON_A_GPU)
def test_on_the_gpu(
    lengths: list[int], shared: list[int], rows: int, columns: int, dim: int, group: int, kv_heads: int
) -> None:
    """The compiled kernels through the wrappers, as `check`."""
    sizes = {"rows": rows, "columns": columns, "kv_heads": kv_heads, "group": group, "dim": dim}
    poisoned, clean = case(lengths, shared, **sizes)
    assert active_implementation() == "mosaic"
    ends = poisoned["lengths"]
    plan = functools.partial(
        plan_sharing,
        rows=rows,
        columns=columns,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=poisoned["key_pages"].shape[1],
        dtype=jnp.bfloat16,
    )
    sharing = jax.jit(plan)(poisoned["block_table"], ends, jnp.maximum(ends - columns, 0))
    assert sharing is not None
    got = np.asarray(jax.jit(paged_attention)(**poisoned, sharing=sharing), np.float32)
    assert np.isfinite(got).all()
    live = np.asarray(ends) > 0
    expected = want(clean)
    np.testing.assert_allclose(got[live], expected[live], rtol=0, atol=4 * 2**-9 * np.abs(expected[live]).max())
