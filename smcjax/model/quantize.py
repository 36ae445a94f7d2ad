"""Weight-only int8: half the bytes of bfloat16 in every matrix, one scale a row, arithmetic as before.

    W ≈ diag(scale) · values,   scale[o] = max |W[o]| / 127,   values = round(W / scale)
    x · Wᵀ ≈ (x · valuesᵀ) ∘ scale

int8 values are exact in bfloat16, so the only error is the rounding of the weights; the conversion is fused into the
product's load. Norms, biases and an embedding that is only looked up stay as they are. Columns are stored in the order
that kernels want (`smcjax.pallas.int8`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from smcjax.model.params import Params
from smcjax.numerics import Product, form_of, product_precision
from smcjax.pallas.int8 import interleave, restore

QUANTIZATIONS = ("int8",)


def check_quantization(name: str, value: object) -> None:
    """Raises ValueError for what argument `name` cannot be."""
    if value is not None and value not in QUANTIZATIONS:
        raise ValueError(f"{name} must be 'int8' or None (weights as they are), got {value!r}.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [out, in] as int8 rows with a scale each. Looking up rows gives them in `compute_dtype`."""

    values: Any  # Int8[Array, "O I"], columns as `interleave` orders them
    scale: Any  # Float32[Array, " O"]
    compute_dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """Of what it stands for: activations and KV follow it."""
        return jnp.dtype(self.compute_dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.values.shape

    def __getitem__(self, rows: Any) -> jax.Array:
        values = restore(self.values[rows])
        return (values.astype(jnp.float32) * self.scale[rows][..., None]).astype(self.dtype)


def quantize_matrix(matrix: jax.Array) -> QuantizedMatrix:
    """Symmetric, per row, rounded to nearest."""
    wide = matrix.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)
    scale = jnp.where(largest > 0, largest / 127.0, 1.0)
    values = jnp.round(wide / scale[:, None]).astype(jnp.int8)
    return QuantizedMatrix(interleave(values), scale, jnp.dtype(matrix.dtype).name)


def quantized_product(x: jax.Array, weight: QuantizedMatrix, dtype: Any) -> jax.Array:
    """x · Wᵀ, accumulated and scaled in f32, in `dtype`."""
    *shape, inputs = x.shape
    # So that `products_asked` sees it: of forms it has but one.
    form_of(Product(math.prod(shape), weight.shape[0], inputs, "int8", jnp.dtype(dtype).name))
    y = jax.lax.dot_general(
        interleave(x),  # in the order of the matrix, beside which a step's x is small
        weight.values.astype(x.dtype),
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=product_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return (y * weight.scale).astype(dtype)


def quantize_params(params: Params, *, consume: bool = False) -> Params:
    """The same decoder with every matrix that a forward streams in int8. `consume` frees each one as it is replaced."""
    quantize = jax.jit(quantize_matrix)

    def convert(path: Any, leaf: jax.Array) -> Any:
        looked_up_only = params.lm_head is not None and jax.tree_util.keystr(path) == ".embed"
        if leaf.ndim != 2 or looked_up_only:
            return leaf
        quantized = quantize(leaf)
        if consume:
            jax.block_until_ready(quantized)
            leaf.delete()
        return quantized

    return jax.tree_util.tree_map_with_path(convert, params)
