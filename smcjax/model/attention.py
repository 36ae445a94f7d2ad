"""Kinds of attention: which keys a query sees, what pages keep of a token, and how a layer reads them.

A kind is one frozen, hashable, static value of a layer's spec that answers all questions about its attention. The
cache, the decoder and what plans memory ask it and know no kind by name, so a new kind is a new class.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.kv import CacheSpec, LayerCache, PageArray
from smcjax.model.view import BatchView, TreeView
from smcjax.model.visible_kv import grouped, masked_softmax, scaled_scores, tree_kv
from smcjax.pallas import (
    HeadNorms,
    PendingNorm,
    attends_by_kernels,
    attention,
    paged_attention,
    plan_sharing,
    rotate_and_write,
    split_and_rotate,
    split_heads,
)
from smcjax.pallas.attention.reference import sees
from smcjax.pallas.cache.rotate_and_write import Write

Plan = Any  # a pytree, or None
Selection = Any  # what a layer's queries have chosen, for later layers to take; None: nothing
Weights = Mapping[str, Any]  # a kind's own, by name: jax.Array, or jax.ShapeDtypeStruct in `param_shapes`
Heads = tuple[Float[Array, "R T H D"], Float[Array, "R T Hkv D"], Float[Array, "R T Hkv D"]]


@dataclasses.dataclass(frozen=True)
class Projection:
    """A layer's fused product, and what makes queries, keys and values of it."""

    qkv: Float[Array, "R T HHH D"]  # H query heads, Hkv key heads, Hkv value heads
    cos: Float[Array, "R T half"]
    sin: Float[Array, "R T half"]
    num_kv_heads: int  # of all the kind's pairs of keys and values
    norms: HeadNorms | None
    pending: PendingNorm | None  # the layer's norm, where the product was made without
    x: Float[Array, "R T E"]  # what the product was made of: the layer's input, normed unless that is pending
    weights: Weights | None  # the kind's own
    angles: Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # positions [R, T] → `cos`, `sin` of these

    def heads(self) -> Heads:
        """Returns q, k, v; the first two normed where the model does so, and rotated."""
        return split_and_rotate(self.qkv, self.cos, self.sin, **self._terms())

    def unrotated(self) -> Heads:
        """Returns q, k, v like `heads`, but none rotated."""
        return split_heads(self.qkv, **self._terms())

    def _terms(self) -> dict[str, Any]:
        return {"num_kv_heads": self.num_kv_heads, "norms": self.norms, "pending": self.pending}


def write_pair(
    projection: Projection, cache: LayerCache, view: BatchView
) -> tuple[Float[Array, "R T H D"], LayerCache]:
    """Writes the new tokens of a kind with one pair of keys and values, which are copied before where the view says so.

    Returns the tokens' queries, rotated, and the layer with "keys" and "values" changed.
    """
    q, keys, values = rotate_and_write(*pair_write(projection, cache, view))
    return q, {**cache, "keys": keys, "values": values}


def pair_write(projection: Projection, cache: LayerCache, view: BatchView) -> Write:
    """Returns the operands by which kernels do what `write_pair` does."""
    return Write(
        projection.qkv,
        projection.cos,
        projection.sin,
        cache["keys"],
        cache["values"],
        view.write_pages,
        view.slots,
        view.copies,
        projection.norms,
        projection.pending,
    )


class HeadShape(Protocol):
    """The sizes of a `smcjax.model.config.ModelConfig` that attention goes by."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class OwnWeight(NamedTuple):
    """One of the weights that a layer has for its kind of attention alone. Its first axis is that of heads.

    Attributes:
        shape: its shape on one device.
        by_query_head: whether it has a row a query head; else it has one a key-value head.
        of_input: whether it multiplies the layer's input, [..., E], as the layer's product does.
    """

    shape: tuple[int, ...]
    by_query_head: bool = False
    of_input: bool = False


class AttentionKind(abc.ABC):
    """One kind of attention. Values are frozen and hashable.

    What is not abstract has the answer of a kind with one pair of keys and values, no weights of its own, no plan and
    no kernels.
    """

    @property
    def kv_pairs(self) -> int:
        """Pairs of keys and values that a layer's product makes of a token, each of Hkv heads."""
        return 1

    @property
    def selects(self) -> bool:
        """True where queries select blocks, which layers behind may take (`BatchView.sparse`)."""
        return False

    def own_weights(self, config: HeadShape) -> Mapping[str, OwnWeight]:
        """Describes the weights that a layer of the kind has of its own, by name."""
        return {}

    def param_shapes(self, config: HeadShape, dtype: Any) -> Weights | None:
        """Returns `own_weights` as `jax.ShapeDtypeStruct` of this dtype; None without any."""
        own = self.own_weights(config)
        return {name: jax.ShapeDtypeStruct(of.shape, jnp.dtype(dtype)) for name, of in own.items()} or None

    def partition(self, devices: int, axis: str) -> AttentionKind:
        """Returns the kind as each of `devices` devices computes it that divide a key-value head's queries.

        They are neighbours along the mesh axis `axis`, and each has that key-value head's keys.
        """
        return self

    @abc.abstractmethod
    def cache(self, config: HeadShape) -> CacheSpec:
        """Names the arrays that a layer's pages hold."""

    @abc.abstractmethod
    def least_read(self, context: int, first: int = 0) -> Mapping[str, int]:
        """Counts what the last of `context` positions reads at least: entries of arrays that `cache` names.

        Entries written at positions before `first` are left out. An array that is not named need not be read.
        """

    def plan(self, config: HeadShape, view: BatchView, *, columns: int, dtype: Any) -> Plan:
        """Makes what all layers of the kind need once a cycle, for steps of 1 to `columns` new tokens a row."""
        return None

    def by_kernels(self, config: HeadShape, *, columns: int, page_size: int, dtype: Any) -> bool:
        """True where a kernel reads single rows of `columns` new tokens, planned so."""
        return False

    @abc.abstractmethod
    def dense(self, projection: Projection, positions: Int[Array, "R T"]) -> Float[Array, "R T H D"]:
        """Attends among the tokens themselves, without pages: the oracle, and what is trained."""

    @abc.abstractmethod
    def __call__(
        self, projection: Projection, cache: LayerCache, plan: Plan, view: BatchView, earlier: Selection = None
    ) -> tuple[Float[Array, "R T H D"], LayerCache, Selection]:
        """Writes the new tokens to the layer's pages and attends to all that each sees; returns both results.

        `view.lengths` counts the slots that hold KV after this forward. `plan` is None where nothing was planned.
        The third result is what queries have chosen, or taken of a layer before: `earlier`, where that is given.
        """

    @abc.abstractmethod
    def over_tree(
        self, projection: Projection, cache: LayerCache, scratch: LayerCache, view: TreeView, earlier: Selection = None
    ) -> tuple[Float[Array, "R T H D"], LayerCache, Selection]:
        """Puts what the new nodes end to scratch, attends to what is committed and each path; returns both results.

        All goes by path position: a node's output is that of its path written out as a sequence. `earlier` and the
        third result are as in a call.
        """


class _Softmax(AttentionKind):
    """Softmax over keys and values that pages hold as they are."""

    window: int | None
    scale: float | None
    first: ClassVar[int] = 0  # position that is seen

    def _visible(self, slot: Int[Array, "*#shape"], position: Int[Array, "*#shape"]) -> Bool[Array, "*shape"]:
        return sees(slot, position, self.window, self.first)

    def cache(self, config: HeadShape) -> CacheSpec:
        array = PageArray(config.num_kv_heads, config.head_dim)
        return CacheSpec({"keys": array, "values": array})

    def least_read(self, context: int, first: int = 0) -> dict[str, int]:
        start = 0 if self.window is None else context - self.window
        return dict.fromkeys(("keys", "values"), max(0, context - max(start, first, self.first)))

    def plan(self, config: HeadShape, view: BatchView, *, columns: int, dtype: Any) -> Plan:
        return plan_sharing(
            view.block_table,
            view.lengths,
            view.num_immutable,
            rows=view.rows,
            window=self.window,
            scale=self.scale,
            **_shape_of(config, columns, view.page_size, dtype),
        )

    def by_kernels(self, config: HeadShape, *, columns: int, page_size: int, dtype: Any) -> bool:
        shape = _shape_of(config, columns, page_size, dtype)
        return attends_by_kernels(window=self.window, scale=self.scale, first=self.first, **shape)

    def dense(self, projection: Projection, positions: Int[Array, "R T"]) -> Float[Array, "R T H D"]:
        visible = self._visible(positions[:, None, :], positions[:, :, None])
        return attention(*projection.heads(), visible, scale=self.scale)

    def write(
        self, projection: Projection, cache: LayerCache, view: BatchView
    ) -> tuple[Float[Array, "R T H D"], LayerCache]:
        """Writes the new tokens to the layer's pages; returns their queries, and the layer with both arrays changed."""
        return write_pair(projection, cache, view)

    def __call__(
        self, projection: Projection, cache: LayerCache, plan: Plan, view: BatchView, earlier: Selection = None
    ) -> tuple[Float[Array, "R T H D"], LayerCache, Selection]:
        q, cache = self.write(projection, cache, view)
        attended = paged_attention(
            q,
            cache["keys"],
            cache["values"],
            view.block_table,
            view.positions,
            view.lengths,
            sharing=plan,
            window=self.window,
            scale=self.scale,
            first=self.first,
        )
        return attended, cache, None

    def over_tree(
        self, projection: Projection, cache: LayerCache, scratch: LayerCache, view: TreeView, earlier: Selection = None
    ) -> tuple[Float[Array, "R T H D"], LayerCache, Selection]:
        q, keys, values = projection.heads()
        scratch = view.put(scratch, {"keys": keys, "values": values})
        seen_keys, seen_values = (tree_kv(view, cache[name], scratch[name]) for name in ("keys", "values"))
        _, slots, kv_heads, _ = seen_keys.shape
        scores = scaled_scores(grouped(q, kv_heads), seen_keys, self.scale)
        visible = self._visible(jnp.arange(slots)[None, None, None, None], view.positions[:, :, None, None, None])
        return masked_softmax(scores, seen_values, visible)[1].reshape(q.shape), scratch, None


def _shape_of(config: HeadShape, columns: int, page_size: int, dtype: Any) -> dict[str, Any]:
    """The keywords of `smcjax.pallas.supports`."""
    return {
        "columns": columns,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "page_size": page_size,
        "dtype": dtype,
    }


@dataclasses.dataclass(frozen=True)
class Full(_Softmax):
    """Causal attention to every earlier position and the query's own. `scale` None: 1/√head_dim."""

    scale: float | None = None
    window: None = dataclasses.field(default=None, init=False, repr=False)


@dataclasses.dataclass(frozen=True)
class SlidingWindow(_Softmax):
    """Causal attention to the last `window` positions, the query's own among them. `scale` None: 1/√head_dim.

    Raises ValueError for a window below 1.
    """

    window: int
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1, the query's own position, got {self.window}.")


@dataclasses.dataclass(frozen=True)
class AfterFirst(Full):
    """Causal attention to every position but the first, whose slot holds any finite numbers. Nothing is planned."""

    first: ClassVar[int] = 1

    def plan(self, config: HeadShape, view: BatchView, *, columns: int, dtype: Any) -> None:
        return None


FULL = Full()
