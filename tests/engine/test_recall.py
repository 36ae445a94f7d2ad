"""The recall pair on long documents: greedy speculation gives the target's tokens, which are right.

Its dense draft is seldom wrong, so a sparse one drafts in its place: the target of `tests/data/recall`, which
`scripts/training/train_recall.py small` made in a quarter of an hour on a CPU and which is wrong every third line.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from smcjax import LLM, Autoregressive, Rejection, SamplingParams
from smcjax.decoders import Decoding
from smcjax.engine.results.outputs import RequestOutput
from smcjax.tasks import recall

WORSE = str(Path(__file__).parents[1] / "data" / "recall" / "target")
CONTEXT, STRIDE, BLOCK, GENERATED = 1024, 16, 64, 12
pytestmark = pytest.mark.slow


@functools.cache
def prompts() -> list[list[int]]:
    """A document up to every fifth place of its answers, as many as a stride has, over more than a block."""
    ids = recall.tokens(np.random.default_rng(6), CONTEXT, "eval").tolist()
    begin = ids.index(recall.vocabulary().index("answers")) + 2
    assert begin + 5 * STRIDE + GENERATED < CONTEXT
    return [ids[: begin + more] for more in range(0, 5 * STRIDE, 5)]


def answered(decoding: Decoding, draft: str | None = None) -> list[RequestOutput]:
    shape = {"max_model_len": CONTEXT, "max_num_seqs": 4, "dtype": "float32"}
    with LLM("recall", draft_model=draft, decoding=decoding, **shape) as llm:
        params = SamplingParams(max_tokens=GENERATED, temperature=0)
        first, *others = [{"prompt_token_ids": ids} for ids in prompts()]
        begun = llm.generate(first, params, use_tqdm=False)  # whose document the others find in the cache
        return begun + llm.generate(others, params, use_tqdm=False)


@functools.cache
def wanted() -> list[list[int]]:
    return [output.outputs[0].token_ids for output in answered(Autoregressive())]


def test_greedy_speculation_is_the_targets_from_every_place() -> None:
    """Every place in a stride of compressed tokens and in a block, whose drafts are now right and now wrong."""
    assert {len(ids) % STRIDE for ids in prompts()} == set(range(STRIDE)), "places that prompts end at"
    generated = {(len(ids) + more) % BLOCK for ids in prompts() for more in range(GENERATED)}
    assert generated == set(range(BLOCK))
    outputs = answered(Rejection(gamma=4), WORSE)
    assert [output.outputs[0].token_ids for output in outputs] == wanted()
    drafted = sum(output.metrics.cycles for output in outputs) * 4
    accepted = sum(output.metrics.mean_accepted_length * output.metrics.cycles for output in outputs)
    assert 0.4 * drafted < accepted < 0.97 * drafted


def test_the_target_reads_what_is_far() -> None:
    """Values of facts beyond the window and the last blocks are found much more often than one in forty is guessed."""
    ids = recall.tokens(np.random.default_rng(6), CONTEXT, "eval")
    far = right = 0
    equals = recall.vocabulary().index("=")
    for prompt, tokens in zip(prompts(), wanted(), strict=True):
        if prompt[-1] != equals:
            continue
        (places,) = np.nonzero((ids[:-2] == prompt[-3]) & (ids[1:-1] == prompt[-2]) & (ids[2:] == equals))
        if len(prompt) - places[0] > 256 + BLOCK:
            far += 1
            right += tokens[0] == ids[places[0] + 3]
    assert far >= 3
    assert right >= far / 2
