"""The bounds of `scripts/measure_marginals.py`, on populations of one token whose laws are known."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import measure_marginals as script

P, Q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.2, 0.3, 0.4])
LAW: dict[tuple[int, ...], float] = {(token,): float(p) for token, p in enumerate(P)}
PROMPTS, GROUPS, N = 3, 400, 3


def populations(rng: np.random.Generator, law: np.ndarray, weigh: bool) -> list[list[script.Group]]:
    """Groups of N tokens of a law, weighed by P over it or each an answer alone."""
    made = []
    for _ in range(PROMPTS):
        tokens = rng.choice(len(P), (GROUPS, N if weigh else 1), p=law)
        weights = (P / law)[tokens] if weigh else np.ones(tokens.shape)
        groups = []
        for row, of_row in zip(tokens.tolist(), weights, strict=True):
            own = {(token,): float(of_row[np.array(row) == token].sum() / of_row.sum()) for token in row}
            groups.append(script.Group(own, float(of_row.mean())))
        made.append(groups)
    return made


def exact_distance(weigh: bool) -> float:
    """Total variation of the answer's law to P, all tokens of a population enumerated."""
    law = np.zeros(len(P))
    for tokens in np.ndindex(*[len(P)] * (N if weigh else 1)):
        weights = (P / Q)[list(tokens)] if weigh else np.ones(len(tokens))
        np.add.at(law, list(tokens), Q[list(tokens)].prod() * weights / weights.sum())
    return float(np.maximum(law - P, 0).sum())


@pytest.mark.parametrize("weigh", [True, False])
def test_bounds_of_another_law(weigh: bool) -> None:
    """The lower bound is near what it bounds with hundreds of groups, and the upper bound is above."""
    prompts, distance = populations(np.random.default_rng(0), Q, weigh), exact_distance(weigh)
    assert distance > 0.1
    if not weigh:  # an answer alone knows nothing of its weight
        prompts = [[script.Group(group.weights, 1.0) for group in groups] for groups in prompts]
    _, low, high = script.lower_bound(prompts, [LAW] * PROMPTS)
    assert 0.8 * distance < low < distance < high
    if weigh:
        assert np.mean([max(1 - group.evidence, 0) for groups in prompts for group in groups]) > distance


def test_bounds_of_the_law_itself() -> None:
    """Noise is not taken for a distance: the bound is 0 or less in the mean, over many small experiments."""
    found = []
    for seed in range(40):
        prompts = [groups[:12] for groups in populations(np.random.default_rng(seed), P, False)]
        found.append(script.lower_bound(prompts, [LAW] * PROMPTS)[0])
    assert np.mean(found) < 4 * np.std(found) / np.sqrt(len(found))
    naive = [script.separating(groups, LAW, 0.0).seen(groups)[0].mean() for groups in prompts]
    assert np.mean(naive) > 0.05, "control: tried on the groups that it was made from, a set finds noise"


def test_the_control_variate_narrows_intervals() -> None:
    """And leaves the mean where it is; where every Ẑ is 1 it has no part."""
    prompts = populations(np.random.default_rng(1), 0.8 * P + 0.2 * Q, True)
    with_it = script.lower_bound(prompts, [LAW] * PROMPTS)
    alone = [[script.Group(group.weights, 1.0) for group in groups] for groups in prompts]
    without = script.lower_bound(alone, [LAW] * PROMPTS)
    assert with_it[2] - with_it[1] < 0.5 * (without[2] - without[1])
    assert without[1] < with_it[0] < without[2]
    assert script.share_of_control([script.separating(groups, LAW, 0.0) for groups in alone], alone) == 0


def test_the_table() -> None:
    near = (0.01, -0.02, 0.04)
    row = script.Row("SMC", 0.1, 48, 1.5, (-1, -2, 0), (0.25, 0.2, 0.3), near, near, near, 1.0)
    start = "| SMC | 0.1 | -1.00 (-2.00 to 0.00) | 0.25 (0.20 to 0.30) |"
    assert script.markdown([row]).endswith(start + " +0.010 (-0.020 to +0.040) |" * 3)
