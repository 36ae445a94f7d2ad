"""Verification and packing: every variant against an oracle written in loops, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.device import HOPPER
from smcjax.pallas.dispatch import active_implementation, implementations
from studies.verification import verify_pack as vp
from studies.verification.acceptance import (
    Acceptance,
    acceptance_scan,
    acceptance_scan_mosaic,
    op_by_op,
    scan_rows_mosaic,
)
from studies.verification.counted import cycles_by_length
from studies.verification.slow_kernels import naive_scan, pack_by_rows
from studies.verification.synthetic import floor_bytes, like_cycles, synthetic, with_lengths

INTERPRET = plgpu.InterpretGPUParams()


class Case(NamedTuple):
    draft: np.ndarray
    target: np.ndarray
    kv: np.ndarray  # NaN wherever the draft is rejected
    lengths: np.ndarray


def poisoned(ids: Any, dim: int, dtype: Any = ml_dtypes.bfloat16) -> Case:
    """Makes a case of `ids` and of random KV with NaN in every rejected entry."""
    kv = np.random.default_rng(1).standard_normal((*ids.draft.shape, dim)).astype(dtype)
    kv[np.arange(ids.draft.shape[1]) >= ids.lengths[:, None]] = np.nan
    return Case(ids.draft, ids.target, kv, ids.lengths)


def case(rows: int, gamma: int, dim: int = 8, alpha: float = 0.7, dtype: Any = ml_dtypes.bfloat16) -> Case:
    return poisoned(synthetic(rows, gamma, alpha), dim, dtype)


def special(name: str, rows: int = 6, gamma: int = 7, dim: int = 16) -> Case:
    """The named corner."""
    rng = np.random.default_rng(3)
    if name == "matches again":  # agrees everywhere but at k
        ids = with_lengths(rng.integers(0, gamma, rows), gamma)
        target = ids.target.copy()
        target[:, :gamma] = ids.draft
        at = np.arange(rows), ids.lengths
        target[at] = (ids.draft[at] + 1) % 4096
        return poisoned(ids._replace(target=target), dim)
    lengths = {
        "all accept": np.full(rows, gamma),
        "all reject": np.zeros(rows, int),
        "first or last": np.where(np.arange(rows) % 2, 0, gamma - 1),
        "one row of all": np.where(np.arange(rows) == 2, gamma, 0),
    }[name]
    return poisoned(with_lengths(lengths, gamma), dim)


REFERENCE = jax.jit(vp.verify_and_pack_reference)
SPECIAL = ["matches again", "all accept", "all reject", "first or last", "one row of all"]
GAMMAS = [1, 31, 32, 33, 129]
ROWS = [1, 33, 257]


class Wanted(NamedTuple):
    acceptance: Acceptance
    packed: np.ndarray


def oracle(given: Case) -> Wanted:
    """In loops over rows and positions."""
    rows, gamma = given.draft.shape
    lengths, following, offsets, packed = [], [], [], []
    for i in range(rows):
        offsets.append(len(packed))
        k = 0
        while k < gamma and given.draft[i, k] == given.target[i, k]:
            packed.append(given.kv[i, k])
            k += 1
        lengths.append(k)
        following.append(given.target[i, k])
    out = np.zeros((rows * gamma, given.kv.shape[2]), given.kv.dtype)
    out[: len(packed)] = np.reshape(packed, (len(packed), -1)) if packed else 0
    missed = [k < gamma for k in lengths]
    return Wanted(Acceptance(*map(np.asarray, (lengths, missed, following, offsets))), out)


def bits(x: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8)


def check_acceptance(got: Any, given: Case) -> None:
    """Asserts that the results, of which `got` may hold only the first, equal the oracle's."""
    want = oracle(given).acceptance
    np.testing.assert_array_equal(want.lengths, given.lengths)  # what the generator promised
    for name, ours, theirs in zip(Acceptance._fields, got, want, strict=False):
        assert ours.dtype == (jnp.bool_ if name == "has_mismatch" else jnp.int32)
        np.testing.assert_array_equal(np.asarray(ours), theirs, err_msg=name)


def check_packed(got: jax.Array, given: Case) -> None:
    want = oracle(given).packed
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert not np.isnan(want.astype(np.float32)).any()  # so NaN that leaks is seen, and -0 and 0 differ
    np.testing.assert_array_equal(bits(got), bits(want))


def check(verify_and_pack: Callable[..., Any], given: Case) -> None:
    acceptance, packed = verify_and_pack(jnp.asarray(given.draft), jnp.asarray(given.target), jnp.asarray(given.kv))
    check_acceptance(acceptance, given)
    check_packed(packed, given)


# ---------------------------------------------------------------------------------------------------------- references


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIAL)
def test_corners(name: str) -> None:
    given = special(name)
    check(vp.verify_and_pack_reference, given)
    check_acceptance(op_by_op(jnp.asarray(given.draft), jnp.asarray(given.target)), given)


@pytest.mark.parametrize(("rows", "gamma"), [(5, GAMMAS[0]), (5, GAMMAS[-1]), (ROWS[-1], 9)], ids=str)
def test_shapes(rows: int, gamma: int) -> None:
    given = case(rows, gamma, dim=3)
    check(REFERENCE, given)
    check_acceptance(jax.jit(op_by_op)(given.draft, given.target), given)
    check_acceptance(acceptance_scan(jnp.asarray(given.draft), jnp.asarray(given.target)), given)
    check_packed(vp.pack(jnp.asarray(given.kv), jnp.asarray(given.lengths)), given)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "dtype"), [(1, ml_dtypes.bfloat16), (129, np.float16)])
def test_odd_widths_go_through_the_dispatcher(dim: int, dtype: Any) -> None:
    check(vp.verify_and_pack, case(4, 6, dim, dtype=dtype))


@given(st.lists(st.integers(0, 6), min_size=5, max_size=5), st.integers(2, 3))
def test_any_lengths(lengths: list[int], vocabulary: int) -> None:
    """Draws few different tokens, so that drafts agree again behind the mismatch."""
    check(REFERENCE, poisoned(with_lengths(np.asarray(lengths), 6, vocabulary=vocabulary), 4))


def test_bad_shapes_are_refused() -> None:
    ids, kv = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="bonus position"):
        vp.verify_and_pack(ids, ids, kv)
    with pytest.raises(ValueError, match="bonus position"):
        acceptance_scan(ids, ids)
    with pytest.raises(ValueError, match="must agree"):
        vp.verify_and_pack(ids, jnp.zeros((2, 4), jnp.int32), kv[:, :2])


# ---------------------------------------------------------------------------------------------------- kernels on a CPU


def interpreted(given: Case, tuning: vp.Tuning) -> Callable[..., Any]:
    return functools.partial(vp.verify_and_pack_mosaic, tuning=tuning, interpret=INTERPRET)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIAL)
def test_fused_kernel_at_corners(name: str) -> None:
    given = special(name)
    check(interpreted(given, vp.Tuning(blocks=2, warpgroups=1, tile=3, slots=3)), given)


@pytest.mark.parametrize(
    ("rows", "gamma", "tuning"),
    [
        (1, 1, vp.Tuning(1, 1, 1, 2)),
        (5, 33, vp.Tuning(2, 2, 11, 2)),
        (33, 2, vp.Tuning(1, 1, 4, 2)),  # the ring of two goes round eight times
    ],
    ids=str,
)
def test_fused_kernel(rows: int, gamma: int, tuning: vp.Tuning) -> None:
    given = case(rows, gamma)
    check(interpreted(given, tuning), given)


def test_pack_kernel() -> None:
    given = case(6, 9, dim=4, dtype=np.float32)
    packed, offsets = vp.pack_mosaic(
        jnp.asarray(given.kv), jnp.asarray(given.lengths), tuning=vp.Tuning(2, 2, 4, 2), interpret=INTERPRET
    )
    check_packed(packed, given)
    np.testing.assert_array_equal(offsets, oracle(given).acceptance.offsets)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIAL[::4])
def test_pack_kernel_with_a_block_a_row(name: str) -> None:
    given = special(name, 3, 4, 8)
    check_packed(pack_by_rows(jnp.asarray(given.kv), jnp.asarray(given.lengths), interpret=INTERPRET), given)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIAL[1:4])
def test_pack_kernel_at_corners(name: str) -> None:
    given = special(name)
    tuning = vp.Tuning(2, 1, 3, 2)
    kernel = vp.pack_mosaic(jnp.asarray(given.kv), jnp.asarray(given.lengths), tuning=tuning, interpret=INTERPRET)
    check_packed(kernel[0], given)


@pytest.mark.slow
def test_scan_then_pack() -> None:
    given = case(5, 6, dim=8)
    check(functools.partial(vp.scan_then_pack_mosaic, interpret=INTERPRET), given)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "gamma"), [(9, 33), (5, 3)])
def test_scan_kernel_of_one_block(rows: int, gamma: int) -> None:
    given = case(rows, gamma)
    got = acceptance_scan_mosaic(given.draft, given.target, warpgroups=2, interpret=INTERPRET)
    check_acceptance(got, given)


@pytest.mark.slow
def test_scan_kernel_of_many_blocks() -> None:
    given = case(11, 33)  # four rows a block, the last block one too few
    check_acceptance(scan_rows_mosaic(given.draft, given.target, blocks=3, warpgroups=1, interpret=INTERPRET), given)
    got = acceptance_scan_mosaic(given.draft, given.target, warpgroups=1, most_recomputed=10, interpret=INTERPRET)
    check_acceptance(got, given)


# ------------------------------------------------------------------------------------------------------- plan, lowering

SHAPES = list(itertools.product([1, 4, 32, 257, 1024], [1, 8, 33, 128, 129], [8, 128, 512, 2048, 8192]))


def test_every_plan_fits_and_leaves_no_block_idle() -> None:
    for rows, gamma, dim in SHAPES:
        tuning = vp.plan(rows, gamma, 2 * dim)
        tiles = -(-rows * gamma // tuning.tile)
        assert 1 <= tuning.blocks <= HOPPER.multiprocessors
        assert (tuning.blocks - 1) * tuning.warpgroups < tiles
        held = 2 * dim * tuning.tile * (tuning.slots * tuning.warpgroups + 1)
        assert held + 8 * 32 * (-(-rows // 32) | 1) + 4096 < HOPPER.shared_memory
        assert 2 <= tuning.slots <= 32


def text(function: Callable[..., Any], rows: int, gamma: int, dim: int, dtype: Any = jnp.bfloat16) -> str:
    """The program that a GPU is given."""
    ids = [jax.ShapeDtypeStruct((rows, gamma + extra), jnp.int32) for extra in (0, 1)]
    arguments = [*ids, jax.ShapeDtypeStruct((rows, gamma, dim), dtype)]
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def launches(program: str) -> int:
    return program.count("stablehlo.custom_call @mosaic_gpu")


@pytest.mark.parametrize(("rows", "gamma", "dim"), [(1024, 8, 128), (33, 7, 8192)], ids=str)
def test_lowers_for_cuda(rows: int, gamma: int, dim: int) -> None:
    assert launches(text(vp.verify_and_pack_mosaic, rows, gamma, dim)) == 1
    assert launches(text(vp.scan_then_pack_mosaic, rows, gamma, dim)) == 2
    assert launches(text(lambda d, t, _: acceptance_scan_mosaic(d, t), rows, gamma, dim)) == 1
    assert launches(text(lambda d, t, _: naive_scan(d, t), rows, gamma, dim)) == 1
    assert launches(text(lambda d, _, kv: pack_by_rows(kv, d[:, 0]), rows, gamma, dim)) == 1


@pytest.mark.slow
def test_the_dispatcher_goes_by_the_number_of_ids_and_by_alignment() -> None:
    with implementations("mosaic"):
        assert launches(text(vp.verify_and_pack, 64, 128, 128)) == 1
        assert launches(text(vp.verify_and_pack, 65, 128, 128)) == 2
        assert launches(text(vp.verify_and_pack, 32, 128, 128, jnp.float16)) == 1
        assert launches(text(vp.verify_and_pack, 32, 128, 2047)) == 0  # rows are not multiples of 16 bytes
        assert launches(text(vp.verify_and_pack, 32, 128, 12)) == 0
        assert launches(text(vp.verify_and_pack, 1025, 8, 128)) == 0
    with implementations("xla"):
        assert launches(text(vp.verify_and_pack, 32, 128, 128)) == 0


def test_looking_ahead_lowers_for_cuda() -> None:
    tuning = dataclasses.replace(vp.plan(32, 128, 4096), ahead=32)
    assert launches(text(functools.partial(vp.verify_and_pack_mosaic, tuning=tuning), 32, 128, 2048)) == 1


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_nothing_goes_to_the_host(implementation: str) -> None:
    with implementations(implementation):
        program = text(vp.verify_and_pack, 32, 128, 2048)
    assert not re.search(r"callback|infeed|outfeed|stablehlo\.(send|recv)", program)


# ------------------------------------------------------------------------------------------------------------ generator


def test_the_generator_is_that_of_the_study() -> None:
    ids = synthetic(4000, 8, 0.6)
    assert ids.draft.dtype == ids.target.dtype == np.int32
    assert ids.draft.min() == ids.target.min() == 0
    assert ids.draft.max() == ids.target.max() == 4095
    np.testing.assert_allclose(ids.lengths.mean(), 8 * 0.6, atol=5 * np.sqrt(8 * 0.6 * 0.4 / 4000))
    np.testing.assert_allclose(ids.lengths.var(), 8 * 0.6 * 0.4, rtol=0.12)
    np.testing.assert_array_equal(synthetic(5, 8, 0.6).draft, synthetic(5, 8, 0.6, seed=7).draft)
    assert (synthetic(5, 8, 0.6, seed=8).draft != synthetic(5, 8, 0.6).draft).any()


def test_rows_accept_like_counted_cycles() -> None:
    cycles = (10, 0, 30, 60)  # of 100 that keep 0, 1, 2, 3 drafts
    batch = like_cycles(20_000, cycles, seed=3)
    assert batch.draft.shape == (20_000, 3)
    shares = np.bincount(batch.lengths, minlength=4) / 20_000
    np.testing.assert_allclose(shares, np.asarray(cycles) / 100, atol=0.015)  # four standard deviations
    binomial = np.bincount(synthetic(20_000, 3, 0.8, seed=3).lengths, minlength=4) / 20_000  # the same mean
    assert np.abs(shares - binomial).max() > 0.05  # negative control
    first = batch.draft[:, :1] == batch.target[:, :1]
    np.testing.assert_array_equal(first[:, 0], batch.lengths > 0)


def test_cycles_are_counted_by_what_they_keep() -> None:
    assert cycles_by_length(10, (9, 9, 4)) == [1, 0, 5, 4]


def test_floor_of_the_stress_point() -> None:
    """6.6 µs at 4.8 TB/s with the tail, 6.3 without (k = 115)."""
    assert 6.6e-6 < floor_bytes(32, 128, 2048, 32 * 115) / 4.8e12 < 6.7e-6
    assert 6.25e-6 < floor_bytes(32, 128, 2048, 32 * 115, tail=False) / 4.8e12 < 6.35e-6


# ------------------------------------------------------------------------------------------------------------ on a GPU


def both_structures(given: Case) -> None:
    """One launch, and two, compiled."""
    assert active_implementation() == "mosaic"
    check(vp.verify_and_pack_mosaic, given)
    check(vp.scan_then_pack_mosaic, given)


def every_variant(given: Case) -> None:
    """Checks each function by its public name, the way that callers reach it."""
    assert active_implementation() == "mosaic"
    draft, target, kv = map(jnp.asarray, given[:3])
    check_acceptance(op_by_op(draft, target), given)
    check_acceptance(acceptance_scan(draft, target), given)
    check_acceptance(naive_scan(draft, target), given)
    check_packed(vp.pack(kv, jnp.asarray(given.lengths)), given)
    if kv.dtype == jnp.bfloat16:
        check_packed(pack_by_rows(kv, jnp.asarray(given.lengths)), given)
    check(REFERENCE, given)
    check(vp.verify_and_pack, given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize(("rows", "gamma", "dim"), [(6, 7, 16), (32, 128, 2048)], ids=str)
def test_corners_on_the_gpu(name: str, rows: int, gamma: int, dim: int) -> None:
    given = special(name, rows, gamma, dim)
    both_structures(given)
    every_variant(given)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "gamma"), list(itertools.product(ROWS, GAMMAS)), ids=str)
def test_shapes_on_the_gpu(rows: int, gamma: int) -> None:
    both_structures(case(rows, gamma, dim=128))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "gamma", "dim"), [(9, 12, 7), (9, 12, 2047), (4, 5, 8192), (1024, 128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "f16"])
def test_widths_on_the_gpu(rows: int, gamma: int, dim: int, dtype: Any) -> None:
    every_variant(case(rows, gamma, dim, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
def test_the_same_bits_again_and_again_on_the_gpu(alpha: float) -> None:
    """Races between copies would show as a difference now and then."""
    given = case(32, 128, 2048, alpha)
    first = vp.verify_and_pack_mosaic(*map(jnp.asarray, given[:3]))
    check_packed(first[1], given)

    @jax.jit
    def differs(a: jax.Array, b: jax.Array) -> jax.Array:
        return (jax.lax.bitcast_convert_type(a, jnp.uint16) != jax.lax.bitcast_convert_type(b, jnp.uint16)).any()

    for _ in range(200):
        assert not differs(first[1], vp.verify_and_pack_mosaic(*map(jnp.asarray, given[:3]))[1])
