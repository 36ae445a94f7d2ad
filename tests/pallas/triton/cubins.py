"""Triton kernels as machine code for GPUs that are not here, and what that code takes of a multiprocessor."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from smcjax.device import SHARED_MEMORY
from smcjax.pallas.dispatch import implementations
from smcjax.pallas.triton import launch
from tests.lazily import program_patches

TARGETS = (80, 89, 90, 100, 120)
MAX_REGISTERS = 255  # a thread


@dataclasses.dataclass(frozen=True)
class Cubin:
    """The resources that one kernel takes on one target.

    Attributes:
        name: of the kernel.
        registers: a thread.
        spilled: bytes a thread of what does not fit in registers.
        shared_memory: bytes a block.
        limit: bytes of shared memory that a block of the target may have.
    """

    name: str
    registers: int
    spilled: int
    shared_memory: int
    limit: int


def compiled(capability: int, function: Callable[..., Any], *args: Any) -> list[Cubin]:
    """Compiles each kernel that `function` of such arguments launches on a GPU of a capability."""
    import jax_triton

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def recorded(*arrays: Any, kernel: Any, out_shape: Any, **options: Any) -> Any:
        calls.append((kernel, (*arrays, *jax.tree.leaves(out_shape)), options))
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), out_shape)

    with (
        mock.patch.object(jax_triton, "triton_call", recorded),
        program_patches(launch, "target_capability", lambda: capability),
        implementations("triton"),
    ):
        jax.eval_shape(lambda *given: function(*given), *args)  # a function that JAX has not traced before
    assert calls, "no Triton kernel is launched"
    return [_compile(kernel, arrays, options, capability) for kernel, arrays, options in calls]


def _compile(kernel: Any, arrays: tuple[Any, ...], options: dict[str, Any], capability: int) -> Cubin:
    import triton
    from jax_triton.triton_lib import get_triton_type
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launched = {"grid", "num_warps", "num_stages", "compute_capability", "enable_fp_fusion", "input_output_aliases"}
    static = {name: value for name, value in options.items() if name not in launched}
    types = [get_triton_type(jax.core.ShapedArray(array.shape, array.dtype)) for array in arrays]
    signature = dict(zip(kernel.arg_names, types, strict=False)) | dict.fromkeys(static, "constexpr")
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in static.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in range(len(arrays))},
    )
    chosen = {name: options[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    # jax-triton leaves Triton without a folder for what it compiled.
    triton.knobs.cache.dir = str(Path(".pytest_cache/d/smcjax/triton").resolve())
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
    registers, spilled = _resources(made.asm["cubin"])
    return Cubin(kernel.__name__, registers, spilled, made.metadata.shared, SHARED_MEMORY[f"sm{capability}"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said.stdout)
    assert found, said.stdout
    return int(found[1]), int(found[2]) + int(found[3])


def lowered(function: Callable[..., Any], *args: Any) -> str:
    """The text of a program for Hopper GPUs in which Triton's kernels are launched. Skips without JAX's CUDA plugin."""
    pytest.importorskip("jax_cuda13_plugin")
    with implementations("triton"):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
