"""How Native Sparse Attention routes a query: by its weights of compressed tokens to blocks, by gates to branches.

    p_h = softmax(q_h · K_cmp)        score_b = Σ_i common(i, b) · Σ_h p_h,i        (equations 8 to 10)

Token i counts for block b by the strides that they have in common, summed over the heads that select together. First
and last blocks are always selected, then the best.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smcjax.kv import LayerCache, PageArray
from smcjax.model.attention import Projection
from smcjax.model.view import BatchView, TreeView
from smcjax.model.visible_kv import VisibleKV, grouped, masked_softmax, scaled_scores
from smcjax.pallas.sparse.best_blocks import best_blocks
from smcjax.pallas.sparse.block_ranking import Ranking
from smcjax.pallas.sparse.gates import Products, gated_sum, sigmoid_gates, weighed_sum
from smcjax.pallas.sparse.grouped_attention import Tasks
from smcjax.pallas.sparse.grouped_merge import Unmerged
from smcjax.sparse.groups import Chosen, Weighed


class Entries[T](NamedTuple):
    """Keys and values by position, those of the selection and of the window, and compressed tokens by number."""

    keys: T
    values: T
    window_keys: T
    window_values: T
    compressed_keys: T
    compressed_values: T


class Routed(NamedTuple):
    """The output of a layer's compressed branch, and the blocks that its weights rank and select."""

    output: Float[Array, "R T Hkv G D"]  # f32 where groups have read it, else as entries are
    scores: Float[Array, "R T S blocks"] | None  # None where blocks are another layer's
    selected: Bool[Array, "R T S blocks"]


class Branches(NamedTuple):
    """The parts of a layer's output, and how blocks were ranked. S, the sets of a query, are Hkv."""

    outputs: Float[Array, "R T H 3 D"]  # without gates
    gates: Float[Array, "R T H 3"]
    scores: Float[Array, "R T S blocks"] | None  # None where blocks are another layer's
    selected: Bool[Array, "R T S blocks"]
    tasks: Tasks | None = None  # by which groups have read the selected blocks
    total: Float[Array, "R T H D"] | None = None  # the layer's output, where kernels make it

    @property
    def chosen(self) -> Chosen:
        """The layer's choice, which later layers may take."""
        return Chosen(self.selected, self.tasks)

    def gated(self) -> Float[Array, "R T H D"]:
        """The layer's output."""
        if self.total is not None:
            return self.total
        return weighed_sum(self.gates, self.outputs)


class Routing:
    """Routing by the options that `smcjax.sparse.nsa.NSA` explains and checks."""

    kernel_size: int
    kernel_stride: int
    block_size: int
    num_blocks: int
    window: int
    init_blocks: int
    local_blocks: int

    def compressed_array(self, heads: int = 1, dim: int = 1) -> PageArray:
        """Compressed keys or values as pages hold them."""
        return PageArray(heads, dim, self.kernel_stride, self.kernel_size)

    def route[S: VisibleKV](
        self,
        projection: Projection,
        kv: Entries[S],
        positions: Int[Array, "R T"],
        last: Int[Array, "R T"],
        earlier: Bool[Array, "R T S blocks"] | None = None,
    ) -> Routed:
        """Attends to the compressed tokens that queries at `positions` see up to `last`, and selects blocks.

        With `earlier`, blocks that a layer before this one has selected, these are taken and none is ranked.
        """
        kv_heads, last = kv.keys.shape[2], last[:, :, None, None, None]
        ends = self.compressed_array().ends(kv.compressed_keys.shape[1])
        logits = scaled_scores(grouped(projection.heads()[0], kv_heads), kv.compressed_keys)
        weights, output = masked_softmax(logits, kv.compressed_values, ends[None, None, None, None] <= last)
        if earlier is not None:
            return Routed(output, None, earlier)
        scores = self.block_scores(weights, -(-kv.keys.shape[1] // self.block_size))
        return Routed(output, scores, self.select(scores, positions))

    def routed_by(self, weighed: Weighed, cache: LayerCache, view: BatchView | TreeView) -> Routed:
        """Returns what `route` does for queries over pages, from the weights of compressed tokens by slot."""
        kv_heads = cache["keys"].shape[2]
        blocks = -(-view.block_table.shape[1] * view.page_size // self.block_size)
        scores = self.by_blocks(self._of_sets(grouped(weighed.weights, kv_heads)), blocks)
        output = grouped(weighed.output, kv_heads)
        selected = self.select(scores, view.positions) if weighed.selected is None else weighed.selected
        return Routed(output, scores, selected)

    def block_scores(self, weights: Float[Array, "R T Hkv G N"], blocks: int) -> Float[Array, "R T S blocks"]:
        """The scores of blocks, of compressed tokens' weights, 0 for incomplete tokens.

        A token counts for a block by their overlap, in strides: the paper's double sum. A block without a token has 0.
        """
        before = self.kernel_size // self.kernel_stride - 1  # slots before the first token's
        return self.by_blocks(jnp.pad(self._of_sets(weights), [(0, 0)] * 3 + [(before, 0)]), blocks)

    def _of_sets(self, weights: Float[Array, "R T Hkv G N"]) -> Float[Array, "R T S N"]:
        """Adds up the weights of the heads that select together."""
        return self.sum_of_group(weights.sum(axis=3))

    def by_blocks(self, of_slots: Float[Array, "R T S slots"], blocks: int) -> Float[Array, "R T S blocks"]:
        """Returns the scores of blocks, of weights by slot of compressed tokens: a token's is that of its last stride.

        A block begins at the slot of its first stride. What token and block have in common, in strides, is what two
        rows of l/d and l'/d ones have that pass each other: their convolution.
        """
        strides = self.block_size // self.kernel_stride
        common = np.convolve(np.ones(self.kernel_size // self.kernel_stride), np.ones(strides)).astype(np.float32)
        most = blocks * strides + len(common) - 1
        of_slots = jnp.pad(of_slots, [(0, 0)] * 3 + [(0, max(0, most - of_slots.shape[-1]))])
        terms = [
            float(weight) * of_slots[..., first : first + blocks * strides : strides]
            for first, weight in enumerate(common)
        ]
        return functools.reduce(jnp.add, terms)

    def ranking(self, blocks: int) -> Ranking | None:
        """How a kernel ranks blocks as `by_blocks` and `ranked` do; None where it cannot."""
        sizes = (self.num_blocks, self.init_blocks, self.local_blocks)
        strides = (self.block_size // self.kernel_stride, self.kernel_size // self.kernel_stride)
        return Ranking(blocks, *sizes, *strides)

    def sum_of_group(self, of_heads: jax.Array) -> jax.Array:
        """The sum over a key-value head's query heads, of the sum over those that are here."""
        return of_heads

    def select(self, scores: Float[Array, "R T S blocks"], positions: Int[Array, "R T"]) -> Bool[Array, "R T S blocks"]:
        """True for the blocks that queries at `positions` attend to: first and last ones, then the best; of equal ones
        the earlier."""
        return best_blocks(self.ranked(scores, positions), self.num_blocks)

    def ranked(
        self, scores: Float[Array, "R T S blocks"], positions: Int[Array, "R T"]
    ) -> Float[Array, "R T S blocks"]:
        """`scores`, but ∞ for blocks that queries at `positions` always select, and −∞ for those behind their own."""
        block, own = jnp.arange(scores.shape[-1])[None, None, None], positions[:, :, None, None] // self.block_size
        return jnp.where(block <= own, jnp.where(self.forced(block, own), jnp.inf, scores), -jnp.inf)

    def forced(self, block: Any, own: Any) -> Any:
        """True for blocks that a query of block `own` always selects."""
        return (block < self.init_blocks) | (block > own - self.local_blocks)

    def gates(self, projection: Projection) -> Float[Array, "R T H 3"]:
        """Sigmoids of a linear map of the layer's input, f32."""
        assert projection.weights is not None
        gate, bias = projection.weights["gate"], projection.weights["gate_bias"]
        return sigmoid_gates(projection.x, gate, bias, projection.pending)

    def put_together(
        self,
        projection: Projection,
        routed: Routed,
        slc: jax.Array,
        win: jax.Array,
        products: Products | None = None,
        unmerged: Sequence[Unmerged | None] = (),
    ) -> Branches:
        """The parts of a layer from its compressed branch and the outputs of the two others, for R·T·H queries.

        `products` are those of gates, if they are there already, `unmerged` the segments of branches that a kernel has
        merged into their outputs. Kernels, of which no gradient is to be had, take parts in f32 alone: what `dense` is
        trained by has others.
        """
        assert projection.weights is not None
        dtype, shape = projection.qkv.dtype, projection.qkv.shape
        parts = tuple(part.reshape(*shape[:2], -1, shape[3]) for part in (routed.output, slc, win))
        outputs = jnp.stack([part.astype(dtype) for part in parts], axis=3)
        weights = projection.weights["gate"], projection.weights["gate_bias"]
        of_gates = projection.x, *weights, parts, projection.pending, products, unmerged
        kernel = gated_sum.kernel_for(*of_gates)
        total = None if kernel is None else kernel.run(*of_gates)
        return Branches(outputs, self.gates(projection), routed.scores, routed.selected, total=total)


def compressed_of(arrays: LayerCache) -> tuple[jax.Array, jax.Array]:
    """A layer's compressed keys and values, of pages or of scratch."""
    return arrays["compressed_keys"], arrays["compressed_values"]
