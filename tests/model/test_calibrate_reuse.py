"""The script that finds which sparse layers can take the blocks of earlier ones: what it measures, and its search."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import calibrate_reuse
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax.model import LayerSpec
from smcjax.model.attention import SlidingWindow
from smcjax.model.decoder import unembed
from smcjax.model.paged import paged_hidden_states
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SparseVerification
from tests.helpers import noisy_params, tiny_config

SPARSE = NSA(kernel_size=4, kernel_stride=2, block_size=4, num_blocks=3, window=3, init_blocks=1, local_blocks=1)
LAYERS = (LayerSpec(SPARSE), LayerSpec(SlidingWindow(4)), LayerSpec(SPARSE), LayerSpec(SPARSE))
CONFIG = tiny_config(7, layers=LAYERS, num_layers=4)
BEGIN = np.array([20, 25])


@functools.cache
def texts() -> calibrate_reuse.Texts:
    tokens = np.random.default_rng(0).integers(0, 7, (2, 40))
    return calibrate_reuse.read(CONFIG, noisy_params(CONFIG), tokens, BEGIN)


def by_decoders(schedule: tuple[bool, ...]) -> np.ndarray:
    """Log-probabilities of answers' tokens' successors, as verification has them."""
    params, read = noisy_params(CONFIG), texts()
    view = dataclasses.replace(read.view, sparse=SparseVerification(schedule=schedule))
    forward = jax.jit(paged_hidden_states, static_argnums=0)
    logits = unembed(params, forward(CONFIG, params, read.cache, view)[0])
    return np.asarray(jax.nn.log_softmax(logits), np.float64)[np.asarray(read.counts)]


@pytest.mark.slow
def test_divergence_is_that_of_what_decoders_compute() -> None:
    """Sparse layers are numbered without others; 19 and 14 tokens have a successor.

    Control: another schedule diverges otherwise.
    """
    kl = calibrate_reuse.divergence_of(CONFIG, noisy_params(CONFIG), texts())
    assert kl((True, True, True)) == 0
    whole, reused = by_decoders((True, True, True)), by_decoders((True, False, True))
    assert len(whole) == 19 + 14
    want = (np.exp(whole) * (whole - reused)).sum(axis=1).mean()
    assert want > 1e-3
    assert kl((True, False, True)) == pytest.approx(want, rel=1e-3)
    assert kl((True, True, False)) != pytest.approx(want, rel=0.1)


@pytest.mark.slow
def test_divergence_of_modes_is_that_of_groups() -> None:
    """Groups that are exact diverge by rounding; shared ones do.

    Control: what is said of a whole answer at once is what cycles of C tokens say, one after the other.
    """
    params, read = noisy_params(CONFIG), texts()
    kl = calibrate_reuse.divergence_of_modes(CONFIG, params, read)
    assert abs(kl(SparseVerification("merged", 4))) < 1e-6
    shared = SparseVerification("shared", 4)
    assert kl(shared) > 1e-4

    laws = calibrate_reuse.verified_laws(CONFIG, params, read.cache, read.view)
    forward, cache, found = jax.jit(paged_hidden_states, static_argnums=0), read.cache, []
    for at in range(0, read.view.tokens.shape[1], 4):
        cut = {name: getattr(read.view, name)[:, at : at + 4] for name in ("tokens", "positions", "write_pages")}
        view = dataclasses.replace(read.view, **cut, sparse=shared)
        hidden, cache = forward(CONFIG, params, cache, view)
        found.append(jax.nn.log_softmax(unembed(params, hidden)))
    assert kl(shared) == pytest.approx(
        float(calibrate_reuse.divergence(laws, jnp.concatenate(found, axis=1), read.counts)), rel=1e-3
    )


COST = np.array([9.0, 2.0, 4.0, 1.0, 2.0])


def cost(schedule: Sequence[bool]) -> float:
    """A made-up divergence: the sum of what each layer costs that does not select."""
    return float(COST[~np.array(schedule)].sum())


def test_search_takes_the_cheapest_layer_next_and_stops_at_the_limit() -> None:
    steps, following = calibrate_reuse.search(5, cost, 5.0)
    assert [(step.layer, step.kl) for step in steps] == [(3, 1.0), (1, 3.0), (4, 5.0)]
    assert following is not None
    assert (following.layer, following.kl) == (2, 9.0)
    assert calibrate_reuse.search(5, cost, 0.5)[0] == []
    steps, following = calibrate_reuse.search(5, cost, 100)
    assert following is None
    assert steps[-1].schedule == (True, False, False, False, False)
    steps, following = calibrate_reuse.search(2, lambda schedule: float("nan"), 5.0)
    assert not steps, "what is no number is above any limit"


def test_report() -> None:
    found = calibrate_reuse.report(5, cost, 5.0)
    assert found["schedule"] == [True, False, True, False, False]
    assert found["spacings"] == [2, 3]
    assert found["regular"] == {2: cost((True, False, True, False, True)), 4: cost((True, False, False, False, True))}
    assert found["next"] == {"layer": 2, "kl": 9.0}


def test_answers_begin_behind_their_heading() -> None:
    tokens, begin = calibrate_reuse.documents(0, 3, 512)
    words = calibrate_reuse.recall.vocabulary()
    for row, at in zip(tokens, begin, strict=True):
        assert "".join(words[token] for token in row[at - 2 : at + 2]) == "answers\n1 "
    assert jnp.shape(tokens) == (3, 512)
