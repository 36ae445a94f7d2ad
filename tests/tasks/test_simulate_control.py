"""The simulation of ways to reject drafts: each is unbiased, and c = 1 is the target's law."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import simulate_control as sim

PAIR = sim.Pair.made(0.6)
GROUPS = 1000


@pytest.mark.parametrize("variant", sim.VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_is_unbiased(variant: sim.Variant) -> None:
    """Ẑ has mean 1, and Ẑ·length that of the target's texts."""
    result = sim.simulate(PAIR, variant, GROUPS, gamma=3, seed=1)
    evidence = np.exp(result.log_evidence)
    for values, wanted in ((evidence, 1.0), (evidence * result.lengths, sim.mean_length(PAIR))):
        assert abs(values.mean() - wanted) < 4 * values.std() / np.sqrt(GROUPS) + 1e-9


def _half(gained: np.ndarray, owed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a cycle as they are, with weights that are half as sharp."""
    return 0.5 * gained, owed


def test_what_is_biased_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: weights that are half as sharp, and lengths that no weight makes up for."""
    advance = sim.advance
    lengths = sim.simulate(PAIR, sim.Variant("", 0.0), GROUPS, gamma=3, seed=1).lengths
    parted = sim.parted
    with monkeypatch.context() as patch:
        patch.setattr(sim, "parted", lambda rng, w, done: np.where(np.isinf(parted(rng, w, done)), -np.inf, w))
        coins = np.exp(sim.simulate(PAIR, sim.Variant("", 0.0, early=True), GROUPS, gamma=3, seed=1).log_evidence)
    assert abs(coins.mean() - 1) > 4 * coins.std() / np.sqrt(GROUPS), "weights not divided by the coin's share"
    monkeypatch.setattr(sim, "advance", lambda *args: _half(*advance(*args)))
    evidence = np.exp(sim.simulate(PAIR, sim.Variant("", 0.1), GROUPS, gamma=3, seed=1).log_evidence)
    for values, wanted in ((evidence, 1.0), (lengths, sim.mean_length(PAIR))):
        assert abs(values.mean() - wanted) > 4 * values.std() / np.sqrt(GROUPS)


def test_evidence_bounds_the_distance() -> None:
    """E max(1 − Ẑ, 0) is above the total variation of each token, less what 1,000 answers leave by chance."""
    result = sim.simulate(PAIR, sim.Variant("", 0.0), GROUPS, gamma=3, seed=1)
    bound = np.maximum(1 - np.exp(result.log_evidence), 0).mean()
    chance = sim.variation(PAIR, sim.simulate(PAIR, sim.Variant("", 1.0), GROUPS, gamma=3, seed=1))
    assert sim.variation(PAIR, result) - chance < bound < 0.3


def test_the_target_itself() -> None:
    """Control 1 has no weights and the target's law, which is not that of other tables."""
    exact = sim.simulate(PAIR, sim.Variant("", 1.0), GROUPS, gamma=3, seed=1)
    np.testing.assert_allclose(exact.log_evidence, 0, atol=1e-9)
    assert sim.variation(PAIR, exact) < 0.04 < sim.variation(dataclasses.replace(PAIR, p=PAIR.p[::-1]), exact)
