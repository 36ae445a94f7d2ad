"""Engines of fewer programs: what costs in most tests of engines is to trace and compile those that differ by sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from smcjax.engine import engine
from smcjax.engine.run.runner import Runner
from smcjax.engine.schedule.scheduler import ChunkLengths

_buckets, _chunk_lengths = engine.buckets, Runner._chunk_lengths


def _of_the_largest(max_num_seqs: int) -> list[int]:
    return _buckets(max_num_seqs)[-1:]


def _of_one_length(runner: Runner) -> ChunkLengths:
    chunks = _chunk_lengths(runner)
    return ChunkLengths(chunks.together, chunks.together, one_slot=False)


def _set(buckets: object, chunk_lengths: object) -> None:
    engine.buckets, Runner._chunk_lengths = buckets, chunk_lengths


@contextlib.contextmanager
def one_size() -> Iterator[None]:
    """Engines made within have programs for their largest batch, and for chunks of one length in all slots, alone."""
    before = engine.buckets, Runner._chunk_lengths
    _set(_of_the_largest, _of_one_length)
    try:
        yield
    finally:
        _set(*before)


@contextlib.contextmanager
def all_sizes() -> Iterator[None]:
    """Engines made within have the programs that users' have, whatever the file."""
    before = engine.buckets, Runner._chunk_lengths
    _set(_buckets, _chunk_lengths)
    try:
        yield
    finally:
        _set(*before)
