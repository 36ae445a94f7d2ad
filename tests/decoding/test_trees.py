"""Draft trees on sparse targets: greedy tokens and log-probabilities are the target's.

That sparse drafts do so too: `test_sparse_verification.py`; dense attention: `tests/rejection/test_decoder.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import rejection
from smcjax.decoders import Rejection
from smcjax.sparse.nsa import NSA
from tests import exact
from tests.decoding import test_nsa as sparse
from tests.helpers import assert_pages_sound, batch

V, MAX_MODEL_LEN = sparse.V, sparse.MAX_MODEL_LEN


DECODING = Rejection(tree=(-1, 0, 0, 2, 0, 1, 3), siblings="top", order="dfs")


ASKS = [*sparse.GREEDY, *sparse.SAMPLED]


def decode() -> tuple[list[tuple[list[int], np.ndarray]], set[int]]:
    """Generated tokens and log-probabilities by request, and all accepted lengths; pages begin full of NaN."""
    params = sparse.pair_of(sparse.DENSE_DRAFT)
    program = rejection.Program(DECODING, sparse.TARGET, sparse.DENSE_DRAFT, MAX_MODEL_LEN, 8)
    num_pages = len(ASKS) * (program.max_pages + 2) + 1
    state = sparse.init(program, params, *batch(ASKS, V, MAX_MODEL_LEN), num_pages)
    step, accepted = jax.jit(functools.partial(rejection.step, program)), set()  # anew: controls patch what it calls
    while state.running.any():
        state, info = step(params, state)
        assert_pages_sound(state.sequences.block_table, state.memory.pool)
        accepted |= set(np.asarray(info.accepted)[np.asarray(info.ran)].tolist())
    assert not state.failed.any()
    return sparse.first_rows(DECODING, ASKS, state), accepted


@pytest.mark.slow
def test_tokens_are_the_targets() -> None:
    """Greedy from every prompt length mod d and l′, and sampled ones' log-probabilities, all in one batch."""
    found, accepted = decode()
    assert accepted == set(range(DECODING.speculation.gamma + 1))
    for ask, (tokens, logprobs) in zip(ASKS, found, strict=True):
        if ask.temperature == 0:
            assert tokens == sparse.greedy(ask.prompt, ask.max_tokens)
        else:
            laws = [exact.next_law(sparse.after, ask, tuple(tokens[:at])) for at in range(len(tokens))]
            want = [np.log(law[token]) for law, token in zip(laws, tokens, strict=True)]
            np.testing.assert_allclose(logprobs, want, atol=1e-4)


def mistakes() -> int:
    """Greedy requests whose tokens are not the target's."""
    found, _ = decode()
    pairs = zip(sparse.GREEDY, found[: len(sparse.GREEDY)], strict=True)
    return sum(tokens != sparse.greedy(ask.prompt, ask.max_tokens) for ask, (tokens, _) in pairs)


@pytest.mark.slow
def test_control_another_path_kept(patch_programs: Any) -> None:
    """Nodes' keys that are kept of other nodes than the accepted ones change what the target says."""
    write = rejection.decoder.keep_path

    def last_but_one(program: Any, state: Any, drafts: Any, scratch: Any, last: Any) -> Any:
        return write(program, state, drafts, jax.tree.map(lambda array: jnp.roll(array, 1, axis=1), scratch), last)

    patch_programs(rejection.decoder, "keep_path", last_but_one)
    assert mistakes() > 0


def test_compressed_tokens_lie_where_pages_have_them() -> None:
    """Every array of a sparse layer says how many tokens an entry stands for: what the kept path is written by."""
    arrays = NSA(kernel_size=4, kernel_stride=2, block_size=4).cache(sparse.TARGET).arrays
    ends = {name: np.flatnonzero(np.asarray(array.ended_at(jnp.arange(10))) >= 0) for name, array in arrays.items()}
    np.testing.assert_array_equal(ends["compressed_keys"], [3, 5, 7, 9])
    np.testing.assert_array_equal(ends["window_keys"], np.arange(10))
