"""The launch of a Triton kernel within a JAX program, through jax-triton.

A kernel is one function that `triton.jit` compiles for one architecture while JAX lowers the program. It becomes a
custom call of that program, which CUDA graphs capture like any other launch. Triton is imported when the first kernel
runs: modules of kernels (`*_triton_kernel.py`), which import it, are imported by the functions that launch them.
"""

from __future__ import annotations

from typing import Any

import jax

from smcjax.device import HOPPER, this_device

type Shapes = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]


def launch(
    kernel: Any,
    *arrays: jax.Array,
    out: Shapes,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    aliases: dict[int, int] | None = None,
    interpret: bool = False,
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
        interpret: whether the kernel runs on a CPU, slowly, with arrays that are not traced; for tests.
        static: Python numbers and strings that the kernel is compiled for.
    """
    if interpret:
        from smcjax.pallas.triton.interpreter import interpreted

        return interpreted(kernel, *arrays, out=out, grid=grid, aliases=aliases or {}, **static)
    import jax_triton

    results = "out_shape" if jax_triton.__version_info__ < (0, 4) else "out_type"
    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        grid=grid,
        num_warps=warps,
        num_stages=stages,
        compute_capability=target_capability(),
        enable_fp_fusion=True,
        input_output_aliases=aliases or {},
        **{results: out},
        **static,
    )


def power_of_two(number: int) -> int:
    """The least power of two that is not below: sizes of Triton's blocks are such."""
    return 1 << (number - 1).bit_length()


def target_capability() -> int:
    """The compute capability, times ten, that kernels are compiled for: this GPU's, or Hopper's where there is none."""
    return this_device().capability or HOPPER.capability
