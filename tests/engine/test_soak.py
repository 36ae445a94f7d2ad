"""Hundreds of short requests, some of them aborted: nothing may grow, leak or compile."""

from __future__ import annotations

import random

import jax
import pytest

from smcjax import LLM, SamplingParams
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm

pytestmark = [pytest.mark.all_sizes, pytest.mark.compiled_at_once, pytest.mark.llvm_passes]

MAX_OPEN_REQUESTS = 24  # requests that wait or run at a time
PROMPTS = ("a", "bc", "a longer prompt")


def soak(llm: LLM, requests: int, *, seed: int = 0) -> list[str | None]:
    """Runs short requests, aborting about every tenth, and returns why each ended."""
    rng, engine = random.Random(seed), llm.engine
    living: set[str] = set()
    reasons: list[str | None] = []
    asked = 0
    while asked < requests or living:
        while asked < requests and len(living) < MAX_OPEN_REQUESTS and rng.random() < 0.7:
            params = SamplingParams(max_tokens=rng.randint(1, 24), seed=asked, temperature=rng.uniform(0.5, 1.2))
            request = llm.request(rng.choice(PROMPTS), params)
            engine.add_request(request, stream=asked % 2 == 0)
            living.add(request.request_id)
            asked += 1
        for name in sorted(living):
            if rng.random() < 0.01:
                engine.abort(name)
        for output in engine.step():
            reasons.append(output.outputs[0].finish_reason)
            living.discard(output.request_id)
            engine.forget(output.request_id)
    return reasons


def bytes_alive() -> int:
    """Returns the bytes of all arrays on the device."""
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
def test_three_hundred_requests_leave_nothing_behind(pair: Pair) -> None:
    with smc_llm(pair, smc={"trace": False}, num_pages=60, max_num_seqs=2) as llm:
        llm.warm_up(use_tqdm=False)
        soak(llm, 8, seed=1)  # state on the device
        before, held = llm.metrics(), bytes_alive()
        reasons = soak(llm, 300)
        after = llm.metrics()
        assert (len(reasons), reasons.count("error")) == (300, 0)
        assert reasons.count("abort") > 5
        assert after["compilations"] == before["compilations"]
        assert after["kv_pages_total"] == after["kv_pages_free"]
        assert bytes_alive() - held < 1 << 20
