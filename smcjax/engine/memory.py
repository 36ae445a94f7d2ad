"""How many pages there are, and how many a request can ever need. Host arithmetic."""

from __future__ import annotations

from smcjax.kv import pages_for

CPU_KV_BYTES = 1 << 30  # default share of host memory; a GPU's share is a fraction of what the device has


def worst_case_pages(prompt_length: int, limit: int, rows: int, page_size: int) -> int:
    """Pages of one request when every row diverges right after the prompt.

    Full pages of the prompt stay shared for good; whatever comes after is each row's own up to `limit` tokens.
    """
    shared = min(prompt_length, limit) // page_size
    return shared + rows * (pages_for(limit, page_size) - shared)


def choose_num_pages(
    *,
    page_bytes: int,
    largest_request: int,
    max_num_seqs: int,
    available_bytes: int,
) -> int:
    """Pages to allocate, the trash page included: room for `max_num_seqs` of the largest request, if that fits.

    `largest_request` is a request's worst case in pages, `available_bytes` what KV may take. Raises ValueError when
    not even one such request fits.
    """
    affordable = available_bytes // page_bytes - 1
    if affordable < largest_request:
        raise ValueError(
            f"one request of max_model_len tokens may need {largest_request} KV pages "
            f"({largest_request * page_bytes / 2**30:.2f} GiB) and only {max(affordable, 0)} fit; "
            "lower max_model_len or n_particles."
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
