"""Defines the methods that `bench.py` measures, the grid of cases, and inputs that rotate."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from smcjax.pallas import active_implementation
from studies.verification import acceptance
from studies.verification import verify_pack as vp
from studies.verification.slow_kernels import naive_scan, pack_after_a_wait, pack_by_rows
from studies.verification.synthetic import SEED, like_cycles, rotations, synthetic

MAX_SINGLE_LAUNCH = 40_000  # ids; beyond, one launch is compiled for nothing
STRESS: dict[str, Any] = {"rows": 32, "gamma": 128, "alpha": 0.9, "dim": 2048}
Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the grid and what is measured there; `dim` 0 has ids only.

    With `cycles`, counted by the number of drafts that they keep, rows accept like these, and α is their mean.
    """

    rows: int
    gamma: int
    alpha: float
    dim: int = 0
    methods: tuple[str, ...] = ()
    in_program: bool = False
    cycles: tuple[int, ...] = ()

    @property
    def point(self) -> dict[str, Any]:
        return {"rows": self.rows, "gamma": self.gamma, "alpha": self.alpha, "dim": self.dim}


# ------------------------------------------------------------------------------------------------------------- methods

SCANS = ("scan: op by op", "scan: xla", "scan: a thread a row", "scan: ours")
PACKS = ("pack: xla", "pack: a block a row", "pack: the same after a wait", "pack: ours")
VERIFIES = ("verify: xla", "verify: two launches", "verify: one launch", "verify: one block")
ON_CPU = ("scan: op by op", "scan: xla", "pack: xla", "verify: xla")
NO_JIT = ("scan: op by op", "pack: the same after a wait")


def one_block(draft: jax.Array, target: jax.Array, kv: jax.Array) -> Any:
    """The study's structure: a single block scans, sums and copies."""
    rows, gamma, dim = kv.shape
    return vp.verify_and_pack_mosaic(draft, target, kv, tuning=vp.plan(rows, gamma, 2 * dim, blocks=1))


METHODS: dict[str, Call] = {
    "scan: op by op": acceptance.op_by_op,
    "scan: xla": jax.jit(acceptance.acceptance_scan_reference),
    "scan: a thread a row": naive_scan,
    "scan: ours": jax.jit(acceptance.acceptance_scan_mosaic),
    "pack: xla": jax.jit(vp.pack_reference),
    "pack: a block a row": pack_by_rows,
    "pack: the same after a wait": pack_after_a_wait,
    "pack: ours": jax.jit(lambda kv, lengths: vp.pack_mosaic(kv, lengths)[0]),
    "verify: xla": jax.jit(vp.verify_and_pack_reference),
    "verify: two launches": jax.jit(vp.scan_then_pack_mosaic),
    "verify: one launch": jax.jit(vp.verify_and_pack_mosaic),
    "verify: one block": jax.jit(one_block),
}


def grid(quick: bool) -> list[Case]:
    """The study's grid, its sweep of γ, widths of KV, and batches beyond; first what the goals are stated for."""
    every = (0.3, 0.6, 0.9)
    alphas = (0.9,) if quick else every
    steps = ("verify: two launches", "verify: one launch")
    cases = [Case(**STRESS, methods=PACKS + VERIFIES, in_program=True)]
    for dim, gamma, alpha in itertools.product((128, 512, 1024, 2048), (8, 128), alphas):
        cases.append(Case(32, gamma, alpha, dim, PACKS + VERIFIES, in_program=alpha == 0.9 and dim in (128, 2048)))
    for gamma, alpha in itertools.product((8, 64, 128), every):
        cases.append(Case(32, gamma, alpha, methods=SCANS, in_program=alpha in alphas))
    beyond = (64, 257, 1024)
    for rows, gamma, dim, alpha in itertools.product(beyond, (8, 128), (128, 2048), (0.3, 0.9)):
        if not (quick and rows > 64):
            cases.append(Case(rows, gamma, alpha, dim, (*steps, "verify: xla")))
    for rows, gamma, alpha in itertools.product((1, 4, 16), (8, 64, 128), every):
        cases.append(Case(rows, gamma, alpha, methods=SCANS))
    for gamma, alpha in itertools.product((4, 16, 32), (0.3, 0.9)):
        cases.append(Case(32, gamma, alpha, methods=SCANS))
    for rows, gamma, dim, alpha in itertools.product((1, 4, 16, 32), (8, 64, 128), (128, 2048), alphas):
        one = ("verify: one block",) if (rows, gamma) == (4, 8) else ()
        cases.append(Case(rows, gamma, alpha, dim, steps + one))
    cases += counted_cases()
    merged: dict[tuple[Any, ...], Case] = {}
    for case in cases:
        at = tuple(case.point.values())
        old = merged.get(at)
        merged[at] = (
            case
            if old is None
            else dataclasses.replace(
                old,
                methods=tuple(dict.fromkeys(old.methods + case.methods)),
                in_program=old.in_program or case.in_program,
            )
        )
    return [fitted(case) for case in merged.values()]


def counted_cases() -> list[Case]:
    """Returns the cases of the bundled pair's acceptance, at the batch and widths that the study's tables have."""
    cycles = tuple(json.loads(Path(__file__).with_name("counted_cpu.json").read_text())["cycles"])
    gamma = len(cycles) - 1
    alpha = sum(kept * count for kept, count in enumerate(cycles)) / (gamma * sum(cycles))
    point = functools.partial(Case, 32, gamma, alpha, cycles=cycles)
    return [point(methods=SCANS), *(point(dim, PACKS + VERIFIES) for dim in (128, 2048))]


def fitted(case: Case) -> Case:
    """Without methods that do not run here or are not worth compiling."""
    too_many = case.rows * case.gamma > MAX_SINGLE_LAUNCH
    keep = [m for m in case.methods if not (too_many and m == "verify: one launch")]
    if active_implementation() == "xla":
        keep = [m for m in keep if m in ON_CPU]
    return dataclasses.replace(case, methods=tuple(keep))


def tunings() -> dict[str, vp.Tuning]:
    """Other ways to divide the stress point, for whoever sets the constants."""
    rows, gamma, row_bytes = STRESS["rows"], STRESS["gamma"], 2 * STRESS["dim"]
    base = vp.plan(rows, gamma, row_bytes)
    change = functools.partial(dataclasses.replace, base)
    return {
        "as planned": base,
        "looks ahead by gamma / 8": change(ahead=gamma // 8),
        "looks ahead by gamma / 4": change(ahead=gamma // 4),
        "tiles of 1 row": change(tile=1, slots=8),
        "tiles of 4 rows": change(tile=4, slots=3),
        "2 slots": change(slots=2),
        "2 warpgroups": change(warpgroups=2, slots=8),
        "8 warpgroups": change(warpgroups=8, slots=2),
        "264 blocks of 2 warpgroups": change(blocks=264, warpgroups=2, slots=5),
    }


# -------------------------------------------------------------------------------------------------------------- inputs


class Batches:
    """Inputs of one case, several sets, kept for the next phase."""

    def __init__(self, pool: jax.Array, case: Case) -> None:
        count = rotations(case.rows, case.gamma, case.dim)
        ids = _ids(case.rows, case.gamma, case.alpha, case.cycles, count)
        self.lengths = [lengths for _, _, lengths, _ in ids]
        self.accepted = statistics.fmean(int(lengths.sum()) for lengths in self.lengths)
        scan: list[tuple[jax.Array, ...]] = [(draft, target) for draft, target, _, _ in ids]
        self.inputs = {"scan": scan}
        if case.dim:
            kv = _kv(pool, (case.rows, case.gamma, case.dim), count)
            self.inputs["pack"] = [(one, lengths) for one, (_, _, _, lengths) in zip(kv, ids, strict=True)]
            self.inputs["verify"] = [(*two, one) for two, one in zip(scan, kv, strict=True)]
        self.small = count == 64

    def of(self, method: str) -> list[tuple[jax.Array, ...]]:
        return self.inputs[kind(method)]


@functools.cache
def _ids(rows: int, gamma: int, alpha: float, cycles: tuple[int, ...], count: int) -> list[tuple[Any, ...]]:
    """Draft and target on the device; lengths on the host and on the device."""
    seeds = range(SEED, SEED + count)
    if cycles:
        made = [like_cycles(rows, cycles, seed=seed) for seed in seeds]
    else:
        made = [synthetic(rows, gamma, alpha, seed=seed) for seed in seeds]
    return [(*jax.device_put((one.draft, one.target)), one.lengths, jax.device_put(one.lengths)) for one in made]


_pieces: dict[tuple[int, ...], list[jax.Array]] = {}


def _kv(pool: jax.Array, shape: tuple[int, ...], count: int) -> list[jax.Array]:
    """Pieces of the pool, which is of random numbers between −1 and 1."""
    size = math.prod(shape)
    if shape not in _pieces:
        starts = [i * size % max(1, pool.size - size) for i in range(count)]
        _pieces[shape] = [_piece(pool, start, shape) for start in starts]
    return _pieces[shape]


def kind(method: str) -> str:
    return method.partition(":")[0]


@functools.partial(jax.jit, static_argnums=2)
def _piece(pool: jax.Array, start: int, shape: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(pool, (start,), (math.prod(shape),)).reshape(shape)


@functools.partial(jax.jit, static_argnums=0)
def make_pool(size: int) -> jax.Array:
    i = lax.iota(jnp.uint32, size) * jnp.uint32(2654435761)
    i = (i ^ (i >> 15)) * jnp.uint32(2246822519)
    i = (i ^ (i >> 13)) * jnp.uint32(3266489917)
    return ((i ^ (i >> 16)).astype(jnp.float32) * 2.0**-31 - 1).astype(jnp.bfloat16)


def shapes_of(case: Case, method: str) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the arguments that the method is called with."""
    draft, target, lengths = (
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((case.rows, case.gamma), (case.rows, case.gamma + 1), (case.rows,))
    )
    kv = jax.ShapeDtypeStruct((case.rows, case.gamma, case.dim), jnp.bfloat16)
    return {"scan": [draft, target], "pack": [kv, lengths], "verify": [draft, target, kv]}[kind(method)]
