"""How sparse targets are read by default: in groups by kernels, and in the pages that these want."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from smcjax.decoders import Decoding
from smcjax.engine.load.loading import DEFAULT_PAGE_SIZE, Models, check_pages
from smcjax.pallas.dispatch import implementations
from smcjax.pallas.sparse.grouped_attention import grouped_branches
from smcjax.sparse.groups import reads_by_kernels
from smcjax.sparse.verification import KERNEL_GROUP, SparseVerification

KERNEL_PAGE_SIZE = 128  # with the eight compressed tokens by which kernels of groups find them


def default_sparse_mode(decoding: Decoding, models: Models, page_size: int | None, implementation: str) -> Decoding:
    """The decoder as it reads a sparse target by default: in groups if kernels can, to the same result.

    With `page_size` None pages are those that `default_page_size` says for such groups.
    """
    target = models.local_target
    kinds: Any = target.selecting.values()
    if decoding.speculation.sparse is not None or not kinds:
        return decoding
    queries = min(decoding.speculation.rows * decoding.speculation.scored, KERNEL_GROUP)
    decoder: Any = decoding
    grouped: Decoding = dataclasses.replace(decoder, sparse=SparseVerification("merged", queries))
    size = default_page_size([grouped], models, implementation) if page_size is None else page_size
    with implementations(implementation):
        by_kernels = all(reads_by_kernels(kind, target, queries, size, target.dtype) for kind in kinds)
    return grouped if by_kernels else decoding


def default_page_size(decodings: Iterable[Decoding], models: Models, implementation: str) -> int:
    """Tokens of a KV page by default: those that kernels of grouped sparse attention want, else 16.

    One of the `decodings` that reads in groups suffices, since they share their pages. 128 is taken only where it cuts
    no block of either model.
    """
    kinds = (decoding.speculation.sparse for decoding in decodings)
    with implementations(implementation):
        if not grouped_branches.has_kernel() or not any(sparse is not None and sparse.is_grouped for sparse in kinds):
            return DEFAULT_PAGE_SIZE
    try:
        for config in (models.target, models.draft):
            if config is not None:
                check_pages(config, KERNEL_PAGE_SIZE)
    except ValueError:
        return DEFAULT_PAGE_SIZE
    return KERNEL_PAGE_SIZE
