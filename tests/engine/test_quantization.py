"""`LLM(quantization=…, draft_quantization=…)`: what is held, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import LLM, Autoregressive
from smcjax.model import load_checkpoint
from smcjax.model.quantize import quantize_matrix
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm


def test_both_models_in_int8(pair: Pair) -> None:
    with smc_llm(pair, quantization="int8", draft_quantization="int8", max_num_seqs=1) as llm:
        assert llm.models.draft_params is not None
        for params, path in ((llm.models.target_params, pair.target), (llm.models.draft_params, pair.draft)):
            plain = load_checkpoint(path)[1]
            for name in ("qkv", "o", "gate_up", "down"):
                assert_int8(getattr(params.layers[0], name), getattr(plain.layers[0], name))
            assert_int8(params.unembed, plain.unembed[: params.unembed.shape[0]])  # without its padding


def assert_int8(kept: jax.Array, plain: jax.Array) -> None:
    """On a CPU int8 weights are kept multiplied out: the numbers of the int8 matrix, none of the original's."""
    matrix = quantize_matrix(plain)
    np.testing.assert_array_equal(np.asarray(kept), np.asarray(matrix.rows(jnp.arange(plain.shape[0]))))
    assert not np.array_equal(np.asarray(kept), np.asarray(plain))


def test_one_model_alone(pair: Pair) -> None:
    target, draft = load_checkpoint(pair.target)[1], load_checkpoint(pair.draft)[1]
    with smc_llm(pair, draft_quantization="int8") as llm:
        assert llm.models.draft_params is not None
        assert_int8(llm.models.draft_params.layers[0].qkv, draft.layers[0].qkv)
        np.testing.assert_array_equal(llm.models.target_params.layers[0].qkv, target.layers[0].qkv)


def test_what_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"quantization must be 'int8', 'float8' or None .*, got 'awq'"):
        smc_llm(pair, quantization="awq")
    with pytest.raises(ValueError, match=r"^draft_quantization is 'int8' and Autoregressive\(\) has no draft; omit it"):
        LLM(pair.target, decoding=Autoregressive(), draft_quantization="int8")
