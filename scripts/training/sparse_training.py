"""Attention for training at long contexts: dense, windowed, and Native Sparse Attention, by cuDNN's fused kernels.

`NSA.dense` holds the scores of all queries against all keys, which at 8,192 tokens is 2 GB a row and layer. Here

    selection    ranks by compressed tokens row by row, without gradient: none passes a choice
    o_slc        is causal attention under a mask of the chosen blocks
    o_cmp        is attention under the fixed mask of complete compressed tokens
    o_win        is attention in a window

each by one fused call, whose memory grows with the length but for the masks. What a layer makes is made again in the
backward pass, but for the choice of blocks. Equal to `NSA.dense` up to rounding (tests/tasks/test_sparse_training.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from smcjax.device import product_precision
from smcjax.model import ModelConfig
from smcjax.model.attention import Projection, SlidingWindow
from smcjax.model.decoder import Attend
from smcjax.model.visible_kv import grouped
from smcjax.pallas.attention.reference import LOWEST
from smcjax.sparse.nsa import NSA
from smcjax.sparse.routing import Branches, Entries

SELECTED = "selected blocks"  # what a layer keeps for its backward pass, by this name
WORTH_FINDING = 0.1  # of a group's attention, in one block
Choose = Callable[[NSA, jax.Array, jax.Array], jax.Array]  # `selection`, or what stands for it


def fused(implementation: str, q: Any, k: Any, v: Any, **options: Any) -> Float[Array, "R T H D"]:
    """`jax.nn.dot_product_attention` over q [R, T, H, D] and k, v [R, S, Hkv, D]."""
    attend: Any = jax.nn.dot_product_attention
    return attend(q, k, v, implementation=implementation, **options)


def routing_loss(kind: NSA, projection: Projection, queries: Int[Array, "R Q"]) -> Float[Array, ""]:
    """How far the ranking of blocks is from dense attention's own, at some positions: a mean cross-entropy in nats.

    The teacher, which takes no gradient, is what each block would get of the heads' attention if a query saw all.
    Blocks that are always selected and those that get less than `WORTH_FINDING` are left out: what is spread thin no
    few blocks hold. Queries and keys learn from it as well as the weights that compress: a sum of 32 keys tells which
    one matches only if the others are dull.
    """
    kv, (rotated, _, _) = kind.entries_without_pages(projection), projection.heads()
    length, (_, _, kv_heads, _) = rotated.shape[1], kv.keys.shape
    blocks = -(-length // kind.block_size)
    q = grouped(jnp.take_along_axis(rotated, queries[:, :, None, None], axis=1), kv_heads)

    def of_row(row: tuple[jax.Array, ...]) -> jax.Array:
        positions, q, keys, compressed_keys = row
        block, own = jnp.arange(blocks)[None], positions[:, None] // kind.block_size
        free = ((block <= own) & ~kind.forced(block, own))[:, None].astype(jnp.float32)
        visible = jnp.arange(length)[None] <= positions[:, None]
        mass = jax.lax.stop_gradient(weights_of(q, keys, visible)).mean(axis=2)
        mass = jnp.pad(mass, [(0, 0), (0, 0), (0, blocks * kind.block_size - length)])
        mass = mass.reshape(*mass.shape[:2], blocks, -1).sum(-1) * free
        mass = jnp.where(mass >= WORTH_FINDING, mass, 0)
        scores = block_scores(kind, q, compressed_keys, positions, blocks) / q.shape[2] * free + 1e-9
        return -(mass * jnp.log(scores / scores.sum(axis=-1, keepdims=True))).sum(-1).mean()

    rows = (queries, q, kv.keys, kv.compressed_keys)
    return jax.lax.map(of_row, rows, batch_size=rows_at_once(length)).mean()


def weights_of(
    q: Float[Array, "T Hkv G D"], keys: Float[Array, "S Hkv D"], visible: Bool[Array, "T S"]
) -> Float[Array, "T Hkv G S"]:
    """Attention weights of one row's queries, f32; 0 where nothing is visible."""
    precision = product_precision(q.dtype)
    logits = jnp.einsum("tkgd,skd->tkgs", q, keys, precision=precision, preferred_element_type=jnp.float32)
    logits = jnp.where(visible[:, None, None], logits / q.shape[-1] ** 0.5, LOWEST)
    return jnp.where(visible[:, None, None], jax.nn.softmax(logits, axis=-1), 0)


def block_scores(
    kind: NSA, q: Float[Array, "T Hkv G D"], keys: Float[Array, "N Hkv D"], positions: Int[Array, " T"], blocks: int
) -> Float[Array, "T Hkv blocks"]:
    """The scores by which one row's queries rank blocks, from compressed keys."""
    complete = _complete(kind, positions, keys.shape[0])
    return kind.block_scores(weights_of(q, keys, complete)[None], blocks)[0]


def attend_by(implementation: str, config: ModelConfig, *, dense: bool = False) -> Attend:
    """The attention of every layer of `config` for `smcjax.model.decoder.hidden_states`.

    implementation: "cudnn", which is for a GPU and bf16, or "xla"; `dense`: sparse layers attend to all.
    """

    def attend(index: int, projection: Projection) -> jax.Array:
        kind = config.layer(index).attention
        if isinstance(kind, NSA) and not dense:
            # What is not an array of the projection is static.
            arrays = (projection.qkv, projection.cos, projection.sin, projection.x, projection.weights)

            @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SELECTED))
            def sparse(qkv: Any, cos: Any, sin: Any, x: Any, weights: Any) -> jax.Array:
                new = Projection(qkv, cos, sin, projection.num_kv_heads, None, None, x, weights, projection.angles)
                return nsa(implementation, kind, new)

            return sparse(*arrays)
        if isinstance(kind, SlidingWindow):
            return windowed(implementation, *projection.heads(), kind.window)
        if isinstance(kind, NSA) and kind.kv != "shared":
            raise ValueError(f"kv must be 'shared' to attend to all, got {kind.kv!r}.")
        return fused(implementation, *projection.heads(), is_causal=True)

    return attend


def nsa(
    implementation: str, kind: NSA, projection: Projection, choose: Choose | None = None
) -> Float[Array, "R T H D"]:
    """`kind.dense` at positions 0 … T − 1; `choose` stands for `selection`."""
    choose = choose or selection
    kv = kind.entries_without_pages(projection)
    rotated = projection.heads()[0]
    selected = checkpoint_name(choose(kind, *map(jax.lax.stop_gradient, (rotated, kv.compressed_keys))), SELECTED)
    rows, length, _, dim = rotated.shape
    kv_heads = kv.keys.shape[2]

    def by_head(x: jax.Array) -> jax.Array:
        """[R, S, Hkv·G, D] → [R·Hkv, S, G, D]: each key-value head has a mask of its own."""
        x = x.reshape(rows, x.shape[1], kv_heads, -1, dim)
        return jnp.moveaxis(x, 2, 1).reshape(rows * kv_heads, x.shape[1], -1, dim)

    chosen = jnp.repeat(jnp.moveaxis(selected, 2, 1), kind.block_size, axis=-1)[..., :length]
    mask = chosen.reshape(rows * kv_heads, 1, length, length)
    slc = fused(implementation, by_head(rotated), by_head(kv.keys), by_head(kv.values), mask=mask, is_causal=True)
    slc = jnp.moveaxis(slc.reshape(rows, kv_heads, length, -1, dim), 1, 2).reshape(rotated.shape)

    win = windowed(implementation, rotated, kv.window_keys, kv.window_values, kind.window)
    outputs = jnp.stack([compressed(implementation, kind, rotated, kv), slc, win], axis=3)
    return Branches(outputs, kind.gates(projection), None, selected).gated()


def windowed(
    implementation: str,
    q: Float[Array, "R T H D"],
    k: Float[Array, "R T Hkv D"],
    v: Float[Array, "R T Hkv D"],
    window: int,
) -> Float[Array, "R T H D"]:
    """Attention to the last `window` positions, in chunks of as many queries, each over its own keys and those before.

    cuDNN has windows too; with them gradients became NaN after some hundred steps (three of three runs, an H100).
    """
    rows, length = q.shape[:2]
    chunks = -(-length // window)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, chunks * window - length), (0, 0), (0, 0)]).reshape(
            rows, chunks, window, *x.shape[2:]
        )

    def with_before(x: jax.Array) -> jax.Array:
        x = cut(x)
        before = jnp.pad(x, [(0, 0), (1, 0), (0, 0), (0, 0), (0, 0)])[:, :-1]
        return jnp.concatenate([before, x], axis=2).reshape(-1, 2 * window, *x.shape[3:])

    query, key = jnp.arange(window)[:, None] + window, jnp.arange(2 * window)[None]
    near = (key <= query) & (key > query - window)
    there = (jnp.arange(chunks) > 0)[:, None, None] | (key >= window)[None]
    mask = jnp.tile((near[None] & there)[:, None], (rows, 1, 1, 1))
    out = fused(implementation, cut(q).reshape(-1, window, *q.shape[2:]), with_before(k), with_before(v), mask=mask)
    return out.reshape(rows, chunks * window, *q.shape[2:])[:, :length]


def compressed(
    implementation: str, kind: NSA, q: Float[Array, "R T H D"], kv: Entries[jax.Array]
) -> Float[Array, "R T H D"]:
    """The branch of compressed tokens; 0 where none is complete."""
    pad = [(0, 0), (0, -kv.compressed_keys.shape[1] % 64), (0, 0), (0, 0)]
    keys, values = (jnp.pad(x, pad) for x in (kv.compressed_keys, kv.compressed_values))
    complete = _complete(kind, jnp.arange(q.shape[1]), keys.shape[1])
    # A query that sees nothing is given a token to see, as kernels may make NaN of nothing, and its output dropped.
    mask = complete.at[:, 0].set(True)[None, None]
    return jnp.where(complete.any(axis=1)[:, None, None], fused(implementation, q, keys, values, mask=mask), 0)


def selection(
    kind: NSA,
    q: Float[Array, "R T H D"],
    keys: Float[Array, "R N Hkv D"],
    scores: Callable[..., jax.Array] = block_scores,
) -> Bool[Array, "R T Hkv blocks"]:
    """The blocks that queries attend to, as `NSA.select` has them, by passes for the largest instead of sorting.

    `scores` stands for `block_scores`.
    """
    length, positions = q.shape[1], jnp.arange(q.shape[1])
    blocks = -(-length // kind.block_size)

    def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, keys = row
        ranked = kind.ranked(scores(kind, q, keys, positions, blocks)[None], positions[None])[0]

        def take(_: Any, left: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            ranked, taken = left
            best = jnp.arange(blocks)[None, None] == jnp.argmax(
                ranked, axis=-1, keepdims=True
            )  # of equal ones the first
            best &= ranked > -jnp.inf
            return jnp.where(best, -jnp.inf, ranked), taken | best

        return jax.lax.fori_loop(0, min(kind.num_blocks, blocks), take, (ranked, jnp.zeros(ranked.shape, bool)))[1]

    return jax.lax.map(of_row, (grouped(q, keys.shape[2]), keys), batch_size=rows_at_once(length))


def rows_at_once(length: int) -> int:
    """How many rows of `length` tokens fit the memory that one of 16,384 takes."""
    return max(1, 16_384 // length)


def _complete(kind: NSA, positions: Int[Array, " T"], tokens: int) -> Bool[Array, "T N"]:
    """True for the compressed tokens that a query at each position sees."""
    return kind.compressed_array().ends(tokens)[None] <= positions[:, None]
