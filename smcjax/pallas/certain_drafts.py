"""A cycle's verdict on drafts that are certain, and its commit, in two launches: Mosaic GPU kernels (Hopper).

    accepted   draft j iff u_j < p_j(d_j), up to the first that is not
    following  argmax over v ≠ d_j of logit_j(v) + noise(v) at the first rejection, behind all K drafts over all v

The residual of a certain draft is p without it, so that its Gumbel draw needs neither p nor its sum, and one noise over
the vocabulary serves whichever column it comes to: all columns' draws are made in the pass that sums their laws. XLA
takes seven passes and some thirty launches.

    laws       a block for every 1,024 ids of a request: top, mass and the best perturbed id but the draft, of each
               column (`gumbel_max.Candidates`, a column one row)
    commit     a block a request: candidates reduced, drafts judged, the run appended, stops and the cap seen to

The reference is `smcjax.rejection.decoder.advance`'s; a greedy request has no noise, and accepts the likeliest draft.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from smcjax.noise import fold_in, gumbel, uniform
from smcjax.pallas.mosaic import threads
from smcjax.pallas.mosaic.compat import plgpu
from smcjax.pallas.mosaic.gumbel_max import DTYPES, NO_ID, Candidates
from smcjax.pallas.mosaic.threads import WARP, WARPGROUP, WARPS, Ref, Threads, Word
from smcjax.pallas.mosaic.wgmma import MASKED

TILE = (64, 16)  # ids of a block, as an array of numbers: 8 a thread
IDS = TILE[0] * TILE[1]
UNIFORMS = (64, 8)
MOST_COLUMNS = 16  # C: their work is written out in line


class Asked(NamedTuple):
    """The part of requests that a cycle's verdict and commit ask for, of G requests."""

    key: UInt[Array, "G 2"]
    temperature: Float[Array, " G"]  # 0: greedy
    minimum: Int[Array, " G"]  # generated tokens within which no stop may come
    prompt: Int[Array, " G"]
    limit: Int[Array, " G"]
    stops: Bool[Array, "G V"]


class Rows(NamedTuple):
    """The part of the state that a commit changes, of G requests with a row each."""

    tokens: Int[Array, "G T"]
    logprobs: Float[Array, "G T"]
    length: Int[Array, " G"]
    finished: Bool[Array, " G"]
    running: Bool[Array, " G"]
    failed: Bool[Array, " G"]
    cycle: Int[Array, " G"]


class Committed(NamedTuple):
    """The report of a commit."""

    accepted: Int[Array, " G"]
    tokens: Int[Array, "G C"]  # those behind the run are stale
    ran: Bool[Array, " G"]
    done: Bool[Array, " G"]
    before: Int[Array, " G"]  # lengths
    after: Int[Array, " G"]


Found = list[Word]  # five words, as `Candidates` has them


def _better(t: Threads, a: Found, b: Found) -> Found:
    """The better of two perturbed ids: best, id and logit."""
    is_first = t.where(a[0] == b[0], _flag(t, a[1] < b[1]), _flag(t, b[0] < a[0])) != 0
    return [t.where(is_first, x, y) for x, y in zip(a, b, strict=True)]


def _larger(t: Threads, a: Found, b: Found) -> Found:
    """The larger of words, one by one."""
    return [t.where(x < y, y, x) for x, y in zip(a, b, strict=True)]


def _both(t: Threads, a: Found, b: Found) -> Found:
    """The candidate of two candidates' ids."""
    (top,) = _larger(t, a[3:4], b[3:4])
    mass = a[4] * t.exp(a[3] - top) + b[4] * t.exp(b[3] - top)
    return [*_better(t, a[:3], b[:3]), top, mass]


def _of_warp(t: Threads, combine: Callable[[Threads, Found, Found], Found], found: Found) -> Found:
    """The words of all lanes of a warp combined, in every lane."""
    for distance in (16, 8, 4, 2, 1):
        found = combine(t, found, [t.shuffle_xor(word, distance) for word in found])
    return found


def _flag(t: Threads, condition: Word) -> Word:
    return t.where(condition, 1, 0)


def _inverse(t: Threads, temperature: Word) -> Word:
    """1 / temperature, 1 of greedy requests."""
    return t.constant(1.0) / t.where(temperature == 0.0, 1.0, temperature)


def _laws(
    t: Threads,
    logits: Ref,  # [G, C, V] f32 GMEM, as all but the noise and the parts
    drafts: Ref,  # [G, K] int32
    temperature: Ref,  # [G] f32
    minimum: Ref,  # [G], as the next two
    prompt: Ref,
    length: Ref,
    stops: Ref,  # [G, V] bool
    *refs: Any,  # five [G, C, blocks]; noise [64, 16] f32 SMEM; five parts [C · 4] SMEM; the request and the block
    shape: tuple[int, int, int],
) -> None:
    columns, vocab, blocks = shape
    found, noise, parts, (group, block) = refs[:5], refs[5], refs[6:11], refs[11:]
    heat = t.load(temperature, group)
    inverse, scale = _inverse(t, heat), t.where(heat == 0.0, 0.0, t.constant(1.0))
    number = t.load(length, group) - t.load(prompt, group) + 1  # of the first column's token, from 1
    within = t.load(minimum, group) - number  # columns up to it may not stop
    ids = [block * IDS + t.index + i * WARPGROUP for i in range(IDS // WARPGROUP)]
    there = [t.minimum(v, vocab - 1) for v in ids]
    loaded = [[t.load(logits, (group * columns + c) * vocab + v) for v in there] for c in range(columns)]
    stop = [t.load(stops, group * vocab + v) for v in there]
    proposed = [t.load(drafts, group * (columns - 1) + c) for c in range(columns - 1)]
    t.synchronize()
    noises = [t.load(noise, t.index + i * WARPGROUP) * scale for i in range(len(ids))]
    warp, lane = t.index // WARP, t.index % WARP
    for c, (products, draft) in enumerate(zip(loaded, [*proposed, t.constant(-1)], strict=True)):
        forbids = within >= c
        values = []
        for v, x, stops_here in zip(ids, products, stop, strict=True):
            allowed = t.where(forbids & (stops_here != 0), -math.inf, x * inverse)
            values.append(t.where(v < vocab, allowed, -math.inf))
        top = t.constant(MASKED)
        for value in values:
            (top,) = _larger(t, [top], [value])
        (top,) = _of_warp(t, _larger, [top])
        best, at, logit, mass = t.constant(-math.inf), t.constant(NO_ID), t.constant(-math.inf), t.constant(0.0)
        for v, value, extra in zip(ids, values, noises, strict=True):
            mass = mass + t.exp(value - top)
            perturbed = t.where(v == draft, -math.inf, value + extra)
            better = best < perturbed
            at, logit = t.where(better, v, at), t.where(better, value, logit)
            best = t.where(better, perturbed, best)
        (mass,) = _of_warp(t, lambda _, a, b: [a[0] + b[0]], [mass])
        of_warp = [*_of_warp(t, _better, [best, at, logit]), top, mass]
        for part, word in zip(parts, of_warp, strict=True):
            t.store(part, warp + c * WARPS, word, only=lane == 0)
    t.synchronize()
    column = t.minimum(t.index, columns - 1)
    whole = [t.load(part, column * WARPS) for part in parts]
    for other in range(1, WARPS):
        whole = _both(t, whole, [t.load(part, column * WARPS + other) for part in parts])
    for ref, word in zip(found, whole, strict=True):
        t.store(ref, (group * columns + column) * blocks + block, word, only=t.index < columns)


def _commit(
    t: Threads,
    logits: Ref,  # [G, C, V] f32 GMEM, as all but the last
    drafts: Ref,  # [G, K]
    temperature: Ref,  # [G] f32
    minimum: Ref,  # [G], as the next two
    prompt: Ref,
    limit: Ref,
    stops: Ref,  # [G, V] bool
    *refs: Any,  # five [G, C, blocks]; `Rows`; `Committed`; SMEM; the request
    shape: tuple[int, int, int],
    most: int,
) -> None:
    columns, vocab, blocks = shape
    found, refs = refs[:5], refs[5:]
    (tokens, logprobs, length, finished, running, failed, cycle), refs = refs[:7], refs[7:]  # changed
    (accepted_ref, run_ref, ran_ref, done_ref, before_ref, after_ref), refs = refs[:6], refs[6:]
    uniforms, parts, (accepts, ends, group) = refs[0], refs[1:6], refs[6:]  # [512] f32; five [C]; [C] int32 each
    zero, one = t.constant(0), t.constant(1)
    warp, lane = t.index // WARP, t.index % WARP

    # Everything is asked for before any of it is waited for: a thread's column and draft, and its warp's candidates.
    column, is_column = t.minimum(t.index, columns - 1), t.index < columns
    heat, size = t.load(temperature, group), t.load(length, group)
    has_draft = t.index < columns - 1
    draft = t.load(drafts, group * (columns - 1) + t.minimum(t.index, columns - 2))
    turns = []
    for turn in range(-(-columns // WARPS)):
        of_warp = t.minimum(warp + turn * WARPS, columns - 1)
        places = [t.minimum(lane + at, blocks - 1) for at in range(0, blocks, WARP)]
        begin = (group * columns + of_warp) * blocks
        candidates = [[t.load(ref, begin + place) for ref in found] for place in places]
        turns.append((of_warp, candidates))
    token_number = size - t.load(prompt, group) + 1 + column
    stop = t.load(stops, group * vocab + draft)
    value = t.load(logits, (group * columns + column) * vocab + draft) * _inverse(t, heat)
    value = t.where((t.load(minimum, group) >= token_number) & (stop != 0), -math.inf, value)
    for of_warp, candidates in turns:
        for number, candidate in enumerate(candidates):
            # Behind the last one comes that again, which adds nothing.
            candidate[4] = t.where(lane + number * WARP < blocks, candidate[4], 0.0)
        mine = functools.reduce(functools.partial(_both, t), candidates)
        for part, word in zip(parts, _of_warp(t, _both, mine), strict=True):
            t.store(part, of_warp, word, only=lane == 0)
    t.synchronize()

    # A thread a column: whether its draft is accepted, if all before it are.
    best, at, _, top, mass = (t.load(part, column) for part in parts)
    chance = t.exp(value - top) / mass
    likeliest = t.where(value == best, _flag(t, draft < at), _flag(t, best < value))
    drawn = _flag(t, t.load(uniforms, column) < chance)
    t.store(accepts, column, t.where(has_draft, t.where(heat == 0.0, likeliest, drawn), 0), only=is_column)
    t.synchronize()
    accepted, on = zero, one
    for c in range(columns - 1):
        on = on * t.load(accepts, zero + c)
        accepted = accepted + on

    # The run: its drafts and the token behind them.
    _, following, logit, _, mass_behind = (t.load(part, accepted) for part in parts)
    following = t.minimum(following, vocab - 1)
    is_last = column == accepted
    token = t.where(is_last, following, t.where(has_draft, draft, 0))
    logprob = t.where(is_last, logit, value) - top - t.log2(mass) * math.log(2)
    cap = t.load(limit, group)
    # A softmax is NaN for all tokens or for none. Behind the cap laws mean nothing.
    has_law = t.where(size + accepted < cap, _flag(t, t.constant(0.0) < mass_behind), 1)
    has_law = has_law * _flag(t, t.constant(0.0) < t.load(parts[4], zero))
    is_stop = t.load(stops, group * vocab + token)
    t.store(ends, column, t.where(size + column + 1 >= cap, 1, is_stop), only=is_column)
    t.synchronize()
    count, ended = zero, zero
    for c in range(columns):
        inside = _flag(t, accepted >= c)
        count = count + inside * (one - ended)
        ended = t.where(inside * t.load(ends, zero + c) != 0, 1, ended)

    goes, was_finished = t.load(running, group), t.load(finished, group)
    live = goes * (one - was_finished) * has_law
    place = size + column
    writes = is_column & (live != 0) & (place < most)
    t.store(tokens, group * most + place, token, only=writes)
    t.store(logprobs, group * most + place, logprob, only=writes)
    t.store(run_ref, group * columns + column, token, only=is_column)
    t.synchronize()  # all have read what the first of them changes
    now_finished = t.where(live * ended != 0, 1, was_finished)
    now_runs = goes * has_law * (one - now_finished)
    length_now = size + live * count
    for ref, word in (
        (length, length_now),
        (finished, now_finished),
        (running, now_runs),
        (failed, t.where(goes * (one - has_law) != 0, 1, t.load(failed, group))),
        (cycle, t.load(cycle, group) + goes),
        (accepted_ref, accepted),
        (ran_ref, goes),
        (done_ref, one - now_runs),
        (before_ref, size),
        (after_ref, length_now),
    ):
        t.store(ref, zero + group, word, only=t.index == 0)


def supports_certain_drafts(logits: Any, drafts: Any) -> bool:
    """True for logits [G, C, V] behind K = C − 1 drafts that the kernels take."""
    return logits.dtype == jnp.float32 and 1 < logits.shape[1] <= MOST_COLUMNS and drafts.shape[1] > 0


def commit_mosaic(
    logits: Float[Array, "G C V"],
    drafts: Int[Array, "G K"],
    asked: Asked,
    rows: Rows,
    *,
    purposes: tuple[int, int],
    interpret: Any = None,
) -> tuple[Rows, Committed]:
    """Judges K = C − 1 drafts a request, and appends what is accepted and a token more to the rows of those that run.

    `logits` are the target's own, by column. `purposes` are folded into each cycle's key: that of the uniforms and that
    of the noise. `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU.
    """
    groups, columns, vocab = logits.shape
    blocks = -(-vocab // IDS)
    shape, inside = (columns, vocab, blocks), interpret is not None
    accept, following = purposes

    def parts(size: int) -> dict[str, Any]:
        """Shared memory for so many candidates."""
        fields = zip(Candidates._fields, DTYPES, strict=True)
        return {name: plgpu.SMEM((size,), dtype) for name, dtype in fields}

    def laws(keys: Ref, cycle: Ref, *refs: Ref, noise: Ref, **found: Ref) -> None:
        group, block = lax.axis_index("request"), lax.axis_index("block")
        row, column = (plgpu.broadcasted_iota(jnp.int32, TILE, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
        ids = block * IDS + row * TILE[1] + column
        noise[...] = gumbel(*_key(TILE, keys, cycle, group, following), ids.astype(jnp.uint32))
        program = functools.partial(_laws, shape=shape)
        threads.run(program, *refs, noise, *found.values(), group, block, interpret=inside)

    found = plgpu.kernel(
        laws,
        out_type=[jax.ShapeDtypeStruct((groups, columns, blocks), dtype) for dtype in DTYPES],
        grid=(groups, blocks),
        grid_names=("request", "block"),
        scratch_types={"noise": plgpu.SMEM(TILE, jnp.float32), **parts(columns * WARPS)},
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="certain_laws",
    )(
        asked.key,
        rows.cycle,
        logits,
        drafts,
        asked.temperature,
        asked.minimum,
        asked.prompt,
        rows.length,
        asked.stops,
    )

    changed = [jax.new_ref(array) for array in rows]

    def commit(keys: Ref, *refs: Ref, uniforms: Ref, accepts: Ref, ends: Ref, **best: Ref) -> None:
        group = lax.axis_index("request")
        row, column = (plgpu.broadcasted_iota(jnp.int32, UNIFORMS, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
        words = _key(UNIFORMS, keys, refs[18], group, accept)
        uniforms[...] = uniform(*words, (row * UNIFORMS[1] + column).astype(jnp.uint32))
        program = functools.partial(_commit, shape=shape, most=rows.tokens.shape[1])
        threads.run(program, *refs, uniforms, *best.values(), accepts, ends, group, interpret=inside)

    one = {dtype: jax.ShapeDtypeStruct((groups,), dtype) for dtype in (jnp.int32, jnp.bool_)}
    committed = plgpu.kernel(
        commit,
        out_type=[
            one[jnp.int32],
            jax.ShapeDtypeStruct((groups, columns), jnp.int32),
            one[jnp.bool_],
            one[jnp.bool_],
            one[jnp.int32],
            one[jnp.int32],
        ],
        grid=(groups,),
        grid_names=("request",),
        scratch_types={
            "uniforms": plgpu.SMEM(UNIFORMS, jnp.float32),
            **parts(columns),
            "accepts": plgpu.SMEM((columns,), jnp.int32),
            "ends": plgpu.SMEM((columns,), jnp.int32),
        },
        compiler_params=threads.compiler_params(),
        interpret=interpret,
        kernel_name="certain_commit",
    )(
        asked.key,
        logits,
        drafts,
        asked.temperature,
        asked.minimum,
        asked.prompt,
        asked.limit,
        asked.stops,
        *found,
        *changed,
    )
    return Rows(*map(jax.freeze, changed)), Committed(*committed)


def _key(shape: tuple[int, int], keys: Ref, cycle: Ref, group: jax.Array, purpose: int) -> tuple[jax.Array, jax.Array]:
    """The words of the key of a request's draw in this cycle, as `group_keys` makes it, throughout an array."""

    def full(value: Any) -> jax.Array:
        return jnp.full(shape, value, jnp.uint32)

    words = (full(keys[group, 0]), full(keys[group, 1]))
    for data in (full(cycle[group].astype(jnp.uint32)), full(jnp.uint32(purpose))):
        words = fold_in(*words, data)
    return tuple(plgpu.layout_cast(word, plgpu.Layout.WGMMA) for word in words)
