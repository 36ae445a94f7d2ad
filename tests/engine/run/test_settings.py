"""Whatever a process has set of JAX, a seed gives the same tokens, without a warning, or one sentence says why not."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from smcjax import LLM, SamplingParams
from smcjax.engine.run.settings import PROMOTION, own_settings
from smcjax.noise import key_from, key_of, words_of
from tests.checkpoints import Pair

PROMPTS = ["Tom has 3 apples.", "Anna has 5 pens. How many"]
PARAMS = SamplingParams(max_tokens=8, seed=1, temperature=0.8)
SCRIPT = f"""
import sys
from smcjax import LLM, SMC, SamplingParams
prompts, params = {PROMPTS}, SamplingParams(max_tokens=8, seed=1, temperature=0.8)
fields = dict(decoding=SMC(n_particles=4, gamma=3, control=0), max_model_len=48, max_num_seqs=1)
with LLM(sys.argv[1], draft_model=sys.argv[2], **fields) as llm:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    streamed = [token for chunk in llm.generate_stream(prompts[1], params) for token in chunk.token_ids]
    print([output.outputs[0].token_ids for output in outputs], streamed)
    assert llm.metrics()["kv_pages_free"] == llm.metrics()["kv_pages_total"]
"""


def run(pair: Pair, **settings: str) -> str:
    """Runs the script with these environment variables, all warnings being errors, and returns its stdout."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, pair.target, pair.draft]
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **settings}  # each compiles for itself
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout


SETTINGS = {
    "JAX_TRANSFER_GUARD": "disallow",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg",
    "JAX_LEGACY_PRNG_KEY": "error",
    "JAX_ENABLE_X64": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_DEBUG_NANS": "1",
    "JAX_DEBUG_INFS": "1",
    "JAX_DEBUG_KEY_REUSE": "1",
    "JAX_ENABLE_CHECKS": "1",
}


@pytest.mark.slow
def test_settings_change_nothing(pair: Pair, llm: LLM) -> None:
    """All at once, which are none of this process's: none of them takes back what another does."""
    first, second = (output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert run(pair, **SETTINGS) == f"{[first, second]} {second}\n"


def test_settings_that_cannot_be_honoured_are_refused_before_any_work() -> None:
    held = len(jax.live_arrays())
    with (
        jax.disable_jit(),
        pytest.raises(ValueError, match=r"^jax_disable_jit is on and .*; unset it \(JAX_DISABLE_JIT\)\.$"),
    ):
        LLM()
    before = jax.config.jax_transfer_guard_device_to_host
    try:
        jax.config.update("jax_transfer_guard_device_to_host", "disallow_explicit")
        with pytest.raises(ValueError, match=r"^jax_transfer_guard_device_to_host is 'disallow_explicit' and .*\.$"):
            LLM()
    finally:
        jax.config.update("jax_transfer_guard_device_to_host", before)
    assert len(jax.live_arrays()) == held


def test_the_engine_has_its_own_settings_for_as_long_as_it_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROMOTION, "rank", "allow")  # as in users' processes
    monkeypatch.setitem(PROMOTION, "dtype", "standard")
    with jax.enable_x64(True):  # and all tests are strict
        with own_settings():
            assert (jax.numpy.arange(3) + jax.numpy.ones(3, bool)).dtype == np.int32
            assert jax.numpy.arange(3).dtype == np.int32
            assert (jax.numpy.zeros((2, 3)) + jax.numpy.zeros(3)).shape == (2, 3)
        assert jax.numpy.arange(3).dtype == np.int64


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_are_of_one_kind(kind: str) -> None:
    with jax.default_prng_impl(kind):
        key = key_of(7)
        assert (words_of(key) == jax.random.key_data(jax.random.key(7, impl="threefry2x32"))).all()
        assert key_from(words_of(key)) == key
        if kind != "threefry2x32":
            with pytest.raises(ValueError, match=f"keys are '{kind}' and draws know 'threefry2x32' only; use"):
                words_of(jax.random.key(7))
