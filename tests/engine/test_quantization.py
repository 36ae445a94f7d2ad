"""`LLM(quantization=…, draft_quantization=…)`: what is held, that it runs, and what is refused."""

from __future__ import annotations

import jax
import pytest

from smcjax import LLM, Autoregressive, SamplingParams
from smcjax.model.quantize import QuantizedMatrix
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm


@pytest.mark.slow
def test_both_models_in_int8(pair: Pair) -> None:
    with smc_llm(pair, quantization="int8", draft_quantization="int8", max_num_seqs=1) as llm:
        assert llm.models.draft_params is not None
        for params in (llm.models.target_params, llm.models.draft_params):
            assert isinstance(params.layers[0].down, QuantizedMatrix)
            assert isinstance(params.unembed, QuantizedMatrix)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.runner.params))
        outputs = llm.generate(["ab", "hello"], SamplingParams(max_tokens=9, seed=1, ignore_eos=True), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 9]
    assert [output.error for output in outputs] == [None, None]
    with smc_llm(pair) as plain:
        # The embedding of an untied model is only looked up and stays as it is.
        assert held < 0.65 * sum(leaf.nbytes for leaf in jax.tree.leaves(plain.engine.runner.params))


def test_one_model_alone(pair: Pair) -> None:
    with smc_llm(pair, draft_quantization="int8") as llm:
        assert llm.models.draft_params is not None
        assert isinstance(llm.models.draft_params.layers[0].qkv, QuantizedMatrix)
        assert not isinstance(llm.models.target_params.layers[0].qkv, QuantizedMatrix)


def test_what_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"quantization must be 'int8' or None .*, got 'awq'"):
        smc_llm(pair, quantization="awq")
    with pytest.raises(ValueError, match=r"^draft_quantization is 'int8' and Autoregressive\(\) has no draft; omit it"):
        LLM(pair.target, decoding=Autoregressive(), draft_quantization="int8")
