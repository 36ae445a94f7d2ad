"""Populations outside of the engine: each decision is unbiased, exact decoders have the target's law."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import dense_smc as dense

from smcjax.model.config import ModelConfig
from smcjax.model.decoder import logits
from smcjax.model.params import init_params
from smcjax.numerics import key_of
from smcjax.smc.acceptance import RejectionControl
from smcjax.smc.control import at

V, TOKENS, GROUPS = 4, 4, 6000


@dataclasses.dataclass(frozen=True)
class Table:
    """A law of the next token behind each token; there is nothing to remember."""

    def begun(self, rows: int, slots: int) -> Any:
        return None

    def behind(self, params: Any, state: Any, tokens: jax.Array, places: jax.Array) -> tuple[jax.Array, Any]:
        return params[tokens], state


def laws(seed: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """log p and log q behind each token, float64."""
    rng = np.random.default_rng(seed)
    p = 1.2 * rng.normal(size=(V, V))
    q = p + noise * rng.normal(size=(V, V))
    return tuple(x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))


P, Q = laws(3, 1.5)
PAIR = dense.Pair(Table(), jnp.asarray(P, jnp.float32), Table(), jnp.asarray(Q, jnp.float32))
PROMPT = (0, 1)


def wanted(function: Any) -> float:
    """The target's mean of a function of whole answers."""
    total = 0.0
    for answer in itertools.product(range(V), repeat=TOKENS):
        path = (PROMPT[-1], *answer)
        total += np.exp(sum(P[a, b] for a, b in itertools.pairwise(path))) * function(np.array(answer))
    return total


FUNCTIONS = {
    "Ẑ": lambda answer: np.ones(answer.shape[:-1]),
    "the last token": lambda answer: 1.0 * (answer[..., -1] == 2),
    "all tokens": lambda answer: np.cos(answer @ np.arange(1.0, TOKENS + 1)),
}


def away(result: dense.Result) -> list[float]:
    """Standard errors by which the mean of Ẑ·Σ W f is away from the target's mean of f, for each function."""
    found = []
    for function in FUNCTIONS.values():
        values = np.exp(result.log_evidence) * (result.weights * function(result.answers)).sum(axis=1)
        found.append(abs(values.mean() - wanted(function)) / (values.std() / np.sqrt(len(values)) + 1e-6))
    return found


def runs(method: Any, n: int, gamma: int, groups: int = GROUPS) -> dense.Result:
    """All groups' answers to one prompt."""
    prompts, lengths = np.tile(PROMPT, (groups, 1)), np.full(groups, len(PROMPT))
    return dense.run(PAIR, method, prompts, lengths, n=n, gamma=gamma, tokens=TOKENS, seed=5)


@pytest.mark.parametrize("method", [dense.Control(0.0), dense.Control(0.7), dense.Exact()], ids=str)
def test_every_decision_is_unbiased(method: Any) -> None:
    """E[Ẑ·Σ W f] is the target's mean of f, with blocks that the answer's end cuts and such that it does not."""
    assert max(away(runs(method, n=3, gamma=2))) < 4


def test_tokens_have_their_log_probabilities() -> None:
    """A row has the log-probabilities of its own tokens, whatever was copied from where."""
    result = runs(dense.Control(0.3), 3, 2, 50)
    path = np.concatenate([np.full((50, 3, 1), PROMPT[-1]), result.answers], axis=2)
    np.testing.assert_allclose(result.logprobs, P[path[..., :-1], path[..., 1:]], rtol=1e-5)


def test_exact_ways_have_evidence_one() -> None:
    """Control 1 and exact decoding have no weights; the target's own answers have the target's law."""
    for method in (dense.Control(1.0), dense.Exact()):
        np.testing.assert_allclose(runs(method, 3, 2, 200).log_evidence, 0, atol=1e-5)
    prompts, lengths = np.tile(PROMPT, (GROUPS, 1)), np.full(GROUPS, len(PROMPT))
    own = dense.sampled(PAIR, prompts, lengths, n=1, tokens=TOKENS, seed=1)
    assert max(away(own)) < 4
    path = np.concatenate([np.full((GROUPS, 1), PROMPT[-1]), own.answers[:, 0]], axis=1)
    np.testing.assert_allclose(own.logprobs[:, 0], P[path[:, :-1], path[:, 1:]], rtol=1e-5)


def test_what_is_biased_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: every emitted token weighs as a kept one would, and a rejected draft's successor is p's."""

    def patched(name: str, change: Any) -> float:
        with monkeypatch.context() as patch:
            patch.setattr(RejectionControl, name, change)
            jax.clear_caches()
            found = max(away(runs(dense.Control(0.7), n=3, gamma=2)))
        jax.clear_caches()
        return found

    assert patched("increment", lambda rule, log_p, log_q, tokens: at(log_p - log_q, tokens)) > 4
    assert patched("residual", lambda rule, log_p, log_q: log_p) > 4


def test_a_transformer_reads_what_a_dense_forward_does() -> None:
    """Rows of several lengths, token by token and in blocks that overwrite each other, against the oracle."""
    config = ModelConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        dtype="float32",
    )
    params = init_params(config, key_of(0), "float32")
    model = dense.Transformer(config, 32, 0.7)
    tokens = np.random.default_rng(0).integers(0, 32, (3, 12))
    oracle = jax.nn.log_softmax(logits(config, params, tokens) / 0.7)
    starts = np.array([2, 5, 1])
    other = np.random.default_rng(1).integers(0, 32, (3, 12))
    _, state = model.behind(params, model.begun(3, 16), jnp.asarray(other), jnp.broadcast_to(jnp.arange(12), (3, 12)))
    for row, start in enumerate(starts):
        other[row, :start] = tokens[row, :start]
    _, state = model.behind(params, state, jnp.asarray(other), jnp.broadcast_to(jnp.arange(12), (3, 12)))
    places = starts[:, None] + np.arange(4)
    block = np.take_along_axis(tokens, places, axis=1)
    found, state = model.behind(params, state, jnp.asarray(block), jnp.asarray(places))
    np.testing.assert_allclose(found, np.take_along_axis(np.asarray(oracle), places[..., None], axis=1), atol=1e-5)
