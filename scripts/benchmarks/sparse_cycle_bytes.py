"""Bytes of KV that verifications of a sparse target read, as `bench_sparse.py` prints them."""

from __future__ import annotations

from replayed_sets import Counted

from smcjax.decoders import Decoding
from smcjax.model.config import ModelConfig
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SHARED


def issued_bytes(
    config: ModelConfig, decoding: Decoding, context: int, overlap: float, own: int = 0, sets: Counted | None = None
) -> int:
    """Bytes of KV that a request's verification reads from pages, in all layers of the target.

    Rows of a request share all but the last `own` positions, which a group reads for each of its rows, column by
    column.
    Groups' unions are those of `sets`, without which neighbours have the fraction `overlap` of theirs in common.
    """
    queries = decoding.rows * decoding.speculation.scored
    sparse = decoding.speculation.sparse
    total = 0.0
    for index in range(config.num_layers):
        layer = config.layer(index)
        pair = 2 * config.num_kv_heads * config.head_dim * config.itemsize
        kind = layer.attention
        if not isinstance(kind, NSA):
            total += pair * (context + (decoding.rows - 1) * own)
            continue
        complete = max(0, (context - kind.kernel_size) // kind.kernel_stride + 1)
        window, blocks = min(kind.window, context), min(kind.num_blocks, -(-context // kind.block_size))
        size = 1 if sparse is None or not sparse.is_grouped else min(sparse.queries, queries)
        groups = -(-queries // size)
        union = blocks if sparse is not None and sparse.mode in SHARED else blocks * (1 + (size - 1) * (1 - overlap))
        union = min(union, -(-context // kind.block_size)) if sets is None else sets.union(size)
        apart = own // kind.kernel_stride + min(own, kind.local_blocks * kind.block_size) + min(own, window)
        read = complete + union * kind.block_size + window + (min(decoding.rows, size) - 1) * apart
        total += pair * groups * (read + (size if size > 1 else 0))
    return round(total)


def unique_bytes(config: ModelConfig, sets: Counted) -> int:
    """Bytes of KV that some query of a request's verification reads, each once, in all layers of a sparse target."""
    slot = 2 * config.num_kv_heads * config.head_dim * config.itemsize
    return round(config.num_layers * slot * sets.unique_slots())
