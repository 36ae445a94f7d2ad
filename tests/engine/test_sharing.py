"""Two decoders on the same weights: each answers as if alone, and closing one leaves the other's models."""

from __future__ import annotations

import jax
import pytest

from smcjax import LLM, SMC, Autoregressive, Rejection, SamplingParams
from smcjax.engine.run.memory import choose_num_pages
from tests.checkpoints import Pair
from tests.engine.conftest import MAX_MODEL_LEN, smc_llm

FIELDS: dict[str, int] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2, "page_size": 4}


@pytest.mark.slow
def test_decoders_share_weights(pair: Pair, plain: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    sampled = SamplingParams(seed=3, max_tokens=12)
    with smc_llm(pair) as llm:
        before = llm.generate("ab", sampled, use_tqdm=False)[0].outputs
        for decoding in (Rejection(gamma=3, n_candidates=2), Autoregressive()):
            with LLM(share=llm, decoding=decoding, **FIELDS) as other:
                theirs = {id(leaf) for leaf in jax.tree.leaves(llm.models.target_params)}
                assert {id(leaf) for leaf in jax.tree.leaves(other.models.target_params)} == theirs
                assert other.generate("ab", greedy, use_tqdm=False)[0].outputs[0].token_ids == (
                    plain.generate("ab", greedy, use_tqdm=False)[0].outputs[0].token_ids
                )
            with pytest.raises(ValueError, match="this LLM is closed"):
                other.generate("ab")
        assert llm.generate("ab", sampled, use_tqdm=False)[0].outputs == before
    with pytest.raises(ValueError, match="share must be an LLM that is not closed"):
        LLM(share=llm, decoding=Autoregressive())


def test_what_cannot_be_shared(pair: Pair, plain: LLM) -> None:
    with pytest.raises(ValueError, match="the models to share have no draft"):
        LLM(share=plain, decoding=SMC())
    with pytest.raises(ValueError, match=r"model is .* and share brings the models"):
        LLM(pair.target, share=plain, decoding=Autoregressive())
    with pytest.raises(ValueError, match="dtype is 'bfloat16' and share brings the models"):
        LLM(share=plain, decoding=Autoregressive(), dtype="bfloat16")
    with pytest.raises(
        ValueError, match=r"num_pages must be a whole number from 2 to \d+, or a share such as 0.5, got 1.5"
    ):
        LLM(share=plain, decoding=Autoregressive(), num_pages=1.5)


def test_fractions_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves and the weights stay within the share of the memory that may be used."""
    for name in ("gpu_memory", "device_memory"):
        monkeypatch.setattr(f"smcjax.engine.run.memory.{name}", lambda: 1_000_000)

    def pages(share: float | None) -> int:
        fields = {"page_bytes": 1_000, "largest_request": 10, "max_num_seqs": 1 << 10, "weight_bytes": 200_000}
        return choose_num_pages(share, gpu_memory_utilization=0.8, **fields)

    assert pages(None) == pages(1.0) == 600
    assert pages(0.5) == 300
