"""Counts how many of γ drafts a cycle of the bundled pair keeps, for the study's cases of real acceptance.

    python -m studies.verification.counted studies/verification/counted_cpu.json

takes a minute on two cores. Drafts that the end of an answer cuts off are not kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from smcjax import LLM, Rejection, SamplingParams
from smcjax.tasks.questions import questions

GAMMA = 8
PROBLEMS = 200


def cycles_by_length(cycles: int, accepted_at: Sequence[int]) -> list[int]:
    """How many cycles keep 0, 1, … γ drafts, of all `cycles` and those whose draft at each position is kept."""
    reached = np.asarray([cycles, *accepted_at, 0])
    return [int(count) for count in reached[:-1] - reached[1:]]


def count(problems: int) -> list[int]:
    """Cycles of speculative sampling at temperature 1 by the number of drafts that they keep."""
    asked = [one.prompt for one in questions("words", 7, problems)]
    total = np.zeros(GAMMA + 1, int)
    with LLM(decoding=Rejection(gamma=GAMMA)) as llm:
        for answer in llm.generate(asked, SamplingParams(temperature=1.0, max_tokens=96, seed=7), use_tqdm=False):
            of = answer.metrics
            total += cycles_by_length(of.cycles, of.accepted_at or ())
    return total.tolist()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({"gamma": GAMMA, "cycles": count(PROBLEMS)}) + "\n")
