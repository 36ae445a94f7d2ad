"""The Triton attention kernels: interpreted, against the plain version; lowered, and compiled for every target."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.device import HOPPER
from smcjax.pallas import dispatch
from smcjax.pallas.attention.paged_attention import attends_by_kernels, paged_attention, plan_sharing
from smcjax.pallas.attention.paged_attention_triton import Tuning, paged_attention_triton, supports
from smcjax.pallas.attention.prefix_plan import CommonPrefix, find_common_prefix
from smcjax.pallas.dispatch import implementations
from tests.lazily import Patch
from tests.pallas.attention.test_prefix_shared import Case, attention_of, case, want
from tests.pallas.triton.cubins import MAX_REGISTERS, TARGETS, compiled, lowered
from tests.pallas.triton.interpreter import interpreted

pytest.importorskip("jax_triton")

SMALL = Tuning(queries=16, slots=16, splits=1, shared_splits=0, warps=4, stages=2, settled=False)


def as_type(inputs: Case, dtype: Any) -> Case:
    return {name: x.astype(dtype) if x.dtype == jnp.bfloat16 else x for name, x in inputs.items()}


def prefix_of(inputs: Case, rows: int, unseen: int = 0) -> CommonPrefix:
    """The plan of a cycle whose last `unseen` slots of each row are not there when it begins."""
    lengths, page_size = inputs["lengths"], inputs["key_pages"].shape[1]
    immutable = jnp.maximum(lengths - unseen, 0)
    return find_common_prefix(inputs["block_table"], lengths, immutable, rows=rows, page_size=page_size)


def check(poisoned: Case, clean: Case, tuning: Tuning | None, rows: int = 1, **how: Any) -> np.ndarray:
    """The kernels on pages with NaN in all that no row holds, against the plain version in float32 without."""
    plan = prefix_of(poisoned, rows, poisoned["q"].shape[1]) if rows > 1 else None
    got = paged_attention_triton(**poisoned, sharing=plan, tuning=tuning, interpret=interpreted, **how)
    assert got.dtype == poisoned["q"].dtype
    close(got, want(clean, **how), poisoned)
    return np.asarray(got, np.float32)


def close(got: jax.Array, expected: np.ndarray, inputs: Case) -> None:
    """Of rows that hold something; in bfloat16 weights, values and output round by 2⁻⁹ each of the largest value."""
    live = np.asarray(inputs["lengths"]) > 0
    scale = 4 * 2**-9 if got.dtype == jnp.bfloat16 else 1e-6
    found = np.asarray(got, np.float32)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[live], expected[live], rtol=0, atol=scale * np.abs(expected[live]).max())


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([9, 0, 70], {"columns": 1}),
        ([40, 33], {"columns": 5, "kv_heads": 2, "page_size": 8}),
        ([1, 16, 17], {"columns": 1, "group": 1, "dim": 16}),
        ([50], {"columns": 3, "group": 7, "page_size": 24, "dim": 48}),
        ([37], {"columns": 20, "group": 2, "page_size": 64, "dim": 128}),
    ],
    ids=str,
)
def test_rows_one_by_one(lengths: list[int], shape: dict[str, int]) -> None:
    """Odd lengths, pages, groups and head sizes; an empty row, tiles that end within a row; of both dtypes."""
    dtype = jnp.float32 if shape["columns"] == 1 else jnp.bfloat16
    poisoned, clean = (as_type(each, dtype) for each in case(lengths, [0] * len(lengths), rows=1, **shape))
    check(poisoned, clean, SMALL)


@pytest.mark.parametrize(("splits", "settled"), [(2, False), (5, True)])
def test_shares_are_merged(splits: int, settled: bool) -> None:
    """Also where there are fewer steps than shares, and where a query sees nothing of a share."""
    poisoned, clean = case([70, 18, 0], [0] * 3, rows=1, columns=4)
    tuning = Tuning(queries=16, slots=16, splits=splits, shared_splits=0, warps=4, stages=2, settled=settled)
    check(poisoned, clean, tuning)


@pytest.mark.parametrize(
    ("how", "splits"),
    [({"window": 7}, 1), ({"window": 30}, 2), ({"window": 500}, 2), ({"scale": 0.3}, 1), ({"first": 1}, 2)],
    ids=str,
)
def test_windows_scales_and_a_first_slot(how: dict[str, Any], splits: int) -> None:
    """Control: without them the result differs, except for a window wider than the rows."""
    poisoned, clean = case([80, 33, 20], [0] * 3, rows=1, columns=3)
    got = check(poisoned, clean, Tuning(16, 16, splits, 0, 4, 2, settled=True), **how)
    usual = want(clean)
    assert (np.abs(got - usual).max() > 5e-2) == (how != {"window": 500})


@pytest.mark.parametrize(
    ("lengths", "how"), [([90, 84, 87], {"window": 45}), ([0, 75, 70], {}), ([0, 0, 0], {})], ids=str
)
def test_a_groups_common_prefix_is_read_by_all_its_rows(lengths: list[int], how: dict[str, Any]) -> None:
    """Two groups, one of which shares nothing; dead rows, the first one among them; a tile of several rows."""
    poisoned, clean = case([*lengths, 40, 40, 33], [0, 4, 3, 0, 0, 0], rows=3, columns=3)
    assert (prefix_of(poisoned, 3, 3).slots[0] > 0) == any(lengths)
    check(poisoned, clean, Tuning(16, 16, 2, 2, 4, 2, settled=True), rows=3, **how)


def test_a_prefix_ends_where_a_rows_first_new_token_may_stand() -> None:
    table = jnp.asarray([[1, 2, 3, 4], [1, 2, 3, 5], [0, 0, 0, 0], [1, 6, 3, 4]])
    find = functools.partial(find_common_prefix, table, rows=2, page_size=8)
    lengths = jnp.asarray([30, 27, 0, 20])
    plan = find(lengths, jnp.asarray([25, 22, 0, 20]))
    assert plan.slots.tolist() == [16, 16]  # 24 slots are the same, of which row 1 sees 22; a row alone shares all
    assert plan.leaders.tolist() == [0, 3]
    assert find(lengths, jnp.asarray([25, 25, 0, 20])).slots.tolist() == [24, 16]
    assert find(0 * lengths, 0 * lengths).slots.tolist() == [0, 0]


LLAMA = {"columns": 9, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": jnp.bfloat16}


def test_supports() -> None:
    assert supports(**LLAMA)
    assert supports(**{**LLAMA, "columns": 512, "dtype": jnp.float32, "head_dim": 256})
    for other in ({"num_kv_heads": 3}, {"head_dim": 40}, {"head_dim": 512}, {"columns": 2048}, {"dtype": jnp.int8}):
        assert not supports(**{**LLAMA, **other})


def test_plans_are_common_prefixes_of_wide_tables() -> None:
    def plan(width: int, rows: int = 8, **other: Any) -> Any:
        make = functools.partial(plan_sharing, rows=rows, **{**LLAMA, **other})
        numbers = jax.ShapeDtypeStruct((8,), jnp.int32)
        return jax.eval_shape(make, jax.ShapeDtypeStruct((8, width), jnp.int32), numbers, numbers)

    with implementations("triton"):
        assert isinstance(plan(256), CommonPrefix)
        assert isinstance(plan(256, window=4096), CommonPrefix)
        assert plan(256, window=512) is None
        assert plan(64) is None
        assert plan(256, rows=1) is None
        assert plan(256, head_dim=40) is None
        assert attends_by_kernels(**LLAMA, window=512)
        assert not attends_by_kernels(**{**LLAMA, "head_dim": 40})
    with implementations("xla"):
        assert plan(256) is None
        assert not attends_by_kernels(**LLAMA)


def test_hopper_takes_windows_and_wide_heads_from_here(patch_programs: Patch) -> None:
    """Beside Mosaic's kernels, and not in float32."""
    patch_programs(dispatch, "this_device", lambda: HOPPER)
    patch_programs(dispatch, "has_triton", lambda: True)

    def run_of(dtype: Any = jnp.bfloat16, dim: int = 128, **how: Any) -> Any:
        q, pages = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 9, 32, dim), (64, 16, 8, dim)))
        whose = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 64), (1, 9), (1,)))
        kernel = paged_attention.kernel_for(q, pages, pages, *whose, **how)
        return None if kernel is None else kernel.run

    assert run_of(window=512) is run_of(scale=0.05) is run_of(dim=256) is paged_attention_triton
    assert run_of() is not paged_attention_triton
    assert run_of(jnp.float32) is None
    assert run_of(jnp.float32, window=512) is None
    with implementations("triton"):
        assert run_of() is run_of(jnp.float32) is paged_attention_triton


REAL: dict[str, dict[str, Any]] = {
    "8B verify": {"T": 9},
    "8B verify shared": {"N": 8, "T": 9},
    "8B prompt": {"R": 1, "T": 512},
    "1B shared": {"D": 64, "T": 2, "N": 8},
    "Gemma 1B": {"H": 4, "Hkv": 1, "D": 256, "T": 9, "window": 512},
    "Gemma prompt": {"R": 1, "T": 512, "H": 8, "Hkv": 4, "D": 256, "window": 1024},
    "float32": {"T": 9, "dtype": jnp.float32},
    "Gemma float32": {"H": 4, "Hkv": 1, "D": 256, "T": 9, "dtype": jnp.float32},
}


@pytest.mark.parametrize(("name", "calls"), [("8B verify shared", 2), ("many rows", 1)])
def test_a_program_has_one_custom_call_and_another_where_shares_are_merged(name: str, calls: int) -> None:
    attend, arrays = attention_of(**{**REAL, "many rows": {"R": 64}}[name])
    assert lowered(attend, *arrays).count("custom_call @triton_kernel_call_ffi") == calls


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        *(("8B verify shared", target) for target in TARGETS),
        *(("8B verify", 100), ("8B prompt", 90), ("1B shared", 89), ("float32", 80)),
        *(("Gemma 1B", 120), ("Gemma prompt", 89), ("Gemma float32", 120)),  # of targets with the least shared memory
    ],
)
def test_the_kernels_are_compiled_for_every_target(name: str, capability: int) -> None:
    attend, arrays = attention_of(**REAL[name])
    for cubin in compiled(capability, attend, *arrays):
        assert cubin.spilled <= (40 if name == "Gemma float32" else 0), cubin
        assert cubin.registers <= MAX_REGISTERS, cubin
        assert cubin.shared_memory <= cubin.limit, cubin


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"window": 300}, {"scale": 0.05}], ids=str)
@pytest.mark.parametrize(
    ("columns", "dim", "group", "dtype"),
    [
        (1, 128, 4, jnp.bfloat16),
        (9, 128, 4, jnp.bfloat16),
        (2, 64, 4, jnp.bfloat16),
        (9, 256, 4, jnp.bfloat16),
        (5, 48, 7, jnp.bfloat16),
        (3, 128, 4, jnp.float32),
    ],
)
def test_on_the_gpu(columns: int, dim: int, group: int, dtype: Any, how: dict[str, Any]) -> None:
    """A family tree, wide tables, unequal and dead rows; with a plan and without, twice the same bits."""
    lengths, shared = [1500, 1501, 1499, 1500, 700, 1500, 0, 64], [0, 90, 93, 40, 43, 85, 20, 3]
    made = case(lengths, shared, rows=8, columns=columns, kv_heads=2, group=group, dim=dim)
    poisoned, clean = (as_type(each, dtype) for each in made)
    with implementations("triton"):
        compute = jax.jit(functools.partial(paged_attention, **how))
        plans = (None, prefix_of(poisoned, 8, columns))
        for got, again in ((compute(**poisoned, sharing=plan), compute(**poisoned, sharing=plan)) for plan in plans):
            close(got, want(clean, **how), poisoned)
            np.testing.assert_array_equal(np.asarray(got), np.asarray(again))


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "how"), [(128, {}), (64, {}), (256, {"window": 200})], ids=str)
def test_prompts_on_the_gpu(dim: int, how: dict[str, Any]) -> None:
    poisoned, clean = case([700, 512, 0], [0] * 3, rows=1, columns=512, kv_heads=2, dim=dim)
    with implementations("triton"):
        close(jax.jit(functools.partial(paged_attention, **how))(**poisoned), want(clean, **how), poisoned)
