"""Rotation, page copies and KV writes in one kernel: against the plain version, and lowered for CUDA at real shapes."""

from __future__ import annotations

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.kv import TRASH
from smcjax.pallas.cache.rotate_and_write import (
    MAX_COLUMNS,
    Copies,
    HeadNorms,
    rotate_and_write,
    rotate_and_write_mosaic,
    rotate_and_write_reference,
    supports_write,
)
from smcjax.pallas.dispatch import active_implementation, implementations
from smcjax.pallas.layer.norm import PendingNorm

INTERPRET = plgpu.InterpretGPUParams()
NUM_PAGES = 12


def case(
    *,
    rows: int = 3,
    columns: int = 2,
    heads: int = 8,
    kv_heads: int = 4,
    dim: int = 64,
    page_size: int = 4,
    norms: bool = False,
    hidden: int = 0,
) -> dict[str, Any]:
    """Pages full of other people's KV; row r writes from slot 2 of page 1 + r on, over into page 5 + r.

    With `hidden`, the width of the residual stream, its norm is pending.
    """
    keys = iter(jax.random.split(jax.random.key(columns + heads + dim), 7))

    def random(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    angles = 100 * jax.random.uniform(next(keys), (rows, columns, dim // 2))
    slots = 2 + jnp.broadcast_to(jnp.arange(columns), (rows, columns))
    row = jnp.arange(rows)[:, None]
    return {
        "qkv": random(rows, columns, heads + 2 * kv_heads, dim),
        "cos": jnp.cos(angles),
        "sin": jnp.sin(angles),
        "key_pages": random(NUM_PAGES, page_size, kv_heads, dim),
        "value_pages": random(NUM_PAGES, page_size, kv_heads, dim),
        "pages": jnp.where(slots < page_size, 1 + row, 5 + row),
        "slots": slots % page_size,
        "norms": HeadNorms(random(dim), 1 + random(dim), 1e-6) if norms else None,
        "pending": PendingNorm(7 * random(rows, columns, hidden), 1e-5) if hidden else None,
    }


def check(inputs: dict[str, Any], **how: Any) -> None:
    """Compares the kernel, through the wrapper unless it is told `how`."""
    compute = rotate_and_write if not how else functools.partial(rotate_and_write_mosaic, **how)
    fixed = {name: inputs[name] for name in ("norms", "pending")}
    arrays = {name: x for name, x in inputs.items() if name not in fixed}
    compare(inputs, jax.jit(functools.partial(compute, **fixed))(**arrays))


def compare(inputs: dict[str, Any], got: Any) -> None:
    """Equal to the plain version: copied and written values exactly, rotated ones to one rounding of bf16.

    Where a norm is pending all are divided, by a root that two sums of squares round apart: one more rounding.

    Unspecified are the trash page, and slots of a copied page that are neither before the row's first token nor
    written.
    """
    want = rotate_and_write_reference(**inputs)
    pages, slots = np.asarray(inputs["pages"]), np.asarray(inputs["slots"])
    certain = np.ones(inputs["key_pages"].shape[:2], bool)
    certain[TRASH] = False
    if inputs.get("copies") is not None:
        for row, page in enumerate(np.asarray(inputs["copies"].target)):
            written = np.flatnonzero(pages[row] != TRASH)
            if page != TRASH and len(written):
                certain[page, slots[row, written[0]] :] = False
    certain[pages[pages != TRASH], slots[pages != TRASH]] = True
    for name, g, w in zip(("q", "keys", "values"), got, want, strict=True):
        g, w = (np.asarray(x.astype(jnp.float32)) for x in (g, w))
        if name != "q":
            g, w = g[certain], w[certain]
        bound: dict[str, Any] = {"rtol": 0.0, "atol": 0.0} if name == "values" else {"rtol": 2**-7, "atol": 1e-6}
        if inputs["pending"] is not None:
            bound = {"rtol": 2**-6, "atol": 2**-7}  # absolute: what rotation takes from numbers of about 1
        np.testing.assert_allclose(g, w, err_msg=name, **bound)


SHAPES = [
    {},
    {"dim": 128},
    {"columns": 3, "heads": 4, "kv_heads": 4, "norms": True},
    {"page_size": 1, "columns": 1},
    {"hidden": 2048, "dim": 128, "norms": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_reference(shape: dict[str, int]) -> None:
    check(case(**shape), interpret=INTERPRET)


def copying(**shape: Any) -> dict[str, Any]:
    """Row 0 has page 9 copied to its page 1; row 1 keeps page 2; row 2, not live, writes nowhere and copies nothing."""
    inputs = case(**shape)
    inputs["pages"] = inputs["pages"].at[2].set(TRASH)
    return {**inputs, "copies": Copies(jnp.asarray([9, TRASH, TRASH]), jnp.asarray([1, TRASH, TRASH]))}


@pytest.mark.parametrize("columns", [1, 3])
def test_copies(columns: int) -> None:
    check(copying(columns=columns), interpret=INTERPRET)


def test_copies_beside_a_pending_norm() -> None:
    check(copying(columns=2, hidden=1024), interpret=INTERPRET)


def test_a_pending_norm_divides_the_product() -> None:
    """A pending norm gives, within f32's rounding, the product that x / rms(x) would have given."""
    inputs = {**case(hidden=1024), "norms": None}
    inputs = {
        name: x.astype(jnp.float32) if name.endswith(("pages", "qkv")) and x.dtype == jnp.bfloat16 else x
        for name, x in inputs.items()
    } | {"pending": PendingNorm(inputs["pending"].x.astype(jnp.float32), 1e-5)}
    x = np.asarray(inputs["pending"].x, np.float64)
    rms = np.sqrt((x**2).mean(axis=-1) + 1e-5)
    divided = (np.asarray(inputs["qkv"], np.float64) / rms[..., None, None]).astype(np.float32)
    want = rotate_and_write_reference(**{**inputs, "qkv": jnp.asarray(divided), "pending": None})
    got = rotate_and_write_reference(**inputs)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def test_copies_from_a_page_that_its_keeper_goes_on_writing() -> None:
    """Rows 0 and 1 get copies of row 2's page; all three write behind what they share."""
    inputs = {**case(), "copies": Copies(jnp.asarray([3, 3, TRASH]), jnp.asarray([1, 2, TRASH]))}
    check(inputs, interpret=INTERPRET)


def test_a_first_token_that_is_not_written_is_copied() -> None:
    """The draft's deferred token at group start: its KV is in the shared page already, so the copy takes it along."""
    inputs = copying(columns=2)
    inputs["pages"] = inputs["pages"].at[0, 0].set(TRASH)
    check(inputs, interpret=INTERPRET)


def test_a_row_that_writes_nothing_has_the_whole_page_copied() -> None:
    inputs = copying()
    inputs["pages"] = inputs["pages"].at[0].set(TRASH)
    check(inputs, interpret=INTERPRET)


@pytest.mark.slow
def test_copies_beside_many_columns() -> None:
    inputs = copying(columns=MAX_COLUMNS + 1, page_size=64)
    _, keys, values = rotate_and_write_mosaic(**inputs, interpret=INTERPRET)
    _, want_keys, want_values = rotate_and_write_reference(**inputs)
    for got, want, old in ((keys, want_keys, inputs["key_pages"]), (values, want_values, inputs["value_pages"])):
        np.testing.assert_array_equal(got[1, :2], want[1, :2])
        assert (want[1, :2] != old[1, :2]).any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        {"columns": 9},
        {"columns": 9, "hidden": 4096},
        {"columns": 1},
        {"columns": 2, "norms": True},
        {"columns": 2, "norms": True, "hidden": 2048},
        {"columns": 300},
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128])
def test_on_the_gpu(shape: dict[str, int], dim: int) -> None:
    """The compiled kernel, through the wrapper that chooses it."""
    assert active_implementation() == "mosaic"
    sizes = {"heads": 32, "kv_heads": 8, "dim": dim, "page_size": 16, **shape}
    if shape["columns"] > 16:
        inputs = case(**{**sizes, "page_size": 512})
        check(inputs)
        return
    check(case(**sizes))
    check(copying(**sizes))


REAL = [
    {"R": 8, "T": 9, "D": 128, "copies": True},
    {"R": 8, "T": 1},
    {"R": 1, "T": 512, "D": 128},
    {"R": 8, "T": 2, "H": 28, "Hkv": 4, "D": 128, "norms": True, "copies": True},
    {"R": 8, "T": 2, "H": 28, "Hkv": 4, "D": 128, "norms": True, "E": 3072},
]


def lowered(shape: dict[str, Any], implementation: str = "mosaic", dtype: Any = jnp.bfloat16) -> str:
    sizes = {"H": 32, "Hkv": 8, "D": 64, "B": 16, "P": 512, **shape}
    sizes |= {"HHH": sizes["H"] + 2 * sizes["Hkv"], "half": sizes["D"] // 2}
    sizes = {"Q": sizes["D"], "K": sizes["D"], **sizes}

    def struct(kind: Any, *axes: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct([sizes[axis] for axis in axes], kind)

    def write(key_pages: jax.Array, value_pages: jax.Array, weights: Any, x: Any, **inputs: Any) -> Any:
        norms = HeadNorms(weights[0], weights[1], 1e-6) if weights else None
        pending = None if x is None else PendingNorm(x, 1e-5)
        given = {**inputs, "norms": norms, "pending": pending}
        return rotate_and_write(key_pages=key_pages, value_pages=value_pages, **given)

    pool = struct(dtype, "P", "B", "Hkv", "D")
    row = struct(jnp.int32, "R")
    inputs = {
        "qkv": struct(dtype, "R", "T", "HHH", "D"),
        "cos": struct(jnp.float32, "R", "T", "half"),
        "sin": struct(jnp.float32, "R", "T", "half"),
        "pages": struct(jnp.int32, "R", "T"),
        "slots": struct(jnp.int32, "R", "T"),
        "copies": Copies(row, row) if shape.get("copies") else None,
    }
    weights = (struct(dtype, "Q"), struct(dtype, "K")) if shape.get("norms") else None
    x = struct(dtype, "R", "T", "E") if shape.get("E") else None
    with implementations(implementation):
        traced = jax.jit(write, donate_argnums=(0, 1)).trace(pool, pool, weights, x, **inputs)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("shape", REAL, ids=str)
def test_lowers_for_cuda_in_place(shape: dict[str, Any]) -> None:
    """The real Mosaic lowering: one kernel, the pages of both pools its operands and its results, and nothing else."""
    text = lowered(shape)
    calls = [line for line in text.splitlines() if "stablehlo.custom_call @mosaic_gpu" in line]
    assert len(calls) == 1
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d+)", calls[0])
    operands = 7 + 2 * bool(shape.get("copies")) + 2 * bool(shape.get("norms")) + bool(shape.get("E"))
    assert aliases == [("1", str(operands - 2)), ("2", str(operands - 1))]
    d = shape.get("D", 64)
    pool = rf"tensor<512x16x{shape.get('Hkv', 8)}x{d}xbf16>"
    others = [line for line in text.splitlines() if pool in line and "stablehlo." in line and line not in calls]
    assert not others, "nothing else touches the pages"


def test_the_wrapper_takes_the_kernel_only_where_it_applies() -> None:
    shape = {"R": 8, "T": 1}
    assert "mosaic_gpu" in lowered(shape)
    assert "mosaic_gpu" not in lowered(shape, "xla")
    assert "mosaic_gpu" not in lowered(shape, dtype=jnp.float32)
    assert "mosaic_gpu" not in lowered({**shape, "Hkv": 2, "D": 128})
    assert "mosaic_gpu" not in lowered({**shape, "E": 896})
    assert "mosaic_gpu" in lowered({**shape, "norms": True})
    assert "mosaic_gpu" not in lowered({**shape, "norms": True, "Q": 32 * 64, "K": 8 * 64}), "all heads at once"


def test_supports() -> None:
    llama = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": jnp.bfloat16}
    assert supports_write(**llama)
    assert supports_write(**{**llama, "num_heads": 28, "num_kv_heads": 4})
    others: list[dict[str, Any]] = [{"num_kv_heads": 2}, {"num_heads": 30}, {"head_dim": 96}, {"dtype": jnp.float32}]
    assert not any(supports_write(**{**llama, **other}) for other in others)
