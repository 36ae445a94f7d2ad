"""Products of few rows: against float64, interpreted and on a GPU, and lowered for CUDA at the sizes of real models."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.matmul import Quantized
from smcjax.model.quantize import quantize_matrix
from smcjax.pallas.dispatch import active_implementation, implementations
from smcjax.pallas.layer.norm import Norm
from smcjax.pallas.layer.skinny_gemm import (
    MAX_FLOAT8_ROWS,
    float8_mosaic,
    product_mosaic,
    product_reference,
    skinny_gemm,
    skinny_gemm_eight_bits,
    skinny_gemm_swiglu,
    swiglu_product_mosaic,
    swiglu_product_reference,
)
from smcjax.pallas.layer.skinny_gemm_tuning import Tuning, default_tuning, objection, tiles_of
from smcjax.quantization import FLOAT8, INT8

EPS = 1e-5
NORM = Norm(None, EPS)
INTERPRETED = plgpu.InterpretGPUParams()
LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def operands(rows: int, outputs: int, columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, W and what the product is added to; sums are of the order of x, which differs from row to row."""
    keys = jax.random.split(jax.random.key(outputs + columns), 3)
    x = jax.random.normal(keys[0], (rows, columns), jnp.bfloat16) * (1 + jnp.arange(rows, dtype=jnp.bfloat16))[:, None]
    w = jax.random.normal(keys[1], (outputs, columns), jnp.bfloat16) * columns**-0.5
    return x, w, jax.random.normal(keys[2], (rows, outputs), jnp.bfloat16)


def exact(x: jax.Array, w: jax.Array, add_to: jax.Array | None = None) -> np.ndarray:
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    return y if add_to is None else y + np.asarray(add_to, np.float64)


def exact_swiglu(x: jax.Array, w: jax.Array | Quantized, norm: Norm | None = NORM) -> np.ndarray:
    product = exact_eight_bits(x, w, norm=norm) if isinstance(w, Quantized) else exact(x, w) * inverse_rms(x, norm)
    gate, up = np.split(product, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def inverse_rms(x: jax.Array, norm: Norm | None) -> Any:
    squares = (np.asarray(x, np.float64) ** 2).mean(axis=-1, keepdims=True)
    return 1.0 if norm is None else 1 / np.sqrt(squares + norm.eps)


def exact_eight_bits(
    x: jax.Array, matrix: Quantized, add_to: jax.Array | None = None, norm: Norm | None = None
) -> np.ndarray:
    """Computes the product of the rounded numbers in float64."""
    seen = np.asarray(x, np.float64)
    if matrix.kind.rounds_activations:
        wide = x.astype(jnp.float32)
        if norm is not None and norm.weight is not None:
            wide = wide * norm.weight[None].astype(jnp.float32)
        rounded, of_x = matrix.kind.round(wide)
        seen = np.asarray(rounded, np.float64) * np.asarray(of_x, np.float64)[:, None] * inverse_rms(x, norm)
    values = np.asarray(matrix.kind.restored(matrix.values), np.float64) * np.asarray(matrix.scale, np.float64)[:, None]
    return exact(seen, values, add_to)


def magnitude(x: jax.Array, matrix: Quantized) -> np.ndarray:
    """The sums of products' magnitudes. Hopper's tensor cores keep 14 bits of the terms of a sum of float8 products."""
    return exact_eight_bits(abs(x), dataclasses.replace(matrix, values=abs(matrix.values)))


def check(
    got: jax.Array,
    want: np.ndarray,
    dtype: Any = jnp.bfloat16,
    of_row: float = 1e-5,
    largest: np.ndarray | None = None,
) -> None:
    """One rounding to `dtype`, and what sums may miss: a part of the row's largest number, or of `largest`."""
    assert got.shape == want.shape
    assert got.dtype == dtype
    rounding = 2**-8 if dtype == jnp.bfloat16 else 0.0
    atol = of_row * (np.abs(want).max(axis=-1, keepdims=True) if largest is None else largest)
    difference = np.abs(np.asarray(got, np.float64) - want)
    assert (difference <= rounding * np.abs(want) * 1.01 + atol).all(), (difference / (np.abs(want) + atol)).max()


def test_references() -> None:
    x, w, add_to = operands(3, 48, 96)
    check(product_reference(x, w, out=jnp.float32), exact(x, w), jnp.float32)
    check(product_reference(x, w, add_to=add_to), exact(x, w, add_to), of_row=2**-7)
    check(swiglu_product_reference(x, w, NORM), exact_swiglu(x, w), of_row=2**-7)


@pytest.mark.parametrize("rows", [1, 9, 32])
def test_every_number_of_rows(rows: int) -> None:
    x, w, add_to = operands(rows, 64, 256)
    got = product_mosaic(x, w, add_to=add_to, tuning=Tuning(32, 64, 3), interpret=INTERPRETED)
    check(got, exact(x, w, add_to))


@pytest.mark.parametrize(
    ("outputs", "tuning"),
    [
        (32, Tuning(16, 128, 2)),  # fewer rows a block than are multiplied
        (104, Tuning(104, 64, 1)),  # tiles that overlap
        (88, Tuning(24, 64, 3, passes=2)),  # the last block begins early, and the ring goes on from pass to pass
    ],
    ids=str,
)
def test_rows_of_w_are_divided(outputs: int, tuning: Tuning) -> None:
    x, w, _ = operands(9, outputs, 256)
    check(product_mosaic(x, w, out=jnp.float32, tuning=tuning, interpret=INTERPRETED), exact(x, w), jnp.float32)


@pytest.mark.parametrize(
    ("rows", "tuning"), [(5, Tuning(72, 64, 3)), (16, Tuning(24, 128, 2)), (27, Tuning(16, 64, 2))], ids=str
)
def test_swiglu(rows: int, tuning: Tuning) -> None:
    x, w, _ = operands(rows, 2 * 72, 256)
    check(swiglu_product_mosaic(x, w, NORM, tuning=tuning, interpret=INTERPRETED), exact_swiglu(x, w))


@pytest.mark.parametrize(
    ("rows", "outputs", "tuning"),
    [
        (5, 88, Tuning(24, 256, 1, passes=2)),  # two sums of 128 products a step
        (16, 104, Tuning(104, 128, 2)),  # tiles that overlap
        (9, 88, Tuning(16, 128, 2, passes=2, consumers=2)),  # the last block begins early
    ],
    ids=str,
)
def test_float8(rows: int, outputs: int, tuning: Tuning) -> None:
    x, w, add_to = operands(rows, outputs, 256)
    matrix = quantize_matrix(w, FLOAT8)
    got = float8_mosaic(x, matrix, add_to=add_to, tuning=tuning, interpret=INTERPRETED)
    check(got, exact_eight_bits(x, matrix, add_to))
    with pytest.raises(AssertionError):  # the control: a scale of W's that is another row's
        check(got, exact_eight_bits(x, dataclasses.replace(matrix, scale=jnp.roll(matrix.scale, 1)), add_to))


@pytest.mark.parametrize(
    ("rows", "tuning", "how"),
    [
        (9, Tuning(16, 128, 2), "none"),
        (9, Tuning(16, 128, 2), "weighted"),
        (72, Tuning(24, 128, 3, passes=2, consumers=2), "plain"),
    ],
    ids=str,
)
def test_swiglu_of_float8(rows: int, tuning: Tuning, how: str) -> None:
    x, w, _ = operands(rows, 2 * 96, 256)
    weight = jax.random.normal(jax.random.key(5), (256,), jnp.bfloat16) if how == "weighted" else None
    norm = None if how == "none" else Norm(weight, EPS)
    x = x / 16 if norm is None else x
    matrix = quantize_matrix(w, FLOAT8)
    got = swiglu_product_mosaic(x, matrix, norm, tuning=tuning, interpret=INTERPRETED)
    check(got, exact_swiglu(x, matrix, norm))
    with pytest.raises(AssertionError):  # the control: up's scales where gate's belong
        check(got, exact_swiglu(x, dataclasses.replace(matrix, scale=jnp.roll(matrix.scale, 96)), norm))


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, w, _ = operands(9, 64, 128)
    got = swiglu_product_mosaic(x.at[2, 5].set(jnp.nan), w, NORM, tuning=Tuning(32, 64, 2), interpret=INTERPRETED)
    assert jnp.isnan(got[2]).all()
    others = jnp.arange(9) != 2
    check(got[others], exact_swiglu(x, w)[np.asarray(others)])


def test_a_column_that_is_left_out_shows() -> None:
    """The control of all that stands above."""
    x, w, _ = operands(9, 64, 256)
    got = product_mosaic(x, w, tuning=Tuning(32, 64, 2), interpret=INTERPRETED)
    with pytest.raises(AssertionError):
        check(got, exact(x, w.at[5, 17].set(0)))


# ------------------------------------------------------------------------------------------------------------- tuning


@pytest.mark.parametrize("rows", [8, 32, 64, 104, 112, 248])
def test_tiles_cover_the_rows(rows: int) -> None:
    tiles = tiles_of(rows)
    assert {row for first in tiles for row in range(first, first + 64)} >= set(range(rows))
    assert all(first % 8 == 0 and first + 64 <= max(rows, 64) for first in tiles)


@pytest.mark.parametrize(("rows", "size"), [(1, 2), (9, 2), (32, 2), (1, 1), (72, 1), (MAX_FLOAT8_ROWS, 1)])
@pytest.mark.parametrize("name", LLAMA_8B)
def test_blocks_have_equal_shares(name: str, rows: int, size: int) -> None:
    """Each row of W, of bfloat16 or float8, is in one block, and 128 of 132 multiprocessors are at work."""
    outputs, columns = LLAMA_8B[name]
    parts = 2 if name == "gate_up" else 1
    tuning = default_tuning(rows, outputs // parts, columns, parts, size=size)
    blocks = tuning.blocks(outputs // parts)
    assert blocks == 128
    assert blocks * (tuning.rows if size == 2 else tuning.block_rows) * tuning.passes * parts == outputs
    assert objection(tuning, rows, outputs // parts, columns, parts, size=size) is None
    if size == 1:
        assert tuning.stages > 2
        assert tuning.consumers == parts  # one tile a consumer, or gate's and up's


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": 12}, "no multiple of 8"),
        ({"rows": 264}, "more than 256"),
        ({"tile_k": 192}, "columns"),
        ({"rows": 8}, "at the same time"),
        ({"stages": 40}, "shared memory"),
    ],
    ids=str,
)
def test_objections(change: dict[str, Any], why: str) -> None:
    tuning = dataclasses.replace(default_tuning(9, 4096, 4096), **change)
    reason = objection(tuning, 9, 4096, 4096)
    assert reason is not None
    assert why in reason


def test_no_tuning_for_odd_sizes() -> None:
    for outputs, columns, why in [(4092, 4096, "4092 outputs"), (4096, 4064, "4064 columns")]:
        with pytest.raises(ValueError, match=why):
            default_tuning(9, outputs, columns)
    x, w, _ = operands(9, 64, 128)
    with pytest.raises(ValueError, match="columns"):
        product_mosaic(x, w, tuning=Tuning(32, 256, 2), interpret=INTERPRETED)


# ----------------------------------------------------------------------------------------------------------- lowering


def lowered(rows: int, outputs: int, columns: int, swiglu: bool, dtype: Any = jnp.bfloat16, how: str = "mosaic") -> str:
    x, w, add_to = (
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, columns), (outputs, columns), (rows, outputs))
    )
    with implementations(how):
        if swiglu:
            traced = jax.jit(lambda x, w: skinny_gemm_swiglu(x, w, NORM)).trace(x, w)
        else:
            traced = jax.jit(lambda x, w, add_to: skinny_gemm(x, w, add_to=add_to)).trace(x, w, add_to)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "swiglu"),
    [(9, *LLAMA_8B["gate_up"], True), (32, *LLAMA_8B["down"], False), (1, 2048, 8192, False)],
)
def test_lowers_for_cuda(rows: int, outputs: int, columns: int, swiglu: bool) -> None:
    text = lowered(rows, outputs, columns, swiglu)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "stablehlo.pad" not in text
    assert "stablehlo.dot_general" not in text


def float8_shape(outputs: int, columns: int) -> Quantized:
    values = jax.ShapeDtypeStruct((outputs, columns), jnp.float8_e4m3fn)
    return Quantized(values, jax.ShapeDtypeStruct((outputs,), jnp.float32), "bfloat16", FLOAT8.name)


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_float8_lowers_for_cuda(name: str) -> None:
    x = jax.ShapeDtypeStruct((72, LLAMA_8B[name][1]), jnp.bfloat16)
    operation = (lambda x, w: skinny_gemm_swiglu(x, w, NORM)) if name == "gate_up" else skinny_gemm_eight_bits
    with implementations("mosaic"):
        traced = jax.jit(lambda x, w: operation(x, w)).trace(x, float8_shape(*LLAMA_8B[name]))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "stablehlo.dot_general" not in text


def test_the_kernel_takes_matrices_of_float8() -> None:
    def taken(rows: int, matrix: Quantized) -> bool:
        x = jax.ShapeDtypeStruct((rows, matrix.shape[1]), jnp.bfloat16)
        with implementations("mosaic"):
            return skinny_gemm_eight_bits.kernel_for(x, matrix) is not None

    matrix = float8_shape(4096, 14336)
    assert taken(1, matrix)
    assert taken(MAX_FLOAT8_ROWS, matrix)
    assert not taken(MAX_FLOAT8_ROWS + 1, matrix)
    assert not taken(9, float8_shape(4096, 4032))
    assert not taken(9, dataclasses.replace(matrix, quantization=INT8.name))


def test_the_wrapper_takes_the_kernel_only_where_it_applies() -> None:
    for swiglu in (False, True):
        assert "mosaic_gpu" not in lowered(9, 4096, 4096, swiglu, how="xla")
        assert "mosaic_gpu" not in lowered(9, 4096, 4096, swiglu, dtype=jnp.float32)
        assert "mosaic_gpu" not in lowered(33, 4096, 4096, swiglu)
        assert "mosaic_gpu" not in lowered(9, 4096, 4080, swiglu)
        assert "mosaic_gpu" not in lowered(9, 4092, 4096, swiglu)


# ----------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "rows", "float8"),
    [
        *itertools.product([*LLAMA_8B, "odd"], [1, 7, 8, 9, 16, 27, 32], [False]),
        *itertools.product(LLAMA_8B, [1, 9, 72, MAX_FLOAT8_ROWS], [True]),
    ],
)
def test_on_a_gpu(name: str, rows: int, float8: bool) -> None:
    """The compiled kernel, chosen by the operation, and 200 times the same bits."""
    assert active_implementation() == "mosaic"
    x, w, add_to = operands(rows, *LLAMA_8B.get(name, (2 * 2376, 1536)))
    matrix: Any = quantize_matrix(w, FLOAT8) if float8 else w
    product = skinny_gemm_eight_bits if float8 else skinny_gemm
    if name == "gate_up":
        assert skinny_gemm_swiglu.kernel_for(x, matrix, NORM) is not None
        run, want = jax.jit(lambda x, w, _: skinny_gemm_swiglu(x, w, NORM)), exact_swiglu(x, matrix)
    else:
        assert product.kernel_for(x, matrix, add_to=add_to) is not None
        run = jax.jit(lambda x, w, add_to: product(x, w, add_to=add_to))
        want = exact_eight_bits(x, matrix, add_to) if float8 else exact(x, w, add_to)
    got = run(x, matrix, add_to)
    assert all(bool(jnp.array_equal(got, run(x, matrix, add_to))) for _ in range(200))
    if not float8:
        check(got, want)
    elif name == "gate_up":  # a product's part is what gate and up may both miss of theirs
        check(got, want, of_row=2**-9)
    else:
        check(got, want, of_row=2**-14, largest=magnitude(x, matrix))
