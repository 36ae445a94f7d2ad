"""The cycles of a traced request, put together again, are the population that its output holds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from smcjax import LLM, RequestOutput, SamplingParams
from smcjax.engine.results.outputs import Cycle
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm


def follow(llm: LLM, params: SamplingParams, *, trace: bool = True) -> tuple[list[Cycle], RequestOutput]:
    """A request's cycles, and its output."""
    request = dataclasses.replace(llm.request("ab", params), trace=trace)
    cycles = []
    with llm._turn:
        llm.engine.add_request(request, stream=True)
        while True:
            llm.engine.step()
            for chunk in llm.engine.chunks(request.request_id):
                if chunk.cycle is not None:
                    cycles.append(chunk.cycle)
                if chunk.output is not None:
                    llm.engine.forget(request.request_id)
                    return cycles, chunk.output


def replayed(cycles: list[Cycle]) -> list[list[int]]:
    """The rows' tokens, by the rule that `Cycle` states."""
    rows: list[list[int]] = [[] for _ in cycles[0].blocks]
    for cycle in cycles:
        before = rows
        rows = []
        for ancestor, length in zip(cycle.ancestors, cycle.lengths, strict=True):
            old = before[ancestor]
            rows.append(old + cycle.blocks[ancestor][: length - len(old)])
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_cycles_replay_the_population(llm: LLM, seed: int) -> None:
    params = SamplingParams(seed=seed, max_tokens=30, min_tokens=seed * 6)
    cycles, output = follow(llm, params)
    assert output.smc is not None
    assert output.smc.trace is not None
    assert [cycle.index for cycle in cycles] == list(range(output.metrics.cycles + 1))
    assert replayed(cycles) == [particle.token_ids for particle in output.smc.particles]
    for name in ("ess", "resampled", "ancestors", "log_weights", "lengths", "finished"):
        told = np.array([getattr(cycle, name) for cycle in cycles[1:]])
        kept = getattr(output.smc.trace, name)
        np.testing.assert_array_equal(told.reshape(kept.shape), kept)
    assert output.outputs == llm.generate("ab", params, use_tqdm=False)[0].outputs


def test_ancestors_matter(llm: LLM) -> None:
    """A control: some population is another one where its resamplings are left out."""
    forked = False
    for seed in range(4):
        cycles, output = follow(llm, SamplingParams(seed=seed, max_tokens=30, ignore_eos=True))
        assert output.smc is not None
        unforked = [dataclasses.replace(cycle, ancestors=np.arange(4)) for cycle in cycles]
        forked |= replayed(unforked) != [particle.token_ids for particle in output.smc.particles]
    assert forked


@pytest.mark.slow
def test_only_who_asks_is_told(pair: Pair) -> None:
    with smc_llm(pair, {"trace": False}) as llm:
        params = SamplingParams(seed=1, max_tokens=8)
        silent, output = follow(llm, params, trace=False)
        assert silent == []
        assert output.smc is not None
        assert output.smc.trace is None
        told, traced = follow(llm, params)
        assert told
        assert traced.smc is not None
        assert traced.smc.trace is not None
        assert traced.outputs == output.outputs
