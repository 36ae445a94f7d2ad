"""Penalties and biases of exact decoders: every position's law, the target's and the draft's, counts what lies before.

The oracle is a few lines of NumPy over the whole text: it knows no frontier, no block and no draft.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import autoregressive, rejection
from smcjax.autoregressive import Autoregressive
from smcjax.decoding import speculation
from smcjax.decoding.adjustments import Adjustments
from smcjax.decoding.distribution import SamplingDistribution, distribution_of
from smcjax.decoding.drafts.ngram import NGram
from smcjax.decoding.drafts.proposer import Proposer
from smcjax.decoding.program import Feature
from smcjax.model import ModelConfig
from smcjax.rejection import Rejection
from tests import exact
from tests.helpers import Ask, batch
from tests.rejection.test_decoder import AFTER, MAX_MODEL_LEN, PAIR, V, answers, init, program_of, run
from tests.smc.reference import language_model

DRAFT_AFTER = language_model(PAIR.draft, PAIR.params.draft, MAX_MODEL_LEN)
ASK = Ask((1, 2, 1), max_tokens=4)
MISTAKE = "control"
ADJUSTED: frozenset[Feature] = frozenset({"adjustments"})
DECODINGS: list[tuple[Rejection, Proposer | ModelConfig]] = [
    (Rejection(gamma=3), PAIR.draft),
    (Rejection(gamma=2, n_candidates=3, draft_temperature=1.5), PAIR.draft),
    (Rejection(tree=(-1, 0, 0, 2, 0, 2)), PAIR.draft),
    (Rejection(tree=(2, 2, 1), siblings="top", order="dfs"), PAIR.draft),
    (Rejection(gamma=3), NGram()),
]


@dataclasses.dataclass(frozen=True)
class Wish:
    """A request's adjustments as a user writes them."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    def of(self, groups: int) -> Adjustments:
        """The same for so many requests."""
        biased, bias = np.full((groups, 3), V, np.int32), np.zeros((groups, 3), np.float32)
        for place, (token, value) in enumerate(self.bias):
            biased[:, place], bias[:, place] = token, value
        numbers = (np.full(groups, x, np.float32) for x in (self.repetition, self.frequency, self.presence))
        return Adjustments(*jax.tree.map(jnp.asarray, (*numbers, biased, bias)))

    def behind(self, after: Callable[[list[int]], np.ndarray], prompt: int) -> Callable[[list[int]], np.ndarray]:
        """A model's logits with these adjustments, by a text of which the first `prompt` tokens are the prompt."""

        def adjusted(tokens: list[int]) -> np.ndarray:
            logits, answer = after(tokens).astype(np.float64), tokens[prompt:]
            for token, value in self.bias:
                logits[token] += value
            for token in set(tokens):
                logits[token] *= 1 / self.repetition if logits[token] > 0 else self.repetition
            for token in answer:
                logits[token] -= self.frequency
            for token in set(answer):
                logits[token] -= self.presence
            return logits

        return adjusted


STRONG = Wish(repetition=1.7, frequency=0.8, presence=1.1, bias=((0, 0.7), (3, -1.5)))


def states(program: Any, samples: int, wish: Wish, module: Any = rejection, ask: Ask = ASK) -> Any:
    """So many requests of the same kind, first tokens drawn."""
    prompts, requests = batch([ask], V, MAX_MODEL_LEN)
    prompts, requests = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), (prompts, requests))
    requests = dataclasses.replace(
        requests, key=jax.random.split(jax.random.key(1), samples), adjustments=wish.of(samples)
    )
    if module is rejection:
        return init(program, PAIR.params, prompts, requests, num_pages=samples * program.rows * 4 + 1)
    memory = program.create_memory(PAIR.params, samples * 4 + 1)
    state = module.begin(program, memory, prompts, requests, requests.prompt_length > 0)
    hidden = jnp.zeros((samples, program.target.hidden_size))
    state, hidden = module.prefill(program, PAIR.params, state, jnp.asarray(0, jnp.int32), prompts.shape[1], hidden)
    return module.start(program, PAIR.params, state, hidden)


def law_of(wish: Wish) -> dict[tuple[int, ...], float]:
    return exact.outcomes(wish.behind(AFTER, len(ASK.prompt)), ASK, MAX_MODEL_LEN)


def worst_logprob(program: Any, state: Any, wish: Wish) -> float:
    """The largest difference between a token's log-probability as reported and as enumerated."""
    after, worst = wish.behind(AFTER, len(ASK.prompt)), 0.0
    rows, begin = np.asarray(state.sequences.logprobs)[:: program.rows], len(ASK.prompt)
    for row, tokens in zip(rows, texts(state, program.rows), strict=True):
        for count, token in enumerate(tokens):
            want = np.log(exact.next_law(after, ASK, tokens[:count])[token])
            worst = max(worst, abs(float(row[begin + count]) - want))
    return worst


def texts(state: Any, rows: int) -> list[tuple[int, ...]]:
    """Each request's answer so far."""
    pairs = zip(np.asarray(state.sequences.tokens)[::rows], np.asarray(state.sequences.length)[::rows], strict=True)
    return [tuple(tokens[len(ASK.prompt) : length].tolist()) for tokens, length in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(("decoding", "draft"), DECODINGS, ids=lambda one: str(one)[:40])
def test_rejection_keeps_the_adjusted_law(decoding: Rejection, draft: Proposer | ModelConfig) -> None:
    """By enumeration: each token's log-probability, and χ² of 4,096 answers; the plain law is far from both."""
    program = program_of(decoding, 2, draft, features=ADJUSTED)
    state, infos = run(program, PAIR.params, states(program, 4096, STRONG), ASK.max_tokens - 1)
    assert not state.running.any()
    assert len(np.unique(infos.accepted[0])) > 1, "rows of one step accept differently"
    assert worst_logprob(program, state, STRONG) < 1e-4
    seen = collections.Counter(answers(program, state))
    value, bins = exact.chi_square(seen, law_of(STRONG))
    assert bins > 8
    assert value < bins + 4.5 * np.sqrt(2 * bins) + 5, (value, bins)
    for mistaken in (Wish(), dataclasses.replace(STRONG, frequency=0.0), dataclasses.replace(STRONG, repetition=1.0)):
        value, bins = exact.chi_square(seen, law_of(mistaken))
        assert value > bins + 15 * np.sqrt(2 * bins), MISTAKE


@pytest.mark.slow
@pytest.mark.parametrize("decoding", [Rejection(gamma=3), Rejection(tree=(2, 2, 1))], ids=str)
def test_control_a_target_that_counts_committed_tokens_alone(decoding: Rejection, patch_programs: Any) -> None:
    """Negative control: leaving earlier drafts out of the target's laws shows in both."""
    patch_programs(SamplingDistribution, "before", lambda *_: None)
    program = program_of(decoding, 2, features=ADJUSTED)
    jax.clear_caches()  # of traces made without the mistake
    state, _ = run(program, PAIR.params, states(program, 4096, STRONG), ASK.max_tokens - 1)
    jax.clear_caches()
    assert worst_logprob(program, state, STRONG) > 0.1
    value, bins = exact.chi_square(collections.Counter(answers(program, state)), law_of(STRONG))
    assert value > bins + 15 * np.sqrt(2 * bins)


@pytest.mark.slow
def test_drafts_are_adjusted_as_the_target_is() -> None:
    """q of every position of a chain, and behind every node of a tree, is the draft model's own law, adjusted."""
    for decoding in (Rejection(gamma=3), Rejection(tree=(-1, 0, 0, 2, 2, 0, 3))):
        program = program_of(decoding, 2, features=ADJUSTED)
        state = states(program, 6, STRONG)
        propose = speculation.propose if decoding.tree is None else speculation.propose_tree
        options = {"keep_logits": True} if decoding.tree is None else {}

        def drafted(state: Any, program: Any = program, propose: Any = propose, options: Any = options) -> Any:
            distribution = distribution_of(state, rows=1, features=program.features)
            return propose(program, PAIR.params, state, distribution, **options)[1]

        drafts = jax.jit(drafted)(state)
        after = STRONG.behind(DRAFT_AFTER, len(ASK.prompt))
        tree, worst = program.speculation.tree, [0.0, 0.0]
        paths = [tuple(range(column)) for column in range(3)] if tree is None else tree.drafts_to(tree.inner)
        for row, tokens in enumerate(texts(state, 1)):
            if state.sequences.finished[row]:
                continue
            for column, path in enumerate(paths):
                before = (*tokens, *(int(drafts.tokens[row, place]) for place in path))
                got = np.asarray(jax.nn.softmax(drafts.logits[row, column]))
                for i, oracle in enumerate((after, DRAFT_AFTER)):
                    law = exact.next_law(oracle, ASK, before)
                    worst[i] = max(worst[i], float(np.abs(got - law).max()))
        assert worst[0] < 1e-5
        assert worst[1] > 0.1, MISTAKE


def test_the_target_alone_has_the_adjusted_law() -> None:
    program = autoregressive.Program(Autoregressive(), PAIR.target, None, MAX_MODEL_LEN, page_size=2, features=ADJUSTED)

    @jax.jit
    def decode() -> Any:
        state = states(program, 4096, STRONG, autoregressive)
        return autoregressive.run(program, PAIR.params, state, ASK.max_tokens - 1)[0]

    state = decode()
    assert worst_logprob(program, state, STRONG) < 1e-4
    seen = collections.Counter(texts(state, 1))
    value, bins = exact.chi_square(seen, law_of(STRONG))
    assert value < bins + 4.5 * np.sqrt(2 * bins) + 5, (value, bins)
    for mistaken in (Wish(), dataclasses.replace(STRONG, presence=0.0), dataclasses.replace(STRONG, bias=())):
        value, bins = exact.chi_square(seen, law_of(mistaken))
        assert value > bins + 15 * np.sqrt(2 * bins), MISTAKE
