"""The one door from activations to weights: x · Wᵀ and the lookup of rows, however a matrix is kept.

    matrix(layer.qkv)(x)                             # x · Wᵀ in x's dtype
    matrix(layer.o)(x, add_to=residual)              # residual + x · Wᵀ
    matrix(params.unembed)(x, out=jnp.float32)       # logits
    matrix(params.embed).rows(tokens)

Leaves of `Params` are plain arrays [out, in], or of a packed kind; `matrix` gives both the interface of `Matrix`. A
packed kind is a frozen dataclass that is registered as a pytree, stands in `PACKED` and implements `Matrix`; everything
else goes by that. Matrices in eight bits are one such kind, `Quantized`, whichever `Quantization` they have. Kernels
read `values` by themselves and take the dtypes of it that they know.

Matrices that several devices hold together (`smcjax.model.parallel`) come in three kinds. One that is split by rows,
whose reader has its part of the outputs, is what it is on one device. `RowParallel` is split by columns and
`VocabularyParallel` by rows that everybody needs; both are seen only within `jax.shard_map`, and all that devices say
to each other is said here: `_sum_over`, `sum_over_neighbours` and `_gather_over`. The persistent decode step alone sums
what a `RowParallel` leaves by itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from smcjax.device import product_precision
from smcjax.quantization import QUANTIZATIONS, Quantization

_dtypes: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("dtypes", default=None)


@contextlib.contextmanager
def product_dtypes() -> Iterator[set[str]]:
    """Collects the stored dtypes of the matrices that XLA multiplies by in what this context traces."""
    found: set[str] = set()
    token = _dtypes.set(found)
    try:
        yield found
    finally:
        _dtypes.reset(token)


def _record_product(dtype: Any) -> None:
    found = _dtypes.get()
    if found is not None:
        found.add(jnp.dtype(dtype).name)


class Matrix(Protocol):
    """W [out, in], as activations see it. `values` are the stored numbers [out, in], perhaps of a narrower dtype."""

    values: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's [out, in]."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the matrix as activations see it: they and KV have it."""
        ...

    def __call__(
        self, x: Float[Array, "*shape I"], *, add_to: Float[Array, "*shape O"] | None = None, out: Any = None
    ) -> Float[Array, "*shape O"]:
        """x · Wᵀ, accumulated in f32, in the dtype `out` (None: that of x); plus `add_to`, of that dtype."""
        ...

    def rows(self, ids: Any, *, out: Any = None) -> jax.Array:
        """Rows `ids` [...] of W as [..., in], in the dtype `out` (None: `dtype`)."""
        ...


@dataclasses.dataclass(frozen=True)
class Dense(Matrix):
    """A plain array [out, in] as a `Matrix`. A GPU adds `add_to` within the product's kernel."""

    values: Any  # Float[Array, "O I"]

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self.values.dtype

    def __call__(self, x: jax.Array, *, add_to: jax.Array | None = None, out: Any = None) -> jax.Array:
        """x · Wᵀ, as `Matrix` says."""
        _record_product(x.dtype)
        y = _contract(x, self.values, None if out is None else jnp.dtype(out))
        return y if add_to is None else add_to + y

    def rows(self, ids: Any, *, out: Any = None) -> jax.Array:
        """Rows of W, as `Matrix` says."""
        found = self.values[ids]
        return found if out is None else found.astype(out)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized(Matrix):
    """A `Matrix` kept as rows of eight-bit numbers with a scale each."""

    values: Any  # [out, in] of `kind.dtype`, columns as `kind.ordered` orders them
    scale: Any  # Float32[Array, " O"]
    compute_dtype: str = dataclasses.field(metadata={"static": True})
    quantization: str = dataclasses.field(metadata={"static": True})  # a name of `QUANTIZATIONS`

    @property
    def kind(self) -> Quantization:
        """How the numbers are rounded and multiplied."""
        return QUANTIZATIONS[self.quantization]

    @property
    def dtype(self) -> Any:
        """Dtype that products and rows have."""
        return jnp.dtype(self.compute_dtype)

    def __call__(self, x: jax.Array, *, add_to: jax.Array | None = None, out: Any = None) -> jax.Array:
        """x · Wᵀ, accumulated and scaled in f32, as `Matrix` says."""
        result = jnp.dtype(x.dtype if out is None else out)
        _record_product(self.values.dtype)
        if self.kind.rounds_activations:
            rounded, of_x = self.kind.round(x)
            y = _contract(self.kind.ordered(rounded), self.values, jnp.dtype(jnp.float32)) * of_x[..., None]
        else:  # the order is the matrix's, beside which a step's x is small
            y = _contract(self.kind.ordered(x), self.values.astype(x.dtype), jnp.dtype(jnp.float32))
        y = (y * jnp.broadcast_to(self.scale, y.shape)).astype(result)
        return y if add_to is None else add_to + y

    def rows(self, ids: Any, *, out: Any = None) -> jax.Array:
        """Rows of W, multiplied out in f32, as `Matrix` says."""
        wide = self.kind.restored(self.values[ids]).astype(jnp.float32) * self.scale[ids][..., None]
        return wide.astype(self.dtype if out is None else out)


class PeerMemory(Protocol):
    """The devices' own way to exchange arrays (`smcjax.pallas.collectives.peer_memory`), for arrays that it takes."""

    def sums(self, x: jax.Array) -> bool: ...
    def gathers(self, x: jax.Array) -> bool: ...
    def sum(self, x: jax.Array, add_to: jax.Array | None = None) -> jax.Array: ...
    def gather(self, x: jax.Array) -> jax.Array: ...


def _sum_over(axis: str, x: jax.Array, peer_memory: PeerMemory | None, add_to: jax.Array | None = None) -> jax.Array:
    """The sum of all devices' x along a mesh axis, plus `add_to`, which all have: the same bits on each of them."""
    if peer_memory is not None and peer_memory.sums(x):
        return peer_memory.sum(x, add_to)
    total: jax.Array = jax.lax.psum(x, axis)
    return total if add_to is None else add_to + total


def sum_over_neighbours(axis: str, count: int, x: jax.Array) -> jax.Array:
    """The sum of x over each `count` neighbours along a mesh axis: the same bits on each of them."""
    groups = [list(range(start, start + count)) for start in range(0, jax.lax.axis_size(axis), count)]
    total: jax.Array = jax.lax.psum(x, axis, axis_index_groups=groups)
    return total


def _gather_over(axis: str, x: jax.Array, peer_memory: PeerMemory | None) -> jax.Array:
    """All devices' x along a mesh axis, side by side along the last dimension."""
    if peer_memory is not None and peer_memory.gathers(x):
        return peer_memory.gather(x)
    whole: jax.Array = jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
    return whole


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowParallel(Matrix):
    """A `Matrix` of which each device along a mesh axis has some columns, and of x the entries that these read.

    Named as in Megatron-LM, where W is stored [in, out]. Products are summed in the dtype of the result.
    """

    part: Any  # the device's own columns: an array, or a packed kind
    axis: str = dataclasses.field(metadata={"static": True})
    peer_memory: Any = None  # `PeerMemory`; None: devices speak by XLA's collectives

    @property
    def values(self) -> Any:
        """The device's stored numbers [out, in/n]."""
        return matrix(self.part).values

    @property
    def dtype(self) -> Any:
        """Dtype of the part."""
        return matrix(self.part).dtype

    def __call__(self, x: jax.Array, *, add_to: jax.Array | None = None, out: Any = None) -> jax.Array:
        """The sum over devices of x · Wᵀ, as `Matrix` says; `add_to`, which all have, is added once."""
        return _sum_over(self.axis, matrix(self.part)(x, out=out), self.peer_memory, add_to)

    def rows(self, ids: Any, *, out: Any = None) -> jax.Array:
        """Whole rows of W, as `Matrix` says."""
        return _gather_over(self.axis, matrix(self.part).rows(ids, out=out), self.peer_memory)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VocabularyParallel(Matrix):
    """A `Matrix` with a row a token, of which each device along a mesh axis has as many: embedding or LM head.

    Rows behind the last token fill up the last devices' parts.
    """

    part: Any  # the device's own rows: an array, or a packed kind
    axis: str = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})  # V
    peer_memory: Any = None  # `PeerMemory`; None: devices speak by XLA's collectives

    @property
    def values(self) -> Any:
        """The device's stored numbers [⌈V/n⌉, in]."""
        return matrix(self.part).values

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole matrix's [V, in]."""
        return (self.num_tokens, *matrix(self.part).shape[1:])

    @property
    def dtype(self) -> Any:
        """Dtype of the part."""
        return matrix(self.part).dtype

    def __call__(self, x: jax.Array, *, add_to: jax.Array | None = None, out: Any = None) -> jax.Array:
        """x · Wᵀ of all tokens, on every device, as `Matrix` says."""
        y = _gather_over(self.axis, matrix(self.part)(x, out=out), self.peer_memory)[..., : self.num_tokens]
        return y if add_to is None else add_to + y

    def rows(self, ids: Any, *, out: Any = None) -> jax.Array:
        """Rows of W, as `Matrix` says: exactly those that the one device has whose rows they are."""
        part = matrix(self.part)
        own = ids - jax.lax.axis_index(self.axis) * part.shape[0]
        is_own = (own >= 0) & (own < part.shape[0])
        found = part.rows(jnp.where(is_own, own, 0), out=out)
        return _sum_over(self.axis, jnp.where(is_own[..., None], found, jnp.zeros_like(found)), self.peer_memory)


PACKED = (Quantized, RowParallel, VocabularyParallel)  # kinds that are leaves of `Params` by themselves
ON_ONE_DEVICE = (Dense, Quantized)  # kinds whose `values` are the whole matrix, as kernels take it


def is_packed(leaf: Any) -> bool:
    """True for a leaf of `Params` that keeps its matrix otherwise than as one plain array."""
    return isinstance(leaf, PACKED)


def is_whole(leaf: Any) -> bool:
    """True for a leaf of `Params` whose stored numbers are those of the whole matrix."""
    return isinstance(matrix(leaf), ON_ONE_DEVICE)


def matrix(leaf: Any) -> Matrix:
    """A leaf of `Params` [out, in] as a `Matrix`."""
    return leaf if is_packed(leaf) else Dense(leaf)


def _contract(x: jax.Array, values: jax.Array, result: Any) -> jax.Array:
    dimensions, precision = (((x.ndim - 1,), (1,)), ((), ())), product_precision(x.dtype)
    return jax.lax.dot_general(x, values, dimensions, precision=precision, preferred_element_type=result)
