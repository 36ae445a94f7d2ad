"""A trained sparse target and a trained dense draft on long documents: greedy speculation gives the target's tokens.

The pair in `tests/data/recall` was made by `scripts/train_recall.py`: the draft on an H100, the target from the draft's
weights in a quarter of an hour on a CPU, which is enough for it to choose blocks by what they hold and not enough to
be right about all of them.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from smcjax import LLM, Autoregressive, Rejection, SamplingParams
from smcjax.decoders import Decoding
from smcjax.engine.outputs import RequestOutput
from smcjax.tasks import recall

PAIR = Path(__file__).parents[1] / "data" / "recall"
CONTEXT, STRIDE, BLOCK, GENERATED = 1024, 16, 64, 16
pytestmark = pytest.mark.slow


@functools.cache
def prompts() -> list[list[int]]:
    """A document up to each of as many consecutive places in its answers as a block has positions."""
    ids = recall.tokens(np.random.default_rng(6), CONTEXT, "eval").tolist()
    begin = ids.index(recall.vocabulary().index("answers")) + 2
    assert begin + BLOCK + GENERATED < CONTEXT
    return [ids[: begin + more] for more in range(BLOCK)]


def answered(decoding: Decoding) -> list[RequestOutput]:
    draft = PAIR / "draft" if decoding.drafts else None
    shape = {"max_model_len": CONTEXT, "max_num_seqs": 16, "dtype": "float32"}
    with LLM(PAIR / "target", draft_model=draft, decoding=decoding, **shape) as llm:
        params = SamplingParams(max_tokens=GENERATED, temperature=0)
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False)


@functools.cache
def wanted() -> list[list[int]]:
    return [output.outputs[0].token_ids for output in answered(Autoregressive())]


@pytest.mark.parametrize("decoding", [Rejection(gamma=4), Rejection(tree=(3, 2, 1), siblings="top")], ids=str)
def test_greedy_speculation_is_the_targets_from_every_place(decoding: Decoding) -> None:
    """Every place in a stride of compressed tokens and in a block, whose drafts are now right and now wrong."""
    assert {len(ids) % BLOCK for ids in prompts()} == set(range(BLOCK))
    outputs = answered(decoding)
    assert [output.outputs[0].token_ids for output in outputs] == wanted()
    drafted = sum(output.metrics.cycles for output in outputs) * decoding.speculation.gamma
    accepted = sum(output.metrics.mean_accepted_length * output.metrics.cycles for output in outputs)
    assert 0.4 * drafted < accepted < 0.99 * drafted


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
