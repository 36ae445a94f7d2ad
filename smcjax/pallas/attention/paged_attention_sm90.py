"""Attention over paged keys and values as one Mosaic GPU kernel (Hopper). Its reference: `reference.py`.

One block serves one (row, key-value head, split). Its T·G queries (G = H/Hkv query heads share a key-value head) are
the 64-side of the tensor-core products; keys and values come in chunks of C slots, page by page, by TMA through a
ring in shared memory:

    S = Q·Kᵀ,  (m, Σ, O) ← online softmax with S and V        for every chunk

The row's chunks, as many as it has slots in use and not as its table is wide, are divided among splits · warpgroups
contiguous ranges, one to a warpgroup with a ring of its own. The warpgroups of a block merge in shared memory; with
several splits each block writes its share in f32 as (O/Σ, log2 of Σ exp), and XLA merges those.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from smcjax.device import HOPPER
from smcjax.pallas.mosaic.compat import pl, plgpu, store
from smcjax.pallas.mosaic.wgmma import MASKED, QUERIES, Product, Ref, across, product_of, swizzled, swizzled_f32


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices of the kernel."""

    splits: int = 1  # blocks that share the slots of one (row, key-value head)
    warpgroups: int = 1  # warpgroups of a block, which share its part of the slots
    chunk: int = 64  # C, slots a step: 64 or 128
    stages: int = 4  # depth of a warpgroup's ring, in chunks; at least 2


def _kernel(
    q_ref: Ref,  # [R, T, H, D] GMEM
    keys_ref: Ref,  # [P, B, Hkv, D] GMEM
    values_ref: Ref,  # [P, B, Hkv, D] GMEM
    table_ref: Ref,  # [R, M] int32 GMEM
    positions_ref: Ref,  # [R, T] int32 GMEM
    lengths_ref: Ref,  # [R] int32 GMEM
    out_ref: Ref,  # [R, T, H, D] GMEM; with splits f32 [splits, R, T, H, D]
    lse_ref: Ref = None,  # [splits, R, Hkv, 64] f32 GMEM, with splits only
    *,
    q_smem: Ref,  # [64, D] SMEM
    out_smem: Ref,  # [64, D] SMEM, of out_ref's dtype
    row_smem: Ref,  # [2, warpgroups, 64] f32 SMEM: maxima (then log-sum-exp), sums
    acc_smem: Ref,  # [max(1, warpgroups − 1), 64, D] f32 SMEM, with several warpgroups only
    k_smem: Ref,  # [warpgroups · stages, C, D] SMEM
    v_smem: Ref,  # [warpgroups · stages, C, D] SMEM
    q_ready: Ref,  # barrier
    k_ready: Ref,  # [warpgroups · stages] barriers
    v_ready: Ref,  # [warpgroups · stages] barriers
    merged: Ref,  # [2] barriers of all warpgroups
    tuning: Tuning,
    product: Product,
    unseen: int,
) -> None:
    """Attends from a row's new tokens to one split of its slots, for one key-value head: the body of a block.

    Every warpgroup loads and multiplies the chunks of its own range; the first one also loads the queries and, where
    there are several, adds up what all have found.
    """
    _, columns, heads, dim = q_ref.shape
    _, page_size, kv_heads, _ = keys_ref.shape
    group = heads // kv_heads
    chunk, stages, warpgroups = tuning.chunk, tuning.stages, tuning.warpgroups
    row, head, part = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("split")
    warpgroup = lax.axis_index("warpgroup")
    own_heads = pl.ds(head * group, group)
    # Each warpgroup has `stages` places of the rings, from this one on, and is the only one that fills and reads them.
    ring = warpgroup * stages

    @pl.when(warpgroup == 0)
    def _load_queries() -> None:
        # The 64 rows of the product are (token, head) pairs: G heads of each token by one copy, each an arrival at
        # `q_ready`. Rows behind T·G keep whatever shared memory held: their results are never stored.
        for t in range(columns):
            plgpu.copy_gmem_to_smem(q_ref.at[row, t, own_heads], q_smem.at[pl.ds(t * group, group)], q_ready)

    first, last = positions_ref[row, 0], positions_ref[row, columns - 1]
    # Slots in use: never more than the last query sees, nor than the table names.
    length = lax.min(lax.min(lengths_ref[row], last + 1), table_ref.shape[1] * page_size)
    chunks = lax.div(length + (chunk - 1), chunk)
    # Contiguous ranges of equal length, rounded up, so the last ranges may be empty: start ≥ stop, and no copy is sent
    # for.
    share = lax.div(chunks + (tuning.splits * warpgroups - 1), tuning.splits * warpgroups)
    start = (part * warpgroups + warpgroup) * share
    stop = lax.min(start + share, chunks)
    last_page = lax.div(length - 1, page_size)

    def fetch(source: Ref, buffer: Ref, ready: Ref, index: jax.Array, slot: jax.Array) -> None:
        """Sends for chunk `index`, to `buffer[slot]`; beyond the row's end for its last page again, which is masked."""
        # A chunk lies within one page: one copy [C, D]. The barrier counts max(1, C/B) arrivals, one a copy.
        if page_size >= chunk:
            page = table_ref[row, lax.div(index * chunk, page_size)]
            offset = pl.multiple_of(lax.rem(index * chunk, page_size), chunk)
            plgpu.copy_gmem_to_smem(source.at[page, pl.ds(offset, chunk), head], buffer.at[slot], ready.at[slot])
            return
        # A chunk is several whole pages, whose names are loaded together before the first copy.
        pages = chunk // page_size
        names = [table_ref[row, lax.min(index * pages + j, last_page)] for j in range(pages)]
        for j, page in enumerate(names):
            target = buffer.at[slot, pl.ds(j * page_size, page_size)]
            plgpu.copy_gmem_to_smem(source.at[page, :, head], target, ready.at[slot])

    # Keys and values have buffers and barriers of their own, in the same places of both rings.
    fetch_keys = functools.partial(fetch, keys_ref, k_smem, k_ready)
    fetch_values = functools.partial(fetch, values_ref, v_smem, v_ready)
    # Fills the ring, as far as the range goes: `step` sends for a place again as soon as it has read it.
    for i in range(stages):

        @pl.when(start + i < stop)
        def _prologue(i: int = i) -> None:
            fetch_keys(start + i, ring + i)
            fetch_values(start + i, ring + i)

    # Q [64, D] stays in registers as the first factor of every chunk's product. All warpgroups wait for the copies that
    # the first one has sent for.
    plgpu.barrier_wait(q_ready)
    q = plgpu.layout_cast(q_smem[...], plgpu.Layout.WGMMA)
    # Scores are in base 2.
    scale = math.log2(math.e) / math.sqrt(dim)

    def step(index: jax.Array, carry: tuple[jax.Array, ...], *, masked: bool) -> tuple[jax.Array, ...]:
        # One chunk: S = Q·Kᵀ [64, C] f32, softmax, O += P·V [64, D].
        acc, m, mass = carry
        slot = ring + lax.rem(index - start, stages)
        # The same place of the ring takes the chunk `stages` ahead, if the range has one.
        refill = index + stages < stop

        # Completes when all of the chunk's copies have come.
        plgpu.barrier_wait(k_ready.at[slot])
        s = product(None, (q, k_smem.at[slot].transpose((1, 0)))) * scale
        # The product is done when it returns, and only this warpgroup reads the place: the next copy may overwrite it
        # at once, with no barrier between consumer and producer.
        pl.when(refill)(lambda: fetch_keys(index + stages, slot))
        # Chunks at the row's end: causal masks between the new tokens, the end of what the row holds, and slots before
        # the first that any query sees.
        if masked:
            query = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
            key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA) + index * chunk
            # Query i is column i // G, so it sees key ≤ first + i // G, that is (key − first)·G ≤ i.
            seen = ((key - first) * group <= query) & (key < length)
            s = jnp.where(seen & (key >= unseen) if unseen else seen, s, MASKED)
        # Online softmax: O and Σ so far shrink by 2^(m − m'). A query whose scores were all masked so far has m =
        # `MASKED` and weighs them 1 each; its first visible score shrinks that to 0.
        new_m = jnp.maximum(m, s.max(axis=1))
        alpha = jnp.exp2(m - new_m)
        p = jnp.exp2(s - across(new_m, s.shape))
        mass = mass * alpha + p.sum(axis=1)
        acc = acc * across(alpha, acc.shape)

        # Values are waited for only now, behind the softmax.
        plgpu.barrier_wait(v_ready.at[slot])
        if masked:  # 0 · NaN is NaN: slots that hold nothing must be zeros
            # V goes through registers and back. Only slots beyond the row's end may hold NaN; for others P of 0 is
            # enough.
            v = plgpu.layout_cast(v_smem[slot], plgpu.Layout.WGMMA)
            key = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA) + index * chunk
            store(v_smem.at[slot], jnp.where(key < length, v, jnp.zeros_like(v)))
            # The tensor core must see these ordinary stores.
            plgpu.commit_smem()
        # P [64, C] goes from registers, rounded to bf16, as the first factor.
        acc = product(acc, (p.astype(q.dtype), v_smem.at[slot]))
        # As for keys: the product has read the values.
        pl.when(refill)(lambda: fetch_values(index + stages, slot))
        return acc, new_m, mass

    # O, m and Σ before the first chunk, in the layouts of a product's result and of its rows.
    carry = (
        plgpu.layout_cast(jnp.zeros((QUERIES, dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((QUERIES,), MASKED, jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
        plgpu.layout_cast(jnp.zeros((QUERIES,), jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
    )
    # The chunks that every query sees whole need no mask: those that end at or before `first`.
    clear = lax.clamp(start, lax.div(lax.min(first + 1, length), chunk), lax.max(start, stop))
    begin = start
    if unseen:  # and those behind the slots that none of them sees
        # Up to here chunks hold slots before `unseen`, so they need masks.
        begin = lax.clamp(start, jnp.int32(-(-unseen // chunk)), lax.max(start, stop))
        carry, clear = lax.fori_loop(start, begin, functools.partial(step, masked=True), carry), lax.max(begin, clear)
    # Three ranges of one sequence: masked for unseen slots, unmasked, masked for the row's end.
    carry = lax.fori_loop(begin, clear, functools.partial(step, masked=False), carry)
    acc, m, mass = lax.fori_loop(clear, stop, functools.partial(step, masked=True), carry)

    def finish(acc: jax.Array, m: jax.Array, mass: jax.Array) -> None:
        """Divides by the sums and stores; one warpgroup of the block calls it."""
        # A range without a chunk has Σ = 0: its output is 0, and its log-sum-exp −∞ with splits.
        seen = mass > 0
        mass = jnp.where(seen, mass, 1.0)
        # [64, D], rounded to q's dtype, or f32 where splits are merged by XLA.
        store(out_smem, (acc / across(mass, acc.shape)).astype(out_smem.dtype))
        target = out_ref
        if lse_ref is not None:
            # Takes the place of the first warpgroup's maxima, which every warpgroup has read before `merged[1]`
            # completed.
            store(row_smem.at[0, 0], jnp.where(seen, m + jnp.log2(mass), -jnp.inf))
            target = out_ref.at[part]
        # The copy engine must see these ordinary stores.
        plgpu.commit_smem()
        # The reverse of the queries' copies: G rows of each token; rows behind T·G are not stored.
        for t in range(columns):
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(t * group, group)], target.at[row, t, own_heads])
        if lse_ref is not None:
            plgpu.copy_smem_to_gmem(row_smem.at[0, 0], lse_ref.at[part, row, head])
        # The block must not end while the stores still read its shared memory.
        plgpu.wait_smem_to_gmem(0)

    # One warpgroup had all of the split.
    if warpgroups == 1:
        finish(acc, m, mass)
        return

    def everyone(barrier: Ref) -> None:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    def row_values(ref: Ref) -> jax.Array:
        return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA.reduce(1))

    # First exchange: each warpgroup leaves its maxima [64], and all wait, since each needs all of them.
    store(row_smem.at[0, warpgroup], m)
    everyone(merged.at[0])
    # Each brings its own O and Σ to the common maximum, so that they can be added as they are.
    top = functools.reduce(jnp.maximum, [row_values(row_smem.at[0, w]) for w in range(warpgroups)])
    alpha = jnp.exp2(m - top)
    acc, mass = acc * across(alpha, acc.shape), mass * alpha

    @pl.when(warpgroup > 0)
    def _give() -> None:
        # Second exchange: all but the first leave Σ [64] and O [64, D] f32.
        store(row_smem.at[1, warpgroup], mass)
        store(acc_smem.at[warpgroup - 1], acc)

    # All warpgroups arrive, as at the first barrier; only the first warpgroup reads what was left.
    everyone(merged.at[1])

    @pl.when(warpgroup == 0)
    def _take() -> None:
        total_acc, total_mass = acc, mass
        # In the order of warpgroups, so sums have the same bits run after run.
        for w in range(1, warpgroups):
            total_acc = total_acc + plgpu.layout_cast(acc_smem[w - 1], plgpu.Layout.WGMMA)
            total_mass = total_mass + row_values(row_smem.at[1, w])
        finish(total_acc, top, total_mass)


def supports(*, columns: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any) -> bool:
    """True for shapes that the kernel takes, T = `columns` new tokens a row among them."""
    return (
        jnp.dtype(dtype) == jnp.bfloat16
        and head_dim in (64, 128)
        and num_heads % num_kv_heads == 0
        and columns * (num_heads // num_kv_heads) <= QUERIES
        and page_size % 8 == 0
        and (64 % page_size == 0 or page_size % 64 == 0)
    )


def default_tuning(*, rows: int, kv_heads: int, dim: int, slots: int) -> Tuning:
    """Enough warpgroups, then blocks, to fill the GPU; M·B = `slots` in a table.

    Splits cost a merge in XLA, so they are for wide tables only.
    """
    blocks = rows * kv_heads
    warpgroups = 1
    if blocks < 2 * HOPPER.multiprocessors:
        warpgroups = 4 if dim == 64 else 2
    splits = 1
    if slots > 2048:
        splits = max(1, min(-(-HOPPER.multiprocessors // blocks), slots // 1024))
    stages = 2 if warpgroups > 1 else 256 // dim
    return Tuning(splits=splits, warpgroups=warpgroups, chunk=64, stages=stages)


@functools.partial(jax.jit, static_argnames=("first", "interpret", "tuning"))
def paged_attention_mosaic(
    q: Float[Array, "R T H D"],
    key_pages: Float[Array, "P B Hkv D"],
    value_pages: Float[Array, "P B Hkv D"],
    block_table: Int[Array, "R M"],
    positions: Int[Array, "R T"],
    lengths: Int[Array, " R"] | None = None,
    *,
    first: int = 0,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Float[Array, "R T H D"]:
    """Attention of T new tokens a row over pages: query (r, t) sees slots `first`…positions[r, t] of row r's table.

    A row's positions are consecutive and increasing. Slots before `first` hold finite numbers. `lengths` is how many
    slots of each row hold KV, by default up to its last position; slots from there on, and pages named beyond it, may
    hold anything. What a query at or beyond it, or before `first`, returns means nothing, but is finite. `interpret` is
    `plgpu.InterpretGPUParams()` to run on a CPU.

    A jit of its own, so that a model's layers trace and lower the kernel once.
    """
    rows, columns, heads, dim = q.shape
    _, page_size, kv_heads, _ = key_pages.shape
    applies = supports(
        columns=columns, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, page_size=page_size, dtype=q.dtype
    )
    if not applies:
        raise ValueError(f"no kernel for q {q.dtype}{list(q.shape)} over pages {list(key_pages.shape)}")
    if tuning is None:
        slots = block_table.shape[1] * page_size
        tuning = default_tuning(rows=rows, kv_heads=kv_heads, dim=dim, slots=slots)
    splits, warpgroups, chunk, stages = tuning.splits, tuning.warpgroups, tuning.chunk, tuning.stages
    if chunk % page_size and page_size % chunk:
        raise ValueError(f"pages of {page_size} slots do not tile chunks of {chunk}")
    lengths = positions[:, -1] + 1 if lengths is None else lengths

    split = splits > 1
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if split:
        out_type = [
            jax.ShapeDtypeStruct((splits, *q.shape), jnp.float32),
            jax.ShapeDtypeStruct((splits, rows, kv_heads, QUERIES), jnp.float32),
        ]
    slots_in_ring = warpgroups * stages
    copies = max(1, chunk // page_size)
    parts = (warpgroups - 1, QUERIES, dim) if warpgroups > 1 else (1, 8, 32)
    scratch: dict[str, Any] = {
        "q_smem": plgpu.SMEM((QUERIES, dim), q.dtype),
        "out_smem": plgpu.SMEM((QUERIES, dim), out_type[0].dtype),
        "row_smem": plgpu.SMEM((2, warpgroups, QUERIES), jnp.float32),
        "acc_smem": plgpu.SMEM(parts, jnp.float32, transforms=swizzled_f32()),
        "k_smem": plgpu.SMEM((slots_in_ring, chunk, dim), q.dtype, transforms=swizzled()),
        "v_smem": plgpu.SMEM((slots_in_ring, chunk, dim), q.dtype, transforms=swizzled()),
        "q_ready": plgpu.Barrier(num_arrivals=columns),
        "k_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=slots_in_ring),
        "v_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=slots_in_ring),
        "merged": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=2),
    }
    body = functools.partial(_kernel, tuning=tuning, product=product_of(bool(interpret)), unseen=first)
    outputs = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(rows, kv_heads, splits),
        grid_names=("row", "head", "split"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_attention",
    )(q, key_pages, value_pages, block_table, positions, lengths)
    return _merge(outputs[0], outputs[1], q.dtype) if split else outputs[0]


def _merge(
    parts: Float[Array, "S R T H D"], log2_sums: Float[Array, "S R Hkv queries"], dtype: Any
) -> Float[Array, "R T H D"]:
    """Σ over splits of each one's share, weighted by its part of the softmax's denominator."""
    splits, rows, columns, heads, _ = parts.shape
    kv_heads = log2_sums.shape[2]
    group = heads // kv_heads
    # [S, R, Hkv, 64] to [S, R, T, H], without the rows behind T·G.
    lse = log2_sums[..., : columns * group].reshape(splits, rows, kv_heads, columns, group)
    lse = lse.transpose(0, 1, 3, 2, 4).reshape(splits, rows, columns, heads)
    # A split that saw nothing has −∞ and weighs 0; a query for which all are −∞ gets 0, not NaN.
    weights = jnp.exp2(lse - jnp.maximum(jnp.max(lse, axis=0, keepdims=True), MASKED))
    weights = weights / jnp.maximum(jnp.sum(weights, axis=0, keepdims=True), 1e-30)
    return jnp.sum(parts * weights[..., None], axis=0).astype(dtype)
