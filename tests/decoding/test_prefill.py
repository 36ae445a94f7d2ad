"""The paged forward, prompts in chunks and tokens one by one, gives the logits of the dense forward."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import autoregressive, smc
from smcjax.decoders import Autoregressive
from smcjax.decoding.admission import admit
from smcjax.decoding.groups import PairParams
from smcjax.decoding.prefill import prefill_chunk
from smcjax.kv import PagePool
from smcjax.model import ModelConfig, Rope, RopeScaling, init_params, logits
from smcjax.model.decoder import unembed
from tests.helpers import Ask, assert_pages_sound, batch, noisy_params, tiny_config

MAX_LEN = 24
_chunk = jax.jit(prefill_chunk, static_argnums=(0, 5))
_dense = jax.jit(logits, static_argnums=0)
_admit, _unembed = jax.jit(admit, static_argnums=0), jax.jit(unembed)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa, tied": {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 16, "tie_embeddings": True},
    "qwen3": {"qk_norm": "head"},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "llama3-rope": {"rope": Rope(500.0, RopeScaling(8.0, 1.0, 4.0, 16))},
}


def paged_logits(config: ModelConfig, params: Any, prompts: list[list[int]], chunk: int, page_size: int) -> np.ndarray:
    """Logits after each whole prompt."""
    program = autoregressive.Program(Autoregressive(), config, None, MAX_LEN, page_size)
    memory = program.create_memory(PairParams(params), len(prompts) * program.max_pages + 1)
    # Stale slots hold whatever the last request left: here NaN.
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), memory.target)
    padded, requests = batch([Ask(tuple(p)) for p in prompts], config.vocab_size, MAX_LEN)
    pool, sequences = _admit(program, memory.pool, padded, requests, jnp.ones(len(prompts), bool))
    assert_pages_sound(sequences.block_table, pool)
    hidden = jnp.full((len(prompts), config.hidden_size), jnp.nan)
    for start in range(0, padded.shape[1], chunk):
        cache, hidden, _ = _chunk(config, params, cache, sequences, jnp.asarray(start), chunk, hidden)
    return np.asarray(_unembed(params, hidden))


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_equals_dense(variant: str) -> None:
    config = tiny_config(11, **VARIANTS[variant])
    params = noisy_params(config)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 11, length).tolist() for length in (1, 5, 13, 16)]
    for chunk, page_size in ((4, 4), (16, 3)) if variant == "plain" else ((5, 4),):
        got = paged_logits(config, params, prompts, chunk, page_size)
        for row, prompt in enumerate(prompts):
            expected = _dense(config, params, jnp.asarray([prompt + [0] * (16 - len(prompt))]))[0, len(prompt) - 1]
            np.testing.assert_allclose(got[row], expected, atol=1e-4)
            if len(prompt) > 1:
                other = _dense(
                    config, params, jnp.asarray([[(prompt[0] + 1) % 11, *prompt[1:], *[0] * (16 - len(prompt))]])
                )
                assert np.abs(got[row] - other[0, len(prompt) - 1]).max() > 1e-3, "control: another prompt differs"


def test_fan_out_shares_pages() -> None:
    """A group's rows name the same pages; an absent group takes none."""
    prompts, requests = batch([Ask((1, 2, 3, 4, 0)), Ask((1,)), Ask((2, 2))], 5, MAX_LEN)
    program = smc.Program(smc.SMC(3, 2), tiny_config(5), tiny_config(5), MAX_LEN, page_size=4)
    present = jnp.asarray([True, True, False])
    pool, sequences = jax.jit(functools.partial(admit, program))(PagePool.create(20), prompts, requests, present)
    assert_pages_sound(sequences.block_table, pool)
    assert int(pool.num_free) == 19 - 3
    table = np.asarray(sequences.block_table)
    assert (table[:3] == table[0]).all()
    assert (table[6:] == 0).all()
    assert sequences.length.tolist() == [5, 5, 5, 1, 1, 1, 1, 1, 1]


def test_no_row_outgrows_its_buffers() -> None:
    """Requests for more tokens than there is room for are cut, prompts that do not fit are refused."""
    program = autoregressive.Program(Autoregressive(), tiny_config(5), None, MAX_LEN, page_size=4)
    prompts, requests = batch([Ask((1, 2), max_tokens=9)], 5, MAX_LEN)
    memory = jax.eval_shape(
        lambda: program.create_memory(PairParams(init_params(program.target, jax.random.key(0))), 20)
    )
    memory = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), memory)
    asked = dataclasses.replace(requests, limit=jnp.asarray([10 * MAX_LEN]))
    state = autoregressive.begin(program, memory, prompts, asked, jnp.ones(1, bool))
    assert state.requests.limit.tolist() == [MAX_LEN]
    long = jnp.ones((1, MAX_LEN + 1), jnp.int32)
    with pytest.raises(ValueError, match=f"prompts have {MAX_LEN + 1} columns and max_model_len is {MAX_LEN}"):
        autoregressive.begin(program, memory, long, requests, jnp.ones(1, bool))
