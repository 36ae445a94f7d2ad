"""The end of a decode step, interpreted and on a GPU, equals one reduction in plain XLA; it lowers for CUDA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.pallas.decode_step.conclude import (
    WHOLE,
    Concluded,
    conclude,
    conclude_reference,
    padded_candidates,
)
from smcjax.pallas.decode_step.shape import padded_tokens
from smcjax.pallas.mosaic.gumbel_max import DTYPES, NO_ID, Candidates

INTERPRET = plgpu.InterpretGPUParams()
VOCABULARY = 5000


def candidates(tokens: int, count: int) -> Candidates:
    """Makes candidates: a token's ids differ, two share its largest perturbed logit, and the padding is poison."""
    rng = np.random.default_rng(count)
    best, logit, top = rng.normal(size=(3, tokens, count)).astype(np.float32)
    ids = np.stack([rng.permutation(VOCABULARY)[:count] for _ in range(tokens)])
    for row, equal in enumerate(rng.permuted(np.tile(np.arange(count), (tokens, 1)), axis=1)[:, :2]):
        best[row, equal] = 5.0
    mass = rng.uniform(0.1, 9.0, (tokens, count)).astype(np.float32)

    def behind(x: np.ndarray, poison: Any) -> jax.Array:
        missing = padded_candidates(count) - count
        return jnp.asarray(np.pad(x, ((0, 0), (0, missing)), constant_values=poison))

    nan = np.float32(np.nan)
    return Candidates(
        behind(best, nan), behind(ids.astype(np.int32), -7), *(behind(x, nan) for x in (logit, top, mass))
    )


def model(hidden: int) -> tuple[jax.Array, jax.Array]:
    """Embeddings and norms."""
    keys = jax.random.split(jax.random.key(hidden))
    embed = jax.random.normal(keys[0], (VOCABULARY, hidden), jnp.bfloat16)
    return embed, jax.random.normal(keys[1], (3, hidden), jnp.bfloat16)


def check(got: Concluded, want: Concluded) -> None:
    """Integers and embeddings to the bit; log-probabilities to f32's sums of some thousand terms."""
    np.testing.assert_array_equal(got.token, want.token)
    np.testing.assert_allclose(got.logprob, want.logprob, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(got.following, want.following, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


CASES = [(3, 1, 64, 256), (8, 2, 600, 128), (1, 1, WHOLE, 1024)]  # rows, tokens a row, candidates, E


@pytest.mark.parametrize(
    ("rows", "columns", "count", "hidden", "interpret"),
    [
        *((*case, INTERPRET) for case in CASES),
        *(pytest.param(*case, None, marks=pytest.mark.gpu) for case in (*CASES, (8, 1, 132 * 16, 2048))),
    ],
)
def test_equals_one_reduction(rows: int, columns: int, count: int, hidden: int, interpret: Any) -> None:
    found, (embed, norms) = candidates(padded_tokens(rows * columns), count), model(hidden)
    shape = {"count": count, "rows": rows, "columns": columns}
    got = conclude(found, embed, norms, **shape, interpret=interpret)
    check(got, jax.jit(functools.partial(conclude_reference, **shape))(found, embed, norms[0]))
    tokens = np.asarray(got.token)
    best, ids = (np.asarray(x)[columns - 1 : rows * columns : columns, :count] for x in (found.best, found.ids))
    assert (tokens == np.where(best == 5.0, ids, NO_ID).min(axis=1)).all(), "of equal ones the lowest id"
    assert not np.asarray(got.following.x, np.float32)[rows:].any()


def test_a_row_that_is_no_law_has_no_probability_and_harms_no_other() -> None:
    found, (embed, norms) = candidates(8, 64), model(128)
    broken = Candidates(
        found.best.at[1].set(-jnp.inf),
        found.ids.at[1].set(0),
        found.logit.at[1].set(-jnp.inf),
        found.top.at[1, 5].set(jnp.nan),
        found.mass.at[1].set(jnp.nan),
    )
    shape = {"count": 64, "rows": 8, "columns": 1}
    got, whole = (conclude(x, embed, norms, **shape, interpret=INTERPRET) for x in (broken, found))
    assert np.isnan(np.asarray(got.logprob)[1])
    assert 0 <= int(got.token[1]) < VOCABULARY
    others = np.arange(8) != 1
    np.testing.assert_array_equal(np.asarray(got.token)[others], np.asarray(whole.token)[others])
    np.testing.assert_array_equal(np.asarray(got.logprob)[others], np.asarray(whole.logprob)[others])


@pytest.mark.parametrize(("rows", "columns", "hidden"), [(8, 1, 2048), (8, 2, 2048), (1, 1, 4096), (16, 1, 3072)])
def test_lowers_for_cuda(rows: int, columns: int, hidden: int) -> None:
    count = 132 * 16
    place = (padded_tokens(rows * columns), padded_candidates(count))
    found = Candidates(*(jax.ShapeDtypeStruct(place, dtype) for dtype in DTYPES))
    embed, norms = (jax.ShapeDtypeStruct((n, hidden), jnp.bfloat16) for n in (128_256, 33))
    run = functools.partial(conclude, count=count, rows=rows, columns=columns)
    text = jax.jit(run).trace(found, embed, norms).lower(lowering_platforms=("cuda",)).as_text()
    assert "conclude_step" in text
