"""Matrices in eight bits a number, with one scale a row: the kinds, each registered here once.

    W ≈ diag(scale) · values,   scale[o] = max |W[o]| / largest,   values = W / scale, rounded

    int8      −127 to 127. A product multiplies x by the numbers as they are, which bfloat16 holds exactly, so that the
              only error is that of the weights. Columns are stored in the order that kernels want (`interleave`).
    float8    e4m3, −448 to 448. A product rounds x in the same way, a scale a row of x, and multiplies eight bits by
              eight bits: twice the rate of bfloat16 on GPUs of compute capability 8.9 and up, for a larger error.

A further kind is one more `Quantization` in `QUANTIZATIONS`: options, files, memory checks and devices go by that.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

COLUMNS = 16  # whose order `interleave` changes: those of a tensor core's instruction


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A way to keep matrices in eight bits a number.

    Attributes:
        name: as `LLM(quantization=…)` takes it.
        dtype: of the numbers, as JAX names it.
        stored: of the numbers in a file, as safetensors names it.
        largest: the number that a row's largest magnitude becomes.
        whole: whether numbers are whole.
        columns: columns whose order kernels change, of which a device must hold whole groups; 1: none.
        rounds_activations: whether products round what they multiply as well.
    """

    name: str
    dtype: str
    stored: str
    largest: float
    whole: bool
    columns: int
    rounds_activations: bool

    def round(self, rows: Float[Array, "*shape I"]) -> tuple[Shaped[Array, "*shape I"], Float[Array, "*shape"]]:
        """Rounds each row to nearest, symmetrically: numbers in the order of `rows`, and scales in float32."""
        wide = rows.astype(jnp.float32)
        scale = jnp.max(jnp.abs(wide), axis=-1) / self.largest
        scale = jnp.where(scale > 0, scale, 1.0)  # of a row of zeros, or of numbers that are 0 beside any other
        values = wide / scale[..., None]
        if self.whole:
            values = jnp.round(values)
        else:  # beyond its largest number e4m3 has NaN
            values = jnp.clip(values, -self.largest, self.largest)
        return values.astype(self.dtype), scale

    def ordered(self, x: Shaped[Array, "*shape I"]) -> Shaped[Array, "*shape I"]:
        """Columns in the order in which matrices are stored."""
        return interleave(x) if self.columns > 1 else x

    def restored(self, x: Shaped[Array, "*shape I"]) -> Shaped[Array, "*shape I"]:
        """Columns that `ordered` has ordered, in their own order."""
        return restore(x) if self.columns > 1 else x


INT8 = Quantization("int8", "int8", "I8", 127.0, whole=True, columns=COLUMNS, rounds_activations=False)
FLOAT8 = Quantization("float8", "float8_e4m3fn", "F8_E4M3", 448.0, whole=False, columns=1, rounds_activations=True)
QUANTIZATIONS = {one.name: one for one in (INT8, FLOAT8)}


@functools.partial(jax.jit, static_argnames="kind")
def stored_order(values: Shaped[Array, "*shape I"], kind: Quantization) -> Shaped[Array, "*shape I"]:
    """`kind.ordered` as one program for all matrices of a shape, where `jax.jit(kind.ordered)` is one for each call."""
    return kind.ordered(values)


def check_quantization(name: str, value: object) -> None:
    """Raises ValueError unless argument `name` is None or the name of a quantisation."""
    if value is not None and value not in QUANTIZATIONS:
        known = ", ".join(map(repr, QUANTIZATIONS))
        raise ValueError(f"{name} must be {known} or None (weights as they are), got {value!r}.")


def interleave(x: Shaped[Array, "*shape I"]) -> Shaped[Array, "*shape I"]:
    """Columns in the order that int8 matrices are stored in: number habe of 16, in binary, becomes number baeh.

    Thread ab of a tensor core's four loads from number 8b + 4a on, as Mosaic's `WGMMA_UPCAST_2X` has it. Columns are
    as they are where I is no multiple of 16, which kernels do not take.
    """
    return _reordered(x, (2, 1, 3, 0))


def restore(x: Shaped[Array, "*shape I"]) -> Shaped[Array, "*shape I"]:
    """Columns that `interleave` has ordered, in their own order."""
    return _reordered(x, (3, 1, 0, 2))


def _reordered(x: jax.Array, bits: tuple[int, ...]) -> jax.Array:
    *shape, columns = x.shape
    if columns % COLUMNS:
        return x
    first = len(shape) + 1
    axes = (*range(first), *(first + bit for bit in bits))
    return x.reshape(*shape, columns // COLUMNS, 2, 2, 2, 2).transpose(axes).reshape(x.shape)
