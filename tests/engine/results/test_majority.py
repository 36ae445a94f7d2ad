"""What a population says most: by weight and not by heads, of its particles as a request returns them."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy.special import softmax

import smcjax
from smcjax import LLM, Particle, SamplingParams
from smcjax.engine.results.majority import majority

INF = float("inf")
POPULATIONS = st.lists(
    st.tuples(st.sampled_from(["1", "2", "3", ""]), st.sampled_from([-INF, -30.0, -2.0, -1.0, 0.0])), min_size=1
)


def population(texts: list[str], log_weights: list[float]) -> list[Particle]:
    weights = softmax(log_weights)
    return [
        Particle([], log_weight, "stop", text, float(weight))
        for text, log_weight, weight in zip(texts, log_weights, weights, strict=True)
    ]


def answer(text: str) -> str | None:
    return text or None


@given(POPULATIONS)
def test_the_heaviest_answer_wins(particles: list[tuple[str, float]]) -> None:
    texts, log_weights = [text for text, _ in particles], [weight for _, weight in particles]
    if np.isneginf(log_weights).all():
        return  # such a request fails
    rows = population(texts, log_weights)
    totals = {text: sum(row.weight for row in rows if row.text == text) for text in texts if text}
    winner = majority(rows, answer)
    if not any(totals.values()):
        assert winner is None
        return
    assert winner is not None
    assert totals[winner.text] == pytest.approx(max(totals.values()))
    assert winner.weight == max(row.weight for row in rows if row.text == winner.text)


def test_control_heads_are_not_weight() -> None:
    """Two light particles against a heavy one: counted by heads another answer would win."""
    by_weight = majority(population(["a", "b", "b"], np.log([0.6, 0.2, 0.2]).tolist()))
    by_heads = majority(population(["a", "b", "b"], [0.0, 0.0, 0.0]))
    assert by_weight is not None
    assert by_heads is not None
    assert (by_weight.text, by_heads.text) == ("a", "b")


@pytest.mark.slow
def test_a_population_of_an_engine(llm: LLM) -> None:
    """Particles bring the texts and weights that it needs; the selected one's text is the answer's."""
    params = [SamplingParams(seed=seed, max_tokens=12, temperature=0.8, stop="e") for seed in range(6)]
    others = 0
    for output in llm.generate(["ab", "c", "hello", "q", "xyz", "the"], params, use_tqdm=False):
        assert output.smc is not None
        particles = output.smc.particles
        np.testing.assert_allclose([row.weight for row in particles], softmax(output.smc.log_weights), rtol=1e-6)
        assert particles[output.smc.selected].text == output.outputs[0].text
        assert not any("e" in row.text for row in particles)
        totals: dict[str, float] = {}
        for row in particles:
            totals[row.text[:2]] = totals.get(row.text[:2], 0.0) + row.weight
        winner = smcjax.majority(particles, key=lambda text: text[:2])
        assert winner is not None
        assert winner.text[:2] == max(totals, key=lambda text: totals[text])
        others += winner is not particles[output.smc.selected]
    assert others > 0, "control: the particle that is drawn is not always of the majority"


def test_an_error_of_the_key_is_the_callers() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        majority(population(["a"], [0.0]), key=lambda text: [text])
