"""The law of answers to every kind of request, by every draft: plain, truncated, adjusted, with a form, and both.

One batch has requests of all kinds, which share a program. The oracles know no frontier, no block and no draft: a
few lines of NumPy adjust the target's dense logits by the whole text, and Python's `re` tries which texts are of the
form. An EAGLE-3 head drafts three of five tokens; the form has places where it can draft none of those that may come.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import autoregressive, rejection
from smcjax.decoders import Autoregressive, Rejection
from smcjax.decoding import distribution
from smcjax.decoding.adjustments import Adjustments
from smcjax.decoding.distribution import SamplingDistribution
from smcjax.decoding.drafts import eagle, tree_drafts
from smcjax.decoding.drafts.ngram import NGram
from smcjax.engine.run.constraints import make_tables
from smcjax.structured.automaton import Automaton
from smcjax.structured.automaton_child import token_automaton
from smcjax.structured.grammar import expression_automaton
from tests import exact
from tests.decoding.drafts.test_eagle import (
    AFTER,
    CHUNK,
    MAX_MODEL_LEN,
    PRUNED,
    TARGET,
    TARGET_PARAMS,
    V,
    drafted,
    head_of,
    init,
)
from tests.helpers import Ask, batch, tiny_config, tiny_params
from tests.smc.reference import language_model
from tests.test_autoregressive import top_k_p


@dataclasses.dataclass(frozen=True)
class Wish:
    """A request's adjustments as a user writes them."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    def of(self, groups: int) -> Adjustments:
        """Repeats the request's parameters for so many requests."""
        biased, bias = np.full((groups, 3), V, np.int32), np.zeros((groups, 3), np.float32)
        for place, (token, value) in enumerate(self.bias):
            biased[:, place], bias[:, place] = token, value
        numbers = (np.full(groups, x, np.float32) for x in (self.repetition, self.frequency, self.presence))
        return Adjustments(*jax.tree.map(jnp.asarray, (*numbers, biased, bias)))

    def behind(self, after: exact.After, prompt: int) -> exact.After:
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


class Kind(NamedTuple):
    """A request's adjustments, whether it has the form, and where its laws are cut."""

    wish: Wish = Wish()
    has_form: bool = False
    top_k: int = V
    top_p: float = 1.0


STRONG = Wish(repetition=1.7, frequency=0.8, presence=1.1, bias=((0, 0.7), (3, -1.5)))
KINDS: dict[str, Kind] = {
    "plain": Kind(),
    "adjusted": Kind(STRONG),
    "form": Kind(has_form=True),
    "both": Kind(STRONG, has_form=True),
    "truncated": Kind(top_k=3, top_p=0.75),
}
SPELLED = (b"a", b"b", b"aa", b"", b"c")
STOP = 3
REGEX = "([bc]a+)+"  # behind a b or c tokens 0 and 2 may come, and the head has 1, 3 and 4
ASK = Ask((1, 2), max_tokens=4, stops=(STOP,), temperature=0.8)
EACH = 512  # requests of a kind
MOST = 5.5  # standard deviations of χ² above its mean, for the right law

DRAFT = tiny_config(V, num_layers=1, hidden_size=6, num_heads=1, head_dim=6)
DRAFT_PARAMS = tiny_params(DRAFT, 2)
DRAFT_AFTER = language_model(DRAFT, DRAFT_PARAMS, MAX_MODEL_LEN)
EAGLE, EAGLE_PARAMS = head_of(PRUNED)


CASES: dict[str, tuple[Any, Any]] = {
    "chain": (Rejection(gamma=3), DRAFT),
    "two candidates": (Rejection(gamma=2, n_candidates=2, draft_temperature=1.5), DRAFT),
    "lopsided tree": (Rejection(tree=(-1, 0, 0, 2, 2, 0, 3)), DRAFT),
    "tree of top tokens": (Rejection(tree=(2, 2, 1), siblings="top", order="dfs"), DRAFT),
    "n-grams": (Rejection(gamma=3), NGram()),
    "tree of a head": (Rejection(tree=(2, 1)), EAGLE),
    "target alone": (Autoregressive(), None),
}


def matching() -> set[tuple[int, ...]]:
    """All answers of the form, a stop among their tokens unless the cap ends them."""
    found = set()
    for length in range(ASK.max_tokens + 1):
        for tokens in itertools.product((0, 1, 2, 4), repeat=length):
            if re.fullmatch(REGEX.encode(), b"".join(SPELLED[token] for token in tokens)):
                found.add(tokens if length == ASK.max_tokens else (*tokens, STOP))
    return found


MATCHING = matching()
BEGINNINGS = {x[:n] for x in MATCHING for n in range(1, len(x) + 1)}


def may_come(answer: tuple[int, ...]) -> list[bool]:
    """By token, whether it may come behind these."""
    return [(*answer, token) in BEGINNINGS for token in range(V)]


def laws_of(kind: Kind, after: exact.After = AFTER) -> Callable[[list[int]], np.ndarray]:
    """A model's logits as a kind of request has them."""
    prompt = len(ASK.prompt)
    adjusted = kind.wish.behind(after, prompt)

    def logits(tokens: list[int]) -> np.ndarray:
        mask = may_come(tuple(int(token) for token in tokens[prompt:])) if kind.has_form else [True] * V
        return np.where(mask, adjusted(tokens), -np.inf)

    return logits


@functools.cache
def law_behind(kind: Kind, answer: tuple[int, ...]) -> np.ndarray:
    """[V] the law of the token behind these."""
    return exact.next_law(laws_of(kind), ASK, answer, transform=top_k_p(kind.top_k, kind.top_p))


@functools.cache
def law_of(kind: Kind) -> dict[tuple[int, ...], float]:
    return exact.outcomes(laws_of(kind), ASK, MAX_MODEL_LEN, transform=top_k_p(kind.top_k, kind.top_p))


@functools.cache
def tables() -> Any:
    made = token_automaton(*expression_automaton(REGEX, 100), list(SPELLED), 1000)
    return make_tables({1: Automaton(**made)}, 2, V, most_cells=1000, most_states=100)  # the first place is another's


@functools.cache
def program_of(name: str) -> tuple[Any, Any, Any]:
    """The decoder's module, its program, and the weights."""
    decoding, draft = CASES[name]
    params = EAGLE_PARAMS if draft is EAGLE else rejection.PairParams(TARGET_PARAMS, DRAFT_PARAMS)
    module: Any = rejection if isinstance(decoding, Rejection) else autoregressive
    features = frozenset({"adjustments", "truncation"})
    return module, module.Program(decoding, TARGET, draft, MAX_MODEL_LEN, 2, features=features), params


@functools.cache
def started(name: str, each: int = EACH, kinds: tuple[Kind, ...] = (*KINDS.values(),)) -> Any:
    """The state of `each` requests of every kind with first tokens; the tables are in memory from the beginning."""
    (module, program, params), count = program_of(name), each * len(kinds)
    prompts, requests = jax.tree.map(
        lambda x: jnp.repeat(x, count, axis=0), batch([ASK], V, MAX_MODEL_LEN, width=CHUNK)
    )
    requests = dataclasses.replace(
        requests,
        key=jax.random.split(jax.random.key(1), count),
        automaton=jnp.repeat(jnp.asarray([1 if kind.has_form else -1 for kind in kinds], jnp.int32), each),
        top_k=jnp.repeat(jnp.asarray([kind.top_k for kind in kinds], jnp.int32), each),
        top_p=jnp.repeat(jnp.asarray([kind.top_p for kind in kinds], jnp.float32), each),
        adjustments=jax.tree.map(lambda *x: jnp.concatenate(x), *(kind.wish.of(each) for kind in kinds)),
    )
    create = type(program).create_memory

    def with_tables(self: Any, *given: Any) -> Any:
        return dataclasses.replace(create(self, *given), automata=jax.tree.map(jnp.asarray, tables()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(program), "create_memory", with_tables)
        return init(module, program, params, prompts, requests, count * program.rows * 4 + 1)


def answered(name: str, *asked: Any) -> tuple[Any, Any]:
    """The state after all cycles, which are traced anew: a mistake may have been planted since the last time."""
    module, program, params = program_of(name)
    run = jax.jit(lambda params, state: module.run(program, params, state, ASK.max_tokens - 1))
    state, infos = run(params, started(name, *asked))
    assert not state.running.any()
    assert not state.failed.any()
    return state, infos


def texts(state: Any, rows: int) -> list[tuple[int, ...]]:
    """Each request's answer so far."""
    pairs = zip(np.asarray(state.sequences.tokens)[::rows], np.asarray(state.sequences.length)[::rows], strict=True)
    return [tuple(tokens[len(ASK.prompt) : length].tolist()) for tokens, length in pairs]


def excess(seen: list[tuple[int, ...]], kind: Kind) -> float:
    """By how much χ² is above its mean, in its standard deviations; infinite if an answer is impossible."""
    if not {*seen} <= law_of(kind).keys():
        return np.inf
    value, bins = exact.chi_square(collections.Counter(seen), law_of(kind))
    assert bins > (4 if kind == KINDS["truncated"] else 8)  # the truncated law has seven answers
    return float((value - bins) / np.sqrt(2 * bins))


def mistakes(name: str, state: Any) -> dict[str, tuple[float, float]]:
    """By kind, `excess`, and the largest error of a token's log-probability."""
    rows = program_of(name)[1].rows
    seen, logprobs, found = texts(state, rows), np.asarray(state.sequences.logprobs)[::rows], {}
    for place, (name_of_kind, kind) in enumerate(KINDS.items()):
        own, worst = range(place * EACH, (place + 1) * EACH), 0.0
        apart = excess([seen[row] for row in own], kind)
        for row in own if np.isfinite(apart) else ():
            for count, token in enumerate(seen[row]):
                want = np.log(law_behind(kind, seen[row][:count])[token])
                worst = max(worst, abs(float(logprobs[row, len(ASK.prompt) + count]) - want))
        found[name_of_kind] = apart, worst
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_kind_has_its_law(name: str) -> None:
    """χ² of 512 answers a kind against each answer's exact probability, and each token's log-probability.

    Negative control: the answers of one kind are far from the law of another.
    """
    assert any(not any(may_come(x)[token] for token in PRUNED) for x in BEGINNINGS - MATCHING)
    state, infos = answered(name)
    assert name == "target alone" or len(np.unique(infos.accepted[0])) > 1, "rows of one step accept differently"
    for kind, (apart, worst) in mistakes(name, state).items():
        assert apart < MOST, kind
        assert worst < 1e-4, kind
    seen = texts(state, program_of(name)[1].rows)
    for place, kind in enumerate(KINDS):
        others = [other for other in KINDS if other != kind]
        assert all(excess(seen[place * EACH : (place + 1) * EACH], KINDS[other]) > 3 * MOST for other in others), kind


@pytest.mark.slow
def test_control_a_target_that_looks_at_committed_tokens_alone(patch_programs: Any) -> None:
    """Negative control: leaving earlier drafts out of the target's laws shows wherever those look at what is before."""
    name = "lopsided tree"
    patch_programs(SamplingDistribution, "before", lambda *_: None)
    jax.clear_caches()  # of traces made without the mistake
    found = mistakes(name, answered(name)[0])
    jax.clear_caches()
    assert max(found.pop(kind)[0] for kind in ("plain", "truncated")) < MOST
    assert all(apart > 3 * MOST for apart, _ in found.values()), found


@pytest.mark.slow
def test_control_likeliest_drafts_that_are_said_to_be_drawn(patch_programs: Any) -> None:
    """Negative control: what proposes takes every request for a greedy one, and what verifies does not."""

    def careless(law: Any, *given: Any, **options: Any) -> Any:
        return distribution.sample(dataclasses.replace(law, greedy=jnp.ones_like(law.greedy)), *given, **options)

    children: Any = tree_drafts._children
    patch_programs(eagle, "sample", careless)
    patch_programs(tree_drafts, "_children", lambda *given: children(*given[:-1], jnp.ones_like(given[-1])))
    found = mistakes("tree of a head", answered("tree of a head")[0])
    assert all(apart > MOST for apart, _ in found.values()), found


@pytest.mark.slow
def test_drafts_have_the_law_of_their_request() -> None:
    """q behind every node of a tree is the draft's own law, adjusted and masked."""
    name = "lopsided tree"
    each, (_, program, params) = 16, program_of(name)
    state = started(name, each)
    drafts = jax.jit(lambda params, state: drafted(program, params, state))(params, state)
    tree, worst, seen = program.speculation.tree, dict.fromkeys(KINDS, 0.0), collections.Counter[str]()
    for row, tokens in enumerate(texts(state, 1)):
        name_of_kind = [*KINDS][row // program.rows // each]
        for column, path in enumerate(tree.drafts_to(tree.inner)):
            before = (*tokens, *(int(drafts.tokens[row, place]) for place in path))
            if STOP in before or (KINDS[name_of_kind].has_form and before not in BEGINNINGS - MATCHING):
                continue
            got = np.asarray(jax.nn.softmax(drafts.logits[row, column]))
            own, plain = (
                exact.next_law(
                    laws_of(kind, DRAFT_AFTER),
                    dataclasses.replace(ASK, temperature=program.decoding.draft_temperature or ASK.temperature),
                    before,
                    transform=top_k_p(kind.top_k, kind.top_p),
                )
                for kind in (KINDS[name_of_kind], KINDS["plain"])
            )
            np.testing.assert_allclose(got, own, atol=1e-5)
            worst[name_of_kind] = max(worst[name_of_kind], float(np.abs(got - plain).max()))
            seen[name_of_kind] += 1
    assert min(seen[kind] for kind in KINDS) > 8
    assert worst.pop("plain") < 1e-5
    assert min(worst.values()) > 0.1, "negative control"
