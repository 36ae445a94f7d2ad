"""Problems for the persistent decode step, and what the layer-by-layer forward makes of them.

Bounds: both sides round activations to bf16 (relative 2⁻⁸), at different places; a value that went through a handful of
such roundings differs by a few of them relative to the largest value of its tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.decoding.distribution import DeferredLogits
from smcjax.decoding.drafts.fused_step import make_shape, norms_of, prefetches, scales_of, tasks_of, weights_of
from smcjax.decoding.sampling import log_softmax_at
from smcjax.kv import KVCache
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import rope_angles, unembed
from smcjax.model.paged import create_cache, paged_hidden_states
from smcjax.model.params import init_params
from smcjax.model.view import BatchView
from smcjax.noise import gumbels, key_from
from smcjax.pallas import rms_norm
from smcjax.pallas.decode_step import op as ds

PAGE = 16
ROUNDING = 2.0**-8  # bf16, relative
TINY = ModelConfig(
    vocab_size=128,
    hidden_size=256,
    intermediate_size=256,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    dtype="bfloat16",
    max_position_embeddings=1024,
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """G groups of N rows with T new tokens each, which share the beginnings of their tables."""

    config: ModelConfig
    rows: int  # N
    columns: int  # T
    tokens: np.ndarray  # [R, T]
    positions: np.ndarray  # [R, T]
    table: np.ndarray  # [R, M]
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    draws: ds.Draws

    @property
    def write_pages(self) -> np.ndarray:
        """[R, T]."""
        return np.take_along_axis(self.table, self.positions // PAGE, axis=1)


def make_problem(config: ModelConfig, *, groups: int, rows: int, columns: int, context: int, seed: int = 0) -> Problem:
    """Random tokens, lengths around `context`, a tree of shared pages, NaN in every slot that holds nothing."""
    rng = np.random.default_rng(seed)
    total = groups * rows
    lengths = context + rng.integers(-8, 9, total) if context > 16 else np.full(total, context)
    positions = lengths[:, None] + np.arange(columns)
    width = -(-int(positions.max() + 1) // PAGE) + 1
    table = np.zeros((total, width), np.int32)
    fresh = iter(range(1, 1 + total * width))
    for row in range(total):
        need = positions[row, -1] // PAGE + 1
        own = [next(fresh) for _ in range(need)]
        shared = 0
        if row % rows:  # a branch of an earlier row's past: its full pages, some of them
            parent = row - 1 - int(rng.integers(0, row % rows))
            common = min(lengths[row], lengths[parent]) // PAGE
            shared = int(rng.integers(common // 2, common + 1))
            own[:shared] = table[parent, :shared]
        table[row, :need] = own
    count = int(table.max()) + 1
    used = np.zeros((count, PAGE), bool)
    for row in range(total):
        slot = np.arange(lengths[row])
        used[table[row, slot // PAGE], slot % PAGE] = True

    def pool(number: int) -> jax.Array:
        shape = (count, PAGE, config.num_kv_heads, config.head_dim)
        values = jax.random.normal(jax.random.key(seed * 1000 + number), shape, jnp.bfloat16)
        return jnp.where(used[:, :, None, None], values, jnp.nan)

    layers = config.num_layers
    forbidden = rng.integers(0, 2**32, (total, config.vocab_size // 32), dtype=np.uint32)
    forbidden[1:] = 0
    return Problem(
        config=config,
        rows=rows,
        columns=columns,
        tokens=rng.integers(0, config.vocab_size, (total, columns)).astype(np.int32),
        positions=positions.astype(np.int32),
        table=table,
        keys=tuple(pool(i) for i in range(layers)),
        values=tuple(pool(100 + i) for i in range(layers)),
        draws=ds.Draws(
            keys=jax.random.key_data(jax.random.split(jax.random.key(seed), (3, total))),
            temperature=jnp.linspace(0.7, 1.3, total),
            noise_scale=jnp.ones(total).at[-1].set(0.0),
            forbidden=jnp.asarray(forbidden),
            forbids=jnp.asarray([[False] * total, [True] * total, [False] * total]),
        ),
    )


def kernel_shape(problem: Problem, *, int8: bool = False, **tuning: int) -> ds.Shape:
    """The kernel's static shape."""
    groups = problem.table.shape[0] // problem.rows
    table, page_size = ds.kernel_pages(jnp.asarray(problem.table), PAGE)
    return make_shape(
        problem.config,
        groups=groups,
        rows=problem.rows,
        columns=problem.columns,
        page_size=page_size,
        prefetches=prefetches(table),
        int8=int8,
        **tuning,
    )


def run(problem: Problem, params: Any, shape: ds.Shape, interpret: Any = None, live_groups: int | None = None) -> Any:
    """The kernel on the problem, of whose groups the first `live_groups` are live."""
    config = problem.config
    cos, sin = rope_angles(config.layer(0).rope, config.head_dim, jnp.asarray(problem.positions))
    live = np.arange(len(problem.table)) < (len(problem.table) if live_groups is None else live_groups * problem.rows)
    lengths = jnp.asarray(np.where(live, problem.positions[:, -1] + 1, 0))
    table, page_size = ds.kernel_pages(jnp.asarray(problem.table), PAGE)
    sharing = tasks_of(
        config, table, lengths, jnp.asarray(problem.positions[:, 0]), rows=problem.rows, page_size=page_size
    )
    slots = np.where(live[:, None], problem.write_pages, 0) * PAGE + problem.positions % PAGE

    def second(x: np.ndarray) -> jax.Array:
        """The tables' second step of three, of which the others are elsewhere."""
        return jnp.stack([0 * x, x, 0 * x])

    weights = weights_of(params, norms_of(params), scales_of(params))
    return ds.decode_step(
        shape,
        weights,
        ds.embedded(weights.embed, weights.norms[0], jnp.asarray(problem.tokens)),
        1,
        ds.make_tables(shape, second(cos), second(sin), second(problem.positions), second(slots), problem.draws),
        sharing,
        problem.keys,
        problem.values,
        interpret=interpret,
    )


def compiled(problem: Problem, shape: ds.Shape, **how: Any) -> Callable[[Any], Any]:
    """`run` of weights, in one program. KV are arguments of it: constants would take long to compile."""

    @jax.jit
    def program(params: Any, keys: Any, values: Any) -> Any:
        return run(dataclasses.replace(problem, keys=keys, values=values), params, shape, **how)

    return lambda params: program(params, problem.keys, problem.values)


def reference(problem: Problem, params: Any) -> tuple[jax.Array, jax.Array, KVCache]:
    """Tempered logits, logits with noise, and the cache, layer by layer in plain XLA, as one program."""

    @jax.jit
    def program(params: Any, keys: Any, values: Any) -> tuple[jax.Array, jax.Array, KVCache]:
        return _reference(dataclasses.replace(problem, keys=keys, values=values), params)

    return program(params, problem.keys, problem.values)


def _reference(problem: Problem, params: Any) -> tuple[jax.Array, jax.Array, KVCache]:
    config, draws, zeros = problem.config, problem.draws, jnp.zeros(len(problem.tokens), jnp.int32)
    hidden, cache = paged_hidden_states(
        config,
        params,
        create_cache(config, params, num_pages=1, page_size=PAGE).replace(keys=problem.keys, values=problem.values),
        BatchView(
            *map(jnp.asarray, (problem.tokens, problem.positions, problem.table, problem.write_pages)),
            lengths=zeros,
            num_immutable=zeros,
            page_size=PAGE,
        ),
    )
    logits = unembed(params, hidden[:, -1]) / draws.temperature[:, None]
    bits = (draws.forbidden[:, :, None] >> np.arange(32, dtype=np.uint32)[None, None]) & 1
    logits = jnp.where(bits.reshape(logits.shape) == 1, -jnp.inf, logits)
    noise = gumbels(key_from(draws.keys[1]), logits.shape[1:])
    return logits, logits + draws.noise_scale[:, None] * noise, cache


def check(problem: Problem, params: Any, got: Any) -> None:
    """Tokens, log-probabilities and the new tokens' keys and values agree to a few roundings."""
    token, logprob, following, residual, keys, values = got
    logits, perturbed, cache = reference(problem, params)
    finite = np.where(np.isfinite(logits), logits, 0.0)
    tolerance = 8 * ROUNDING * np.abs(finite).max()
    temperature = np.asarray(problem.draws.temperature)[:, None]
    behind = (
        np.asarray(DeferredLogits.from_residual(params, residual, problem.config.rms_norm_eps).logits(params))
        / temperature
    )
    np.testing.assert_allclose(np.where(np.isfinite(logits), behind, 0.0), finite, atol=tolerance)
    # The kernel's own law to f32's accuracy, of sums of E products and V exponentials: a norm that rounds after its
    # scale instead is further from it.
    exact = 2.0**-18 * max(1.0, np.abs(finite).max())
    rebuilt = log_softmax_at(jnp.where(np.isfinite(logits), behind, -jnp.inf), token)
    np.testing.assert_allclose(logprob, rebuilt, atol=exact)
    hidden = rms_norm(residual, params.final_norm, problem.config.rms_norm_eps)
    other = jnp.where(np.isfinite(logits), np.asarray(unembed(params, hidden)) / temperature, -jnp.inf)
    assert np.abs(np.asarray(logprob - log_softmax_at(other, token))).max() > exact, "control"
    picked = np.take_along_axis(np.asarray(perturbed), np.asarray(token)[:, None], axis=1)[:, 0]
    assert (picked >= np.asarray(perturbed).max(axis=1) - 2 * tolerance).all(), "a token that is not nearly the best"
    np.testing.assert_allclose(logprob, log_softmax_at(logits, token), atol=2 * tolerance)
    begin = ds.embedded(params.embed, params.layers[0].attn_norm, token)
    for ours, theirs in zip(following, begin, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
    pages, slots = problem.write_pages, problem.positions % PAGE
    for ours, theirs in ((keys, cache.keys), (values, cache.values)):
        for a, b in zip(ours, theirs, strict=True):
            a, b = (np.asarray(x, np.float32)[pages, slots] for x in (a, b))
            np.testing.assert_allclose(a, b, atol=8 * ROUNDING * np.abs(b).max())


def random_params(config: ModelConfig) -> Any:
    """Weights with norms that are not all one."""
    params = init_params(config, jax.random.key(1), jnp.bfloat16)

    def vary(leaf: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.key(2), leaf.shape)
        return (leaf.astype(jnp.float32) * (1 + 0.2 * noise)).astype(leaf.dtype) if leaf.ndim == 1 else leaf

    return jax.tree.map(vary, params)
