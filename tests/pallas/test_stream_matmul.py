"""The streaming matrix product: in interpret mode against f32, and lowered for CUDA at real shapes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.paged_attention import on_hopper
from smcjax.pallas.stream_matmul import SHARED_MEMORY, Tuning, default_tuning, stream_matmul, supports

INTERPRET = plgpu.InterpretGPUParams()
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)

# Llama 3.1 8B: rows and columns of W, type of the result, and whether silu(gate)·up is fused.
LLAMA = {
    "qkv": (6144, 4096, BF16, False),
    "o": (4096, 4096, BF16, False),
    "gate_up": (28672, 4096, BF16, False),
    "swiglu": (28672, 4096, BF16, True),
    "down": (4096, 14336, BF16, False),
    "head": (128256, 4096, F32, False),
}


def inputs(tokens: int, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(tokens + rows + columns)
    x = jnp.asarray(rng.normal(size=(tokens, columns)), jnp.bfloat16)
    return x, jnp.asarray(rng.normal(size=(rows, columns)) * columns**-0.5, jnp.bfloat16)


def check(got: jax.Array, x: jax.Array, w: jax.Array, *, swiglu: bool = False) -> None:
    """Within the rounding of the result, and that of an f32 sum of K products, from float64."""
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    size = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T  # of what a sum adds up
    summed = x.shape[1] * float(jnp.finfo(jnp.float32).eps) * size
    if swiglu:
        (gate, up), (gate_error, up_error) = (np.split(a, 2, axis=-1) for a in (want, summed))
        want = gate / (1 + np.exp(-gate)) * up
        summed = 1.1 * np.abs(up) * gate_error + np.abs(gate) * up_error + 1e-5 * np.abs(want)  # |silu'| ≤ 1.1
    assert got.shape == want.shape
    np.testing.assert_array_less(
        np.abs(np.asarray(got, np.float64) - want), float(jnp.finfo(got.dtype).eps) * np.abs(want) + summed
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", LLAMA)
@pytest.mark.parametrize("tokens", [17, 72, 144])
def test_on_the_gpu(name: str, tokens: int) -> None:
    """The compiled kernel with its default tuning; twice the same, bit for bit."""
    assert on_hopper()
    rows, columns, dtype, swiglu = LLAMA[name]
    x, w = inputs(tokens, min(rows, 28672), columns)
    got = stream_matmul(x, w, swiglu=swiglu, out_dtype=dtype)
    assert got.dtype == dtype
    check(got, x, w, swiglu=swiglu)
    np.testing.assert_array_equal(got, stream_matmul(x, w, swiglu=swiglu, out_dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(warpgroups=2, splits=4, share=2, token_stages=4),
        Tuning(warpgroups=2, splits=4, partials=True),
        Tuning(warpgroups=1, splits=2, stages=6),
        Tuning(warpgroups=2, splits=8, stages=2, early=True),
    ],
    ids=str,
)
def test_tunings_on_the_gpu(tuning: Tuning) -> None:
    assert on_hopper()
    x, w = inputs(72, 2048, 4096)
    got = stream_matmul(x, w, tuning=tuning)
    check(got, x, w)
    np.testing.assert_array_equal(got, stream_matmul(x, w, tuning=tuning))


def test_a_ring_that_refills() -> None:
    """17 tokens, padded; four blocks, six steps each."""
    x, w = inputs(17, 256, 384)
    got = stream_matmul(x, w, tuning=Tuning(warpgroups=1, stages=2), interpret=INTERPRET)
    assert got.dtype == jnp.bfloat16
    check(got, x, w)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 64, 72, 144])
def test_tokens(tokens: int) -> None:
    x, w = inputs(tokens, 64, 128)
    check(stream_matmul(x, w, tuning=Tuning(warpgroups=1, stages=2), interpret=INTERPRET), x, w)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(warpgroups=1, stages=3, tile_k=128),
        Tuning(warpgroups=1, stages=2, stagger=False),
        Tuning(warpgroups=1, stages=2, token_stages=3),
        Tuning(warpgroups=1, products=2, stages=2),
        Tuning(warpgroups=1, stages=2, splits=2),
    ],
    ids=str,
)
def test_tunings(tuning: Tuning) -> None:
    """With splits the sums are XLA's here: the interpreter has no stores to another block's shared memory."""
    x, w = inputs(24, 256, 512)
    check(stream_matmul(x, w, tuning=tuning, out_dtype=F32, interpret=INTERPRET), x, w)


@pytest.mark.slow
def test_a_block_takes_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiles for two blocks: the ring runs on from tile to tile, and one block has one tile less."""
    monkeypatch.setattr("smcjax.pallas.stream_matmul.STREAMING_MULTIPROCESSORS", 2)
    x, w = inputs(40, 192, 192)
    check(stream_matmul(x, w, tuning=Tuning(warpgroups=1, stages=2), interpret=INTERPRET), x, w)


@pytest.mark.slow
def test_swiglu() -> None:
    x, w = inputs(24, 256, 256)
    tuning = Tuning(warpgroups=1, products=2, stages=2)
    check(stream_matmul(x, w, swiglu=True, tuning=tuning, interpret=INTERPRET), x, w, swiglu=True)


@pytest.mark.slow
def test_many_threads() -> None:
    """Several warpgroups, and clusters: in a process whose XLA has a thread for each that the interpreter blocks.

    It has one per core otherwise, and on two cores three threads of a kernel that wait for the fourth wait for ever.
    """
    program = """
from tests.pallas.test_stream_matmul import INTERPRET, Tuning, check, inputs, stream_matmul
x, w = inputs(24, 256, 512)
for tuning in (
    Tuning(warpgroups=4, stages=2),
    Tuning(warpgroups=2, stages=2),
    Tuning(warpgroups=1, stages=2, share=2),
    Tuning(warpgroups=1, stages=2, share=2, token_stages=3, splits=2),
    Tuning(warpgroups=1, stages=2, share=4, token_stages=4),
    Tuning(warpgroups=2, stages=2, share=2, token_stages=4),
):
    check(stream_matmul(x, w, tuning=tuning, interpret=INTERPRET), x, w)
tuning = Tuning(warpgroups=2, products=2, stages=2)
check(stream_matmul(x, w, swiglu=True, tuning=tuning, interpret=INTERPRET), x, w, swiglu=True)
"""
    environment = {**os.environ, "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    root = pathlib.Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, check=True, timeout=300)


@pytest.mark.parametrize("tokens", [17, 72, 144])
@pytest.mark.parametrize("name", LLAMA)
def test_lowers_for_cuda(name: str, tokens: int) -> None:
    """The real Mosaic lowering at the shapes of Llama 3.1 8B, without a GPU."""
    lower_for_cuda(name, tokens, None)


@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(warpgroups=2, splits=4, share=2, token_stages=4),
        Tuning(warpgroups=2, splits=4, partials=True),
        Tuning(warpgroups=4, splits=8, stages=2),
        Tuning(warpgroups=2, splits=4, early=True),
    ],
    ids=str,
)
def test_tunings_lower_for_cuda(tuning: Tuning) -> None:
    lower_for_cuda("down", 72, tuning)


def lower_for_cuda(name: str, tokens: int, tuning: Tuning | None) -> None:
    rows, columns, dtype, swiglu = LLAMA[name]

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return stream_matmul(x, w, swiglu=swiglu, out_dtype=dtype, tuning=tuning)

    shapes = (jax.ShapeDtypeStruct((tokens, columns), BF16), jax.ShapeDtypeStruct((rows, columns), BF16))
    assert "mosaic_gpu" in jax.jit(product).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_supports() -> None:
    llama: dict[str, Any] = {"tokens": 72, "columns": 4096, "rows": 6144, "dtype": BF16}
    assert supports(**llama)
    others: list[dict[str, Any]] = [
        {"tokens": 257},
        {"tokens": 193, "swiglu": True},
        {"columns": 4100},
        {"rows": 6100},
        {"rows": 64, "swiglu": True},
        {"dtype": F32},
    ]
    assert not any(supports(**{**llama, **other}) for other in others)
    with pytest.raises(ValueError, match="no kernel"):
        stream_matmul(*inputs(8, 100, 64))
    with pytest.raises(ValueError, match="no multiple"):
        stream_matmul(*inputs(8, 64, 64), tuning=Tuning(warpgroups=2))
    with pytest.raises(ValueError, match="sums a thread"):
        stream_matmul(*inputs(144, 256, 64), tuning=Tuning(warpgroups=4))


@pytest.mark.parametrize("tokens", [1, 8, 72, 144, 192, 256])
@pytest.mark.parametrize("name", LLAMA)
def test_what_is_supported_has_a_tuning(name: str, tokens: int) -> None:
    rows, columns, dtype, swiglu = LLAMA[name]
    for height, width in ((rows, columns), (128, 64)):
        if supports(tokens=tokens, columns=width, rows=height, dtype=BF16, swiglu=swiglu):
            tuning = default_tuning(tokens=tokens, columns=width, rows=height, swiglu=swiglu)
            assert tuning.shared_memory(tokens, dtype.itemsize) <= SHARED_MEMORY
