"""Private parts of JAX, for kernels: the only module that imports `jax._src` or changes what JAX does.

JAX may move or drop any of it in a minor version. It was checked in JAX 0.11.2; the package takes JAX from 0.11.2 to
before 0.13. Other MLIR bindings come from `jax.extend.mlir`, Mosaic's own from `jax.experimental.mosaic.gpu`.

    llvm, nvvm        bindings of two MLIR dialects that `jax.extend.mlir` leaves out, for instructions that kernels
                      write by themselves (`simt`, `lanes`, `eviction`)
    after_lowering    a place in Mosaic's table of lowering rules, into which JAX offers no way, for instructions that
                      carry a policy (`eviction`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src.lib.mlir.dialects import llvm, nvvm
from jax.experimental.mosaic.gpu import dialect_lowering

__all__ = ["after_lowering", "llvm", "nvvm"]


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
