"""Requests that ask for more than a draw, on two virtual devices: as on one. And whose a profile is.

Run by `test_parallel.py` in a process of its own, for XLA is told the number of devices when it starts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smcjax import LLM, SMC, Auto, Rejection, RequestOutput, SamplingParams, TextPotential
from smcjax.engine.load.fingerprints import fingerprints
from smcjax.engine.schedule.scheduler import ChunkLengths
from smcjax.planner import Profile
from smcjax.smc import TokenPotential
from tests.checkpoints import Pair, write_model
from tests.engine.parallel_laws import TARGET_SHAPE, same_everywhere
from tests.planner.tables import measured

# Both ask for features of the same programs.
COMMON: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 2, "logit_bias": {98: 4.0, 99: -4.0}, "top_k": 5}
ASKED: list[dict[str, Any]] = [
    {**COMMON, "frequency_penalty": 1.5, "top_p": 0.8},
    {**COMMON, "response_format": {"type": "regex", "regex": "[ab]{3}c{2,9}d"}},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    where, own = tmp_path_factory.mktemp("pair"), {"num_heads": 4, "num_kv_heads": 2, "num_layers": 1}
    target = write_model(where / "target", 271, 1, **TARGET_SHAPE)
    return Pair(target, write_model(where / "draft", 264, 2, hidden_size=12, **own))


def answered(pair: Pair, size: int, where: Path) -> tuple[list[RequestOutput], str]:
    """Answers to `ASKED`, and how the devices are named in a profile of the pair, which is left there."""
    fields: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 2, "page_size": 4, "dtype": "float32"}
    fields |= {"quantization": "int8", "draft_quantization": "int8", "tensor_parallel_size": size}
    decoding = Rejection(gamma=3, n_candidates=2)
    with LLM(pair.target, draft_model=pair.draft, decoding=decoding, **fields) as llm:
        llm.engine.runner.chunks = llm.engine._scheduler.chunks = ChunkLengths(16, 16)
        params = [SamplingParams(max_tokens=14, seed=seed, **one) for seed, one in enumerate(ASKED)]
        outputs = llm.generate([{"prompt_token_ids": [*b"a tale"]}] * len(ASKED), params, use_tqdm=False)
        if size > 1:
            same_everywhere(llm)
        whose = fingerprints(llm.models)
        Profile(whose.device, whose.model, whose.draft, (measured(Rejection(2), {1: 1.0}),)).save(where / "p.json")
        return outputs, whose.device


def test_requests_that_ask_for_more(pair: Pair, tmp_path: Path) -> None:
    """Penalties, a form, truncation, int8: the tokens of one device, and its log-probabilities but for rounding.

    A profile of one device is none of two, on which another decoder may be the faster one.
    """
    one, on_one = answered(pair, 1, tmp_path)
    two, on_two = answered(pair, 2, tmp_path)
    for mine, theirs in zip(two, one, strict=True):
        answer, want = mine.outputs[0], theirs.outputs[0]
        assert (answer.token_ids, answer.finish_reason) == (want.token_ids, want.finish_reason)
        np.testing.assert_allclose(answer.logprobs, want.logprobs, atol=1e-4)
        assert likeliest(mine) == likeliest(theirs) != []
    assert re.fullmatch("[ab]{3}c{2,9}d", two[1].outputs[0].text)
    assert on_two == f"2 × {on_one}"
    with pytest.raises(
        ValueError, match=rf"^profile is of {re.escape(on_two)} and this device is {re.escape(on_one)}; "
    ):
        LLM(pair.target, draft_model=pair.draft, decoding=Auto(profile=tmp_path / "p.json"), dtype="float32")


def test_potentials_steer_two_devices(pair: Pair) -> None:
    """Potentials of text and of tokens give one device's tokens and evidence; requests have their own, and both devices
    draft."""
    favour = TokenPotential(((98, 0.7),))
    longer, shorter = (
        TextPotential(lambda prompt, texts, sign=sign: [sign * 0.2 * len(text) for text in texts], ask=2)
        for sign in (1, -1)
    )
    asks = [
        SamplingParams(max_tokens=14, seed=3, ignore_eos=True, potentials=[one, favour]) for one in (longer, shorter)
    ]

    def steered(size: int) -> list[RequestOutput]:
        fields: dict[str, Any] = {"max_model_len": 48, "max_num_seqs": 2, "page_size": 4, "dtype": "float32"}
        fields |= {"decoding": SMC(3, 2, ess_threshold=0.9), "tensor_parallel_size": size}
        fields |= {"draft_tensor_parallel_size": 2} if size > 1 else {}
        with LLM(pair.target, draft_model=pair.draft, **fields) as llm:
            llm.engine.runner.chunks = llm.engine._scheduler.chunks = ChunkLengths(16, 16)
            outputs = llm.generate(["a tale"] * 2, asks, use_tqdm=False)
            if size > 1:
                same_everywhere(llm)
            return outputs

    one, two = steered(1), steered(2)
    assert [output.outputs[0].token_ids for output in two] == [output.outputs[0].token_ids for output in one]
    evidence = [[output.smc.log_evidence for output in outputs] for outputs in (one, two)]
    np.testing.assert_allclose(evidence[1], evidence[0], atol=1e-4)
    assert one[0].metrics.resamples
    assert abs(evidence[0][0] - evidence[0][1]) > 0.1, "negative control"


def likeliest(output: RequestOutput) -> list[list[int]]:
    """The tokens that were the likeliest ones at each place, of prompt and answer."""
    places = [*(output.prompt_top_logprobs or []), *(output.outputs[0].top_logprobs or [])]
    return [[top.token_id for top in place] for place in places if place is not None]
