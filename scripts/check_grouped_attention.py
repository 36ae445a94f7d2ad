"""Compares the kernel of grouped attention with its reference at many shapes, and in a whole model, on a Hopper GPU.

    python scripts/check_grouped_attention.py         # a line a shape, then the bundled sparse target; a minute or two

Random data: R requests of M queries by groups of C, heads H and Hkv of size D, pages of B slots, contexts of T, n
blocks of 64 and a window of w, selection and window in one launch as `smcjax.sparse.groups` has them. The figure is
the largest difference relative to the largest value, for each branch: bf16 weights and f16 shares make some 0.001. The
model reads documents of recall and verifies answers in groups: its next-token laws with the kernel and by plain XLA,
in bfloat16, against each query by itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import time
from typing import Any, NamedTuple

import calibrate_reuse
import jax
import jax.numpy as jnp
import numpy as np

from smcjax.model import load_checkpoint
from smcjax.model.hub import BUNDLED, bundled_model
from smcjax.pallas.dispatch import implementations
from smcjax.pallas.sparse.grouped_attention import (
    Branch,
    group_tasks,
    grouped_branches,
    grouped_branches_reference,
    span_tasks,
    unit_slots,
)
from smcjax.pallas.sparse.query_groups import QueryGroups
from smcjax.sparse.verification import SparseVerification

BLOCK = 64


class Shape(NamedTuple):
    """Sizes of one comparison, named as in the file's docstring."""

    requests: int
    queries: int
    size: int
    heads: int
    kv_heads: int
    dim: int
    page: int
    context: int
    blocks: int
    window: int


EIGHT_B = Shape(1, 9, 9, 32, 8, 128, 64, 8192, 16, 512)
RECALL = Shape(16, 8, 4, 8, 2, 64, 16, 2048, 8, 256)
SHAPES = (
    EIGHT_B,
    EIGHT_B._replace(page=128),
    EIGHT_B._replace(page=16),
    EIGHT_B._replace(requests=8),
    EIGHT_B._replace(dim=64),
    EIGHT_B._replace(heads=8, kv_heads=2),
    EIGHT_B._replace(size=1),
    RECALL,
    RECALL._replace(requests=1),
    RECALL._replace(requests=1, page=64),
    RECALL._replace(requests=1, dim=128),
    RECALL._replace(dim=128, page=64),
    RECALL._replace(heads=32, kv_heads=8),
    RECALL._replace(size=8),
    RECALL._replace(size=1),
)


def inputs(shape: Shape, seed: int) -> tuple[Any, tuple[Branch, ...], QueryGroups, int]:
    """Queries, branches, groups and the slots of a unit."""
    rng, pages = np.random.default_rng(seed), shape.context // shape.page
    groups = QueryGroups.of_rows(1, shape.queries, "bfs", shape.size)
    table = 1 + rng.permutation(shape.requests * pages).reshape(shape.requests, 1, pages).repeat(shape.queries, 1)
    ends = shape.context - shape.queries - rng.integers(0, 100, (shape.requests, 1))
    positions = ends + np.arange(shape.queries)
    own = positions // BLOCK
    selected = np.zeros((shape.requests, shape.queries, shape.kv_heads, shape.context // BLOCK), bool)
    for request, query, head in np.ndindex(selected.shape[:3]):
        last = int(own[request, query])
        selected[request, query, head, rng.permutation(np.arange(1, last - 1))[: shape.blocks - 3]] = True
        selected[request, query, head, [0, last - 1, last]] = True
    pool = jnp.asarray(
        rng.standard_normal((2, 1 + shape.requests * pages, shape.page, shape.kv_heads, shape.dim)), jnp.bfloat16
    )
    q = jnp.asarray(2 * rng.standard_normal((shape.requests, shape.queries, shape.heads, shape.dim)), jnp.bfloat16)
    unit, high = unit_slots(shape.page, BLOCK), jnp.asarray(positions, jnp.int32)
    low = jnp.maximum(high - shape.window + 1, 0)
    sizes: dict[str, Any] = {"page_size": shape.page, "rows": 1}
    tasks = group_tasks(
        jnp.asarray(selected), jnp.asarray(table), groups, block_size=BLOCK, most_blocks=shape.blocks, **sizes
    )
    span = span_tasks(
        low,
        high,
        jnp.asarray(table),
        groups,
        unit=unit,
        sets=shape.kv_heads,
        most_slots=shape.window + shape.queries - 1,
        **sizes,
    )
    keys, values = pool
    branches = Branch(keys, values, tasks, jnp.zeros_like(high), high), Branch(keys, values, span, low, high)
    return q, branches, groups, unit


def compare(shape: Shape) -> str:
    """The differences of both branches, by the kernel and by XLA in bfloat16, from the reference in float32."""
    q, branches, groups, unit = inputs(shape, 0)

    def wide(x: Any) -> Any:
        return x.astype(jnp.float32)

    of_wide = tuple(one._replace(key_pages=wide(one.key_pages), value_pages=wide(one.value_pages)) for one in branches)
    units, implementation = (unit, unit), "mosaic" if jax.default_backend() == "gpu" else "xla"
    want = jax.jit(lambda q, b: grouped_branches_reference(q, b, groups, units=units))(wide(q), of_wide)
    with implementations(implementation):
        kernel = grouped_branches.kernel_for(q, branches, groups, units=units)
        got = jax.jit(lambda q, b: grouped_branches(q, b, groups, units=units))(q, branches)
    said = []
    for a, b in zip(got, want, strict=True):
        said.append(f"{float(jnp.abs(a.out - b.out).max() / jnp.abs(b.out).max()):.4f}")
        said.append(f"{float(jnp.abs(a.lse - b.lse).max()):.4f}")
    return f"{shape._asdict()}: {'kernel' if kernel is not None else 'XLA'}; out, lse: {', '.join(said)}"


def of_model(documents: int, group: int, implementation: str, precision: str) -> str:
    """How far the laws of verification in groups are from those of each query by itself, in the bundled target."""
    config, params = load_checkpoint(bundled_model(BUNDLED["recall"]), precision)
    with implementations("xla"):
        texts = calibrate_reuse.read(config, params, *calibrate_reuse.documents(0, documents, 2048))
    cut = {name: getattr(texts.view, name)[:, :8] for name in ("tokens", "positions", "write_pages")}
    view = dataclasses.replace(texts.view, **cut)
    laws = {}
    for name, sparse in (("alone", None), ("groups", SparseVerification("merged", group))):
        with implementations(implementation if sparse else "xla"):
            jax.clear_caches()
            of_sparse = dataclasses.replace(view, sparse=sparse)
            laws[name] = calibrate_reuse.verified_laws(config, params, texts.cache, of_sparse)
    kl = float(calibrate_reuse.divergence(laws["alone"], laws["groups"], texts.counts[:, :8]))
    return f"the model, {documents} documents, groups of {group}, {implementation}, {precision}: KL {kl:.5f}"


def main() -> None:
    """Compares, and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only so many (all)")
    parser.add_argument("--no-model", action="store_true", help="leave out the model")
    args = parser.parse_args()
    began = time.perf_counter()
    print(jax.devices()[0].device_kind, flush=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for line in pool.map(compare, SHAPES[: args.shapes]):
            print(f"{time.perf_counter() - began:4.0f} s  {line}", flush=True)
    if not args.no_model:
        for documents, implementation in itertools.product((1, 16), ("mosaic", "xla")):
            line = of_model(documents, 4, implementation, "bfloat16")
            print(f"{time.perf_counter() - began:4.0f} s  {line}", flush=True)


if __name__ == "__main__":
    main()
