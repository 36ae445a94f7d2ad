"""Laws 2 and 25 through the package's own `init` and `step`: thousands of groups against Ω by dense forwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import smc
from smcjax.smc import lifecycle
from smcjax.smc.weights import bonus_increment
from tests import exact
from tests.helpers import Ask, batch, tiny_pair
from tests.lazily import program_patches
from tests.smc import reference
from tests.smc.test_constraints import LETTERS, FormToy, tables

pytestmark = pytest.mark.slow
V, GROUPS, MAX_MODEL_LEN = 3, 1024, 12
PAIR = tiny_pair(V, target_layers=1)
AFTER = reference.language_model(PAIR.target, PAIR.params.target, MAX_MODEL_LEN)
ASK = Ask((1, 2), max_tokens=5, stops=(2,), temperature=0.9, min_tokens=1)
FORM = FormToy(vocab=V, cap=ASK.max_tokens, stop=2, regex="a(a|bb)*b", spelled=LETTERS)
FUNCTIONS: dict[str, Callable[[exact.Tokens], float]] = {
    "1": lambda x: 1.0,
    "length": len,
    "ends in a stop": lambda x: x[-1] == 2,
    "second token is 1": lambda x: len(x) > 1 and x[1] == 1,
    "parity": lambda x: (-1.0) ** sum(x),
}


def populations(program: smc.Program) -> list[Any]:
    """Returns finished groups' tokens [G, N, T], lengths and weights [G, N], log Ẑ with and without its closing term
    [G]; every other request has the form."""

    @jax.jit
    def decode() -> tuple[jax.Array, ...]:
        prompts, requests = batch([ASK], V, MAX_MODEL_LEN)
        prompts = jnp.tile(prompts, (GROUPS, 1))
        requests = jax.tree.map(lambda x: jnp.repeat(x, GROUPS, axis=0), requests)
        memory = program.create_memory(PAIR.params, GROUPS * program.rows * program.max_pages + 1)
        memory = dataclasses.replace(memory, automata=jax.tree.map(jnp.asarray, tables(FORM.regex, LETTERS)))
        automaton = -(jnp.arange(GROUPS, dtype=jnp.int32) % 2)
        requests = dataclasses.replace(requests, automaton=automaton, key=jax.random.split(jax.random.key(0), GROUPS))
        state = smc.init(program, PAIR.params, prompts, requests, memory=memory)
        state, info = smc.run(program, PAIR.params, state, ASK.max_tokens)
        s, shape = state.sequences, state.log_weight.shape
        return (
            s.tokens.reshape(*shape, -1)[:, :, 2:],
            s.length.reshape(shape) - 2,
            jax.nn.softmax(state.log_weight, axis=1),
            smc.log_evidence(state),
            state.log_evidence,
            info.resampled.any(axis=0),
            state.running | state.failed,
        )

    *result, resampled, unfinished = map(np.asarray, decode())
    assert resampled.any()
    assert not unfinished.any()
    return result


def z_scores(found: list[Any], power: float, has_form: bool, omit_closing_term: bool = False) -> dict[str, float]:
    """How many standard errors Ẑ·Σ W_i f(x_i) is off for each f, of the groups whose answers have the form or not."""
    tokens, length, w, log_z, open_log_z = (part[int(not has_form) :: 2] for part in found)
    z = np.exp(open_log_z if omit_closing_term else log_z)
    law = exact.outcomes(AFTER, ASK, MAX_MODEL_LEN, power)
    padded = np.where(np.arange(tokens.shape[-1]) < length[..., None], tokens, -1).reshape(-1, tokens.shape[-1])
    distinct, which = np.unique(padded, axis=0, return_inverse=True)
    answers = [tuple(token for token in row if token >= 0) for row in distinct.tolist()]
    assert not has_form or all(map(FORM.matches, answers))
    scores = {}
    for name, f in FUNCTIONS.items():
        want = sum(mass * f(x) for x, mass in law.items() if not has_form or FORM.matches(x))
        values = z * (w * np.array([f(x) for x in answers])[which].reshape(w.shape)).sum(axis=1)
        scores[name] = (values.mean() - want) / (values.std() / np.sqrt(len(values)) + 1e-6)
    return scores


@pytest.mark.parametrize(
    "config",
    [
        {"control": 0.3},
        {"pipelined": True, "draft_temperature": 0.8},
    ],
    ids=str,
)
def test_estimates_are_unbiased(config: dict[str, Any]) -> None:
    """Estimates are unbiased of every other request's answers, which have the form, and of the others' beside them.

    Negative control: the closing term left out.
    """
    program = PAIR.program(MAX_MODEL_LEN, **{"gamma": 2, "power": 1.5, "ess_threshold": 0.8, **config})
    found = populations(program)
    for has_form in (True, False):
        scores = z_scores(found, 1.5, has_form)
        assert max(map(abs, scores.values())) < 4, (has_form, scores)
    assert max(map(abs, z_scores(found, 1.5, has_form=True, omit_closing_term=True).values())) > 8


def test_control_the_first_tokens_mass_is_seen() -> None:
    """Negative control: the mass that was allowed of the first token left out."""
    program = PAIR.program(MAX_MODEL_LEN, gamma=2, ess_threshold=0.8)
    with program_patches(lifecycle, "bonus_increment", lambda power, logits, _: bonus_increment(power, logits)):
        scores = z_scores(populations(program), 1.0, has_form=True)
    assert max(map(abs, scores.values())) > 8
