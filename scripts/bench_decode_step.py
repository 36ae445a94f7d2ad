"""The persistent decode step on a GPU: is each stage right, and how long does a step take?

    python scripts/bench_decode_step.py check     # every stage of a layer against jnp, launched alone and together
    python scripts/bench_decode_step.py time      # a whole step: variants of the ring, parts left out

Llama-3.2-1B shapes, 8 rows that share all but their last pages, random data. Times are the kernel's own, from the
profiler, beside the bytes of its weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from profile_cycle import read_kernels

from smcjax.bench.shapes import SHAPES
from smcjax.decoding.fused_step import make_shape, norms_of, prefetches, scales_of, tasks_of, weights_of
from smcjax.device import HOPPER
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import linear, rope_angles
from smcjax.model.params import Params, init_params
from smcjax.model.quantize import quantize_params
from smcjax.pallas import paged_attention_reference, rms_norm, uses_kernels
from smcjax.pallas.attention.prefix_plan import Sharing
from smcjax.pallas.cache.rotate_and_write import rotate
from smcjax.pallas.decode_step import op as ds

PAGE, ROWS, OWN = 16, 8, 20  # OWN: tokens at the end that rows do not share


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of `decode_step`, KV apart."""

    shape: ds.Shape
    table: jax.Array
    positions: jax.Array
    tokens: jax.Array
    tables: ds.Tables
    sharing: Sharing
    pages: int

    def operands(self, params: Params, keys: Any, values: Any) -> ds.Operands:
        """Makes the operands of a launch."""
        weights = weights_of(params, norms_of(params), scales_of(params))
        begin = ds.embedded(weights.embed, weights.norms[0], self.tokens)
        return ds.make_operands(self.shape, weights, begin, 0, self.tables, self.sharing, keys, values)


def make(config: ModelConfig, columns: int, context: int, *, int8: bool = False, **tuning: int) -> Problem:
    """ROWS rows of `columns` tokens after `context`."""
    rng = np.random.default_rng(0)
    positions = np.broadcast_to(context + np.arange(columns), (ROWS, columns)).astype(np.int32)
    shared, need = (context - OWN) // PAGE, int(positions[0, -1]) // PAGE + 1
    count = 1 + shared + ROWS * (need - shared)
    names = 1 + rng.permutation(count - 1)
    table = np.zeros((ROWS, need + 4), np.int32)
    table[:, :shared] = names[:shared]
    table[:, shared:need] = names[shared:].reshape(ROWS, -1)
    block_table = jnp.asarray(table)
    ahead = prefetches(block_table)
    sizes = {"groups": 1, "rows": ROWS, "columns": columns, "page_size": PAGE}
    shape = make_shape(config, **sizes, prefetches=ahead, int8=int8, **tuning)
    assert ds.supports(shape, jnp.bfloat16), shape
    lengths = jnp.asarray(positions[:, -1] + 1)
    settled = jnp.asarray(positions[:, 0])
    sharing = tasks_of(config, block_table, lengths, settled, rows=ROWS, page_size=PAGE)
    cos, sin = rope_angles(config.layer(0).rope, config.head_dim, jnp.asarray(positions))
    slots = np.take_along_axis(table, positions // PAGE, axis=1) * PAGE + positions % PAGE
    draws = ds.Draws(
        keys=jax.random.key_data(jax.random.split(jax.random.key(5), (1, ROWS))),
        temperature=jnp.linspace(0.7, 1.3, ROWS),
        noise_scale=jnp.ones(ROWS),
        forbidden=jnp.zeros((ROWS, config.vocab_size // 32), jnp.uint32),
        forbids=jnp.zeros((1, ROWS), bool),
    )
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (ROWS, columns)), jnp.int32)
    tables = ds.make_tables(shape, cos[None], sin[None], jnp.asarray(positions)[None], jnp.asarray(slots)[None], draws)
    return Problem(shape, block_table, jnp.asarray(positions), tokens, tables, sharing, count)


def pools(config: ModelConfig, pages: int) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Random keys and values of every layer."""
    dims = (pages, PAGE, config.num_kv_heads, config.head_dim)
    normal = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), dims, jnp.bfloat16))
    layers = config.num_layers
    return tuple(normal(i) for i in range(layers)), tuple(normal(100 + i) for i in range(layers))


def error(got: Any, want: Any) -> str:
    """Largest difference of each row, relative to the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    rows = np.abs(got - want).reshape(got.shape[0], -1).max(axis=1) / np.abs(want).max()
    return " ".join(f"{row:.3f}" for row in rows)


# -------------------------------------------------------------------------------------------------------------- check


def stages(config: ModelConfig, params: Params, problem: Problem, keys: Any, values: Any, *, together: bool) -> Any:
    """Runs the one layer and returns each stage's results by name."""

    @jax.jit
    def run(params: Params, keys: Any, values: Any) -> dict[str, jax.Array]:
        operands = problem.operands(params, keys, values)
        after: dict[str, jax.Array] = {"x0": operands.x[...]}
        leaves = {"qkv": "q", "attend": "partial", "merge": "attended", "o": "x", "gate_up": "h", "down": "x"}
        if together:
            ds.launch(problem.shape, operands, stages=ds.LAYER_STAGES, with_head=True)
            after |= {stage: getattr(operands, leaf)[...] for stage, leaf in leaves.items() if stage != "o"}
        else:
            for stage, leaf in leaves.items():
                ds.launch(problem.shape, operands, stages=(stage,), with_head=False)
                after[stage] = getattr(operands, leaf)[...]
        after |= {"lse": operands.partial_lse[...], "keys": operands.keys[0][...], "values": operands.values[0][...]}
        return after

    return jax.device_get(run(params, keys, values))


def shares(problem: Problem, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes in float64 the output and log2-sum-exp that `attend` should leave for each (KV head, split)."""
    shape, sharing = problem.shape, jax.device_get(problem.sharing)
    chunks, pieces = (
        tasks[0, 0, : int(count[0, 0])].tolist()
        for tasks, count in ((sharing.chunks, sharing.num_chunks), (sharing.pieces, sharing.num_pieces))
    )
    packed = [pieces[i : i + shape.pieces_per_chunk] for i in range(0, len(pieces), shape.pieces_per_chunk)]
    tasks = [*([chunk] for chunk in chunks), *packed]
    out = np.zeros((shape.kv_heads * shape.splits, shape.queries, shape.dim))
    lse = np.full(out.shape[:2], -np.inf)
    sees = np.asarray(problem.positions).reshape(-1).repeat(shape.per_kv_head) + 1
    columns = shape.group_tokens // shape.rows
    row = np.arange(shape.queries) // (shape.per_kv_head * columns)
    for head in range(shape.kv_heads):
        for split in range(shape.splits):
            scores, seen = [], []
            for *pages, number, members in (task for together in tasks[split :: shape.splits] for task in together):
                width = len(pages) * PAGE
                k, v = (pool[pages, :, head].reshape(width, -1) for pool in (keys, values))
                visible = np.where((members >> row) & 1, sees - number * width, 0)
                mask = np.arange(width) < visible[:, None]
                scores.append(np.where(mask, q[head] @ k.T / np.sqrt(shape.dim), -np.inf))
                seen.append(v)
            if not scores:
                continue
            s = np.concatenate(scores, axis=1)
            top = np.maximum(s.max(axis=1), -1e30)
            p = np.exp(s - top[:, None])
            mass = p.sum(axis=1)
            block = head * shape.splits + split
            out[block] = p @ np.concatenate(seen) / np.maximum(mass, 1e-30)[:, None]
            with np.errstate(divide="ignore"):
                lse[block] = np.where(mass > 0, (top + np.log(mass)) / np.log(2), -np.inf)
    return out, lse


def halves_together(shape: ds.Shape, out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges a block's 64 rows, of which the lower 32 may be the same queries over other chunks, into one per query."""
    size = shape.queries
    if not shape.paired:
        return out[:, :size], lse[:, :size]
    outs, lses = (np.stack([x[:, :size], x[:, 32 : 32 + size]]) for x in (out, lse))
    total = np.logaddexp2(*lses)
    with np.errstate(invalid="ignore"):
        weights = np.where(np.isfinite(lses), np.exp2(lses - total), 0)
    return np.where(weights[..., None] > 0, weights[..., None] * outs, 0).sum(axis=0), total


def random_params(config: ModelConfig, int8: bool) -> Params:
    """In bf16, or rounded to int8."""
    params = jax.jit(lambda: init_params(config, jax.random.key(1), jnp.bfloat16))()
    return quantize_params(params, consume=True) if int8 else params


def check(columns: int, context: int, int8: bool) -> None:
    """Prints every stage's error, each from what the kernel itself handed it."""
    config = dataclasses.replace(SHAPES["llama-3.2-1b"], num_layers=1)
    params = random_params(config, int8)
    layer, eps = params.layers[0], config.rms_norm_eps
    problem = make(config, columns, context, int8=int8)
    keys, values = pools(config, problem.pages)
    shape = problem.shape
    total = shape.group_tokens
    for together in (False, True):
        got = stages(config, params, problem, keys, values, together=together)
        dtype = "int8" if int8 else "bf16"
        print(f"\n{dtype}, T={columns}, context {context}, {'together' if together else 'stage by stage'}")
        x0 = got["x0"][:total]
        qkv = linear(rms_norm(x0, layer.attn_norm, eps), layer.qkv, None).reshape(ROWS, columns, -1, shape.dim)
        cos, sin = rope_angles(config.layer(0).rope, config.head_dim, problem.positions)
        want_q, want_k = (rotate(part, cos, sin) for part in (qkv[:, :, : shape.heads], qkv[:, :, shape.heads :]))
        q = got["qkv"].reshape(shape.kv_heads, shape.tokens, shape.per_kv_head, shape.dim)[:, :total]
        print("q      ", error(q.swapaxes(0, 1), want_q.reshape(total, shape.kv_heads, shape.per_kv_head, -1)))
        slots = np.asarray(problem.tables.slots)[:total]
        flat = (-1, shape.kv_heads, shape.dim)
        print("k      ", error(got["keys"].reshape(flat)[slots], want_k.reshape(total, -1, shape.dim)[:, : flat[1]]))
        want_v = qkv.reshape(total, -1, shape.dim)[:, shape.heads + shape.kv_heads :]
        print("v      ", error(got["values"].reshape(flat)[slots], want_v))
        by_head = q.reshape(shape.kv_heads, shape.queries, shape.dim).astype(np.float64)
        pages = (got[name].astype(np.float64) for name in ("keys", "values"))
        out, lse = shares(problem, by_head, *pages)
        used = np.isfinite(lse)
        ours, ours_lse = halves_together(shape, got["attend"], got["lse"])
        print("shares ", f"{np.abs(np.where(used[..., None], ours - out, 0)).max() / np.abs(out).max():.4f}", end=" ")
        print("lse", f"{np.abs(ours_lse[used] - lse[used]).max():.4f}", "unused", np.unique(ours_lse[~used])[:4])
        wrong = np.abs(np.where(used, ours_lse, 0) - np.where(used, lse, 0)) > 0.1
        print("        wrong lse at (KV head · splits + split, query):", np.argwhere(wrong)[:12].tolist())
        queries = jnp.asarray(q.swapaxes(0, 1).reshape(ROWS, columns, shape.heads, shape.dim))
        want = paged_attention_reference(
            queries,
            jnp.asarray(got["keys"]),
            jnp.asarray(got["values"]),
            problem.table,
            problem.positions,
            problem.positions[:, -1] + 1,
        ).reshape(total, -1)
        print("merged ", error(got["merge"][:total], want))
        x1 = x0 + linear(jnp.asarray(got["merge"][:total]), layer.o, None)
        if "o" in got:
            print("x1     ", error(got["o"][:total], x1))
            x1 = jnp.asarray(got["o"][:total])
        gate, up = jnp.split(linear(rms_norm(x1, layer.mlp_norm, eps), layer.gate_up, None), 2, axis=-1)
        print("h      ", error(got["gate_up"][:total], jax.nn.silu(gate) * up))
        print("x2     ", error(got["down"][:total], x1 + linear(jnp.asarray(got["gate_up"][:total]), layer.down, None)))


# --------------------------------------------------------------------------------------------------------------- time


def time_step(name: str, config: ModelConfig, params: Params, problem: Problem, launches: Callable[..., None]) -> None:
    """Compiles and times one way to run a step."""
    keys, values = pools(config, problem.pages)

    def step(params: Params, keys: Any, values: Any) -> Any:
        operands = problem.operands(params, keys, values)
        launches(problem.shape, operands)
        return operands.x[...], *(tuple(map(jax.freeze, refs)) for refs in (operands.keys, operands.values))

    began = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(params, keys, values).compile()
    compile_seconds = time.perf_counter() - began
    x, keys, values = compiled(params, keys, values)
    first, same = np.asarray(x), True
    walls = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(20):
            x, keys, values = compiled(params, keys, values)
        jax.block_until_ready(x)
        walls.append((time.perf_counter() - began) / 20 * 1e6)
        same &= bool((np.asarray(x) == first).all())
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(5):
                x, keys, values = compiled(params, keys, values)
            jax.block_until_ready(x)
        kernels = list(read_kernels(Path(directory), {}))
    kernel = sum(one.microseconds for one in kernels if "decode_step" in one.name) / 5
    others = [one.microseconds for one in kernels if "decode_step" not in one.name]
    streamed = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) if len(params.layers) > 1 else 0
    share = 100 * streamed / HOPPER.bandwidth / kernel * 1e6
    print(
        f"{name:<40} {kernel:8.1f} µs {share:5.1f}%  wall {statistics.median(walls):7.1f}  "
        f"others {sum(others) / 5:5.1f} ({len(others) / 5:.0f})  compiled {compile_seconds:4.1f} s  repeatable {same}",
        flush=True,
    )


def _whole(shape: ds.Shape, operands: ds.Operands) -> None:
    """All stages."""
    ds.launch(shape, operands, stages=ds.LAYER_STAGES, with_head=True)


def _without_attention(shape: ds.Shape, operands: ds.Operands) -> None:
    """Launches only the stages that stream weights."""
    ds.launch(shape, operands, stages=("qkv", "o", "gate_up", "down"), with_head=True)


# name: stages, tokens a row, context, tuning
VARIANTS: dict[str, tuple[Callable[..., None], int, int, dict[str, int]]] = {
    "base": (_whole, 1, 256, {}),
    "ring8": (_whole, 1, 256, {"ring": 8}),
    "ring9": (_whole, 1, 256, {"ring": 9}),
    "4/4": (_whole, 1, 256, {"in_flight_early": 4}),
    "4/1": (_whole, 1, 256, {"in_flight_early": 1}),
    "6/2": (_whole, 1, 256, {"in_flight": 6}),
    "bare": (_without_attention, 1, 256, {}),
    "head2": (_whole, 2, 256, {}),
    "4k": (_whole, 1, 4000, {}),
    "4k head2": (_whole, 2, 4000, {}),
    "4k kv2": (_whole, 1, 4000, {"kv_in_flight": 2}),
    "4k kv8": (_whole, 1, 4000, {"kv_in_flight": 8}),
    "32k": (_whole, 1, 32_000, {}),
    "32k kv2": (_whole, 1, 32_000, {"kv_in_flight": 2}),
    "32k kv8": (_whole, 1, 32_000, {"kv_in_flight": 8}),
}


def time_all(variants: list[str], int8: bool) -> None:
    """A line each."""
    config = SHAPES["llama-3.2-1b"]
    params = random_params(config, int8)
    for name in variants or VARIANTS:
        launches, columns, context, tuning = VARIANTS[name]
        label = f"{name}: T={columns} context {context} {'int8 ' if int8 else ''}{tuning or ''}"
        time_step(label, config, params, make(config, columns, context, int8=int8, **tuning), launches)


def main() -> None:
    """`check` or `time`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time"), nargs="?", default="check")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"to time (all): {', '.join(VARIANTS)}")
    parser.add_argument("--int8", action="store_true", help="weights in int8 (default: bfloat16)")
    args = parser.parse_args()
    for variant in args.variants:
        if variant not in VARIANTS:
            parser.error(f"variant {variant!r} is unknown; use some of: {', '.join(VARIANTS)}.")
    if not uses_kernels():
        parser.error("there is no Hopper GPU here; run it on one.")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    if args.what == "time":
        time_all(args.variants, args.int8)
    else:
        for columns, context in ((1, 256), (2, 700), (1, 4000), (2, 4000)):
            check(columns, context, args.int8)


if __name__ == "__main__":
    main()
