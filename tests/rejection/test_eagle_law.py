"""An EAGLE-3 head as the draft of requests with penalties and biases, with a form of the answer, and with both.

The head drafts three of five tokens. The form has places where it can draft none of those that may come. One batch has
all three kinds of requests, which share a program; the oracles are those of `test_adjusted_law` and `exact`, over the
target's dense forward, and try texts with Python's `re`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import rejection, smc
from smcjax.decoders import Rejection
from smcjax.decoding import distribution
from smcjax.decoding.drafts import eagle, tree_drafts
from smcjax.engine.run.constraints import make_tables
from smcjax.structured.automaton import Automaton
from smcjax.structured.automaton_child import token_automaton
from smcjax.structured.grammar import expression_automaton
from tests import exact
from tests.decoding.drafts.test_eagle import AFTER, CHUNK, MAX_MODEL_LEN, PRUNED, TARGET, V, head_of, init
from tests.helpers import Ask, batch
from tests.rejection.test_adjusted_law import STRONG, Wish

SPELLED = (b"a", b"b", b"aa", b"", b"c")
STOP = 3
REGEX = "([bc]a+)+"  # behind a b or c tokens 0 and 2 may come, and the head has 1, 3 and 4
ASK = Ask((1, 2), max_tokens=4, stops=(STOP,), temperature=0.8)
KINDS = {"adjusted": (STRONG, False), "form": (Wish(), True), "both": (STRONG, True)}
EACH = 1024  # requests of a kind
MOST = 5.5  # standard deviations of χ² above its mean, for the right law
DECODINGS = [Rejection(gamma=2), Rejection(tree=(2, 1))]
EAGLE, PARAMS = head_of(PRUNED)


def matching() -> set[tuple[int, ...]]:
    """All answers of the form, a stop among their tokens unless the cap ends them."""
    found = set()
    for length in range(ASK.max_tokens + 1):
        for tokens in itertools.product((0, 1, 2, 4), repeat=length):
            if re.fullmatch(REGEX.encode(), b"".join(SPELLED[token] for token in tokens)):
                found.add(tokens if length == ASK.max_tokens else (*tokens, STOP))
    return found


BEGINNINGS = {x[:n] for x in matching() for n in range(1, len(x) + 1)}


def may_come(answer: tuple[int, ...]) -> list[bool]:
    """By token, whether it may come behind these."""
    return [(*answer, token) in BEGINNINGS for token in range(V)]


def laws_of(wish: Wish, has_form: bool) -> Callable[[list[int]], np.ndarray]:
    """The target's logits as a kind of request has them."""
    adjusted, prompt = wish.behind(AFTER, len(ASK.prompt)), len(ASK.prompt)

    def after(tokens: list[int]) -> np.ndarray:
        mask = may_come(tuple(int(token) for token in tokens[prompt:])) if has_form else [True] * V
        return np.where(mask, adjusted(tokens), -np.inf)

    return after


@functools.cache
def law_behind(wish: Wish, has_form: bool, answer: tuple[int, ...]) -> np.ndarray:
    """[V] the law of the token behind these."""
    return exact.next_law(laws_of(wish, has_form), ASK, answer)


@functools.cache
def tables() -> Any:
    made = token_automaton(*expression_automaton(REGEX, 100), list(SPELLED), 1000)
    return make_tables({0: Automaton(**made)}, 1, V, most_cells=1000, most_states=100)


def requests_of(each: int, kinds: tuple[tuple[Wish, bool], ...]) -> tuple[Any, Any]:
    """`each` prompts and requests of every kind."""
    asks = jax.tree.map(lambda x: jnp.repeat(x, each * len(kinds), axis=0), batch([ASK], V, MAX_MODEL_LEN, width=CHUNK))
    adjustments = jax.tree.map(lambda *x: jnp.concatenate(x), *(wish.of(each) for wish, _ in kinds))
    return asks[0], dataclasses.replace(
        asks[1],
        key=jax.random.split(jax.random.key(1), each * len(kinds)),
        automaton=jnp.repeat(jnp.asarray([0 if has_form else -1 for _, has_form in kinds], jnp.int32), each),
        adjustments=adjustments,
    )


@functools.cache
def started(module: Any, program: Any, each: int, kinds: tuple[tuple[Wish, bool], ...]) -> Any:
    """The state with first tokens; the tables are in memory from the beginning."""
    prompts, requests = requests_of(each, kinds)
    create = type(program).create_memory

    def with_tables(self: Any, *given: Any) -> Any:
        return dataclasses.replace(create(self, *given), automata=jax.tree.map(jnp.asarray, tables()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(program), "create_memory", with_tables)
        return init(module, program, PARAMS, prompts, requests, len(requests.key) * 4 + 1)


def answered(module: Any, program: Any, *asked: Any) -> Any:
    """The state after all cycles, which are traced anew: a mistake may have been planted since the last time."""
    state = started(module, program, *asked)
    return jax.jit(lambda params, state: module.run(program, params, state, ASK.max_tokens - 1))(PARAMS, state)


def texts(state: Any) -> list[tuple[int, ...]]:
    rows = zip(np.asarray(state.sequences.tokens), np.asarray(state.sequences.length), strict=True)
    return [tuple(tokens[len(ASK.prompt) : length].tolist()) for tokens, length in rows]


def excesses(state: Any) -> dict[str, tuple[float, float]]:
    """By kind, by how much χ² is above its mean, in its standard deviations, and the worst error of a logprob."""
    found, seen = {}, texts(state)
    for place, (kind, wanted) in enumerate(KINDS.items()):
        own = range(place * EACH, (place + 1) * EACH)
        law = exact.outcomes(laws_of(*wanted), ASK, MAX_MODEL_LEN)
        counts = collections.Counter(seen[row] for row in own)
        possible = collections.Counter({x: count for x, count in counts.items() if x in law})
        value, bins = exact.chi_square(possible, law)
        assert bins > 8
        logprobs, worst = np.asarray(state.sequences.logprobs), 0.0 if possible == counts else np.inf
        for row in own if worst == 0 else ():
            for count, token in enumerate(seen[row]):
                want = np.log(law_behind(*wanted, seen[row][:count])[token])
                worst = max(worst, abs(float(logprobs[row, len(ASK.prompt) + count]) - want))
        found[kind] = (float((value - bins) / np.sqrt(2 * bins)), worst)
    return found


def decoded(decoding: Rejection) -> tuple[Any, Any]:
    program = rejection.Program(decoding, TARGET, EAGLE, MAX_MODEL_LEN, 2, features=frozenset({"adjustments"}))
    state, infos = answered(rejection, program, EACH, tuple(KINDS.values()))
    return jax.tree.map(np.asarray, dataclasses.replace(state, requests=None, memory=None)), infos


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
def test_every_kind_has_its_law(decoding: Rejection) -> None:
    """χ² of 1,024 answers a kind against each answer's exact probability, and each token's log-probability."""
    assert any(not any(may_come(x)[token] for token in PRUNED) for x in BEGINNINGS if x not in matching())
    state, infos = decoded(decoding)
    assert not state.running.any()
    assert not state.failed.any()
    assert len(np.unique(infos.accepted[0])) > 1, "rows of one step accept differently"
    for kind, (excess, worst) in excesses(state).items():
        assert excess < MOST, kind
        assert worst < 1e-4, kind


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
def test_control_likeliest_drafts_that_are_said_to_be_drawn(decoding: Rejection, patch_programs: Any) -> None:
    """Negative control: what proposes takes every request for a greedy one, and what verifies does not."""

    def careless(law: Any, *given: Any, **options: Any) -> Any:
        return distribution.sample(dataclasses.replace(law, greedy=jnp.ones_like(law.greedy)), *given, **options)

    children: Any = tree_drafts._children
    patch_programs(eagle, "sample", careless)
    patch_programs(tree_drafts, "_children", lambda *given: children(*given[:-1], jnp.ones_like(given[-1])))
    found = excesses(decoded(decoding)[0])
    assert all(excess > MOST for excess, _ in found.values()), found


@pytest.mark.slow
def test_particles_that_reject_all_that_is_wrong() -> None:
    """SMC at control 1 under a form: the locally masked law, and a weight of the probability that was masked away."""
    program = smc.Program(smc.SMC(n_particles=1, gamma=2, control=1.0), TARGET, EAGLE, MAX_MODEL_LEN, 2)
    state, _ = answered(smc, program, EACH, (KINDS["form"],))
    assert not state.running.any()
    assert not state.failed.any()
    seen, law = texts(state), exact.outcomes(laws_of(*KINDS["form"]), ASK, MAX_MODEL_LEN)
    value, bins = exact.chi_square(collections.Counter(seen), law)
    assert bins > 8
    assert value < bins + MOST * np.sqrt(2 * bins), (value, bins)
    want = []
    for tokens in seen:
        laws = [law_behind(Wish(), False, tokens[:count]) for count in range(len(tokens))]
        want.append(sum(np.log(law[may_come(tokens[:count])].sum()) for count, law in enumerate(laws)))
    assert np.ptp(want) > 1
    np.testing.assert_allclose(state.log_weight[:, 0], want, atol=1e-4)
