"""Speculative sampling as it runs: the target's law, ragged acceptance, pages, company, failures."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import rejection
from smcjax.decoding.drafts import draft_model, tree_drafts
from smcjax.decoding.drafts.proposer import Drafts, Proposer
from smcjax.decoding.sampling import Purpose, Softmax
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.model import ModelConfig
from smcjax.rejection import Rejection, decoder, rules
from tests import exact
from tests.helpers import Ask, assert_pages_sound, batch, tiny_pair
from tests.smc.reference import language_model

V, MAX_MODEL_LEN = 4, 24
SLOTS, WIDTH = 36, 8  # of every batch that `decode` makes: one program for all, in which many slots are empty
PAIR = tiny_pair(V, target_layers=1)
AFTER = language_model(PAIR.target, PAIR.params.target, MAX_MODEL_LEN)
DECODINGS = [
    Rejection(gamma=3),
    Rejection(gamma=2, n_candidates=3),
    Rejection(tree=(-1, 0, 0, 2, 0, 2), order="dfs"),
]
PAGES = 601


def program_of(
    decoding: Rejection, page_size: int = 4, draft: Proposer | ModelConfig = PAIR.draft, **changes: Any
) -> rejection.Program:
    return rejection.Program(decoding, PAIR.target, draft, MAX_MODEL_LEN, page_size, **changes)


@functools.partial(jax.jit, static_argnames="program")
def init(program: rejection.Program, params: Any, prompts: Any, requests: Any, num_pages: Any) -> Any:
    """begin, prefill in one chunk, start."""
    memory = program.create_memory(params, PAGES)
    pool = dataclasses.replace(memory.pool, num_free=jnp.asarray(num_pages, jnp.int32))
    memory = dataclasses.replace(memory, pool=pool)
    state = rejection.begin(program, memory, prompts, requests, requests.prompt_length > 0)
    hidden = jnp.zeros((prompts.shape[0], program.target.hidden_size), params.target.embed.dtype)
    state, hidden = rejection.prefill(program, params, state, jnp.asarray(0, jnp.int32), prompts.shape[1], hidden)
    return rejection.start(program, params, state, hidden)


step = jax.jit(rejection.step, static_argnames="program")
run = jax.jit(rejection.run, static_argnames=("program", "num_steps"))


def answers(program: rejection.Program, state: rejection.State) -> list[tuple[int, ...]]:
    """Generated tokens of each request; its rows agree. Nobody has a prompt of no tokens."""
    ended, memory = jax.jit(rejection.conclude, static_argnames="program")(program, state)
    assert (np.asarray(memory.pool.refcount) == 0).all()
    begin = np.asarray(state.requests.prompt_length)
    n = program.decoding.n_candidates
    rows = [
        tuple(tokens[:length])
        for tokens, length in zip(np.asarray(state.sequences.tokens).tolist(), state.sequences.length, strict=True)
    ]
    assert all(len(set(rows[g * n : (g + 1) * n])) == 1 for g in range(len(begin)))
    found = [tuple(row[0, b:e].tolist()) for row, b, e in zip(ended.tokens, begin, ended.length[:, 0], strict=True)]
    return [tokens for tokens, b in zip(found, begin, strict=True) if b > 0]


def begun(
    program: rejection.Program, asks: list[Ask], num_pages: int | None = None, params: Any = PAIR.params
) -> rejection.State:
    """The requests with first tokens, in the first of many slots."""
    slots = [*asks, *[Ask(()) for _ in range(SLOTS - len(asks))]]
    prompts, requests = batch(slots, program.target.vocab_size, program.max_model_len, WIDTH)
    return init(program, params, prompts, requests, PAGES - 1 if num_pages is None else num_pages)


def decode(
    program: rejection.Program, asks: list[Ask], num_pages: int | None = None, params: Any = PAIR.params
) -> tuple[rejection.State, list[rejection.Info]]:
    """Steps until no request runs, with `num_pages` (None: more than enough); checks pages and reports after each."""
    state = begun(program, asks, num_pages, params)
    infos = []
    while state.running.any():
        before = np.asarray(state.sequences.length)
        state, info = step(program, params, state)
        if num_pages is None:
            assert_pages_sound(state.sequences.block_table, state.memory.pool)
        np.testing.assert_array_equal(info.done, ~state.running)
        grown = (np.asarray(state.sequences.length) - before).reshape(SLOTS, -1)
        most = np.where(info.ran & ~state.failed, np.asarray(info.accepted) + 1, 0)[:, None]
        assert (grown <= most).all()
        assert ((grown == most) | np.asarray(state.sequences.finished).reshape(grown.shape)).all()
        infos.append(info)
        assert len(infos) <= MAX_MODEL_LEN, "a request runs on for ever"
    return state, infos


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS[1:], ids=str)
def test_ragged_limits_and_company(decoding: Rejection) -> None:
    """Requests that accept 0 and all share a step; tokens depend on neither neighbours, page size nor place."""
    asks = [
        Ask((1, 2, 3), 14, seed=1),
        Ask((2,), 20, stops=(3,), min_tokens=4, temperature=0.8, seed=2),
        Ask((0, 1) * 4, 1, seed=3),
        Ask((1, 2, 3), 14, seed=1),
        Ask((3, 3), 18, seed=9),
        Ask((0,), 18, temperature=2.0, seed=10),
    ]
    program = program_of(decoding)
    state, infos = decode(program, asks)
    got = answers(program, state)
    spread = [set(np.asarray(info.accepted)[np.asarray(info.ran)].tolist()) for info in infos]
    assert any({0, decoding.gamma} <= accepted for accepted in spread), spread
    assert got[0] == got[3]
    assert len(got[2]) == 1
    for ask, tokens in zip(asks, got, strict=True):
        assert len(tokens) == ask.limit(MAX_MODEL_LEN) - len(ask.prompt) or tokens[-1] in ask.stops
        assert not set(tokens[:-1]) & set(ask.stops)
        assert not set(tokens[: ask.min_tokens]) & set(ask.stops)
    order = [4, 2, 0, 5, 1, 3]
    moved = [dataclasses.replace(asks[i], seed=9) if i == 3 else asks[i] for i in order]
    again = answers(program, decode(program, moved)[0])
    assert [again[order.index(i)] for i in (0, 1, 2, 4, 5)] == [got[i] for i in (0, 1, 2, 4, 5)]
    assert again[order.index(3)] != got[3], "control: another seed"
    if decoding == DECODINGS[1]:
        single = program_of(decoding, page_size=1)
        assert answers(single, decode(single, asks)[0]) == got


@pytest.mark.slow
def test_worst_case_bound_of_pages_suffices() -> None:
    """Three candidates with the pages that agreeing rows can take at most lose no token; with fewer they do."""
    decoding, prompt = Rejection(gamma=2, n_candidates=3), (1, 2, 3)
    program, bound = program_of(decoding, page_size=1), Footprint.of(decoding, 1)
    asks = [Ask(prompt, MAX_MODEL_LEN, seed=seed) for seed in (5, 6)]
    pages = bound.worst_case(len(prompt), MAX_MODEL_LEN)
    assert pages < dataclasses.replace(bound, agrees=False).worst_case(len(prompt), MAX_MODEL_LEN)

    def decoded(num_pages: int | None) -> list[tuple[int, ...]]:
        return answers(program, decode(program, asks, num_pages)[0])

    roomy = decoded(None)
    assert {len(answer) for answer in roomy} == {MAX_MODEL_LEN - len(prompt)}
    assert decoded(2 * pages) == roomy
    assert decoded(3 * pages // 4) != roomy, "control"


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS[1:], ids=str)
def test_log_probabilities_are_the_targets(decoding: Rejection) -> None:
    """Every token of long answers has the target's log probability; wrong KV or a wrong column would be far off."""
    asks = [
        Ask((1, 2, 3), 14, seed=1),
        Ask((3, 3), 18, seed=5),
        Ask((0,), 18, temperature=2.0, seed=6),
        *(Ask((2,), 20, stops=(3,), min_tokens=2 + seed % 8, temperature=0.8, seed=seed) for seed in range(32)),
    ]
    program = program_of(decoding)
    state, _ = decode(program, asks)
    for group, (ask, tokens) in enumerate(zip(asks, answers(program, state), strict=True)):
        want = [np.log(exact.next_law(AFTER, ask, tokens[:count])[token]) for count, token in enumerate(tokens)]
        at = slice(len(ask.prompt), len(ask.prompt) + len(tokens))
        row = np.asarray(state.sequences.logprobs)[group * decoding.n_candidates]
        np.testing.assert_allclose(row[at], want, atol=1e-4)


def test_each_draft_has_a_uniform_of_its_own(patch_programs: Any) -> None:
    """Two requests, three candidates, two drafts: twelve. (`decide` runs as it is, so no trace hides the patch.)"""
    program = program_of(DECODINGS[1])
    state = begun(program, [Ask((1, 2)), Ask((1, 2), seed=1)])
    patch_programs(
        decoder, "candidates", lambda p, q, d, u: rules.Verification(jnp.int32(0), jnp.int32(0), u.reshape(-1))
    )
    rows = 3 * SLOTS
    target, tokens = Softmax.of(jnp.zeros((rows, 3, V))), jnp.zeros((rows, 2), jnp.int32)
    drafts = Drafts(tokens, jnp.zeros((rows, 2)), jnp.zeros((rows, 2, V)))
    law = decoder.decide(program, state, target, drafts).law
    assert np.unique(law[:2]).size == 12


def test_each_node_has_a_uniform_of_its_own(patch_programs: Any) -> None:
    """Two requests, a tree of five drafts: ten."""
    program = program_of(DECODINGS[2])
    state = begun(program, [Ask((1, 2)), Ask((1, 2), seed=1)])
    patch_programs(decoder, "tree", lambda *given: rules.TreeVerification(jnp.int32(0), given[4]))
    target, drafts = Softmax.of(jnp.zeros((SLOTS, 6, V))), jnp.zeros((SLOTS, 6), jnp.int32)
    law = decoder.decide_tree(program, state, target, jnp.zeros((SLOTS, 2, V)), drafts).law
    assert np.unique(law[:2]).size == 10


@pytest.mark.slow
def test_each_node_is_drawn_with_a_key_of_its_own(patch_programs: Any) -> None:
    """Columns 0 … M − 2, each once."""
    columns: list[int] = []
    original = tree_drafts.column_keys

    def recorded(keys: jax.Array, column: jax.Array) -> jax.Array:
        jax.debug.callback(lambda column: columns.append(int(column)), column)
        return original(keys, column)

    patch_programs(tree_drafts, "column_keys", recorded)
    program = program_of(DECODINGS[2])
    state = begun(program, [Ask((1, 2))])
    jax.block_until_ready(jax.jit(functools.partial(rejection.step, program))(PAIR.params, state))
    jax.effects_barrier()
    assert sorted(columns) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_tree_is_one_program_that_copies_no_kv() -> None:
    """Every buffer of the state is updated in place; that copies would be found: `smc/test_one_program.py`."""
    program = program_of(DECODINGS[2])
    state = jax.eval_shape(lambda: begun(program, [Ask((1, 2)), Ask((2,))]))
    jitted = jax.jit(functools.partial(rejection.step, program), donate_argnums=1)
    text = jitted.lower(PAIR.params, state).compile().as_text()
    assert not [word for word in ("callback", "infeed", "outfeed", "send(", "recv(") if word in text]
    assert not re.findall(rf"= f32\[{PAGES},\d+,\d+,\d+\]\S* copy(-start)?\(", text)
    assert re.search(rf"f32\[{PAGES},", text), "shapes are seen"


@pytest.mark.parametrize("decoding", DECODINGS[::2], ids=str)
def test_no_two_draws_of_a_step_have_one_key(decoding: Rejection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which purposes a step takes keys for: drafts, what is accepted, what follows."""
    taken: list[Purpose] = []

    def spy(module: Any, name: str) -> None:
        original = getattr(module, name)

        def recorded(*args: Any) -> Any:
            taken.append(args[-1])
            return original(*args)

        monkeypatch.setattr(module, name, recorded)

    spy(decoder, "group_keys")
    spy(decoder, "row_keys")
    spy(tree_drafts if decoding.tree else draft_model, "row_keys")
    program = program_of(decoding)
    state = jax.eval_shape(lambda: begun(program, [Ask((1, 2))]))
    taken.clear()
    jax.make_jaxpr(functools.partial(rejection.step, program))(PAIR.params, state)
    assert sorted(taken) == sorted([Purpose.DRAFT, Purpose.ACCEPT, Purpose.NEXT])


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS[1:], ids=str)
def test_nan_ends_its_request_alone(decoding: Rejection) -> None:
    params = PAIR.params
    broken = dataclasses.replace(params.target, embed=params.target.embed.at[3].set(jnp.nan))
    pair = dataclasses.replace(params, target=broken)
    forbid: dict[str, Any] = {"stops": (3,), "min_tokens": 99}
    asks = [Ask((1, 2), 7, seed=1, **forbid), Ask((1, 3, 1), 7, seed=2, **forbid), Ask((2,), 9, seed=3, **forbid)]
    program = program_of(decoding)
    state, _ = decode(program, asks, params=pair)
    assert np.flatnonzero(state.failed).tolist() == [1]
    got = answers(program, state)
    assert got[1] == ()
    healthy, _ = decode(program, [asks[0], dataclasses.replace(asks[1], prompt=(1, 1, 1)), asks[2]], params=pair)
    assert not healthy.failed.any()
    assert [answers(program, healthy)[i] for i in (0, 2)] == [got[i] for i in (0, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS[2:], ids=str)
def test_stale_nan_beyond_a_limit_fails_nobody(decoding: Rejection) -> None:
    """Columns of drafts beyond a row's limit have no KV: the slots there may hold what a broken request has left."""
    program = program_of(decoding, draft=PAIR.target)  # whose drafts are all accepted, up to the limit
    pair = rejection.PairParams(PAIR.params.target, PAIR.params.target)
    asks = [Ask((1, 2), max_tokens, seed=max_tokens, temperature=0.0) for max_tokens in range(1, 13)]

    @jax.jit
    def start(fill: float, prompts: Any, requests: Any) -> Any:
        memory = program.create_memory(pair, PAGES)
        caches = jax.tree.map(lambda pages: jnp.full_like(pages, fill), (memory.target, memory.draft))
        memory = dataclasses.replace(memory, target=caches[0], draft=caches[1])
        state = rejection.begin(program, memory, prompts, requests, requests.prompt_length > 0)
        hidden = jnp.zeros((prompts.shape[0], program.target.hidden_size))
        first = jnp.asarray(0, jnp.int32)
        state, hidden = rejection.prefill(program, pair, state, first, prompts.shape[1], hidden)
        return rejection.start(program, pair, state, hidden)

    found = []
    for fill in (0.0, float("nan")):
        state = start(fill, *batch(asks, V, MAX_MODEL_LEN))
        state, _ = run(program, pair, state, MAX_MODEL_LEN)
        assert not state.failed.any()
        found.append(answers(program, state))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tree": (2, 0)}, r"tree must be children per depth, as \(4, 2, 1\), or .*, got \(2, 0\)"),
        ({"tree": (8, 8)}, r"tree must have from 2 to 64 nodes, .* children \(8, 8\) make more; use fewer"),
        ({"tree": (4, 2, 1), "gamma": 4}, "gamma is 4 and the tree is 3 deep; leave gamma out"),
        ({"tree": (2,), "gamma": True}, "gamma is True and the tree is 1 deep; leave gamma out"),
        ({"tree": (2,), "n_candidates": 2}, "n_candidates is 2 and a tree drafts for one row; leave one of them out"),
        ({"tree": (2,), "siblings": "best"}, "siblings must be one of sampled, top, got 'best'"),
        ({"tree": (2,), "order": "depth"}, "order must be one of bfs, dfs, position, got 'depth'"),
        ({"siblings": "top"}, "siblings is 'top' and is about a tree's nodes; give tree, or leave it out"),
        ({"order": "dfs"}, "order is 'dfs' and is about a tree's nodes; give tree, or leave it out"),
        ({"gamma": 0}, "gamma must be a whole number from 1 to 64, got 0"),
        ({"gamma": True}, "gamma must be a whole number from 1 to 64, got True"),
        ({"n_candidates": 2.0}, r"n_candidates must be a whole number from 1 to 1024, got 2\.0"),
        ({"draft_temperature": 0}, "draft_temperature must be a number from 0.01 to 1000"),
    ],
)
def test_bad_options(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rejection(**arguments)
