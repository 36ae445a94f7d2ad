"""Law 25 through the package's own `init` and `step`: thousands of groups against all outputs of the form."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import smc
from smcjax.smc import lifecycle
from smcjax.smc.weights import bonus_increment
from tests import exact
from tests.helpers import Ask, batch
from tests.lazily import program_patches
from tests.smc.test_constraints import LETTERS, FormToy, tables
from tests.smc.test_unbiased_engine import AFTER, FUNCTIONS, MAX_MODEL_LEN, PAIR, V

pytestmark = pytest.mark.slow
GROUPS = 2048
ASK = Ask((1, 2), max_tokens=5, stops=(2,), temperature=0.9)
FORM = FormToy(vocab=V, cap=ASK.max_tokens, stop=2, regex="(a|bb)*b", spelled=LETTERS)


def z_scores(program: smc.Program, batches: int = 2) -> dict[str, float]:
    """How many standard errors Ẑ·Σ W_i f(x_i) is off, for each f, of answers that all have the form."""

    @jax.jit
    def decode(seed: jax.Array) -> tuple[jax.Array, ...]:
        prompts, requests = batch([ASK], V, MAX_MODEL_LEN)
        prompts, requests = jax.tree.map(lambda x: jnp.repeat(x, GROUPS, axis=0), (prompts, requests))
        requests = dataclasses.replace(
            requests, key=jax.random.split(jax.random.key(seed), GROUPS), automaton=jnp.zeros(GROUPS, jnp.int32)
        )
        memory = program.create_memory(PAIR.params, GROUPS * program.rows * program.max_pages + 1)
        memory = dataclasses.replace(memory, automata=jax.tree.map(jnp.asarray, tables(FORM.regex, LETTERS)))
        state = smc.init(program, PAIR.params, prompts, requests, memory=memory)
        state, info = smc.run(program, PAIR.params, state, ASK.max_tokens)
        s, shape = state.sequences, state.log_weight.shape
        tokens, length = s.tokens.reshape(*shape, -1)[:, :, 2:], s.length.reshape(shape) - 2
        weights = jax.nn.softmax(state.log_weight, axis=1)
        going = state.running | state.failed
        return tokens, length, weights, smc.log_evidence(state), info.resampled.any(axis=0), going

    parts = [decode(seed) for seed in range(batches)]
    tokens, length, w, log_z, resampled, going = (
        np.concatenate([np.asarray(part[i]) for part in parts]) for i in range(6)
    )
    assert not going.any()
    assert resampled.any()
    rows = [
        [tuple(row[:n]) for row, n in zip(g, ns, strict=True)] for g, ns in zip(tokens.tolist(), length, strict=True)
    ]
    assert all(FORM.matches(x) for x in {x for group in rows for x in group})
    law = exact.outcomes(AFTER, ASK, MAX_MODEL_LEN, program.decoding.power)
    scores = {}
    for name, f in FUNCTIONS.items():
        want = sum(mass * f(x) for x, mass in law.items() if FORM.matches(x))
        found = [sum(wi * f(x) for wi, x in zip(ws, g, strict=True)) for ws, g in zip(w, rows, strict=True)]
        values = np.exp(log_z) * np.array(found)
        scores[name] = (values.mean() - want) / (values.std() / np.sqrt(len(values)) + 1e-6)
    return scores


@pytest.mark.parametrize(
    "config",
    [
        {"ess_threshold": 0.8, "draft_temperature": 0.8},
        {"ess_threshold": 0.8, "control": 0.3},
        {"ess_threshold": 0.8, "pipelined": True},
    ],
    ids=str,
)
def test_estimates_are_unbiased(config: dict[str, Any]) -> None:
    scores = z_scores(PAIR.program(MAX_MODEL_LEN, gamma=2, power=1.5, **config))
    assert max(map(abs, scores.values())) < 4, scores


def test_control_the_first_tokens_mass_is_seen() -> None:
    """Negative control: the mass that was allowed of the first token left out."""
    program = PAIR.program(MAX_MODEL_LEN, gamma=2, ess_threshold=0.8)
    with program_patches(lifecycle, "bonus_increment", lambda power, logits, _: bonus_increment(power, logits)):
        assert max(map(abs, z_scores(program, batches=1).values())) > 8
