"""How Native Sparse Attention makes one compressed key or value of l stored ones: φ, by key-value head.

    x_r = stored_r + position_r,  r < l
    linear: W · vec(x)      mlp: W₂ · silu(W₁ · vec(x) + b₁) + b₂

vec lists the l vectors one after the other. Keys and values have weights of their own.

Products are in f32. With weights of bfloat16 an f32 factor is two of bfloat16, its rounding and the rest's, so that
tensor cores multiply what is stored: its first 16 bits count, where the result keeps 8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smcjax.model.attention import Weights

COMPRESSIONS = ("mlp", "linear")


def compression_shapes(phi: str, kv_heads: int, dim: int, size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of `compress`, by name; `size` is l. The MLP's hidden size is the head's."""
    shapes: dict[str, tuple[int, ...]] = {}
    for of in "kv":
        shapes[f"position_{of}"] = (kv_heads, size, dim)
        if phi == "linear":
            shapes[f"phi_{of}"] = (kv_heads, dim, size * dim)
        if phi == "mlp":
            shapes |= {f"phi_{of}_in": (kv_heads, dim, size * dim), f"phi_{of}_in_bias": (kv_heads, dim)}
            shapes |= {f"phi_{of}_out": (kv_heads, dim, dim), f"phi_{of}_out_bias": (kv_heads, dim)}
    return shapes


def compress(phi: str, weights: Weights, of: str, stored: Float[Array, "R N l Hkv D"]) -> Float[Array, "R N Hkv D"]:
    """Compressed keys (`of` is "k") or values ("v"), computed in f32 from stored ones of f32."""

    def weight(name: str) -> jax.Array:
        wide: jax.Array = weights[name].astype(jnp.float32)
        return wide

    def product(x: jax.Array, name: str) -> jax.Array:
        factor, terms = weights[name], "rnki,koi->rnko"
        if factor.dtype != jnp.bfloat16:
            return jnp.einsum(terms, x, weight(name), precision=jax.lax.Precision.HIGHEST)
        # A conversion to bfloat16 and back XLA drops on GPUs, so that nothing would be left for the second factor.
        rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        both = jnp.concatenate([rounded, x - rounded]).astype(factor.dtype)
        first, rest = jnp.split(jnp.einsum(terms, both, factor, preferred_element_type=jnp.float32), 2)
        return first + rest

    x = stored + jnp.moveaxis(weight(f"position_{of}"), 0, 1)
    vec = jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], x.shape[3], -1)
    if phi == "linear":
        return product(vec, f"phi_{of}")
    hidden = jax.nn.silu(product(vec, f"phi_{of}_in") + weight(f"phi_{of}_in_bias"))
    return product(hidden, f"phi_{of}_out") + weight(f"phi_{of}_out_bias")
