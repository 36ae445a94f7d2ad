"""The paged attention kernel: in interpret mode against the plain version, and lowered for CUDA at real shapes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.attention.paged_attention import attends_by_kernels, paged_attention, plan_sharing
from smcjax.pallas.attention.paged_attention_sm90 import Tuning, default_tuning, paged_attention_mosaic, supports
from smcjax.pallas.dispatch import active_implementation, implementations
from tests.pallas.attention.test_prefix_shared import Case, want
from tests.pallas.attention.test_prefix_shared import case as family

INTERPRET = plgpu.InterpretGPUParams()


def case(lengths: list[int], **shape: int) -> tuple[Case, Case]:
    """Rows that share no page."""
    return family(lengths, [0] * len(lengths), rows=1, **{"page_size": 32, **shape})


def check(poisoned: Case, clean: Case, tuning: Tuning) -> None:
    """The kernel in bf16 on poisoned pages against the plain version in f32 on clean ones."""
    got = paged_attention_mosaic(**poisoned, tuning=tuning, interpret=INTERPRET)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), want(clean), atol=1.5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "first"), [(1, 0), (2, 0), (9, 0), (1, 1)])
@pytest.mark.parametrize("dim", [64, 128])
def test_on_the_gpu(columns: int, dim: int, first: int) -> None:
    """The compiled kernel, through the wrapper that chooses it, on lengths from one slot to many chunks."""
    assert active_implementation() == "mosaic"
    poisoned, clean = case([9, 64, 65, 333], columns=columns, kv_heads=2, page_size=16, dim=dim)
    if first:
        poisoned, clean = loud_start(poisoned), loud_start(clean)
    got = paged_attention(**poisoned, first=first)
    np.testing.assert_allclose(np.asarray(got, np.float32), want(clean, first=first), atol=1.5e-2)


LLAMA = {"rows": 8, "columns": 2, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}


def kernel_of(*, planned: bool, kv_dtype: Any = None, **other: Any) -> str | None:
    """The kernel that Llama's attention over a wide table runs in, or such a variant of it; None: plain XLA."""
    how = {name: other.pop(name) for name in ("window", "scale", "first") if name in other}
    shape = {**LLAMA, "dtype": jnp.bfloat16, **other}
    rows, columns, heads, kv_heads, dim, page_size, dtype = shape.values()
    table, lengths = jnp.zeros((rows, 256), jnp.int32), jnp.zeros(rows, jnp.int32)
    pages = jax.ShapeDtypeStruct((4, page_size, kv_heads, dim), kv_dtype or dtype)

    def find(q: Any, keys: Any, values: Any, table: Any, positions: Any, lengths: Any) -> None:
        sharing = plan_sharing(table, lengths, lengths, **LLAMA, dtype=jnp.bfloat16) if planned else None
        kernel = paged_attention.kernel_for(q, keys, values, table, positions, lengths, sharing=sharing, **how)
        found.append(kernel and kernel.run.__name__)

    found: list[str | None] = []
    positions = jnp.zeros((rows, columns), jnp.int32)
    q = jax.ShapeDtypeStruct((rows, columns, heads, dim), dtype)
    with implementations("mosaic"):
        jax.eval_shape(find, q, pages, pages, table, positions, lengths)
    return found[0]


@pytest.mark.parametrize("planned", [False, True])
def test_kernels_take_what_is_on_their_list(planned: bool) -> None:
    taken = "_run_tasks" if planned else "_run_rows"
    assert kernel_of(planned=planned) == taken
    assert kernel_of(planned=planned, scale=1 / np.sqrt(128)) == taken, "the usual scale by its number"
    assert kernel_of(planned=planned, first=1) == "_run_rows", "no plan knows of slots that are not seen"
    assert kernel_of(planned=planned, columns=9) == "_run_rows", "a plan for two tokens covers no nine"


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        {"window": 64},
        {"window": 10**6},
        {"scale": 0.1},
        {"scale": 1.0},
        {"head_dim": 256},
        {"columns": 128},
        {"dtype": jnp.float32},
        {"dtype": jnp.float16},
        {"kv_dtype": jnp.float32},
        {"page_size": 24},
    ],
    ids=str,
)
def test_kernels_refuse_what_is_not(planned: bool, other: dict[str, Any]) -> None:
    """The row kernel, and the task kernel with a plan of the usual attention: plain XLA computes these."""
    assert kernel_of(planned=planned, **other) is None


def test_nothing_is_planned_for_attention_that_no_kernel_computes() -> None:
    table, rows = jnp.zeros((8, 256), jnp.int32), jnp.zeros(8, jnp.int32)
    with implementations("mosaic"):

        def plans(**other: Any) -> bool:
            make = functools.partial(plan_sharing, **{**LLAMA, "dtype": jnp.bfloat16, **other})
            return jax.eval_shape(make, table, rows, rows) is not None

        shape = {name: size for name, size in LLAMA.items() if name != "rows"}
        assert plans()
        assert attends_by_kernels(**shape, dtype=jnp.bfloat16)
        for other in ({"window": 64}, {"scale": 0.1}, {"head_dim": 256}, {"dtype": jnp.float32}):
            assert not plans(**other)
            assert not attends_by_kernels(**{**shape, "dtype": jnp.bfloat16, **other})


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"columns": 2, "kv_heads": 2, "group": 1, "dim": 128},
        {"columns": 8, "group": 8, "page_size": 8},
        {"page_size": 128},
    ],
    ids=str,
)
def test_shapes(shape: dict[str, int]) -> None:
    """Unequal rows that share pages, one slot, a full page, a full chunk and one more, and a ring that refills."""
    poisoned, clean = case([150, 145, 64, 65, 9], **shape)
    for inputs in (poisoned, clean):
        table = inputs["block_table"]
        inputs["block_table"] = table.at[1, :1].set(table[0, :1])
    check(poisoned, clean, Tuning(stages=2))


@pytest.mark.parametrize("tuning", [Tuning(splits=2, warpgroups=2, stages=2), Tuning(chunk=128, stages=2)], ids=str)
def test_divided_work(tuning: Tuning) -> None:
    """Also where there are fewer chunks than workers, and where a query sees nothing of a worker's part."""
    check(*case([300, 66], columns=9, kv_heads=2), tuning)


def test_slots_before_the_first_are_not_seen() -> None:
    """One slot, with a key that would take all of the weight: in the first chunk of one worker alone."""
    tuning = Tuning(splits=2, warpgroups=2, stages=2)
    poisoned, clean = (loud_start(each) for each in case([330], columns=3, kv_heads=2))
    without_it, with_it = (want(clean, first=first) for first in (1, 0))
    got = paged_attention_mosaic(**poisoned, first=1, tuning=tuning, interpret=INTERPRET)
    np.testing.assert_allclose(np.asarray(got, np.float32), without_it, atol=1.5e-2)
    assert np.abs(with_it - without_it).max() > 0.5


def loud_start(inputs: Case) -> Case:
    """The case with keys of slot 0 along the sum of each head's queries, eightfold."""
    q, keys, page = inputs["q"], inputs["key_pages"], inputs["block_table"][:, 0]
    of_heads = q.reshape(*q.shape[:2], keys.shape[2], -1, q.shape[3]).astype(jnp.float32).sum((1, 3))
    return {**inputs, "key_pages": keys.at[page, 0].set((8 * of_heads).astype(keys.dtype))}


@pytest.mark.slow
def test_lengths_below_the_last_position() -> None:
    """Padding queries beyond what the row holds, and a row that holds nothing: finite, and no other query minds."""
    poisoned, _ = case([40, 40], columns=3)
    whole = paged_attention_mosaic(**poisoned, tuning=Tuning(stages=2), interpret=INTERPRET)
    positions = poisoned["positions"] + jnp.asarray([[1], [0]])
    got = paged_attention_mosaic(
        **{
            **poisoned,
            "q": jnp.roll(poisoned["q"], -1, axis=1),
            "positions": positions,
            "lengths": jnp.asarray([40, 0]),
        },
        tuning=Tuning(stages=2),
        interpret=INTERPRET,
    )
    assert jnp.isfinite(got).all()
    np.testing.assert_array_equal(got[0, :2], whole[0, 1:])


REAL = [
    {"R": 8, "T": 1, "B": 64},
    {"R": 8, "T": 9, "H": 8},
    {"R": 8, "T": 8, "H": 64, "D": 128, "M": 2048},
]


@pytest.mark.parametrize("shape", REAL, ids=str)
def test_lowers_for_cuda(shape: dict[str, int]) -> None:
    """The real Mosaic lowering, at the shapes of Llama 3.2 1B and 3.1 8B, without a GPU."""
    sizes = {"H": 32, "Hkv": 8, "D": 64, "B": 16, "M": 64, **shape}
    _, t, h, kv, d, b, _ = (sizes[name] for name in ("R", "T", "H", "Hkv", "D", "B", "M"))
    assert supports(columns=t, num_heads=h, num_kv_heads=kv, head_dim=d, page_size=b, dtype=jnp.bfloat16)
    lower_for_cuda(sizes, tuning=None)


@pytest.mark.parametrize("tuning", [Tuning(chunk=128, stages=2), Tuning(splits=2, warpgroups=4, stages=2)], ids=str)
def test_tunings_lower_for_cuda(tuning: Tuning) -> None:
    lower_for_cuda({"R": 8, "T": 1, "H": 32, "Hkv": 8, "D": 64, "B": 16, "M": 64}, tuning)


def test_lowers_for_cuda_without_the_first_slot() -> None:
    lower_for_cuda({"R": 8, "T": 1, "H": 32, "Hkv": 8, "D": 128, "B": 128, "M": 512}, None, first=1)


def lower_for_cuda(sizes: dict[str, int], tuning: Tuning | None, first: int = 0) -> None:
    def struct(dtype: jnp.dtype, *axes: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct([{**sizes, "P": 512}[axis] for axis in axes], dtype)

    arrays = (
        struct(jnp.bfloat16, "R", "T", "H", "D"),
        struct(jnp.bfloat16, "P", "B", "Hkv", "D"),
        struct(jnp.bfloat16, "P", "B", "Hkv", "D"),
        struct(jnp.int32, "R", "M"),
        struct(jnp.int32, "R", "T"),
    )
    attend = jax.jit(lambda *inputs: paged_attention_mosaic(*inputs, first=first, tuning=tuning))
    assert "mosaic_gpu" in attend.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_supports() -> None:
    llama = {"columns": 9, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": jnp.bfloat16}
    assert supports(**llama)
    others = [
        {"columns": 17},
        {"num_kv_heads": 3},
        {"head_dim": 96},
        {"page_size": 1},
        {"page_size": 24},
        {"dtype": jnp.float32},
    ]
    assert not any(supports(**{**llama, **other}) for other in others)
    with pytest.raises(ValueError, match="no kernel"):
        paged_attention_mosaic(**case([4], page_size=4)[0])


@pytest.mark.parametrize("rows", [1, 8, 256])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("slots", [16, 1024, 32768])
def test_default_tuning_fits(rows: int, dim: int, slots: int) -> None:
    """Shared memory of a block: at most 227 KiB."""
    tuning = default_tuning(rows=rows, kv_heads=8, dim=dim, slots=slots)
    assert tuning.stages >= 2
    ring = 2 * tuning.warpgroups * tuning.stages * tuning.chunk * dim * 2
    tiles = 64 * dim * (2 + 4 + 4 * (tuning.warpgroups - 1))
    assert ring + tiles + 4096 <= 227 * 1024
