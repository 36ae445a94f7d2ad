"""Memory that Native Sparse Attention needs beside pages, where kernels rank blocks for groups of queries."""

from __future__ import annotations

from smcjax.model.config import ModelConfig
from smcjax.pallas.attention.prefix_shared import padded
from smcjax.pallas.mosaic.wgmma import QUERIES
from smcjax.pallas.sparse.stored_scores import BYTES
from smcjax.sparse.groups import keeps_scores
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SparseVerification


def stored_scores_bytes(
    config: ModelConfig,
    sparse: SparseVerification | None,
    *,
    requests: int,
    queries: int,
    max_model_len: int,
    page_size: int,
) -> int:
    """Bytes of the scores that one layer keeps, of those that need most: a layer's are gone when the next begins.

    They are [requests · g, Hkv, rows, slots] in float16: a query head's for every slot of compressed tokens, in rows of
    whole tiles of a group. Each request has `queries` that are verified together. 0 where no kernel keeps scores.
    """
    if sparse is None or not sparse.is_grouped:
        return 0
    heads, size = padded(config.num_heads // config.num_kv_heads), min(sparse.queries, queries)
    most_slots = 0
    for kind in config.selecting.values():
        if isinstance(kind, NSA) and keeps_scores(
            kind,
            size=size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=config.dtype,
        ):
            most_slots = max(most_slots, -(-max_model_len // page_size) * (page_size // kind.kernel_stride))
    groups = requests * -(-queries // size)
    rows = -(-size * heads // QUERIES) * QUERIES
    return BYTES * groups * config.num_kv_heads * rows * most_slots
