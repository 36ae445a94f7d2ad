"""Exact decoders under a constraint have the locally masked law: at every token, the target's law of what is allowed.

The oracle masks by trying texts with Python's `re`; it knows no automaton, no frontier, no block and no draft.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import autoregressive, rejection
from smcjax.autoregressive import Autoregressive
from smcjax.decoding import speculation
from smcjax.decoding.distribution import SamplingDistribution, distribution_of
from smcjax.decoding.drafts.ngram import NGram
from smcjax.decoding.drafts.proposer import Proposer
from smcjax.engine.run.constraints import make_tables
from smcjax.model import ModelConfig
from smcjax.rejection import Rejection
from smcjax.structured.automaton import Automaton
from smcjax.structured.automaton_child import token_automaton
from smcjax.structured.grammar import expression_automaton
from tests import exact
from tests.helpers import Ask, batch
from tests.rejection.test_adjusted_law import DRAFT_AFTER, texts
from tests.rejection.test_decoder import AFTER, MAX_MODEL_LEN, PAIR, V, program_of, run

SPELLED = (b"a", b"b", b"ba", b"")
STOP = 3
REGEX = "(ab|b)+a?"
ASK = Ask((1, 2, 1), max_tokens=4, stops=(STOP,))
DECODINGS: list[tuple[Rejection, Proposer | ModelConfig]] = [
    (Rejection(gamma=3), PAIR.draft),
    (Rejection(gamma=2, n_candidates=2, draft_temperature=1.5), PAIR.draft),
    (Rejection(tree=(2, 2, 1)), PAIR.draft),
    (Rejection(gamma=3), NGram()),
]


def answers(most: int) -> set[tuple[int, ...]]:
    """All outputs of the form with at most so many tokens, a stop among them unless the cap ends them."""
    found = set()
    for length in range(most + 1):
        for tokens in itertools.product(range(STOP), repeat=length):
            if re.fullmatch(REGEX.encode(), b"".join(SPELLED[token] for token in tokens)):
                found.add(tokens if length == most else (*tokens, STOP))
    return found


BEGINNINGS = {x[:n] for x in answers(ASK.max_tokens) for n in range(1, len(x) + 1)}


def masking(after: Any, prompt: int = len(ASK.prompt)) -> Any:
    """A model's logits of allowed tokens."""

    def allowed(tokens: list[int]) -> np.ndarray:
        here = tuple(int(token) for token in tokens[prompt:])
        mask = [(*here, token) in BEGINNINGS for token in range(V)]
        return np.where(mask, after(tokens).astype(np.float64), -np.inf)

    return allowed


@functools.cache
def tables() -> Any:
    made = token_automaton(*expression_automaton(REGEX, 100), list(SPELLED), 1000)
    # A place before it is another's.
    return make_tables({1: Automaton(**made)}, 2, V, most_cells=1000, most_states=100)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def states(program: Any, samples: int, module: Any = rejection) -> Any:
    """So many requests of the same kind, first tokens drawn."""
    prompts, requests = batch([ASK], V, MAX_MODEL_LEN)
    prompts, requests = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), (prompts, requests))
    requests = dataclasses.replace(
        requests, key=jax.random.split(jax.random.key(1), samples), automaton=jnp.ones(samples, jnp.int32)
    )
    memory = program.create_memory(PAIR.params, samples * program.rows * 4 + 1)
    memory = dataclasses.replace(memory, automata=jax.tree.map(jnp.asarray, tables()))
    state = module.begin(program, memory, prompts, requests, requests.prompt_length > 0)
    hidden = jnp.zeros((samples, program.target.hidden_size))
    state, hidden = module.prefill(program, PAIR.params, state, jnp.asarray(0, jnp.int32), prompts.shape[1], hidden)
    return module.start(program, PAIR.params, state, hidden)


def law() -> dict[tuple[int, ...], float]:
    return exact.outcomes(masking(AFTER), ASK, MAX_MODEL_LEN)


def check(program: Any, state: Any) -> tuple[float, float, int]:
    """The largest error of a token's log-probability, and χ² of the answers with its bins."""
    assert not state.running.any()
    assert not state.failed.any()
    worst, after = 0.0, masking(AFTER)
    seen = texts(state, program.rows)
    for row, tokens in zip(np.asarray(state.sequences.logprobs)[:: program.rows], seen, strict=True):
        for count, token in enumerate(tokens):
            want = np.log(exact.next_law(after, ASK, tokens[:count])[token])
            worst = max(worst, abs(float(row[len(ASK.prompt) + count]) - want))
    return worst, *exact.chi_square(collections.Counter(seen), law())


def fits(value: float, bins: int) -> bool:
    assert bins > 5
    return value < bins + 4.5 * np.sqrt(2 * bins) + 5


@pytest.mark.parametrize(("decoding", "draft"), DECODINGS, ids=lambda one: str(one)[:40])
def test_rejection_has_the_locally_masked_law(decoding: Rejection, draft: Proposer | ModelConfig) -> None:
    program = program_of(decoding, 2, draft)
    state, infos = run(program, PAIR.params, states(program, 1024), ASK.max_tokens - 1)
    assert len(np.unique(infos.accepted[0])) > 1, "rows of one step accept differently"
    worst, value, bins = check(program, state)
    assert worst < 1e-4
    assert fits(value, bins), (value, bins)


@pytest.mark.slow
def test_the_target_alone_has_the_locally_masked_law() -> None:
    program = autoregressive.Program(Autoregressive(), PAIR.target, None, MAX_MODEL_LEN, page_size=2)
    state = states(program, 2048, autoregressive)
    state = jax.jit(autoregressive.run, static_argnums=(0, 3))(program, PAIR.params, state, ASK.max_tokens - 1)[0]
    worst, value, bins = check(program, state)
    assert worst < 1e-4
    assert fits(value, bins), (value, bins)
    # Control: the target's own law given the form is another.
    own = {x: mass for x, mass in exact.outcomes(AFTER, ASK, MAX_MODEL_LEN).items() if x in answers(ASK.max_tokens)}
    given = {x: mass / sum(own.values()) for x, mass in own.items()}
    value, bins = exact.chi_square(collections.Counter(texts(state, 1)), given)
    assert value > bins + 15 * np.sqrt(2 * bins)


@pytest.mark.slow
def test_drafts_are_masked_as_the_target_is() -> None:
    """q of every position of a chain, and behind every node of a tree, is the draft's own law of allowed tokens."""
    for decoding in (Rejection(gamma=3), Rejection(tree=(-1, 0, 0, 2, 2, 0, 3))):
        program = program_of(decoding, 2)
        propose = speculation.propose if decoding.tree is None else speculation.propose_tree
        options = {"keep_logits": True} if decoding.tree is None else {}

        def drafted(state: Any, program: Any = program, propose: Any = propose, options: Any = options) -> Any:
            distribution = distribution_of(state, rows=1, features=())
            return propose(program, PAIR.params, state, distribution, **options)[1]

        state = states(program, 12)
        drafts, seen = jax.jit(drafted)(state), 0
        tree, after = program.speculation.tree, masking(DRAFT_AFTER)
        paths = [tuple(range(column)) for column in range(3)] if tree is None else tree.drafts_to(tree.inner)
        for row, tokens in enumerate(texts(state, 1)):
            for column, path in enumerate(paths):
                before = (*tokens, *(int(drafts.tokens[row, place]) for place in path))
                if before in BEGINNINGS and before not in answers(ASK.max_tokens):
                    got = np.asarray(jax.nn.softmax(drafts.logits[row, column]))
                    np.testing.assert_allclose(got, exact.next_law(after, ASK, before), atol=1e-5)
                    seen += 1
        assert seen > 8


@pytest.mark.slow
def test_control_a_target_that_walks_committed_tokens_alone(patch_programs: Any) -> None:
    """Negative control: leaving earlier drafts out of the target's states shows."""
    patch_programs(SamplingDistribution, "before", lambda *_: None)
    program = program_of(Rejection(gamma=3), 2)
    jax.clear_caches()  # of traces made without the mistake
    state, _ = run(program, PAIR.params, states(program, 512), ASK.max_tokens - 1)
    jax.clear_caches()
    assert not set(texts(state, 1)) <= answers(ASK.max_tokens)
