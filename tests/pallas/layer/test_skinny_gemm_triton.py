"""Products of few rows by Triton: interpreted, lowered, compiled for every target, and on a GPU against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.device import HOPPER
from smcjax.matmul import Quantized
from smcjax.model.quantize import quantize_matrix
from smcjax.pallas.dispatch import implementations
from smcjax.pallas.layer.norm import Norm
from smcjax.pallas.layer.skinny_gemm import rounded_reference, skinny_gemm, skinny_gemm_eight_bits
from smcjax.pallas.layer.skinny_gemm_triton import (
    MAX_ROWS,
    ROUNDED,
    Tuning,
    eight_bits_triton,
    product_triton,
    round_triton,
    shared_memory,
    tile_rows,
    tuning_for,
)
from smcjax.pallas.triton import launch
from smcjax.quantization import QUANTIZATIONS
from tests.pallas.layer.test_skinny_gemm import check, exact, exact_eight_bits, magnitude, operands
from tests.pallas.triton.cubins import TARGETS, Cubin, compiled, lowered
from tests.pallas.triton.interpreter import interpreted

pytest.importorskip("jax_triton")

KINDS = tuple(QUANTIZATIONS)
WHOLE, SHARED = Tuning(16, 64, 1, 4, 2), Tuning(16, 64, 3, 4, 2)  # 3 shares of 5 steps: 1, 2 and 2
SIZES = {  # of models with 8B and 1B parameters, Gemma's with 2B, and a small one
    "8B, qkv": (6144, 4096),
    "8B, gate_up": (28672, 4096),
    "8B, down": (4096, 14336),
    "8B, head": (128256, 4096),
    "1B, o": (2048, 2048),
    "1B, down": (2048, 8192),
    "Gemma, gate_up": (18432, 2304),
    "small": (48, 144),
}


# --------------------------------------------------------------------------------------------------------- interpreted


@pytest.mark.parametrize(("rows", "tuning"), [(9, WHOLE), (1, SHARED), (16, WHOLE), (41, SHARED), (150, WHOLE)])
def test_every_number_of_rows(rows: int, tuning: Tuning) -> None:
    """40 rows of W and 272 columns are no multiples of a tile."""
    x, w, add_to = operands(rows, 40, 272)
    got = product_triton(x, w, add_to=add_to, tuning=tuning, interpret=interpreted)
    check(got, exact(x, w, add_to))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_results_in_float32(dtype: Any) -> None:
    x, w, _ = operands(5, 32, 128)
    x, w = x.astype(dtype), w.astype(dtype)
    for tuning in (WHOLE, Tuning(32, 128, 1, 4, 2), Tuning(16, 16, 8, 4, 2)):
        check(product_triton(x, w, out=jnp.float32, tuning=tuning, interpret=interpreted), exact(x, w), jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "tuning"), [(9, WHOLE), (72, SHARED)])
def test_eight_bits(kind: str, rows: int, tuning: Tuning) -> None:
    x, w, add_to = operands(rows, 40, 272)
    matrix = quantize_matrix(w, QUANTIZATIONS[kind])
    check(eight_bits_triton(x, matrix, tuning=tuning, interpret=interpreted), exact_eight_bits(x, matrix))
    add_to = add_to.astype(jnp.float32)
    got = eight_bits_triton(x, matrix, add_to=add_to, out=jnp.float32, tuning=tuning, interpret=interpreted)
    check(got, exact_eight_bits(x, matrix, add_to), jnp.float32)


@pytest.mark.parametrize("shape", [(72, 272), (2, 2, 128), (2, ROUNDED + 48)], ids=str)
def test_rows_are_rounded_as_their_kind_says(shape: tuple[int, ...]) -> None:
    """Bit for bit: of zeros, of what is not a number, and of numbers that are the largest. A row's own scale counts."""
    kind = QUANTIZATIONS["float8"]
    x = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16) * jnp.bfloat16(3)
    x = x.reshape(-1, shape[-1]).at[0].set(0).at[1, 5].set(jnp.nan).reshape(shape)
    got, want = round_triton(x, kind, interpret=interpreted), kind.round(x)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
    values, others = (np.asarray(pair[0], np.float32).reshape(-1, shape[-1]) for pair in (got, want))
    sound = np.arange(len(values)) != 1
    np.testing.assert_array_equal(values[sound], others[sound])
    np.testing.assert_array_equal(np.asarray(got[1]).ravel()[sound], np.asarray(want[1]).ravel()[sound])
    assert np.isnan(values[1, 5])
    more = np.asarray(kind.round(x.at[..., -1].set(40))[0], np.float32).reshape(-1, shape[-1])
    assert (values[sound] != more[sound]).any(), "control"


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_normed_while_they_are_rounded(weighted: bool) -> None:
    kind, width = QUANTIZATIONS["float8"], ROUNDED + 48
    x = jax.random.normal(jax.random.key(1), (3, width), jnp.bfloat16) * jnp.bfloat16(3)
    weight = jax.random.normal(jax.random.key(2), (width,), jnp.bfloat16) if weighted else None
    got = round_triton(x, kind, Norm(weight, 1e-5), interpret=interpreted)
    for norm, is_same in ((Norm(weight, 1e-5), True), (Norm(weight, 1.0), False)):  # the control: another ε
        want = rounded_reference(x, kind, norm)
        np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(want[0], np.float32))
        assert np.allclose(got[1], want[1], rtol=1e-6, atol=0) == is_same


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, w, _ = operands(19, 48, 144)
    broken, others = x.at[2, 5].set(jnp.nan), np.arange(19) != 2
    for tuning in (WHOLE, SHARED):
        got = product_triton(broken, w, tuning=tuning, interpret=interpreted)
        assert jnp.isnan(got[2]).all()
        check(got[others], exact(x, w)[others])


def test_what_is_left_out_shows() -> None:
    """The control of all that stands above."""
    x, w, _ = operands(9, 40, 272)
    got = product_triton(x, w, tuning=SHARED, interpret=interpreted)
    with pytest.raises(AssertionError):
        check(got, exact(x, w.at[39, 271].set(1)))
    matrix = quantize_matrix(w, QUANTIZATIONS["float8"])
    got = eight_bits_triton(x, matrix, tuning=SHARED, interpret=interpreted)
    with pytest.raises(AssertionError):
        check(got, exact(x, w))


# ------------------------------------------------------------------------------------------------------------- tuning


def test_tiles_of_x() -> None:
    for rows in range(1, MAX_ROWS + 1):
        one, more = tile_rows(rows)
        tiles = -(-rows // 144)
        assert tiles * (one + more) >= rows
        assert one + more <= max(32, rows // tiles * 1.5)
        assert all(size & (size - 1) == 0 for size in (one, more))


@pytest.mark.parametrize("rows", [9, 72])
@pytest.mark.parametrize("name", SIZES)
def test_multiprocessors_are_at_work(name: str, rows: int, patch_programs: Any) -> None:
    """By rule each has a block, of all matrices that have rows and columns for as many."""
    patch_programs(launch, "target_capability", lambda: 100)
    outputs, columns = SIZES[name]
    for dtype in ("int8", "float8_e4m3fn", "bfloat16"):
        tuning = tuning_for(rows, outputs, columns, dtype, "float8_e4m3fn" if "float8" in dtype else "bfloat16")
        blocks = -(-outputs // tuning.outputs) * tuning.shares
        assert name == "small" or blocks >= HOPPER.multiprocessors * 7 // 8, tuning
        assert tuning.shares <= -(-columns // tuning.columns)
        assert shared_memory(tuning, rows, dtype, "bfloat16") <= HOPPER.shared_memory


# ----------------------------------------------------------------------------------------------------------- lowering


def shape_of(kind: str, outputs: int, columns: int) -> Quantized:
    values = jax.ShapeDtypeStruct((outputs, columns), QUANTIZATIONS[kind].dtype)
    return Quantized(values, jax.ShapeDtypeStruct((outputs,), jnp.float32), "bfloat16", kind)


def calls(text: str) -> int:
    return text.count("custom_call @triton_kernel_call_ffi")


def test_a_product_is_one_launch() -> None:
    def of(rows: int, outputs: int, columns: int, dtype: Any = jnp.bfloat16) -> Any:
        shapes = (rows, columns), (outputs, columns), (rows, outputs)
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    text = lowered(lambda x, w, y: skinny_gemm(x, w, add_to=y), *of(9, 4096, 4096))
    assert calls(text) == 1
    assert "stablehlo.dot_general" not in text
    assert calls(lowered(lambda x, w, y: skinny_gemm(x, w, add_to=y), *of(72, 4096, 14336))) == 1
    assert calls(lowered(lambda x, w, _: skinny_gemm(x, w), *of(9, 64, 128, jnp.float32))) == 1
    for rows, outputs, columns in [(MAX_ROWS + 1, 4096, 4096), (9, 4096, 4088), (9, 8, 4096)]:
        assert calls(lowered(lambda x, w, _: skinny_gemm(x, w), *of(rows, outputs, columns))) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_eight_bits_are_multiplied_by_the_kernel(kind: str) -> None:
    x = jax.ShapeDtypeStruct((9, 4096), jnp.bfloat16)
    text = lowered(lambda x, matrix: skinny_gemm_eight_bits(x, matrix), x, shape_of(kind, 28672, 4096))
    assert calls(text) == 1 + QUANTIZATIONS[kind].rounds_activations
    assert "stablehlo.dot_general" not in text
    wide = jax.ShapeDtypeStruct((9, 4096), jnp.float32)
    assert calls(lowered(lambda x, matrix: skinny_gemm_eight_bits(x, matrix), wide, shape_of(kind, 4096, 4096))) == 0


def test_float8_needs_a_gpu_that_multiplies_it(patch_programs: Any) -> None:
    patch_programs(launch, "target_capability", lambda: 80)
    x = jax.ShapeDtypeStruct((9, 4096), jnp.bfloat16)
    with implementations("triton"):
        taken = {kind: skinny_gemm_eight_bits.kernel_for(x, shape_of(kind, 4096, 4096)) for kind in KINDS}
    assert taken["int8"] is not None
    assert taken["float8"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "capability"), [*(("8B, down", target) for target in TARGETS), ("small", 80)])
def test_kernels_are_compiled_for_every_target(name: str, capability: int) -> None:
    outputs, columns = SIZES[name]

    def check_resources(cubins: list[Cubin]) -> None:
        for cubin in cubins:
            assert cubin.spilled <= (32 if name == "small" else 0), cubin  # of masks: columns do not fill a step
            assert 0 < cubin.registers <= 255
            assert cubin.shared_memory <= cubin.limit, cubin

    for rows in (9, 288) if capability in (80, 120) else (288,):  # of one tile and of two
        x, w = (jax.ShapeDtypeStruct((size, columns), jnp.bfloat16) for size in (rows, outputs))
        check_resources(compiled(capability, lambda x, w: skinny_gemm(x, w), x, w))
        for kind in KINDS if capability >= 89 else ("int8",):
            check_resources(
                compiled(capability, lambda x, m: skinny_gemm_eight_bits(x, m), x, shape_of(kind, *w.shape))
            )
    if name == "small":
        x, w = (jax.ShapeDtypeStruct((size, columns), jnp.float32) for size in (72, outputs))
        check_resources(compiled(capability, lambda x, w: skinny_gemm(x, w), x, w))


# ----------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 1, 72, 150, 288])
@pytest.mark.parametrize("name", [name for name in SIZES if name != "8B, head"])
def test_on_a_gpu(name: str, rows: int) -> None:
    """The compiled kernels, chosen by the operations, and 50 times the same bits."""
    outputs, columns = SIZES[name]
    x, w, add_to = operands(rows, outputs, columns)

    def repeats(function: Any, *args: Any) -> jax.Array:
        run = jax.jit(function)
        got = run(*args)
        assert all(bool(jnp.array_equal(got, run(*args))) for _ in range(50))
        return got

    with implementations("triton"):
        assert skinny_gemm.kernel_for(x, w, add_to=add_to) is not None
        check(repeats(lambda x, w, y: skinny_gemm(x, w, add_to=y), x, w, add_to), exact(x, w, add_to))
        for kind in KINDS:
            matrix = quantize_matrix(w, QUANTIZATIONS[kind])
            if skinny_gemm_eight_bits.kernel_for(x, matrix) is not None:
                got = repeats(lambda x, m, y: skinny_gemm_eight_bits(x, m, add_to=y), x, matrix, add_to)
                bound = {"of_row": 2**-14, "largest": magnitude(x, matrix)} if kind == "float8" else {}
                check(got, exact_eight_bits(x, matrix, add_to), **bound)
