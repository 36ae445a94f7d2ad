"""Describes the comparison of decoding by load with fixed strategies: its requests, its clocks and its arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.planner import Planner
from tests.checkpoints import write_pair
from tests.planner.tables import ALONE, measured, profile

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))

import bench_planner
from bench_planner import Contender, Phase, Took


def took(tokens: int, seconds: float, *requests: float) -> Took:
    return Took(tokens, seconds, 2 * seconds, 3 * seconds, requests or (1.0, 1.0))


def test_phases() -> None:
    """Lulls and bursts of either kind and of both; the same again by the seed, and none of the profile's prompts."""
    asked = bench_planner.phases(1, 6, 2, 4)
    assert [(one.load, len(one.prompts)) for one in asked] == [(1, 2), (1, 2), (4, 6), (4, 6), (4, 6)]
    assert asked == bench_planner.phases(1, 6, 2, 4)
    prompts = [prompt for one in asked for prompt in one.prompts]
    assert len({*prompts, *bench_planner.mixed(1002, 16)}) == len(prompts) + 16
    assert len(bench_planner.mixed(1, 7)) == 7


def test_gains() -> None:
    """Equal rounds gain nothing; one phase that is twice as fast gains its part of the whole."""
    one = Contender("one", [[took(100, 1.0), took(100, 3.0)], [took(100, 2.0), took(100, 6.0)]])
    other = Contender("other", [[took(100, 4.0, 4.0, 1.0), took(100, 1.5)], [took(100, 8.0, 4.0, 1.0), took(100, 3.0)]])
    assert bench_planner.gain(one, one, "wall") == (0, 0, 0)
    assert one.speeds("wall") == [50, 25]
    assert bench_planner.gain(one, other, "cpu") == pytest.approx((5.5 / 4 - 1,) * 3)
    assert bench_planner.by_phase([one, other]) == pytest.approx(200 / 7.5)
    low, middle, high = bench_planner.gains_of_requests(one, other)
    assert (low, middle) == (0, 0)
    assert high == pytest.approx(3.0), "one request of four took four times as long a token"
    found = bench_planner.report([one, other], other, [Phase("a", 1, ()), Phase("b", 1, ())])
    assert found["gains"]["wall"]["over"] == "one"
    assert found["gains"]["counted"]["median"] == pytest.approx(4 / 5.5 - 1)


@pytest.mark.slow
def test_a_phase_counts_its_cycles(tmp_path: Path) -> None:
    """Two at a time, the target alone: a cycle a token, but for the first, at the profile's time of that many lanes."""
    planner = Planner(profile(measured(ALONE, {1: 2.0, 2: 8.0})))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    target = write_pair(tmp_path).target
    with LLM(target, decoding=Autoregressive(), max_model_len=16, max_num_seqs=2, page_size=4) as llm:
        both = bench_planner.run_phase(llm, planner, Phase("both", 2, ("a", "bc")), params)
        alone = bench_planner.run_phase(llm, planner, Phase("alone", 1, ("a", "bc")), params)
    assert both.tokens == alone.tokens == 10
    assert both.counted == pytest.approx(4 * 8e-3)
    assert both.requests == pytest.approx((4 * 8e-3 / 5,) * 2)
    assert alone.counted == pytest.approx(2 * 4 * 2e-3)
    assert alone.requests == pytest.approx((4 * 2e-3 / 5,) * 2)
    assert both.wall > 0
    assert both.cpu > 0
