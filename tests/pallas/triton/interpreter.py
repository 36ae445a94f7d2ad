"""Triton kernels on a CPU, by Triton's own interpreter, with NumPy arrays in place of PyTorch's tensors.

Triton decides when it is imported whether its functions are compiled or interpreted. So a process of its own, which
lives as long as this one, interprets.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import multiprocessing
import os
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np


class Buffer:
    """A NumPy array as the interpreter wants a tensor: an address and a dtype."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype.name

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self.array.ctypes.data


def interpreted(
    kernel: Any,
    *arrays: jax.Array,
    out: Any,
    grid: tuple[int, ...],
    aliases: dict[int, int],
    **static: Any,
) -> Any:
    """Computes what `smcjax.pallas.triton.launch.launch` does, block after block. Results begin as NaN or −1."""
    inputs = [np.array(array) for array in arrays]
    shapes = out if isinstance(out, tuple) else (out,)
    source = {result: argument for argument, result in aliases.items()}
    results = [
        inputs[source[index]] if index in source else _unwritten(shape.shape, shape.dtype)
        for index, shape in enumerate(shapes)
    ]
    where = (kernel.fn.__module__, kernel.fn.__name__)
    found = tuple(map(jnp.asarray, _worker().submit(_interpret, where, inputs, results, grid, static).result()))
    return found if isinstance(out, tuple) else found[0]


def _unwritten(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan if jnp.issubdtype(dtype, jnp.floating) else -1, dtype)


@functools.cache
def _worker() -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=_interpret_from_now_on)


def _interpret_from_now_on() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def _interpret(
    where: tuple[str, str],
    inputs: list[np.ndarray],
    results: list[np.ndarray],
    grid: tuple[int, ...],
    static: dict[str, Any],
) -> list[np.ndarray]:
    """Runs the kernel of a module in the worker's process; returns `results`, written."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # NumPy 2.4 makes no number of an array with an axis.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    builder = interpreter.InterpreterBuilder
    cast, dot, convert = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp

    def cast_rounding(self: Any, source: Any, to: Any) -> Any:  # bfloat16 is kept as uint16 and would be truncated
        kinds = [str(one.scalar) for one in (source.dtype, to)]
        if "bf16" not in kinds:
            return cast(self, source, to)
        numbers = source.data.view(jnp.bfloat16) if kinds[0] == "bf16" else source.data
        found = numbers.astype(jnp.bfloat16 if kinds[1] == "bf16" else interpreter._get_np_dtype(to))
        return interpreter.TensorHandle(found.view(interpreter._get_np_dtype(to)), to.scalar)

    def to_float8(self: Any, source: Any, to: Any, mode: Any) -> Any:  # Triton's own loses what rounding carries over
        if str(to.scalar) != "fp8e4nv" or str(source.dtype.scalar) != "fp32":
            return convert(self, source, to, mode)
        return interpreter.TensorHandle(source.data.astype(jnp.float8_e4m3fn).view(np.uint8), to.scalar)

    def dot_of_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = [cast_rounding(self, one, tl.float32) if str(one.dtype.scalar) == "bf16" else one for one in (a, b)]
        return dot(self, *wide, *others)

    class Executor(interpreter.GridExecutor):  # the base class copies PyTorch's tensors to the host and back
        def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
            return args_dev, kwargs

        def _restore_args_dev(self, *_: Any) -> None:
            pass

    module, name = where
    function = getattr(importlib.import_module(module), name)
    with (
        mock.patch.object(interpreter, "_patch_lang_tensor", patched),
        mock.patch.multiple(builder, cast_impl=cast_rounding, create_dot=dot_of_numbers, create_fp_to_fp=to_float8),
    ):
        Executor(function.rewrite(), function.arg_names, grid)(*map(Buffer, [*inputs, *results]), **static)
    return results
