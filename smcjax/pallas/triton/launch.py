"""The launch of a Triton kernel within a JAX program, through jax-triton.

A kernel is one function that `triton.jit` compiles for one architecture while JAX lowers the program. It becomes a
custom call of that program. CUDA graphs capture typed custom calls alone, which `_lower_typed` makes of jax-triton's.
Triton is imported when the first kernel runs: modules of kernels (`*_triton_kernel.py`), which import it, are imported
by the functions that launch them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jaxlib.mlir import ir

from smcjax.device import HOPPER, this_device

MIN_ARRIVALS = 1024  # counters: one size serves the launches of a program, so that XLA makes their zeros once
TYPED = 4  # StableHLO's number of custom calls with typed arguments

type Shapes = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]


def launch(
    kernel: Any,
    *arrays: jax.Array,
    out: Shapes,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    aliases: dict[int, int] | None = None,
    interpret: Any = None,
    **static: Any,
) -> Any:
    """Runs a Triton kernel over a grid of blocks and returns its results, of the shapes and dtypes `out`.

    The kernel's parameters are the arrays in their order, the results behind them, and `static`, all of them
    `tl.constexpr`. Arrays are row-major. Results are not zeroed: a kernel writes every element that is read later.
    Floating-point products and sums are fused alike on all versions of Triton, so that bits repeat.

    Args:
        kernel: a function under `triton.jit`.
        arrays: what it reads.
        out: shape and dtype of each result; a tuple returns a tuple.
        grid: blocks along one to three axes.
        warps: warps of 32 threads a block.
        stages: loads in flight that the compiler arranges within a loop.
        aliases: maps the index of an array to that of the result which takes its memory.
        interpret: a function that computes the same on a CPU, of arrays that are not traced; for tests.
        static: Python numbers and strings that the kernel is compiled for.
    """
    if interpret is not None:
        return interpret(kernel, *arrays, out=out, grid=grid, aliases=aliases or {}, **static)
    import jax_triton

    _lower_typed()
    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_shape=out,
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        compute_capability=target_capability(),
        enable_fp_fusion=True,
        input_output_aliases=aliases or {},
        **static,
    )


@functools.cache
def _lower_typed() -> None:
    """Has jax-triton launch kernels by the typed custom call of JAX's plugin.

    It emits the untyped one, which XLA leaves out of CUDA graphs: 2,300 launches of a cycle are then the host's.
    """
    from jax_triton import triton_lib

    def lower(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
        results = triton_lib.triton_kernel_call_lowering(triton_lib.get_cuda_backend, ctx, *args, **params)
        attributes = results[0].owner.attributes
        attributes["call_target_name"] = ir.StringAttr.get("triton_kernel_call_ffi")
        attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), TYPED)
        attributes["backend_config"] = ir.DictAttr.get({"opaque": attributes["backend_config"]})
        return results

    mlir.register_lowering(triton_lib.triton_kernel_call_p, lower, platform="cuda")


def arrivals(count: int) -> jax.Array:
    """Zeros by which the blocks of a launch find out which is the last of some: as many counters as asked for, or more.

    A kernel that counts in them leaves zeros, so XLA, which knows of no change, may give all launches of a program the
    same ones. Launches of a program come one after the other.
    """
    return jnp.zeros(max(MIN_ARRIVALS, power_of_two(count)), jnp.int32)


def power_of_two(number: int) -> int:
    """The least power of two that is not below: sizes of Triton's blocks are such."""
    return 1 << (number - 1).bit_length()


def target_capability() -> int:
    """The compute capability, times ten, that kernels are compiled for: this GPU's, or Hopper's where there is none."""
    return this_device().capability or HOPPER.capability
