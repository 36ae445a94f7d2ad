"""Synthetic drafts and predictions whose acceptance is known: the generator of the study of verification kernels.

    k_i ~ Binomial(γ, α);  target_ij = draft_ij for j < k_i;  target_i,k_i ≠ draft_i,k_i;  all else uniform

so that behind the forced disagreement tokens may agree again by chance, which no scan may count. Or k_i is drawn from
the cycles of a real pair (`counted.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

VOCABULARY = 4096
SEED = 7


class Synthetic(NamedTuple):
    """Token ids, int32, and the lengths that a scan has to find."""

    draft: Int[np.ndarray, "b g"]
    target: Int[np.ndarray, "b g1"]
    lengths: Int[np.ndarray, " b"]  # the oracle


def synthetic(rows: int, gamma: int, alpha: float, *, seed: int = SEED, vocabulary: int = VOCABULARY) -> Synthetic:
    """A batch whose rows accept Binomial(γ, α) tokens each. Needs a vocabulary of at least two."""
    rng = np.random.default_rng(seed)
    return with_lengths(rng.binomial(gamma, alpha, rows), gamma, seed=rng, vocabulary=vocabulary)


def like_cycles(rows: int, cycles: Sequence[int], *, seed: int = SEED, vocabulary: int = VOCABULARY) -> Synthetic:
    """A batch whose rows accept k of γ tokens in the share `cycles[k]` of counted cycles, k = 0 … γ."""
    rng = np.random.default_rng(seed)
    shares = np.asarray(cycles) / np.sum(cycles)
    return with_lengths(rng.choice(shares.size, rows, p=shares), shares.size - 1, seed=rng, vocabulary=vocabulary)


def with_lengths(
    lengths: Int[np.ndarray, " b"],
    gamma: int,
    *,
    seed: int | np.random.Generator = SEED,
    vocabulary: int = VOCABULARY,
) -> Synthetic:
    """A batch whose row i accepts `lengths[i]` tokens, from 0 to γ."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int32)
    rows = lengths.size
    draft = rng.integers(vocabulary, size=(rows, gamma), dtype=np.int32)
    target = rng.integers(vocabulary, size=(rows, gamma + 1), dtype=np.int32)
    position = np.arange(gamma)
    agrees = position < lengths[:, None]
    target[:, :gamma] = np.where(agrees, draft, target[:, :gamma])
    disagrees = position == lengths[:, None]
    other = (draft + rng.integers(1, vocabulary, size=draft.shape, dtype=np.int32)) % vocabulary
    target[:, :gamma] = np.where(disagrees, other, target[:, :gamma])
    return Synthetic(draft, target, lengths)


def floor_bytes(rows: int, gamma: int, dim: int, accepted: int, *, itemsize: int = 2, tail: bool = True) -> int:
    """Bytes that verify-and-pack must move: ids, accepted KV in, packed KV out (all of it with the zeroed `tail`)."""
    ids = 4 * rows * (2 * gamma + 1) + rows * (4 + 1 + 4 + 4)
    return ids + itemsize * dim * (accepted + (rows * gamma if tail else accepted))


def rotations(rows: int, gamma: int, dim: int) -> int:
    """How many sets of buffers a benchmark rotates over, inputs and results together more than 200 MB, at most 64."""
    each = 4 * rows * (2 * gamma + 1) + 4 * rows * gamma * dim
    return min(64, 1 + 200_000_000 // each)
