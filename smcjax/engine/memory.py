"""How many pages there are, and how many a request can ever need. Host arithmetic."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import jax

from smcjax.kv import pages_for

CPU_KV_BYTES = 1 << 30  # default share of host memory; a GPU's share is a fraction of what the device has
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def gpu_memory() -> int | None:
    """Bytes that JAX may allocate on the default device, None where that is the host's memory."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats["bytes_limit"]) if "bytes_limit" in stats else None


def device_memory() -> int:
    """Bytes of the memory that programs run in: the GPU's, or the host's as far as its container allows."""
    limit = gpu_memory()
    if limit is not None:
        return limit
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or its limit is "max"
        limit = min(limit, int(_CGROUP_LIMIT.read_text()))
    return limit


def worst_case_pages(prompt_length: int, limit: int, rows: int, page_size: int) -> int:
    """Pages of one request when every row diverges right after the prompt.

    Full pages of the prompt stay shared for good; whatever comes after is each row's own up to `limit` tokens.
    """
    shared = min(prompt_length, limit) // page_size
    return shared + rows * (pages_for(limit, page_size) - shared)


def choose_num_pages(
    num_pages: int | None,
    *,
    page_bytes: int,
    largest_request: int,
    max_num_seqs: int,
    weight_bytes: int,
    gpu_memory_utilization: float,
) -> int:
    """Pages to allocate, the trash page included: `num_pages`, or room for `max_num_seqs` of the largest request.

    `largest_request` is a request's worst case in pages. What is chosen here stays within the given share of a GPU's
    memory, or within 1 GiB of a host's unless one request needs more. Raises ValueError where pages and weights do not
    fit the device, or not even one largest request does.
    """
    free = device_memory() - weight_bytes
    if num_pages is not None:
        if num_pages * page_bytes > free:
            raise ValueError(
                f"num_pages must be at most {max(free, 0) // page_bytes} beside the weights in this device's memory, "
                f"got {num_pages}; lower it."
            )
        return num_pages
    gpu = gpu_memory()
    if gpu is None:
        available = min(free, max(CPU_KV_BYTES, page_bytes * (largest_request + 1)))
    else:
        available = int(gpu * gpu_memory_utilization) - weight_bytes
    affordable = available // page_bytes - 1
    if affordable < largest_request:
        raise ValueError(
            f"one request of max_model_len tokens may need {largest_request} KV pages "
            f"({largest_request * page_bytes / 2**30:.2f} GiB) and only {max(affordable, 0)} fit beside the weights; "
            "lower max_model_len or n_particles, or set num_pages for shorter requests."
        )
    return 1 + min(affordable, largest_request * max_num_seqs)


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that programs exist for: powers of two below `max_num_seqs`, and itself."""
    sizes = []
    size = 1
    while size < max_num_seqs:
        sizes.append(size)
        size *= 2
    return [*sizes, max_num_seqs]
