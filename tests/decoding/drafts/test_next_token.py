"""Which way a step's token is computed: whatever the shapes, a cycle lowers for CUDA with the kernels asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import SMC, autoregressive, smc
from smcjax.decoders import Autoregressive
from smcjax.decoding.constraints import RowConstraint
from smcjax.decoding.distribution import SamplingDistribution, pack_bits, sample, sample_in_head
from smcjax.decoding.drafts import fused_step
from smcjax.decoding.groups import PairParams
from smcjax.decoding.sequences import Requests
from smcjax.engine.run.constraints import make_tables
from smcjax.matmul import Dense
from smcjax.model.attention import Full, SlidingWindow
from smcjax.model.config import ModelConfig
from smcjax.model.params import LayerParams, param_shapes
from smcjax.pallas.decode_step import op as decode_step
from smcjax.structured.automaton import Automaton
from tests.helpers import published

# Of a size that the persistent step takes, with four query heads to a KV head.
MODEL = ModelConfig(128, 512, 512, 2, 8, 2, 64, 4096, tie_embeddings=True, dtype="bfloat16")
PARAMS = param_shapes(MODEL, jnp.bfloat16)


def traced(decoder: Any, program: Any, params: Any, groups: int, *, constrained: bool = False) -> Any:
    """A step of the decoder."""

    def start() -> Any:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        memory = program.create_memory(zeros, 500)
        requests = Requests.alike(jax.random.key(0), jnp.full(groups, 40), vocab_size=128, max_tokens=100)
        if constrained:
            tables = jax.tree.map(jnp.asarray, make_tables({}, groups, 128))
            memory = dataclasses.replace(memory, automata=tables)
            requests = dataclasses.replace(requests, automaton=jnp.zeros(groups, jnp.int32))
        return decoder.begin(program, memory, jnp.zeros((groups, 64), jnp.int32), requests, jnp.ones(groups, bool))

    step = jax.jit(lambda params, state: decoder.step(program, params, state))
    return step.trace(params, jax.eval_shape(start))


def fused(*step: Any, **how: Any) -> bool:
    """True where the kernel is called in `traced`; that such steps lower: `tests/pallas/seal.py`."""
    return "name=decode_step" in str(traced(*step, **how).jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_particles", "groups", "max_model_len", "by_kernel"),
    [
        (16, 1, 1024, True),  # the first step by eight rows, as 16 of two tokens have too many queries
        (5, 1, 1024, True),  # the first step alone: its 10 tokens of four heads fill whole tiles, 5 do not
        (16, 3, 1024, False),
    ],
)
def test_whichever_way_its_steps_take(n_particles: int, groups: int, max_model_len: int, by_kernel: bool) -> None:
    program = smc.Program(published(n_particles, 4), MODEL, MODEL, max_model_len, implementation="mosaic")
    assert fused(smc, program, smc.PairParams(PARAMS, PARAMS), groups) == by_kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SandwichLayer(LayerParams):
    """A layer with one norm more than the fused step knows of."""

    post_attn_norm: Any = None


@dataclasses.dataclass(frozen=True)
class WindowConfig(ModelConfig):
    """A model with something that the fused step does not know of."""

    window: int | None = None


def test_the_fused_step_takes_only_what_it_computes() -> None:
    """A model goes layer by layer if any of its fields holds something that the fused step does not compute."""

    def layers(norm: Any) -> Any:
        fields = [
            {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)} for layer in PARAMS.layers
        ]
        return dataclasses.replace(PARAMS, layers=(PARAMS.layers[0], SandwichLayer(**fields[1], post_attn_norm=norm)))

    norm = jax.ShapeDtypeStruct((MODEL.hidden_size,), jnp.bfloat16)
    program = autoregressive.Program(Autoregressive(), MODEL, None, 1024, implementation="mosaic")
    assert fused(autoregressive, program, PairParams(layers(None)), 1)  # control
    assert not fused(autoregressive, program, PairParams(layers(norm)), 1)
    plain = MODEL.layer(0)
    for changes in ({"attention": SlidingWindow(512)}, {"attention": Full(0.5)}, {"activation": "gelu_tanh"}):
        config = dataclasses.replace(MODEL, layers=(plain, dataclasses.replace(plain, **changes)))
        assert not fused_step.accepts(config, PARAMS)
    for window, takes in ((None, True), (512, False)):
        fields = {field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)}
        assert fused_step.accepts(WindowConfig(**fields, window=window), PARAMS) == takes


@pytest.mark.slow
def test_constrained_drafts_are_drawn_by_the_kernel() -> None:
    """By words of forbidden tokens, made anew before each step; where drafts can be rejected too."""
    program = smc.Program(SMC(8, 3), MODEL, MODEL, 1024, implementation="mosaic")
    assert fused(smc, program, smc.PairParams(PARAMS, PARAMS), 1, constrained=True)


def test_forbidden_tokens_of_a_step_are_as_stops_of_all() -> None:
    """Tables whose forbidden tokens were given with them, and those that were told them later."""
    shape = fused_step.make_shape(MODEL, groups=1, rows=8, columns=2, page_size=16, prefetches=False, int8=False)
    keys = jax.random.split(jax.random.key(0), 3)
    words = jax.random.bits(keys[0], (8, 4), jnp.uint32)
    positions = jnp.arange(16, dtype=jnp.int32).reshape(1, 8, 2)

    def tables(words: Any, forbids: Any) -> Any:
        draws = decode_step.Draws(
            keys=jax.random.bits(keys[1], (1, 8, 2), jnp.uint32),
            temperature=jnp.ones(8),
            noise_scale=jnp.ones(8),
            forbidden=words,
            forbids=forbids,
        )
        angles = jnp.zeros((1, 8, 2, MODEL.head_dim // 2))
        return decode_step.make_tables(shape, angles, angles, positions, positions, draws)

    given = tables(words, jnp.ones((1, 8), bool))
    told = decode_step.with_forbidden(shape, tables(jnp.zeros_like(words), jnp.zeros((1, 8), bool)), words)
    np.testing.assert_array_equal(given.forbidden, told.forbidden)
    used = np.asarray(given.forbids) != 0  # what fills a tile up is nobody's
    assert used.any()
    np.testing.assert_array_equal(given.forbids[used], told.forbids[used])


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LayerParams)])
def test_every_optional_part_of_a_layer_is_known_or_refused(name: str) -> None:
    there = jax.ShapeDtypeStruct((MODEL.hidden_size,), jnp.bfloat16)
    layer = dataclasses.replace(PARAMS.layers[1], **{name: there})
    params = dataclasses.replace(PARAMS, layers=(PARAMS.layers[0], layer))
    known = name in ("qkv", "o", "gate_up", "down", "attn_norm", "mlp_norm")
    assert fused_step.accepts(MODEL, params) == known


def test_features_of_a_step() -> None:
    """A truncated law is drawn from layer by layer; beside scores the kernel draws, and logits are made once more."""
    program = autoregressive.Program(Autoregressive(), MODEL, None, 1024, implementation="mosaic")
    truncated = dataclasses.replace(program, features=frozenset({"truncation"}))
    assert not fused(autoregressive, truncated, PairParams(PARAMS), 1)
    scored = dataclasses.replace(program, features=frozenset({"logprobs"}))
    with_scores, without = (str(traced(autoregressive, one, PairParams(PARAMS), 1).jaxpr) for one in (scored, program))
    assert "name=decode_step" in with_scores
    assert "top_k" in with_scores
    assert "top_k" not in without


def test_the_heads_kernel_is_asked_for_the_same_law() -> None:
    """Its reference in its place: stops within the minimum, greedy rows, temperatures, keys as `sample` has them."""
    rows, vocab, hidden = 64, 64, 32
    keys = jax.random.split(jax.random.key(3), 5)
    x, weight = (jax.random.normal(key, (64, hidden), jnp.bfloat16) for key in keys[:2])
    law = SamplingDistribution(
        temperature=jax.random.uniform(keys[2], (rows,), minval=0.5, maxval=2.0),
        stops=jax.random.bernoulli(keys[3], 0.7, (rows, vocab)),
        minimum=jnp.arange(rows) % 5,
        greedy=jnp.arange(rows) % 3 == 0,
    )
    token_number = jnp.full(rows, 2)
    row_keys = jax.random.split(keys[4], rows)
    ours = sample_in_head(law, row_keys, token_number, x, weight, pack_bits(law.stops))
    theirs = sample(law, row_keys, token_number, Dense(weight)(x, out=jnp.float32))
    np.testing.assert_array_equal(ours.token, theirs.token)
    np.testing.assert_allclose(ours.logprob, theirs.logprob, rtol=1e-5, atol=1e-5)
    within = np.asarray(law.minimum) >= 2
    stopped = np.asarray(law.stops)[np.arange(rows), ours.token]
    assert not stopped[within].any()
    assert stopped[~within].any()  # control
    # With a constraint: of one automaton, which allows every third token in its only state, and stops.
    following = np.zeros((1, 3), np.int16)
    following[0, 1:] = -1
    automaton = Automaton(following, np.arange(vocab, dtype=np.int32) % 3, np.zeros(1, np.int32))
    held = RowConstraint(
        jax.tree.map(jnp.asarray, make_tables({0: automaton}, 1, vocab, most_cells=8, most_states=4)),
        automaton=jnp.zeros(rows, jnp.int32),
        stops=jnp.zeros_like(law.stops),
        state=jnp.where(jnp.arange(rows) % 2 == 0, 0, -1),
        left=jnp.full(rows, 9),
    )
    form = dataclasses.replace(law, features=(held,))
    ours = sample_in_head(form, row_keys, token_number, x, weight, pack_bits(law.stops))
    theirs = sample(form, row_keys, token_number, Dense(weight)(x, out=jnp.float32))
    possible = np.asarray(~form.forbidden(token_number)).any(axis=1)
    np.testing.assert_array_equal(ours.token[possible], theirs.token[possible])
    np.testing.assert_allclose(ours.logprob[possible], theirs.logprob[possible], rtol=1e-5, atol=1e-5)
    constrained = np.asarray(held.state) == 0
    assert (np.asarray(ours.token)[constrained & possible] % 3 == 0).all()
    assert (np.asarray(ours.token)[~constrained] % 3 != 0).any()  # control
