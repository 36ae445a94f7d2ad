"""A draft on a GPU of its own: the tokens of one GPU in float32, and in bfloat16 the same ones run after run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from smcjax import LLM, SMC, SamplingParams
from smcjax.model.parallel import two_devices
from tests.engine.parallel_laws import told
from tests.engine.separate_laws import integers_alike
from tests.engine.test_on_gpu import PROMPTS
from tests.engine.test_parallel_on_gpu import pair as pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices"),
]


def answers(pair: tuple[str, str], *, separate: bool, **changes: Any) -> list[Any]:
    decoding = SMC(8, 4, pipelined=True, ess_threshold=0.9)
    fields: dict[str, Any] = {"max_model_len": 192, "max_num_seqs": 2, **changes}
    found = two_devices() if separate else None
    with (
        mock.patch("smcjax.engine.llm.two_devices", return_value=found),
        LLM(pair[0], draft_model=pair[1], decoding=decoding, **fields) as llm,
    ):
        params = [SamplingParams(max_tokens=60, temperature=1.0, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        if separate:
            integers_alike(llm)
    return outputs


@pytest.mark.parametrize("implementation", ["xla", "auto"])
def test_tokens_are_those_of_one_device_in_float32(pair: tuple[str, str], implementation: str) -> None:
    one, two = (
        answers(pair, separate=separate, dtype="float32", implementation=implementation) for separate in (False, True)
    )
    assert [told(output) for output in two] == [told(output) for output in one]
    assert sum(output.metrics.resamples for output in one) > 0


def test_kernels_give_the_same_run_after_run_and_on_one_device(pair: tuple[str, str]) -> None:
    """In bfloat16 as well: each device runs the kernels that one device runs."""
    first, again, one = (answers(pair, separate=separate) for separate in (True, True, False))
    assert [told(output) for output in first] == [told(output) for output in again]
    assert [told(output) for output in first] == [told(output) for output in one]
    assert all(np.isfinite(output.smc.log_evidence) for output in first)
