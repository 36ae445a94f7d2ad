"""Private parts of JAX, and what its versions do differently: the only module that imports `jax._src` or changes JAX.

JAX may move or drop any of it in a minor version. The package takes JAX from 0.11.2 to before 0.13; CI
tests kernels in 0.11.2 and lowers them in 0.12. Other MLIR bindings are those of `jax.extend.mlir`, Mosaic's own of
`jax.experimental.mosaic.gpu`.

    llvm, nvvm        bindings of two MLIR dialects that `jax.extend.mlir` leaves out, for instructions that kernels
                      write by themselves (`threads`, `tiles`, `l2_policy`)
    after_lowering    a place in Mosaic's table of lowering rules, into which JAX offers no way, for instructions that
                      carry a policy (`l2_policy`)
    store             a store of an array in any layout, as 0.11 makes each

Mosaic and MLIR take a second to import, which happens when a kernel first asks for something of them: on a CPU never.

    pl, plgpu, mgpu, mu, fa Pallas, its Mosaic, Mosaic itself, and of that `utils` and `fragmented_array`
    ir, arith, vector       what JAX does offer of MLIR: its types and values, and two dialects
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["after_lowering", "arith", "fa", "ir", "llvm", "mgpu", "mu", "nvvm", "pl", "plgpu", "store", "vector"]


class _Later(types.ModuleType):
    """A module that is imported when something is first asked of it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported(self.__name__), name)


@functools.cache
def _imported(name: str) -> types.ModuleType:
    """Imports a module. From Mosaic's Pallas on, Mosaic reads the version of ptxas once.

    It would start `ptxas --version`, a process of several ms, for each conversion from or to 8 bits or less that it
    lowers, some 300 in a cycle.
    """
    module = importlib.import_module(name)
    if name == "jax.experimental.pallas.mosaic_gpu" and fa.mgpu_lib is not None:  # None: without JAX's plugin for CUDA
        compiler = fa.mgpu_lib._mosaic_gpu_ext
        compiler._get_ptxas_isa_version = functools.cache(compiler._get_ptxas_isa_version)
    return module


if TYPE_CHECKING:
    from jax._src.lib.mlir.dialects import llvm, nvvm
    from jax.experimental import pallas as pl
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import dialect_lowering
    from jax.experimental.mosaic.gpu import fragmented_array as fa
    from jax.experimental.mosaic.gpu import utils as mu
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith, vector
else:
    ir = _Later("jax.extend.mlir.ir")
    arith, vector = _Later("jax.extend.mlir.dialects.arith"), _Later("jax.extend.mlir.dialects.vector")
    llvm, nvvm = _Later("jaxlib.mlir.dialects.llvm"), _Later("jaxlib.mlir.dialects.nvvm")
    mgpu = _Later("jax.experimental.mosaic.gpu")
    dialect_lowering = _Later("jax.experimental.mosaic.gpu.dialect_lowering")
    fa = _Later("jax.experimental.mosaic.gpu.fragmented_array")
    mu = _Later("jax.experimental.mosaic.gpu.utils")
    pl, plgpu = _Later("jax.experimental.pallas"), _Later("jax.experimental.pallas.mosaic_gpu")


def after_lowering(name: str, change: Callable[[Any], None]) -> None:
    """Calls `change(operation)` for every Mosaic operation `name`, in all kernels, when its own rule has lowered it.

    The insertion point is then behind what the rule wrote. Raises KeyError where Mosaic has no such operation.
    """
    rule = dialect_lowering._lowerings[name]

    def lowered(context: Any, operation: Any) -> Any:
        results = rule(context, operation)
        change(operation)
        return results

    dialect_lowering._lowerings[name] = lowered


def store(ref: Any, value: Any) -> None:
    """Stores an array to a reference of its shape, where threads may write parts of lines or meet at memory banks.

    JAX 0.12 refuses to assign such an array; JAX 0.11 assigns any.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
