"""The runner chooses the lengths of prompt chunks from the device, the implementation, the dtype and the models."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from smcjax import smc
from smcjax.engine.run import runner as runner_module
from smcjax.engine.run.programs import Programs
from smcjax.engine.run.runner import Runner
from smcjax.engine.schedule.scheduler import ChunkLengths
from smcjax.model.config import ModelConfig
from smcjax.model.params import init_params

pytestmark = pytest.mark.all_sizes

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=2048,
)


def pair_runner(max_model_len: int, implementation: str, dtype: jnp.dtype, draft_dim: int) -> tuple[Runner, Any]:
    draft = dataclasses.replace(MODEL, head_dim=draft_dim)
    params = smc.PairParams(*(init_params(model, jax.random.key(0), dtype) for model in (MODEL, draft)))
    program = smc.SMCDecoder(smc.SMC(2, 2), MODEL, draft, max_model_len, implementation=implementation)
    return Runner(program, params, 8, Programs()), program


@pytest.mark.parametrize(("max_model_len", "expected"), [(2048, (32, 128)), (100, (32, 100)), (20, (20, 20))])
def test_prompts_are_read_in_short_chunks_on_a_cpu(max_model_len: int, expected: tuple[int, int]) -> None:
    runner, _ = pair_runner(max_model_len, "auto", jnp.float32, 64)
    assert runner.chunks == ChunkLengths(*expected)


@pytest.mark.parametrize(
    ("max_model_len", "implementation", "dtype", "draft_dim", "expected"),
    [
        (2048, "mosaic", jnp.bfloat16, 64, (128, 512)),
        (300, "mosaic", jnp.bfloat16, 64, (128, 300)),
        (100, "mosaic", jnp.bfloat16, 64, (100, 100)),
        (2048, "xla", jnp.bfloat16, 64, (128, 128)),
        (2048, "mosaic", jnp.float32, 64, (128, 128)),
        (2048, "mosaic", jnp.bfloat16, 96, (128, 128)),
    ],
)
def test_prompts_are_read_in_long_chunks_where_kernels_read_them(
    monkeypatch: pytest.MonkeyPatch,
    max_model_len: int,
    implementation: str,
    dtype: jnp.dtype,
    draft_dim: int,
    expected: tuple[int, int],
) -> None:
    """On a GPU, by the target's and by the draft's forward."""
    monkeypatch.setattr(runner_module, "on_cpu", lambda: False)
    runner, program = pair_runner(max_model_len, implementation, dtype, draft_dim)
    assert runner.chunks == ChunkLengths(*expected)
    lengths = {key[3] for key in runner.jobs(2, program) if key[-1] == "prefill"}
    assert lengths == set(expected)
