"""The engine on a pair with Native Sparse Attention: whoever finds a cached prefix, or is preempted, is as if alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smcjax import LLM, Autoregressive, Rejection, SamplingParams, SparseVerification
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.engine.schedule.scheduler import ChunkLengths
from smcjax.model import LayerSpec
from smcjax.sparse.nsa import NSA
from tests.checkpoints import Pair, write_model
from tests.engine.conftest import MAX_MODEL_LEN, smc_llm
from tests.engine.test_engine import fingerprint, sound

SPARSE = NSA(kernel_size=4, kernel_stride=2, block_size=8, num_blocks=3, window=6, local_blocks=1)
RANDOM = np.random.default_rng(0).integers(0, 256, (4, 40)).tolist()
SHAPES = [(20, 3, 1), (20, 5, 2), (17, 1, 1), (24, 2, 3), (20, 3, 1), (20, 9, 2)]  # tokens shared and own, and whose
PROMPTS = [{"prompt_token_ids": RANDOM[0][:shared] + RANDOM[family][:own]} for shared, own, family in SHAPES]
PARAMS = [SamplingParams(seed=seed, max_tokens=14 + 2 * seed, ignore_eos=True) for seed in range(len(PROMPTS))]


OF_SPARSE: dict[str, Any] = {"layers": (LayerSpec(SPARSE),)}
SMC = {"trace": False, "ess_threshold": 0.0}  # rows that are never resampled share few pages


def in_short_chunks(llm: LLM) -> LLM:
    llm.engine.runner.chunks = llm.engine._scheduler.chunks = ChunkLengths(8, 8)
    return llm


@pytest.mark.slow
def test_cached_prefixes_and_preemption_change_no_token(tmp_path: Path) -> None:
    page_size = 4  # half a block, and a compressed token's length
    target = write_model(tmp_path / "target", 272, 1, **OF_SPARSE)
    pair = Pair(target, write_model(tmp_path / "draft", 264, 2, **OF_SPARSE, hidden_size=12))
    pages = 1 + Footprint(4, page_size, 1).worst_case(1, MAX_MODEL_LEN)  # for the largest request
    fields: dict[str, Any] = {"page_size": page_size, "num_pages": pages, "max_num_seqs": 6}
    with smc_llm(pair, SMC, enable_prefix_caching=False, **fields) as llm:
        each = zip(PROMPTS, PARAMS, strict=True)
        alone = [fingerprint(in_short_chunks(llm).generate(*one, use_tqdm=False)[0]) for one in each]
    with smc_llm(pair, SMC, admission="optimistic", **fields) as llm:
        outputs = in_short_chunks(llm).generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [fingerprint(output) for output in outputs] == alone
        sound(llm.engine)
        metrics = llm.metrics()
    assert metrics["preemptions"] > 0
    assert metrics["prefix_cache_hits"] > 0


@pytest.mark.slow
def test_control_compressed_tokens_where_they_begin_spoil_cached_prefixes(tmp_path: Path, patch_programs: Any) -> None:
    """Harmless for requests that share nothing; those behind one cached prefix write to its pages."""
    target = write_model(tmp_path / "target", 272, 1, **OF_SPARSE)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)

    def logprobs(caching: bool) -> np.ndarray:
        fields: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "page_size": 4, "max_num_seqs": 2}
        fields |= {"num_pages": 80, "enable_prefix_caching": caching}
        with LLM(target, decoding=Autoregressive(), **fields) as llm:
            outputs = in_short_chunks(llm).generate(PROMPTS, params, use_tqdm=False)
            assert (llm.metrics()["prefix_cache_hits"] > 0) == caching
        return np.array([output.outputs[0].logprobs for output in outputs])

    strict = logprobs(caching=True)
    patch_programs(NSA, "home", lambda kind, starts: starts)
    np.testing.assert_allclose(logprobs(caching=False), strict, atol=1e-5)
    assert np.abs(logprobs(caching=True) - strict).max() > 1e-3


@pytest.mark.parametrize("missing", ["target", "draft"])
@pytest.mark.parametrize(("block", "page_size", "seen"), [(8, 12, 12), (24, None, 16)])
def test_pages_that_cut_blocks_are_refused_before_weights_are_read(
    tmp_path: Path, missing: str, block: int, page_size: int | None, seen: int
) -> None:
    layers = {"layers": (LayerSpec(dataclasses.replace(SPARSE, block_size=block)),)}
    plain, sparse = (write_model(tmp_path / name, 272, 1, **of) for name, of in (("plain", {}), ("sparse", layers)))
    pair = Pair(sparse, plain) if missing == "target" else Pair(plain, sparse)
    for path in (plain, sparse):  # which to read would fail
        (weights,) = Path(path).glob("*.safetensors")
        weights.write_bytes(bytes(weights.stat().st_size))
    said = rf"page_size must be a multiple or a divisor of {block}, the block of .*, got {seen}\."
    with pytest.raises(ValueError, match=said):
        smc_llm(pair, SMC, page_size=page_size)


@pytest.mark.parametrize(
    ("layers", "schedule", "words"),
    [
        ({}, None, r"^sparse is about a target's selected blocks and this target has no layer that selects any; .*"),
        (
            OF_SPARSE,
            (True, False),
            r"^schedule must have a flag for each of the target's sparse layers, 1 in all, got 2; give as many, .*",
        ),
    ],
)
def test_targets_that_cannot_be_verified_so_are_refused_before_weights_are_read(
    tmp_path: Path, layers: dict[str, Any], schedule: Any, words: str
) -> None:
    target = write_model(tmp_path / "target", 272, 1, **layers)
    (weights,) = Path(target).glob("*.safetensors")
    weights.write_bytes(bytes(weights.stat().st_size))
    sparse = SparseVerification("merged", schedule=schedule)
    with pytest.raises(ValueError, match=words):
        LLM(target, draft_model="ngram", decoding=Rejection(sparse=sparse))
