"""The noise of draws: the bits that it is made of, the laws of what is drawn by it, and the same bits in a kernel.

The laws are integrals over all words of 64 bits: within [2ⁿ, 2ⁿ⁺¹) as a sum over 2¹³ words, or over all where these are
fewer.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.noise import fold_in, gumbel, gumbel_of_words, gumbels, uniform, uniform_of_words, uniforms
from smcjax.pallas.mosaic.wgmma import Ref

TILE = (64, 16)  # of the elements that a kernel makes
MANY_DRAWS = """
import jax, jax.numpy as jnp
from smcjax.decoding.sampling import draw
logits = jnp.broadcast_to(jnp.zeros(65_536).at[777].set(17.0), (100, 65_536))
keys = jax.random.split(jax.random.key(0), (240, 100))
print(jax.jit(lambda keys: jax.lax.map(lambda some: draw(some, logits), keys))(keys).reshape(-1).tolist())
"""
RATIOS = [2.0**-n for n in range(0, 61, 4)] + [1e-7, 1e-8, 3e-10, 0.3]


def words() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """High and low words that stand for all, and the probability of what each stands for."""
    values, masses = [0], [2.0**-64]
    for bits in range(64):
        count = 1 << min(bits, 13)
        values += [(1 << bits) + (2 * i + 1) * (1 << bits) // (2 * count) for i in range(count)]
        masses += [2.0 ** (bits - 64) / count] * count
    found = np.array(values, np.uint64)
    return (found >> 32).astype(np.uint32), found.astype(np.uint32), np.array(masses)


def old_uniform(high: jax.Array, low: jax.Array) -> jax.Array:
    """JAX's uniform of two words, for controls."""
    return ((high ^ low) >> 9).astype(jnp.float32) * 2.0**-23


def old_gumbel(high: jax.Array, low: jax.Array) -> jax.Array:
    """JAX's Gumbel noise of two words, for controls."""
    return -jnp.log(-jnp.log(jnp.maximum(old_uniform(high, low), float(jnp.finfo(jnp.float32).tiny))))


def law_of(function: Callable[..., jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    """The values of a function of two words in ascending order, and their probabilities."""
    if function in (old_uniform, old_gumbel):  # 2²³ values, all equally likely
        high, low = np.arange(1 << 23, dtype=np.uint32) << 9, np.uint32(0)
        masses = np.full(1 << 23, 2.0**-23)
    else:
        high, low, masses = words()
    values = np.asarray(jax.jit(function)(high, low))
    order = np.argsort(values)
    return values[order], masses[order]


def share_of(ratio: float, law: tuple[np.ndarray, np.ndarray]) -> float:
    """The probability that of two tokens the one is drawn that has `ratio` times the other's probability."""
    noise, mass = law
    above = np.append(np.cumsum(mass[::-1])[::-1], 0.0)  # of this value and all larger ones
    scores = noise + np.float32(np.log(ratio))
    return float(mass @ above[np.searchsorted(scores, noise, side="right")])


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_token_keeps_its_probability_however_small(ratio: float) -> None:
    np.testing.assert_allclose(share_of(ratio, law_of(gumbel_of_words)), ratio / (1 + ratio), rtol=1e-3)


@pytest.mark.slow
def test_control_noise_of_23_bits_loses_it() -> None:
    old = law_of(old_gumbel)
    a = 2.0**-23 / 1e-7
    np.testing.assert_allclose(share_of(1e-7, old) / 1e-7, a / np.expm1(a), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(share_of(0.3, old), 0.3 / 1.3, rtol=1e-3)


@pytest.mark.parametrize("chance", [r for r in RATIOS if r < 1] + [2.0**-60 * 3, 0.999])
def test_a_coin_keeps_its_probability_however_small(chance: float) -> None:
    values, mass = law_of(uniform_of_words)
    np.testing.assert_allclose(mass[values < np.float32(chance)].sum(), chance, rtol=1e-3)


def test_coins_of_probability_0_and_1_are_certain() -> None:
    high, low = (np.array(each, np.uint32) for each in ([0, 0, 2**32 - 1, 2**32 - 1], [0, 1, 0, 2**32 - 1]))
    found = np.asarray(uniform_of_words(high, low))
    assert found.tolist() == [2.0**-65, np.float32(1.5 * 2.0**-64), 1 - 2.0**-24, 1 - 2.0**-24]
    values, _ = law_of(uniform_of_words)
    assert values[0] > 0
    assert values[-1] < 1
    values, mass = law_of(old_uniform)
    assert mass[values < np.float32(1e-9)].sum() > 100e-9, "control: a coin of 23 bits comes too often"


def test_numbers_are_those_of_the_keys_words() -> None:
    """By JAX's own words of each counter and NumPy in float64."""
    keys = jax.random.split(jax.random.key(7), 3)
    both = np.asarray(jax.random.key_data(jax.vmap(lambda key: jax.random.split(key, (40, 50)))(keys)))
    x = both[..., 0] / 2.0**32 + (both[..., 1] + 0.5) / 2.0**64
    got = np.asarray(uniforms(keys, (40, 50)))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, x, rtol=2.0**-23, atol=0)
    np.testing.assert_allclose(gumbels(keys, (40, 50)), -np.log(-np.log1p(-x)), rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(uniforms(keys[1], (40, 50)), got[1])
    np.testing.assert_array_equal(uniforms(keys, ()), got[:, 0, 0])


def test_noise_is_accurate_over_all_its_range() -> None:
    """To a few roundings: at the seam of the two forms 1 − x has 16 bits of x."""
    high, low, _ = words()
    x = high / 2.0**32 + (low + 0.5) / 2.0**64
    got = np.asarray(jax.jit(gumbel_of_words)(high, low))
    np.testing.assert_allclose(got[x < 0.999], -np.log(-np.log1p(-x[x < 0.999])), rtol=2.0**-23, atol=2.0**-16)
    assert -2.82 < got.min() < got.max() < 45.1


def test_keys_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="keys are 'rbg' and draws know 'threefry2x32' only"):
        gumbels(jax.random.key(0, impl="rbg"), (3,))


@pytest.mark.slow
def test_65_535_tokens_of_a_small_share_are_drawn_as_often_as_they_should() -> None:
    """One logit of 17 and all others 0: 64.9 of 24,000 draws are due to those. Noise of 23 bits gave them 14.

    In a process of its own, which XLA compiles for as users' programs: several times as fast as for tests.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", MANY_DRAWS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    drawn = [token for token in json.loads(ended.stdout) if token != 777]
    due = 24_000 * 65_535 / (np.exp(17.0) + 65_535)
    assert abs(len(drawn) - due) < 4 * np.sqrt(due)
    assert len(set(drawn)) > 0.9 * len(drawn)


def in_a_kernel(keys: jax.Array, *, interpret: Any = None) -> list[jax.Array]:
    """The first elements of the noise and the uniforms of a key's words, and the words of a key folded from it."""

    def kernel(keys: Ref, *out: Ref) -> None:
        def full(value: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full(TILE, value, jnp.uint32), plgpu.Layout.WGMMA)

        row, column = (plgpu.broadcasted_iota(jnp.int32, TILE, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
        words, ids = (full(keys[0]), full(keys[1])), (row * TILE[1] + column).astype(jnp.uint32)
        made = (gumbel(*words, ids), uniform(*words, ids), *fold_in(*words, ids))
        for ref, value in zip(out, made, strict=True):
            ref[...] = value

    dtypes = (jnp.float32, jnp.float32, jnp.uint32, jnp.uint32)
    out: list[jax.Array] = plgpu.kernel(
        kernel, out_type=[jax.ShapeDtypeStruct(TILE, dtype) for dtype in dtypes], interpret=interpret
    )(keys)
    return out


def check_in_a_kernel(seed: int, interpret: Any = None) -> None:
    key = jax.random.key(seed)
    folded = jax.vmap(lambda data: jax.random.fold_in(key, data))(jnp.arange(TILE[0] * TILE[1], dtype=jnp.uint32))
    want = [jax.jit(make, static_argnums=1)(key, TILE) for make in (gumbels, uniforms)]
    want += [jax.random.key_data(folded)[:, i].reshape(TILE) for i in range(2)]
    got = jax.jit(functools.partial(in_a_kernel, interpret=interpret))(jax.random.key_data(key))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_interpreted_kernel_makes_the_same_bits() -> None:
    check_in_a_kernel(3, interpret=plgpu.InterpretGPUParams())


def test_the_noise_lowers_for_cuda() -> None:
    words = jax.ShapeDtypeStruct((2,), jnp.uint32)
    text = jax.jit(in_a_kernel).trace(words).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
def test_a_kernel_on_a_gpu_makes_the_same_bits() -> None:
    for seed in range(200):
        check_in_a_kernel(seed)
