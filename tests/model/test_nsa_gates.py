"""Branches of a sparse layer put together, by the kernels of gates: what plain XLA makes of the same parts."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from smcjax.model.attention import Projection
from smcjax.model.config import Rope
from smcjax.model.decoder import rope_angles
from smcjax.pallas.dispatch import Kernel, Op, implementations
from smcjax.pallas.sparse.gates import gated_sum
from smcjax.sparse import routing
from smcjax.sparse.nsa import NSA
from smcjax.sparse.routing import Routed

HEADS, KV_HEADS, DIM, WIDTH, TOKENS = 16, 4, 64, 256, (1, 3)


def interpreted() -> Op[Any, Any]:
    """`gated_sum`, whose kernel is interpreted."""
    _, kernel = gated_sum._kernels  # the first is for segments
    found: Op[Any, Any] = Op(gated_sum.reference)
    run: Any = kernel.run
    interpret = plgpu.InterpretGPUParams()
    found.register(Kernel(kernel.runs_on, functools.partial(run, interpret=interpret), kernel.supports))
    return found


def test_kernels_put_branches_together(patch_programs: Any) -> None:
    """Compressed, selected and window's, each by its own gate. Control: two of them exchanged."""
    patch_programs(routing, "gated_sum", interpreted())
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * scale, dtype)

    kind = NSA(kv="shared")
    config = SimpleNamespace(hidden_size=WIDTH, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    shapes = kind.param_shapes(config, jnp.bfloat16)
    weights = {name: normal(*shapes[name].shape, scale=2 * WIDTH**-0.5) for name in ("gate", "gate_bias")}
    angles = functools.partial(rope_angles, Rope(100.0), DIM)
    qkv, x = normal(*TOKENS, HEADS + 2 * KV_HEADS, DIM), normal(*TOKENS, WIDTH)
    positions = jnp.arange(TOKENS[1])[None]
    projection = Projection(qkv, *angles(positions), KV_HEADS, None, None, x, weights, angles)
    cmp, slc, win = (normal(*TOKENS, HEADS, DIM, dtype=jnp.float32) for _ in range(3))
    selected = jnp.ones((*TOKENS, KV_HEADS, 2), bool)

    def made(name: str, slc: jax.Array, win: jax.Array) -> np.ndarray:
        routed = Routed(cmp.reshape(*TOKENS, KV_HEADS, -1, DIM), None, selected)
        with implementations(name):
            branches = kind.put_together(projection, routed, slc, win)
        assert (branches.total is not None) == (name == "mosaic")
        return np.asarray(branches.gated(), np.float32)

    got, want = made("mosaic", slc, win), made("xla", slc, win)
    np.testing.assert_allclose(got, want, atol=2**-5)  # XLA rounds gates and outputs, the kernels their sum alone
    assert np.abs(made("xla", win, slc) - want).max() > 0.5
