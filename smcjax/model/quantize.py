"""Eight bits a number (`smcjax.matmul.Quantized`) for every matrix that a forward streams.

Norms, biases, weights that a kind of attention has of its own and an embedding that is only looked up stay as they are.
Such matrices may also come from files in eight bits, and go into them (`smcjax.model.files.hf_quantization`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from smcjax.matmul import Quantized, is_packed
from smcjax.model.params import Params
from smcjax.quantization import INT8, Quantization


def quantize_matrix(matrix: jax.Array, kind: Quantization = INT8) -> Quantized:
    """Rounds each row to nearest, symmetrically."""
    values, scale = kind.round(matrix)
    return Quantized(kind.ordered(values), scale, jnp.dtype(matrix.dtype).name, kind.name)


def streamed(params: Params) -> list[bool]:
    """For each leaf of `params`, packed matrices being leaves: True for a matrix that a forward streams."""

    def is_streamed(path: Any, leaf: Any) -> bool:
        name = jax.tree_util.keystr(path)
        looked_up_only = params.lm_head is not None and name == ".embed"
        return len(leaf.shape) == 2 and not looked_up_only and ".attention" not in name

    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed)
    return [is_streamed(path, leaf) for path, leaf in leaves]


def quantize_params(params: Params, kind: Quantization = INT8, *, consume: bool = False) -> Params:
    """Returns the decoder with every matrix that a forward streams in eight bits; packed ones stay as they are.

    `consume` frees each that is replaced.
    """
    return quantize_leaves(params, jax.tree.leaves(params, is_leaf=is_packed), kind, consume=consume)


def quantize_leaves(like: Params, leaves: Iterable[Any], kind: Quantization | None, *, consume: bool = True) -> Params:
    """Returns the decoder of `leaves`, in the order of `like`'s, with matrices as `quantize_params` has them.

    With `kind` None the leaves stay as they are.

    Each matrix is rounded when it comes and, with `consume`, freed: a device never holds two that are not rounded.
    """
    structure = jax.tree.structure(like, is_leaf=is_packed)
    if kind is None:
        return jax.tree.unflatten(structure, list(leaves))
    quantize = jax.jit(functools.partial(quantize_matrix, kind=kind))

    def convert(leaf: Any, chosen: bool) -> Any:
        if not chosen or is_packed(leaf):
            return leaf
        quantized = quantize(leaf)
        if consume:
            jax.block_until_ready(quantized)
            leaf.delete()
        return quantized

    return jax.tree.unflatten(structure, list(map(convert, leaves, streamed(like))))
