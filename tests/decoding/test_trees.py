"""Draft trees on sparse targets: greedy tokens and log-probabilities are the target's.

That pages and dense attention alone do so too: `tests/rejection/test_decoder.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import rejection
from smcjax.decoders import Rejection
from smcjax.decoding.groups import PairParams
from smcjax.model import ModelConfig
from smcjax.model.view import TreeView
from smcjax.sparse.nsa import NSA
from tests import exact
from tests.decoding import test_nsa as sparse
from tests.helpers import Ask, assert_pages_sound, batch
from tests.smc import reference

V, MAX_MODEL_LEN = sparse.V, sparse.MAX_MODEL_LEN


@dataclasses.dataclass(frozen=True)
class Case:
    """A pair of models, the trees that one drafts for the other, and how large pages are."""

    name: str
    target: ModelConfig
    draft: ModelConfig
    decoding: Rejection
    page_size: int

    def __str__(self) -> str:
        return self.name

    @functools.cached_property
    def params(self) -> PairParams:
        """A draft that is often right, and often wrong."""
        return sparse.pair_of(self.draft)

    @functools.cached_property
    def after(self) -> Any:
        """The dense target's logits behind a list of tokens."""
        return reference.language_model(self.target, self.params.target, MAX_MODEL_LEN + 8)


CASES = [
    Case("sparse target and draft", sparse.TARGET, sparse.NSA_DRAFT, Rejection(tree=(2, 1, 1)), 2),
    Case(
        "sparse target, dense draft",
        *(sparse.TARGET, sparse.DENSE_DRAFT),
        Rejection(tree=(-1, 0, 0, 2, 0, 1, 3), siblings="top", order="dfs"),
        8,
    ),
]


def decode(case: Case, asks: list[Ask]) -> tuple[list[tuple[list[int], np.ndarray]], set[int]]:
    """Generated tokens and log-probabilities by request, and all accepted lengths; pages begin full of NaN."""
    program = rejection.Program(case.decoding, case.target, case.draft, MAX_MODEL_LEN, case.page_size)
    num_pages = len(asks) * (program.max_pages + 2) + 1
    state = sparse.init(program, case.params, *batch(asks, V, MAX_MODEL_LEN), num_pages)
    step, accepted = jax.jit(functools.partial(rejection.step, program)), set()  # anew: controls patch what it calls
    while state.running.any():
        state, info = step(case.params, state)
        assert_pages_sound(state.sequences.block_table, state.memory.pool)
        accepted |= set(np.asarray(info.accepted)[np.asarray(info.ran)].tolist())
    assert not state.failed.any()
    return sparse.first_rows(case.decoding, asks, state), accepted


def greedy(case: Case, ask: Ask) -> list[int]:
    """The dense target's own continuation."""
    tokens = list(ask.prompt)
    for _ in range(ask.max_tokens):
        tokens.append(int(case.after(tokens).argmax()))
    return tokens[len(ask.prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_the_targets(case: Case) -> None:
    """Greedy from every prompt length mod d and l′, and sampled ones' log-probabilities, all in one batch."""
    asks = [*sparse.GREEDY, *sparse.SAMPLED]
    found, accepted = decode(case, asks)
    assert accepted == set(range(case.decoding.speculation.gamma + 1))
    for ask, (tokens, logprobs) in zip(asks, found, strict=True):
        if ask.temperature == 0:
            assert tokens == greedy(case, ask)
        else:
            laws = [exact.next_law(case.after, ask, tuple(tokens[:at])) for at in range(len(tokens))]
            want = [np.log(law[token]) for law, token in zip(laws, tokens, strict=True)]
            np.testing.assert_allclose(logprobs, want, atol=1e-4)


def mistakes(case: Case) -> int:
    """Greedy requests whose tokens are not the target's."""
    found, _ = decode(case, sparse.GREEDY)
    return sum(tokens != greedy(case, ask) for ask, (tokens, _) in zip(sparse.GREEDY, found, strict=True))


@pytest.mark.slow
def test_control_compression_update_dropped(patch_programs: Any) -> None:
    """Nodes without compressed tokens change what the target says."""
    put = TreeView.put

    def without_update(view: TreeView, scratch: Any, new: Any) -> Any:
        return put(view, scratch, {name: array for name, array in new.items() if "compressed" not in name})

    patch_programs(TreeView, "put", without_update)
    assert mistakes(CASES[1]) > 0


@pytest.mark.slow
def test_control_another_path_kept(patch_programs: Any) -> None:
    """So do nodes' keys that are kept of other nodes than the accepted ones."""
    write = rejection.decoder.keep_path

    def last_but_one(program: Any, state: Any, drafts: Any, scratch: Any, last: Any) -> Any:
        return write(program, state, drafts, jax.tree.map(lambda array: jnp.roll(array, 1, axis=1), scratch), last)

    patch_programs(rejection.decoder, "keep_path", last_but_one)
    assert mistakes(CASES[1]) > 0


def test_compressed_tokens_lie_where_pages_have_them() -> None:
    """Every array of a sparse layer says how many tokens an entry stands for: what the kept path is written by."""
    arrays = NSA(kernel_size=4, kernel_stride=2, block_size=4).cache(sparse.TARGET).arrays
    ends = {name: np.flatnonzero(np.asarray(array.ended_at(jnp.arange(10))) >= 0) for name, array in arrays.items()}
    np.testing.assert_array_equal(ends["compressed_keys"], [3, 5, 7, 9])
    np.testing.assert_array_equal(ends["window_keys"], np.arange(10))
