"""Thousands of short requests on the bundled pair, some of them aborted: nothing may grow, leak or compile.

    python scripts/soak.py                 # 5,000 requests, four minutes on two cores
    python scripts/soak.py --requests 300

Prints what was asked and what was left behind; fails where that is anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Sequence

import jax
from tqdm import tqdm

from smcjax import LLM, SMC, SamplingParams
from smcjax.tasks.word_problems import generate, prompt

MOST_WAITING = 24  # requests that wait or run at a time
QUESTIONS = tuple(prompt(problem) for problem in generate(0, 64, "eval"))


@dataclasses.dataclass(frozen=True)
class Report:
    """Holds the counts of a soak's requests, its duration, and the memory and pages that it left behind."""

    ended: int
    aborted: int
    errors: int
    seconds: float
    compiled: int  # programs, after the warm-up
    grown_bytes: int  # of arrays alive
    pages_missing: int


def soak(
    llm: LLM, requests: int, prompts: Sequence[str] = QUESTIONS, *, seed: int = 0, use_tqdm: bool = False
) -> Report:
    """Runs `requests` short requests through the engine of a warm `llm`, aborting about every tenth."""
    rng, engine = random.Random(seed), llm.engine
    before = llm.metrics()
    held = _bytes_alive()
    living: set[str] = set()
    aborted = errors = ended = asked = 0
    began = time.perf_counter()
    with tqdm(total=requests, disable=not use_tqdm, dynamic_ncols=True) as bar:
        while asked < requests or living:
            while asked < requests and len(living) < MOST_WAITING and rng.random() < 0.7:
                params = SamplingParams(max_tokens=rng.randint(1, 24), seed=asked, temperature=rng.uniform(0.5, 1.2))
                request = llm.request(rng.choice(prompts), params)
                engine.add_request(request, stream=asked % 2 == 0)
                living.add(request.request_id)
                asked += 1
            for name in sorted(living):
                if rng.random() < 0.01:
                    engine.abort(name)
            for output in engine.step():
                reason = output.outputs[0].finish_reason
                aborted, errors, ended = aborted + (reason == "abort"), errors + (reason == "error"), ended + 1
                living.discard(output.request_id)
                engine.forget(output.request_id)
                bar.update()
    after = llm.metrics()
    return Report(
        ended=ended,
        aborted=aborted,
        errors=errors,
        seconds=time.perf_counter() - began,
        compiled=int(after["compilations"] - before["compilations"]),
        grown_bytes=_bytes_alive() - held,
        pages_missing=int(after["kv_pages_total"] - after["kv_pages_free"]),
    )


def warm(llm: LLM, prompts: Sequence[str] = QUESTIONS) -> None:
    """All programs, and state on the device."""
    llm.warm_up(use_tqdm=False)
    soak(llm, 8, prompts, seed=1)


def _bytes_alive() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def main() -> None:
    """Soaks the bundled pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    args = parser.parse_args()
    with LLM(decoding=SMC(n_particles=4, gamma=4), max_model_len=256, max_num_seqs=4) as llm:
        warm(llm)
        report = soak(llm, args.requests, use_tqdm=True)
    print(report)
    # The state of a batch of another size than before, at most: integers and flags of some lanes.
    if report.ended != args.requests or report.errors or report.compiled or report.pages_missing:
        raise SystemExit("something was lost, failed or compiled")
    if report.grown_bytes > 1 << 20:
        raise SystemExit(f"{report.grown_bytes} bytes more than before")


if __name__ == "__main__":
    main()
