"""The persistent decode step against the layer-by-layer forward: interpreted here, compiled on a GPU.

Bounds: both sides round activations to bf16 (relative 2⁻⁸), at different places; a value that went through a handful of
such roundings differs by a few of them relative to the largest value of its tensor.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.bench.shapes import SHAPES
from smcjax.decoding import fused_step
from smcjax.decoding.distribution import DeferredLogits
from smcjax.decoding.fused_step import make_shape, norms_of, prefetches, scales_of, tasks_of, weights_of
from smcjax.decoding.sampling import log_softmax_at
from smcjax.kv import KVCache
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import rope_angles, unembed
from smcjax.model.paged import create_cache, paged_hidden_states
from smcjax.model.params import init_params, param_shapes
from smcjax.model.quantize import quantize_params
from smcjax.model.view import BatchView
from smcjax.pallas import decode_step as ds
from smcjax.pallas import rms_norm
from smcjax.pallas.decode_kernel import LAUNCHED, REGISTERS
from smcjax.pallas.noise import gumbel

PAGE = 16
ROUNDING = 2.0**-8  # bf16, relative
REPEATS = 1000  # of a step on a GPU: a race between warpgroups may show in one of hundreds only
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
    bits = (draws.forbidden[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    logits = jnp.where(bits.reshape(logits.shape) == 1, -jnp.inf, logits)
    keys = jax.vmap(jax.random.wrap_key_data)(draws.keys[1])
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
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


@jax.jit
def unlike(some: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    """Returns True if any element differs; two NaN count as equal, since slots that hold nothing are full of NaN."""
    pairs = zip(some, others, strict=True)
    return jnp.any(jnp.stack([((one != other) & ~((one != one) & (other != other))).any() for one, other in pairs]))


def random_params(config: ModelConfig) -> Any:
    """Weights with norms that are not all one."""
    params = init_params(config, jax.random.key(1), jnp.bfloat16)

    def vary(leaf: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.key(2), leaf.shape)
        return (leaf * (1 + 0.2 * noise)).astype(leaf.dtype) if leaf.ndim == 1 else leaf

    return jax.tree.map(vary, params)


CASES: dict[str, tuple[ModelConfig, dict[str, int], int, int]] = {  # model, problem, rows read together, blocks
    "eight rows of two tokens, read by four": (TINY, {"groups": 1, "rows": 8, "columns": 2, "context": 150}, 4, 4),
    "one row, wide heads, two layers": (
        dataclasses.replace(TINY, num_heads=2, num_kv_heads=1, head_dim=128, num_layers=2),
        {"groups": 1, "rows": 1, "columns": 1, "context": 330},
        1,
        2,  # one has three chunks, the other two and the pieces
    ),
    "rows of two tokens, two layers, little context": (
        dataclasses.replace(TINY, num_layers=2),
        {"groups": 1, "rows": 2, "columns": 2, "context": 12},
        2,
        4,
    ),
    "four groups of eight": (TINY, {"groups": 4, "rows": 8, "columns": 1, "context": 40}, 8, 8),
    "activations that do not fit": (
        dataclasses.replace(TINY, hidden_size=512, intermediate_size=768, num_heads=8),
        {"groups": 1, "rows": 8, "columns": 1, "context": 20},
        8,
        16,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "by_chunks"), [*((case, False) for case in CASES), *((case, True) for case in list(CASES)[:2])]
)
def test_equals_the_layer_by_layer_forward(case: str, by_chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_chunks:
        monkeypatch.setattr(fused_step, "MAX_PAGES_UNPREFETCHED", 0)
    config, where, together, blocks = CASES[case]
    problem = dataclasses.replace(make_problem(config, **where), rows=together)
    params = random_params(config)
    shape = kernel_shape(problem, ring=4, blocks=blocks)
    assert shape.prefetches == by_chunks
    assert ds.supports(shape, jnp.bfloat16)
    check(problem, params, compiled(problem, shape, interpret=plgpu.InterpretGPUParams())(params))


@pytest.mark.slow
def test_pages_of_several_chunks_are_so_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PAGE", 2 * ds.CHUNK)
    problem, params = make_problem(TINY, groups=1, rows=4, columns=2, context=150), random_params(TINY)
    shape = kernel_shape(problem, ring=4, blocks=4)
    assert shape.page_size == ds.CHUNK
    assert ds.supports(shape, jnp.bfloat16)
    check(problem, params, compiled(problem, shape, interpret=plgpu.InterpretGPUParams())(params))


def test_pages_of_no_whole_chunks_stay_as_they_are() -> None:
    table = jnp.asarray([[3, 1]])
    for page_size in (16, 64, 96):
        assert ds.kernel_pages(table, page_size) == (table, page_size)
    halves, size = ds.kernel_pages(table, 128)
    assert (halves.tolist(), size) == ([[6, 7, 2, 3]], 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "hidden", "ffn", "layers", "blocks", "by_chunks"),
    [(1, 512, 512, 2, 2, True), (8, 1024, 1536, 1, 32, False)],  # of the last, down's activations do not fit
)
def test_int8_equals_the_layer_by_layer_forward(
    rows: int, hidden: int, ffn: int, layers: int, blocks: int, by_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_chunks:
        monkeypatch.setattr(fused_step, "MAX_PAGES_UNPREFETCHED", 0)
    config = dataclasses.replace(TINY, hidden_size=hidden, intermediate_size=ffn, num_heads=8, num_layers=layers)
    problem = make_problem(config, groups=1, rows=rows, columns=1, context=150)
    params = quantize_params(random_params(config))
    shape = kernel_shape(problem, int8=True, ring=4, blocks=blocks)
    assert ds.supports(shape, jnp.bfloat16)
    check(problem, params, compiled(problem, shape, interpret=plgpu.InterpretGPUParams())(params))


def test_the_noise_is_that_of_jax_random() -> None:
    key = jax.random.key(7)
    words = jnp.broadcast_to(jax.random.key_data(key)[:, None], (2, 4096))
    ours = gumbel(words[0], words[1], jnp.arange(4096, dtype=jnp.uint32))
    np.testing.assert_allclose(ours, jax.random.gumbel(key, (4096,)), rtol=1e-6, atol=1e-6)


LOWERED = [("llama-3.2-1b", 1, 8, 1), ("llama-3.2-1b", 1, 8, 2), ("llama-3.2-1b", 4, 8, 1), ("llama-3.1-8b", 1, 1, 1)]


@pytest.mark.parametrize(
    ("name", "groups", "rows", "columns", "int8", "by_chunks"),
    [
        *((*shape, False, False) for shape in LOWERED),
        *((*shape, True, False) for shape in LOWERED[1:]),
        *((*shape, False, True) for shape in (LOWERED[1], LOWERED[3])),
        (*LOWERED[2], True, True),
    ],
)
def test_lowers_to_cuda(
    name: str, groups: int, rows: int, columns: int, int8: bool, by_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_chunks:
        monkeypatch.setattr(fused_step, "MAX_PAGES_UNPREFETCHED", 0)
    config = dataclasses.replace(SHAPES[name], num_layers=3)
    problem = make_problem(
        dataclasses.replace(TINY, num_layers=1), groups=groups, rows=rows, columns=columns, context=40
    )
    struct = jax.ShapeDtypeStruct
    pool = struct((600, PAGE, config.num_kv_heads, config.head_dim), jnp.bfloat16)
    problem = dataclasses.replace(
        problem,
        config=config,
        draws=dataclasses.replace(
            problem.draws, forbidden=jnp.zeros((groups * rows, config.vocab_size // 32), jnp.uint32)
        ),
    )
    shape = kernel_shape(problem, int8=int8)
    assert ds.supports(shape, jnp.bfloat16)

    def step(params: Any, keys: Any, values: Any) -> Any:
        return run(dataclasses.replace(problem, keys=keys, values=values), params, shape)

    pools = (pool,) * config.num_layers
    params = param_shapes(config, jnp.bfloat16)
    params = jax.eval_shape(quantize_params, params) if int8 else params
    lowered = jax.jit(step, donate_argnums=(1, 2)).trace(params, pools, pools)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    int8_rows = int8 and config.tie_embeddings  # beside which XLA concludes
    assert text.count("custom_call @mosaic_gpu") == (1 if int8_rows else 2)
    assert "L2::cache_hint" in text  # what streams leaves the L2 first
    # A count that does not fit its instruction is illegal, which shows on a GPU only.
    found = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32 (\d+)", text)
    counts = [(kind, int(count)) for kind, count in found]
    assert sorted(count for _, count in counts) == (sorted(REGISTERS) if int8 else [])
    assert all(kind == ("inc" if count > LAUNCHED else "dec") and count % 8 == 0 for kind, count in counts)
    assert sum(REGISTERS) <= 4 * LAUNCHED


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("groups", "rows", "columns", "context", "int8"),
    [
        (1, 8, 1, 256, False),
        (1, 8, 2, 700, False),
        (1, 1, 1, 256, False),
        (1, 8, 1, 4000, False),
        (1, 16, 1, 700, False),
        (1, 16, 2, 700, False),
        (2, 8, 2, 700, False),
        (3, 8, 1, 300, False),
        (4, 8, 1, 700, False),
        (4, 8, 1, 4000, False),
        (2, 16, 1, 300, False),
        (1, 8, 1, 256, True),
        (1, 8, 1, 4000, True),
        (1, 8, 2, 4000, True),
        (4, 8, 1, 700, True),
    ],
)
def test_on_a_gpu(groups: int, rows: int, columns: int, context: int, int8: bool) -> None:
    config = dataclasses.replace(SHAPES["llama-3.2-1b"], num_layers=2)
    problem = make_problem(config, groups=groups, rows=rows, columns=columns, context=context)
    problem = dataclasses.replace(problem, rows=min(rows, 64 // (4 * columns)))  # read together
    params = jax.jit(random_params, static_argnums=0)(config)
    params = quantize_params(params) if int8 else params
    shape = kernel_shape(problem, int8=int8)
    step = compiled(problem, shape)
    got = step(params)
    check(problem, params, got)

    def drawn(stepped: Any) -> list[jax.Array]:
        return [stepped.token, stepped.logprob, stepped.residual]

    assert not any(unlike(drawn(step(params)), drawn(got)) for _ in range(REPEATS))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("groups", "rows", "live_groups", "int8"),
    [
        (1, 8, 1, False),
        (2, 8, 1, False),
        (8, 1, 8, False),
        (8, 1, 1, False),
        (4, 8, 4, False),
        (1, 8, 1, True),
        (8, 1, 1, True),
    ],
)
def test_one_launch_equals_a_launch_a_stage(
    groups: int, rows: int, live_groups: int, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, over layers: no block may run ahead of the stages, also where many have nothing to do in them."""
    config = dataclasses.replace(SHAPES["llama-3.2-1b"], num_layers=6)
    problem = make_problem(config, groups=groups, rows=rows, columns=1, context=300)
    params = jax.jit(random_params, static_argnums=0)(config)
    params = quantize_params(params) if int8 else params
    shape = kernel_shape(problem, int8=int8)

    def results(step: Any) -> Any:
        token, logprob, _, residual, keys, values = step(params)
        live = slice(0, live_groups * rows)
        # The trash page holds whichever dead row came last.
        return [token[live], logprob[live], residual[live], *(pages[1:] for pages in (*keys, *values))]

    in_one = compiled(problem, shape, live_groups=live_groups)
    together = results(in_one)
    launched: list[tuple[str, ...]] = []
    launch = ds.launch

    def by_stage(shape: ds.Shape, operands: ds.Operands, *, stages: tuple[str, ...], **rest: Any) -> None:
        if stages == ds.LAYER_STAGES:
            ds._launch_by_stage(shape, operands, None)
        else:
            launched.append(stages)
            launch(shape, operands, stages=stages, **rest)

    monkeypatch.setattr(ds, "launch", by_stage)
    monkeypatch.setattr(ds, "decode_step", inspect.unwrap(ds.decode_step))  # what was traced would not come by here
    apart = results(compiled(problem, shape, live_groups=live_groups))
    assert len(launched) == 6 * config.num_layers + 1
    assert not unlike(together, apart)
    assert not any(unlike(results(in_one), apart) for _ in range(REPEATS // 10))
