"""The persistent decode step against the layer-by-layer forward: interpreted here, compiled on a GPU."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.bench.shapes import SHAPES
from smcjax.decoding.drafts import fused_step
from smcjax.model.config import ModelConfig
from smcjax.model.params import param_shapes
from smcjax.model.quantize import quantize_params
from smcjax.pallas.decode_step import op as ds
from smcjax.pallas.decode_step.kernel import LAUNCHED, REGISTERS
from tests.pallas.decode_step import problem as decode_problem
from tests.pallas.decode_step.problem import PAGE, TINY, check, compiled, kernel_shape, make_problem, random_params, run

REPEATS = 1000  # of a step on a GPU: a race between warpgroups may show in one of hundreds only


@jax.jit
def unlike(some: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    """Returns True if any element differs; two NaN count as equal, since slots that hold nothing are full of NaN."""
    pairs = zip(some, others, strict=True)
    return jnp.any(jnp.stack([((one != other) & ~((one != one) & (other != other))).any() for one, other in pairs]))


CASES: dict[str, tuple[ModelConfig, dict[str, int], int, int]] = {  # model, problem, rows read together, blocks
    "eight rows of two tokens, read by four": (TINY, {"groups": 1, "rows": 8, "columns": 2, "context": 150}, 4, 4),
    "one row, wide heads, two layers": (
        dataclasses.replace(TINY, num_heads=2, num_kv_heads=1, head_dim=128, num_layers=2),
        {"groups": 1, "rows": 1, "columns": 1, "context": 330},
        1,
        2,  # one has three chunks, the other two and the pieces
    ),
    "activations that do not fit, little context": (
        dataclasses.replace(TINY, hidden_size=512, intermediate_size=768, num_heads=8),
        {"groups": 1, "rows": 8, "columns": 1, "context": 12},
        8,
        16,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equals_the_layer_by_layer_forward(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, where, together, blocks = CASES[case]
    if together == 4:  # pages of several chunks are so many pages
        monkeypatch.setattr(decode_problem, "PAGE", 2 * ds.CHUNK)
    problem = dataclasses.replace(make_problem(config, **where), rows=together)
    params = random_params(config)
    shape = kernel_shape(problem, ring=4, blocks=blocks)
    assert ds.supports(shape, jnp.bfloat16)
    assert together != 4 or shape.page_size == ds.CHUNK
    check(problem, params, compiled(problem, shape, interpret=plgpu.InterpretGPUParams())(params))


def test_pages_of_no_whole_chunks_stay_as_they_are() -> None:
    table = jnp.asarray([[3, 1]])
    for page_size in (16, 64, 96):
        assert ds.kernel_pages(table, page_size) == (table, page_size)
    halves, size = ds.kernel_pages(table, 128)
    assert (halves.tolist(), size) == ([[6, 7, 2, 3]], 64)


@pytest.mark.slow
def test_int8_equals_the_layer_by_layer_forward(patch_programs: Any) -> None:
    patch_programs(fused_step, "MAX_PAGES_UNPREFETCHED", 0)
    config = dataclasses.replace(TINY, hidden_size=512, intermediate_size=512, num_heads=8)
    problem = make_problem(config, groups=1, rows=1, columns=1, context=150)
    params = quantize_params(random_params(config))
    shape = kernel_shape(problem, int8=True, ring=4, blocks=2)
    assert shape.prefetches
    assert ds.supports(shape, jnp.bfloat16)
    check(problem, params, compiled(problem, shape, interpret=plgpu.InterpretGPUParams())(params))


@pytest.mark.parametrize(
    ("name", "groups", "rows", "columns", "int8", "by_chunks"),
    [
        ("llama-3.1-8b", 1, 1, 1, False, False),
        ("llama-3.2-1b", 1, 8, 2, False, True),
        ("llama-3.2-1b", 4, 8, 1, True, True),
    ],
)
def test_lowers_to_cuda(
    name: str, groups: int, rows: int, columns: int, int8: bool, by_chunks: bool, patch_programs: Any
) -> None:
    if by_chunks:
        patch_programs(fused_step, "MAX_PAGES_UNPREFETCHED", 0)
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
    groups: int, rows: int, live_groups: int, int8: bool, patch_programs: Any
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

    patch_programs(ds, "launch", by_stage)
    patch_programs(ds, "decode_step", inspect.unwrap(ds.decode_step))  # what was traced would not come by here
    apart = results(compiled(problem, shape, live_groups=live_groups))
    assert len(launched) == 6 * config.num_layers + 1
    assert not unlike(together, apart)
    assert not any(unlike(results(in_one), apart) for _ in range(REPEATS // 10))
