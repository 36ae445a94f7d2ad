"""Begins a sparse layer by one launch: `rotate_and_write` beside the products of its gates.

Gates read the layer's input alone and are needed at the layer's end (`gates.py`): what little they read and write comes
for nothing beside a kernel that waits for memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from smcjax.pallas.cache.rotate_and_write import (
    Eps,
    Task,
    Write,
    Written,
    rotate_and_write,
    split_arguments,
    write_part,
)
from smcjax.pallas.dispatch import Kernel, Op, runs_mosaic
from smcjax.pallas.mosaic.fuse_launches import launch
from smcjax.pallas.sparse.gates import Products, products_part, supports_products


def write_beside_gates_reference(
    x: Float[Array, "R T E"], gate: Float[Array, "H branches E"], write: Write
) -> tuple[Written, Products | None]:
    """Returns what `rotate_and_write` does, and the products of x with `gate` for `gated_sum`: None, to be made there.

    x is the layer's input, normed unless that is pending.
    """
    return rotate_and_write(*write), None


def write_beside_gates_mosaic(
    x: Float[Array, "R T E"], gate: Float[Array, "H branches E"], write: Write, *, interpret: Any = None
) -> tuple[Written, Products | None]:
    """Computes `write_beside_gates` by the kernel; `interpret` is `plgpu.InterpretGPUParams()` to run on a CPU."""
    task, pools, eps = split_arguments(write)
    return _write_beside_gates(x.reshape(-1, x.shape[2]), gate, task, pools, eps=eps, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _write_beside_gates(
    x: Float[Array, "N E"],
    gate: Float[Array, "H branches E"],
    task: Task,
    pools: tuple[jax.Array, jax.Array],
    *,
    eps: Eps,
    interpret: Any,
) -> tuple[Written, Products]:
    """A jit of its own, so that a model's layers trace and lower the kernel once."""
    # References, so that the kernel's results are its operands' buffers.
    keys_ref, values_ref = (jax.new_ref(pool) for pool in pools)
    parts = products_part(x, gate, interpret=interpret), write_part(task, keys_ref, values_ref, eps)
    (products,), (q,) = launch("write_beside_gates", *parts, interpret=interpret)
    return (q, jax.freeze(keys_ref), jax.freeze(values_ref)), products


def _supports(x: jax.Array, gate: jax.Array, write: Write) -> bool:
    return supports_products(x, gate, write.qkv.shape[-1]) and rotate_and_write.kernel_for(*write) is not None


write_beside_gates = Op(write_beside_gates_reference)
write_beside_gates.register(Kernel(runs_mosaic, write_beside_gates_mosaic, _supports))
