"""Two parts of a program that need nothing of each other: one after the other, or on two devices at the same time.

On two devices each runs one part, the other not at all, and then they tell each other the results. A part's own memory
stays where the part runs: on the other device what is kept of it is out of date, which nothing reads.
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


def run_parts(*parts: Part, apart: str | None) -> list[tuple[Any, Any]]:
    """The memory and the results of each part, computed on device i of the mesh axis `apart`; None: all of them here.

    All devices have the same results; memory is right on the part's own device alone.
    """
    if apart is None:
        return [part.compute(part.memory) for part in parts]
    done = [_only_where(jax.lax.axis_index(apart) == i, part) for i, part in enumerate(parts)]
    told = _told([results for _, results in done], apart)
    return [(memory, results) for (memory, _), results in zip(done, told, strict=True)]


def _only_where(here: jax.Array, part: Part) -> tuple[Any, Any]:
    """The part computed where `here` is true; elsewhere the memory as it was, and results of zeros.

    XLA updates what a branch takes and gives in place, and puts both branches into its CUDA graph, so that no host asks
    which to run. Of a loop of one turn or none the host does ask: a cycle then took 10.5 ms in place of 6.1
    (docs/explanation/tensor-parallelism.md).
    """
    shapes = jax.eval_shape(part.compute, part.memory)[1]
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.cond(here, part.compute, lambda memory: (memory, nothing), part.memory)


def _told(results: Any, axis: str) -> Any:
    """The sum over devices of results that all but one of them have as zeros, bit by bit, by one collective."""
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
    """The leaf's elements as int32, whose sum with zeros is exact: a NaN's bits, too."""
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(leaf, jnp.int32)


def _like(words: jax.Array, dtype: Any) -> jax.Array:
    """The elements of `_words` in their own dtype again."""
    return words.astype(bool) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(words, dtype)
