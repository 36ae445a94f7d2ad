"""The law of sampled answers is the target's, by χ², where tokens are truncated and where nothing is asked for."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.decoding.drafts.ngram import NGram
from smcjax.decoding.drafts.proposer import Proposer
from smcjax.model import ModelConfig
from smcjax.rejection import Rejection
from tests import exact
from tests.helpers import Ask, batch
from tests.rejection.test_decoder import AFTER, MAX_MODEL_LEN, PAIR, V, answers, init, program_of, run
from tests.test_autoregressive import top_k_p

LOPSIDED = Rejection(tree=(-1, 0, 1, 0, 3, 3), order="position", draft_temperature=1.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoding", "changes", "top_k", "top_p", "draft"),
    [
        (Rejection(gamma=3), {}, V, 1.0, PAIR.draft),
        (Rejection(gamma=3), {"max_tokens": 4}, 3, 0.9, NGram()),
        (LOPSIDED, {"min_tokens": 2}, 3, 0.75, PAIR.draft),
        (Rejection(tree=(3, 1), siblings="top", order="dfs"), {"max_tokens": 4}, 3, 0.9, PAIR.draft),
    ],
    ids=["plain", "n-gram, truncated", "lopsided tree, truncated", "tree of top tokens, truncated"],
)
def test_sampling_law(
    decoding: Rejection, changes: dict[str, Any], top_k: int, top_p: float, draft: Proposer | ModelConfig
) -> None:
    """χ² of samples against every output's exact probability; the control is a law half as warm again."""
    ask = Ask((1, 2), **{"max_tokens": 3, "stops": (3,), **changes})
    samples = 8192
    program = program_of(decoding, 2, draft, features=frozenset({"truncation"} if top_k < V or top_p < 1 else ()))
    prompts, requests = batch([dataclasses.replace(ask, top_k=top_k, top_p=top_p)], V, MAX_MODEL_LEN)
    prompts, requests = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), (prompts, requests))
    requests = dataclasses.replace(requests, key=jax.random.split(jax.random.key(1), samples))
    state = init(program, PAIR.params, prompts, requests, num_pages=samples * 4 + 1)
    state, infos = run(program, PAIR.params, state, ask.max_tokens - 1)
    assert not state.running.any()
    assert len(np.unique(infos.accepted[0])) > 1, "rows of one step accept differently"
    seen = collections.Counter(answers(program, state))

    def chi_square(temperature: float) -> tuple[float, int]:
        law = exact.outcomes(
            AFTER, dataclasses.replace(ask, temperature=temperature), MAX_MODEL_LEN, transform=top_k_p(top_k, top_p)
        )
        return exact.chi_square(seen, law)

    value, bins = chi_square(ask.temperature)
    assert bins > 4
    assert value < bins + 4.5 * np.sqrt(2 * bins) + 5, (value, bins)
    value, bins = chi_square(1.5 * ask.temperature)
    assert value > bins + 15 * np.sqrt(2 * bins), "control"
