"""Cutting blocks and appending them, against a loop over tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from smcjax.decoding.sequences import Requests, Sequences, append, cut_block

ROWS, COLUMNS, V, T_MAX = 3, 4, 5, 12


@jax.jit
def cut_and_append(
    before: Sequences, tokens: jax.Array, stops: jax.Array, limit: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array, Sequences]:
    """counted, ended, and the rows afterwards; log probabilities are the tokens themselves."""
    block = cut_block(tokens, stops, before.length, limit)
    return block.counted, block.ended, append(before, tokens, tokens.astype(jnp.float32), block, live)


def rows_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """One value a row."""
    return st.lists(values, min_size=ROWS, max_size=ROWS)


@given(
    tokens=rows_of(st.lists(st.integers(0, V - 1), min_size=COLUMNS, max_size=COLUMNS)),
    stops=rows_of(st.sets(st.integers(0, V - 1))),
    length=rows_of(st.integers(1, 8)),
    room=rows_of(st.integers(1, 9)),
    live=rows_of(st.booleans()),
)
def test_cut_and_append_equal_a_loop(
    tokens: list[list[int]], stops: list[set[int]], length: list[int], room: list[int], live: list[bool]
) -> None:
    """A row takes tokens until a stop token or its cap, both included; rows that are not live stay as they are."""
    is_stop = np.array([[v in s for v in range(V)] for s in stops])
    limit = np.asarray(length) + np.asarray(room)
    before = dataclasses.replace(
        Sequences.create(ROWS, max_tokens=T_MAX, max_pages=2),
        tokens=jnp.full((ROWS, T_MAX), 9, jnp.int32),
        length=jnp.asarray(length, jnp.int32),
        finished=~jnp.asarray(live),
    )
    counted, did_end, after = cut_and_append(
        before, jnp.asarray(tokens), jnp.asarray(is_stop), jnp.asarray(limit), jnp.asarray(live)
    )
    for r in range(ROWS):
        kept: list[int] = []
        ended = False
        for token in tokens[r]:
            if not ended:
                kept.append(token)
                ended = token in stops[r] or length[r] + len(kept) >= limit[r]
        assert counted[r].tolist() == [i < len(kept) for i in range(COLUMNS)]
        assert bool(did_end[r]) == ended
        if not live[r]:
            kept, ended = [], True
            np.testing.assert_array_equal(after.tokens[r], before.tokens[r])
        assert int(after.length[r]) == length[r] + len(kept)
        assert bool(after.finished[r]) == ended
        assert after.tokens[r, length[r] : length[r] + len(kept)].tolist() == kept
        assert after.logprobs[r, length[r] : length[r] + len(kept)].tolist() == kept
        assert (after.tokens[r, : length[r]] == 9).all()


def test_the_earlier_end_decides() -> None:
    """A stop token on the cap's own place counts as a stop: nothing distinguishes it in the row but the token."""
    stops = jnp.asarray([[False, True]])
    for tokens, limit, want in (([0, 1, 0], 9, 2), ([0, 0, 1], 5, 2), ([0, 1, 0], 5, 2), ([1, 1, 1], 9, 1)):
        block = cut_block(jnp.asarray([tokens]), stops, jnp.asarray([3]), jnp.asarray([limit]))
        assert int(block.counted.sum()) == want
        assert bool(block.ended[0])


def test_alike_requests_differ_in_prompt_and_key_only() -> None:
    """`Requests.alike` broadcasts everything else, and caps each request behind its own prompt."""
    requests = Requests.alike(
        jax.random.key(3), jnp.array([2, 5]), vocab_size=7, max_tokens=4, temperature=0.5, stop_token_ids=[6]
    )
    assert requests.limit.tolist() == [6, 9]
    assert requests.stops.tolist() == [[False] * 6 + [True]] * 2
    assert requests.temperature.tolist() == [0.5, 0.5]
    assert jax.random.key_data(requests.key[0]).tolist() != jax.random.key_data(requests.key[1]).tolist()
