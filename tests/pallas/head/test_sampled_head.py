"""The LM head and its draw in one kernel: interpreted and on a GPU, against whole logits; and lowered for CUDA."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.decoding.distribution import pack_bits
from smcjax.device import HOPPER
from smcjax.matmul import Dense
from smcjax.pallas.head import sampled_head as sampled_head_module
from smcjax.pallas.head.sampled_head import IDS, NARROW, ROWS, sampled_head_mosaic, sampled_head_reference, supports

INTERPRET = plgpu.InterpretGPUParams()
TOLERANCE = 1e-5  # of log-probabilities: f32 sums in another order


def case(rows: int, vocab: int, hidden: int) -> tuple[jax.Array, ...]:
    """Every third row is greedy, every second has a tenth of its ids forbidden."""
    keys = jax.random.split(jax.random.key(rows), 5)
    x = jax.random.normal(keys[0], (rows, hidden), jnp.bfloat16)
    weight = 3 / hidden**0.5 * jax.random.normal(keys[1], (vocab, hidden), jnp.bfloat16)
    each = jnp.arange(rows)
    return (
        x,
        weight,
        jax.random.key_data(jax.random.split(keys[2], rows)),
        jax.random.uniform(keys[3], (rows,), minval=0.5, maxval=1.5),
        jnp.where(each % 3 == 1, 0.0, 1.0),
        pack_bits(jax.random.bernoulli(keys[4], 0.1, (rows, vocab))).T,
        each % 2 == 0,
    )


def check(arguments: tuple[jax.Array, ...], *, interpret: Any = None) -> None:
    token, logprob = sampled_head_mosaic(*arguments, interpret=interpret)
    want_token, want_logprob = jax.jit(sampled_head_reference)(*arguments)
    np.testing.assert_array_equal(token, want_token)
    np.testing.assert_allclose(logprob, want_logprob, rtol=TOLERANCE, atol=TOLERANCE)
    flags = np.asarray(arguments[-2])[np.asarray(token) // 32, np.arange(len(token))] >> (np.asarray(token) % 32)
    assert not (flags & 1 & np.asarray(arguments[-1])).any(), "a forbidden id was drawn"


@pytest.mark.parametrize(
    ("rows", "vocab", "hidden"),
    [
        (5, 2 * IDS, 128),  # one tile, of 64 rows
        (40, 3 * IDS, 64),  # an odd number of 128 ids, so tiles of 128 rows
        (2 * ROWS + 3, 2 * IDS, 64),  # two groups of rows
    ],
)
def test_equals_whole_logits(rows: int, vocab: int, hidden: int) -> None:
    check(case(rows, vocab, hidden), interpret=INTERPRET)


@pytest.mark.slow
def test_blocks_take_several_tiles(patch_programs: Any) -> None:
    patch_programs(sampled_head_module, "HOPPER", dataclasses.replace(HOPPER, multiprocessors=2))
    check(case(33, 10 * IDS, 64), interpret=INTERPRET)


@pytest.mark.slow
def test_a_row_that_is_no_law_harms_no_other() -> None:
    arguments = case(6, 2 * IDS, 64)
    x = arguments[0].at[2].set(jnp.nan)
    token, logprob = (np.asarray(each) for each in sampled_head_mosaic(x, *arguments[1:], interpret=INTERPRET))
    want_token, want_logprob = (np.asarray(each) for each in sampled_head_reference(*arguments))
    others = np.arange(6) != 2
    np.testing.assert_array_equal(token[others], want_token[others])
    np.testing.assert_allclose(logprob[others], want_logprob[others], rtol=TOLERANCE, atol=TOLERANCE)
    assert 0 <= token[2] < 2 * IDS
    assert np.isnan(logprob[2])


def test_of_equal_ids_the_lowest_is_drawn() -> None:
    """Also of those that one place sees one after the other."""
    x, weight, keys, inverse, noise, flags, forbids = case(6, 2 * IDS, 64)
    weight = jnp.tile(weight[:NARROW], (2 * IDS // NARROW, 1))
    arguments = (x, weight, keys, inverse, 0 * noise, flags, forbids & False)
    token, _ = sampled_head_mosaic(*arguments, interpret=INTERPRET)
    np.testing.assert_array_equal(token, jnp.argmax(Dense(weight[:NARROW])(x, out=jnp.float32), axis=-1))


def test_applies_where_it_says() -> None:
    shape = {"rows": 64, "hidden": 2048, "vocab": 128_256, "dtype": jnp.bfloat16}
    for rows in (40, 64, 128, 256):
        assert supports(**(shape | {"rows": rows}))
    for other in (
        {"rows": 8},
        {"rows": 72},
        {"rows": 512},
        {"hidden": 100},
        {"vocab": 128_300},
        {"dtype": jnp.float32},
    ):
        assert not supports(**(shape | other))


@pytest.mark.parametrize(("rows", "vocab", "hidden"), [(64, 128_256, 2048), (100, 151_936, 1536)])
def test_lowers_for_cuda(rows: int, vocab: int, hidden: int) -> None:
    shapes = jax.eval_shape(functools.partial(case, rows, vocab, hidden))
    text = sampled_head_mosaic.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "vocab", "hidden"), [(64, 128_256, 2048), (37, 32_000, 4096), (100, 151_936, 1536), (300, 128_256, 1024)]
)
def test_on_a_gpu(rows: int, vocab: int, hidden: int) -> None:
    arguments = case(rows, vocab, hidden)
    check(arguments)
    first, second = sampled_head_mosaic(*arguments), sampled_head_mosaic(*arguments)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
