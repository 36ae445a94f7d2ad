"""Draft/target disaggregation: two independent parts of a program, in sequence or on two devices at the same time.

On two devices, device i runs part i alone, and one collective then gives both devices all results. A part's memory is
current on its own device only; the copy on the other device is stale, and nothing reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Part(NamedTuple):
    """A part of a program: `compute(memory)` gives the memory after it, and its results, any pytree."""

    compute: Callable[[Any], tuple[Any, Any]]
    memory: Any


def run_disaggregated(*parts: Part, axis: str | None) -> list[tuple[Any, Any]]:
    """Computes part i on device i of the mesh axis `axis`, or every part on this device if `axis` is None.

    Returns each part's memory and results. All devices have the same results; the memory of part i is current on
    device i only.
    """
    if axis is None:
        return [part.compute(part.memory) for part in parts]
    done = [_only_where(jax.lax.axis_index(axis) == i, part) for i, part in enumerate(parts)]
    shared = _sum_over_devices([results for _, results in done], axis)
    return [(memory, results) for (memory, _), results in zip(done, shared, strict=True)]


def _only_where(here: jax.Array, part: Part) -> tuple[Any, Any]:
    """Computes the part if `here` is true; otherwise returns its memory unchanged, and zeros as its results.

    XLA updates the operands of `cond` in place and puts both branches into its CUDA graph, so the host does not wait to
    learn which branch runs. With a loop of zero or one iterations the host does wait: a cycle took 10.5 ms instead of
    6.1 (docs/explanation/tensor-parallelism.md).
    """
    shapes = jax.eval_shape(part.compute, part.memory)[1]
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.cond(here, part.compute, lambda memory: (memory, nothing), part.memory)


def _sum_over_devices(results: Any, axis: str) -> Any:
    """Sums results over devices, exactly and by one collective; all devices but one must have zeros."""
    leaves, structure = jax.tree.flatten(results)
    words = [_words(leaf).reshape(-1) for leaf in leaves]
    joined = jax.lax.psum(jnp.concatenate(words), axis)
    ends = list(itertools.accumulate(leaf.size for leaf in leaves))
    pieces = [
        _like(piece.reshape(leaf.shape), leaf.dtype)
        for leaf, piece in zip(leaves, jnp.split(joined, ends[:-1]), strict=True)
    ]
    return jax.tree.unflatten(structure, pieces)


def _words(leaf: jax.Array) -> jax.Array:
    """The leaf's elements as int32. Adding zeros to these keeps every bit, those of a NaN included."""
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(leaf, jnp.int32)


def _like(words: jax.Array, dtype: Any) -> jax.Array:
    """Converts int32 words of `_words` back to elements of `dtype`."""
    return words.astype(bool) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(words, dtype)
