"""A cycle is one program: no host, and no copy of the KV."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from smcjax import smc
from smcjax.bench.models import Models
from smcjax.decoding.sequences import Requests
from smcjax.model import LayerSpec
from smcjax.model.folding import folded_shapes
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SparseVerification
from tests.helpers import Ask, Pair, published, start, tiny_pair, tiny_params

PAIR = tiny_pair()
NSA_SPEC = LayerSpec(NSA(kernel_size=4, kernel_stride=2, block_size=4, num_blocks=3, window=3, local_blocks=1))
NSA_TARGET = dataclasses.replace(PAIR.target, layers=(NSA_SPEC,))
SPARSE = dataclasses.replace(
    PAIR, target=NSA_TARGET, params=smc.PairParams(tiny_params(NSA_TARGET, 1), PAIR.params.draft)
)
NUM_PAGES = 2003  # odd: its shape is unmistakable in HLO, and its bytes dwarf everything else
HOST = ("callback", "infeed", "outfeed", "send(", "recv(")
CALL = re.compile(r'custom_call_target="([^"]*)"')
KV_COPY = re.compile(rf"= f32\[{NUM_PAGES},\d+,\d+,\d+\]\S* copy(-start)?\(")


def compiled(function: Any, program: smc.Program, donate: bool = True, pair: Pair = PAIR) -> Any:
    """`function(params, state)` compiled for two groups, its state donated."""
    state = start(program, pair.params, [Ask((1, 2, 3)), Ask((2,))], num_pages=NUM_PAGES)
    jitted = jax.jit(functools.partial(function, program), donate_argnums=(1,) if donate else ())
    return jitted.lower(pair.params, state).compile(), state


def kv_bytes(state: smc.State) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves((state.memory.target, state.memory.draft)))


def test_no_host_and_no_copy_of_the_kv() -> None:
    check_one_program(PAIR, functools.partial(_run, 3))


@pytest.mark.slow
def test_no_host_and_no_copy_of_the_kv_with_sparse_attention_and_a_control() -> None:
    options = {"control": 0.1, "early_end": True, "potentials": (smc.TokenPotential(((1, 0.5),)),)}
    sparse = SparseVerification("merged", 2, "dfs", 2)
    check_one_program(SPARSE, smc.step, calls={"TopK"}, sparse=sparse, **options)  # XLA's own on a CPU


def check_one_program(pair: Pair, function: Any, calls: AbstractSet[str] = frozenset(), **options: Any) -> None:
    """No host, no calls out of XLA but these, no copy of the KV, and every buffer of the state donated."""
    program = pair.program(24, 4, gamma=2, n_particles=2, **options)
    executable, state = compiled(function, program, pair=pair)
    text, memory = executable.as_text(), executable.memory_analysis()
    assert not [word for word in HOST if word in text]
    assert set(CALL.findall(text)) == calls
    assert not KV_COPY.findall(text)
    leaves = jax.tree.leaves(state)
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    assert aliased is not None
    assert aliased.group(1).count("-alias)") == len(leaves), "every buffer of the state is updated in place"
    assert memory.alias_size_in_bytes >= kv_bytes(state)
    assert memory.temp_size_in_bytes < kv_bytes(state) / 4, "no hidden copy among the temporaries"


def _run(cycles: int, program: smc.Program, params: smc.PairParams, state: smc.State) -> Any:
    return smc.run(program, params, state, cycles)


@pytest.mark.slow
def test_control_without_donation_the_kv_is_copied() -> None:
    """Negative control: the searches above do find copies, callbacks and missing aliases where there are some."""
    executable, state = compiled(smc.step, PAIR.program(24, 4, gamma=2, n_particles=2), donate=False)
    text = executable.as_text()
    assert KV_COPY.findall(text)
    assert "input_output_alias" not in text
    assert executable.memory_analysis().output_size_in_bytes >= kv_bytes(state)

    def chatty(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x)
        return x

    text = jax.jit(chatty).lower(1.0).compile().as_text()
    assert any(word in text for word in HOST)
    assert CALL.findall(text)


def lowered(program: smc.Program, params: smc.PairParams, donate: bool = True) -> tuple[str, int]:
    """A cycle lowered for CUDA, and how many buffers its state has."""

    def begin() -> smc.State:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        memory = program.create_memory(zeros, NUM_PAGES)
        vocab_size = program.target.vocab_size
        requests = Requests.alike(jax.random.key(0), jnp.asarray([8]), vocab_size=vocab_size, max_tokens=10)
        return smc.begin(program, memory, jnp.zeros((1, 8), jnp.int32), requests, jnp.ones(1, bool))

    state = jax.eval_shape(begin)
    jitted = jax.jit(functools.partial(smc.step, program), donate_argnums=(1,) if donate else ())
    text = jitted.trace(params, state).lower(lowering_platforms=("cuda",)).as_text()
    return text, len(jax.tree.leaves(state))


KEPT = "tensor<1x8x320x64xf16>"  # scores of 64 compressed tokens by head, of 72 queries in tiles of 16


@pytest.mark.slow
def test_a_sparse_cycle_lowers_for_cuda() -> None:
    """At the 8B model's widths, without a GPU; by groups, and a kernel reads compressed tokens of pages of 128."""
    models = Models("llama-3.1-8b", "llama-3.2-1b", attention="nsa")
    configs = [dataclasses.replace(config, num_layers=1) for config in (models.target_config, models.draft_config)]
    decoding = published(8, 8, sparse=SparseVerification("merged", 72))
    program = smc.Program(decoding, configs[0], configs[1], 1024, 128, implementation="mosaic")
    params = smc.PairParams(*(folded_shapes(config, jnp.bfloat16) for config in configs))
    text, buffers = lowered(program, params)
    assert "mosaic_gpu" in text
    assert KEPT in text
    assert not [word for word in HOST if word in text]
    assert text.count("tf.aliasing_output") == buffers


def test_control_a_lowered_cycle_without_donation_aliases_nothing() -> None:
    text, _ = lowered(PAIR.program(24, 4, gamma=2, n_particles=2), PAIR.params, donate=False)
    assert "tf.aliasing_output" not in text
