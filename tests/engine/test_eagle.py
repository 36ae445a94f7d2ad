"""EAGLE-3 heads as users name them: their directory is known, and caches and company change no token.

The head is random, so it is often wrong; at a high temperature some drafts are accepted. Tokens of a sampled answer
depend on what was drafted, so a head that reads another feature or another request's entry gives other tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import LLM, SMC, CheckpointError, Rejection, SamplingParams
from smcjax.engine.schedule.scheduler import ChunkLengths
from tests.model.test_eagle import HEAD

TARGET = Path(__file__).parents[1] / "data" / "hf_golden" / "llama31_rope_tied"
GOLDEN = json.loads((TARGET / "golden.json").read_text())
PAGE_SIZE, CHUNK = 4, 6
RANDOM = np.random.default_rng(3).integers(3, 384, (3, 16)).tolist()
# All begin alike, for two pages and for two and a half; what follows differs from there on.
PROMPTS = [RANDOM[0], RANDOM[0][:8] + RANDOM[1][:5], RANDOM[0][:10] + RANDOM[2][:3], RANDOM[0]]


def llm_of(**changes: Any) -> LLM:
    """Three drafts, chunks of prefill that end within pages."""
    fields: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 2, "page_size": PAGE_SIZE, "dtype": "float32"}
    llm = LLM(TARGET, draft_model=HEAD, decoding=Rejection(gamma=3), **{**fields, **changes})
    llm.engine.runner.chunks = llm.engine._scheduler.chunks = ChunkLengths(CHUNK, CHUNK)
    return llm


def answers(llm: LLM, prompts: list[list[int]], temperature: float = 4.0) -> list[Any]:
    params = [SamplingParams(max_tokens=20, temperature=temperature, seed=len(p), ignore_eos=True) for p in prompts]
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with llm_of() as llm:
        yield llm


@pytest.mark.slow
def test_greedy_tokens_are_the_targets(llm: LLM) -> None:
    prompts = [prompt for prompt in GOLDEN["prompts"] if len(prompt) < 20]
    want = [
        greedy[:20] for prompt, greedy in zip(GOLDEN["prompts"], GOLDEN["greedy"], strict=True) if prompt in prompts
    ]
    assert tokens(answers(llm, prompts, temperature=0.0)) == want


@pytest.mark.slow
def test_cached_beginnings_and_preemption_change_no_token(llm: LLM) -> None:
    """One by one over cached pages, as two at a time without any, where one has to give its pages up."""
    cached = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    assert [output.metrics.num_cached_tokens for output in cached] == [0, 8, 8, 12]
    assert tokens(cached)[0] == tokens(cached)[3]
    assert sum(output.metrics.accepted for output in cached) > 4
    with llm_of(enable_prefix_caching=False, admission="optimistic", num_pages=14) as other:
        outputs = answers(other, PROMPTS)
        assert sum(output.metrics.preemptions for output in outputs) > 0
        assert sum(output.metrics.num_cached_tokens for output in outputs) == 0
        assert tokens(outputs) == tokens(cached)
        params, runner = other.engine.runner.params, other.engine.runner
        draft = dataclasses.replace(params.draft, fc=jnp.roll(params.draft.fc, 64, axis=1))
        runner.params = dataclasses.replace(params, draft=draft)
        assert tokens(answers(other, PROMPTS)) != tokens(cached), "control: the streams of other layers"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoding": SMC()}, "draft_model is an EAGLE-3 head of 96 of the target's 384 token ids, .* no probability"),
        ({"draft_quantization": "int8"}, "draft_quantization is 'int8' and draft_model is an EAGLE-3 head"),
        ({"draft_drop_layers": [0]}, r"draft_drop_layers is \[0\] and draft_model is an EAGLE-3 head"),
    ],
    ids=["SMC", "quantization", "layers"],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(TARGET, draft_model=HEAD, **{"decoding": Rejection(), **changes})


def test_a_head_of_another_target_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"vocab_size is 384 .* the target has .* token ids; use the head made"):
        LLM(Path(__file__).parents[1] / "data" / "recall" / "target", draft_model=HEAD, decoding=Rejection())
