"""Drafts that are looked up in a row's own text: against plain Python, and what decoders make of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smcjax import smc
from smcjax.decoding.drafts.ngram import NGram, lookup
from tests.helpers import tiny_config

WIDTH, COUNT = 12, 4


def looked_up(tokens: list[int], count: int, longest: int) -> list[int]:
    """The continuation of the newest of the longest earlier matches, in plain Python."""
    best, where = 0, len(tokens) - 2
    for end in range(len(tokens) - 1):
        size = 0
        while size < min(longest, end + 1) and tokens[end - size] == tokens[-1 - size]:
            size += 1
        if size and size >= best:
            best, where = size, end
    text = [*tokens]
    while len(text) < len(tokens) + count:
        text.append(text[where + 1 + len(text) - len(tokens)])
    return text[len(tokens) :]


_lookup = jax.jit(lookup, static_argnames=("count", "longest"))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=3, max_size=3), st.integers(1, 4))
def test_lookup_equals_plain_python(rows: list[list[int]], longest: int) -> None:
    tokens = np.full((3, WIDTH), 7, np.int32)  # beyond a row's length anything may stand
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = text
    got = _lookup(jnp.asarray(tokens), jnp.asarray([len(text) for text in rows]), COUNT, longest)
    assert got.tolist() == [looked_up(text, COUNT, longest) for text in rows]


def test_what_followed_the_last_time_is_proposed() -> None:
    text = jnp.asarray([[5, 6, 7, 8, 9, 5, 6, 0, 0, 0]])
    assert lookup(text, jnp.asarray([7]), 4, 3).tolist() == [[7, 8, 9, 5]]
    assert lookup(text, jnp.asarray([3]), 4, 3).tolist() == [[7, 7, 7, 7]]  # stands nowhere else
    loop = jnp.asarray([[1, 2, 1, 2, 0, 0]])
    assert lookup(loop, jnp.asarray([4]), 5, 3).tolist() == [[1, 2, 1, 2, 1]]  # on and on where the text ends


def test_smc_refuses_drafts_that_leave_tokens_no_probability() -> None:
    config = tiny_config(5)
    with pytest.raises(ValueError, match=r"draft_model is 'ngram', whose drafts .*; use decoding=Rejection"):
        smc.Program(smc.SMC(2, 2), config, NGram(), 16)
