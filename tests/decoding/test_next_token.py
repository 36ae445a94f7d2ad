"""Which way a step's token is computed: whatever the shapes, a cycle lowers for CUDA with the kernels asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from smcjax import SMC, autoregressive, smc
from smcjax.decoding.sequences import Requests
from smcjax.model.config import ModelConfig
from smcjax.model.params import param_shapes

# Of a size that the persistent step takes, with four query heads to a KV head.
MODEL = ModelConfig(128, 512, 512, 2, 8, 2, 64, 4096, tie_embeddings=True, dtype="bfloat16")
PARAMS = param_shapes(MODEL, jnp.bfloat16)
KERNEL = "decode_step_mosaic_gpu"  # its name within the module


def lowered(decoder: Any, program: Any, params: Any, groups: int) -> str:
    """A step of the decoder, lowered for CUDA."""

    def start() -> Any:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        memory = decoder.Memory.create(program, zeros, 500)
        requests = Requests.alike(jax.random.key(0), jnp.full(groups, 40), vocab_size=128, max_tokens=100)
        return decoder.begin(program, memory, jnp.zeros((groups, 64), jnp.int32), requests, jnp.ones(groups, bool))

    step = jax.jit(lambda params, state: decoder.step(program, params, state))
    return step.trace(params, jax.eval_shape(start)).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("n_particles", "groups", "max_model_len", "in_one_kernel"),
    [
        (8, 1, 1024, True),
        (8, 2, 1024, True),
        (8, 4, 1024, True),  # but for the first step, whose 64 tokens are too many
        (5, 1, 1024, True),  # the first step only: its 10 tokens of four heads fill whole tiles, 5 do not
        (5, 1, 4096, True),
        (16, 1, 1024, True),  # the first step by eight rows, as 16 of two tokens have too many queries
        (32, 1, 4096, True),  # the same for all but the first
        (16, 3, 1024, False),
    ],
)
def test_a_cycle_lowers_whichever_way_its_steps_take(
    n_particles: int, groups: int, max_model_len: int, in_one_kernel: bool
) -> None:
    program = smc.Program(SMC(n_particles, 4), MODEL, MODEL, max_model_len, implementation="mosaic")
    assert (KERNEL in lowered(smc, program, smc.PairParams(PARAMS, PARAMS), groups)) == in_one_kernel


@pytest.mark.parametrize("max_model_len", [1024, 4096])
def test_a_truncated_law_is_drawn_from_layer_by_layer(max_model_len: int) -> None:
    program = autoregressive.Program(MODEL, max_model_len, implementation="mosaic")
    assert KERNEL in lowered(autoregressive, program, PARAMS, 1)
    assert KERNEL not in lowered(autoregressive, dataclasses.replace(program, truncates=True), PARAMS, 1)
