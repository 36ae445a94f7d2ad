"""Tensor parallelism on two GPUs: the tokens of one in float32, kernels in bfloat16, and devices that stay alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from smcjax import LLM, SMC, Autoregressive, Rejection, SamplingParams
from tests.engine.parallel_laws import same_everywhere, told
from tests.engine.test_on_gpu import DRAFT, PROMPTS, TARGET, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices"),
    pytest.mark.compiled_at_once,
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return tuple(
        saved(config, seed, Path(tmp_path_factory.mktemp("model"))) for seed, config in enumerate((TARGET, DRAFT))
    )


def answers(pair: tuple[str, str], decoding: Any, size: int, **changes: Any) -> list[Any]:
    fields: dict[str, Any] = {"max_model_len": 192, "max_num_seqs": 2, "tensor_parallel_size": size}
    target, draft = pair
    with LLM(target, draft_model=draft, decoding=decoding, **{**fields, **changes}) as llm:
        params = [SamplingParams(max_tokens=24, temperature=1.0, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        same_everywhere(llm)
    return outputs


@pytest.mark.parametrize("implementation", ["xla", "auto"])  # by collectives of XLA's, and by kernels over peers
@pytest.mark.parametrize("decoding", [Autoregressive(), Rejection(gamma=3), SMC(4, 3, control=0), SMC(4, 3)])
def test_tokens_are_those_of_one_device_in_float32(pair: tuple[str, str], decoding: Any, implementation: str) -> None:
    one, two = (answers(pair, decoding, size, dtype="float32", implementation=implementation) for size in (1, 2))
    assert [told(output) for output in two] == [told(output) for output in one]


@pytest.mark.parametrize("divided", [1, 2])
def test_kernels_give_the_same_run_after_run(pair: tuple[str, str], divided: int) -> None:
    runs = [answers(pair, SMC(8, 4, control=0), 2, draft_tensor_parallel_size=divided) for _ in range(2)]
    first, again = ([told(output) for output in outputs] for outputs in runs)
    assert first == again
    assert all(np.isfinite(output.smc.log_evidence) for output in runs[0])


def test_a_divided_draft_drafts_what_a_whole_one_does(pair: tuple[str, str], tmp_path: Path) -> None:
    """A draft that is another copy of the target is nearly always accepted, by the persistent step on both devices."""
    same = saved(DRAFT, 1, tmp_path)  # as the pair's draft
    cycles = {}
    for divided in (1, 2):
        fields: dict[str, Any] = {"max_model_len": 192, "max_num_seqs": 2, "tensor_parallel_size": 2}
        fields |= {"decoding": Rejection(gamma=4), "draft_tensor_parallel_size": divided}
        with LLM(pair[1], draft_model=same, **fields) as llm:
            params = [SamplingParams(max_tokens=60, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
            llm.generate(PROMPTS, params, use_tqdm=False)
            cycles[divided] = llm.metrics()["cycles"]
    assert cycles[2] < 1.1 * cycles[1] < 1.5 * 60 / 5 * len(PROMPTS)


def test_bfloat16_differs_by_rounding_alone(pair: tuple[str, str]) -> None:
    """Log-probabilities of the same greedy first tokens, by kernels on one device and on two."""
    found = []
    for size in (1, 2):
        with LLM(pair[0], decoding=Autoregressive(), max_model_len=192, tensor_parallel_size=size) as llm:
            params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([{t.token_id: t.logprob for t in one.outputs[0].top_logprobs[0]} for one in outputs])
    for one, two in zip(*found, strict=True):
        common = one.keys() & two.keys()
        assert len(common) >= 3
        for token in common:
            assert abs(one[token] - two[token]) < 0.15
