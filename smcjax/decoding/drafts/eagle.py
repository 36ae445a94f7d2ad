"""Drafts of an EAGLE-3 head: one layer a token, over the target's own features (`smcjax.model.eagle`).

Pages keep the head's keys and values and, beside them, the target's features, which the target's forwards leave where
they have been. A cycle first writes the entries of the tokens that the last one accepted, whose features are there by
now: so the target's take the place of what the head had put there from its own outputs. Then it drafts from the
frontier on: the first step with the target's feature of the position before, each later one with the head's own last
output.

Keys and values of the one layer follow from token and feature alone, so that prompts need no attention, and an entry
that is written again is what it was.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smcjax.decoders import Speculation
from smcjax.decoding.cycle_view import view_of
from smcjax.decoding.distribution import Drawn, SamplingDistribution, sample, within_reach
from smcjax.decoding.drafts.proposer import Drafts
from smcjax.decoding.drafts.tree_drafts import Path, TreeDrafts, grow
from smcjax.decoding.groups import Groups
from smcjax.decoding.prefill import chunk_view
from smcjax.decoding.sampling import Purpose, column_keys, row_keys
from smcjax.decoding.sequences import Sequences
from smcjax.kv import TRASH, Copies, KVCache, page_of
from smcjax.model.config import ModelConfig
from smcjax.model.eagle import ATTENTION, EagleConfig, EagleParams, conclude, eagle_logits, fuse, project
from smcjax.model.view import BatchView, TreeView


@dataclasses.dataclass(frozen=True)
class Eagle:
    """An EAGLE-3 head as a `FeatureProposer` and `TreeProposer`. Its memory is a cache of one layer."""

    config: EagleConfig
    branches: ClassVar[bool] = True

    def __str__(self) -> str:
        if not self.config.prunes:
            return "an EAGLE-3 head"
        drafted, known = self.config.draft_vocab_size, self.config.layer.vocab_size
        return f"an EAGLE-3 head of {drafted} of the target's {known} token ids"

    @property
    def full_support(self) -> bool:
        """True of a head that can draft every token of the target."""
        return not self.config.prunes

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers of the target whose inputs make features."""
        return self.config.aux_layers

    def keeping(self, dtype: str) -> Eagle:
        """The head with weights and pages in `dtype`."""
        layer = dataclasses.replace(self.config.layer, dtype=dtype)
        return Eagle(dataclasses.replace(self.config, layer=layer))

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page: keys, values and features of its tokens."""
        return self.config.cache_spec.page_bytes(page_size, self.config.layer.itemsize)

    def check(self, target: ModelConfig) -> None:
        """Raises ValueError unless the head was made for a target of this shape."""
        made = self.config.layer.vocab_size, self.config.target_hidden_size
        if made != (target.vocab_size, target.hidden_size) or target.num_layers < max(self.aux_layers):
            raise ValueError(
                f"the EAGLE-3 head is for {made[0]} token ids and hidden size {made[1]}, reading layers "
                f"{', '.join(map(str, self.aux_layers))}, and the target has {target.vocab_size}, {target.hidden_size} "
                f"and {target.num_layers} layers; use the head made for it."
            )

    def create_memory(self, params: EagleParams, num_pages: int, page_size: int) -> KVCache:
        """An empty cache in the weights' dtype."""
        spec, dtype = self.config.cache_spec, params.fc.dtype
        return KVCache.create((spec,), num_pages=num_pages, page_size=page_size, dtype=dtype)

    def prefills_by_kernels(self, memory: KVCache, columns: int) -> bool:
        """True: prompts need no attention."""
        return True

    def fuse(self, params: EagleParams, streams: Float[Array, "R T aux_layers S"]) -> Float[Array, "R T E"]:
        """The streams of each position through fc."""
        return fuse(params, streams)

    def write_features(
        self,
        memory: KVCache,
        features: Float[Array, "R T E"],
        positions: Int[Array, "R T"],
        pages: Int[Array, "R T"],
    ) -> KVCache:
        """The cache with these features in the slots of their positions."""
        return memory.write((self.config.feature_spec,), ({"features": features[:, :, None]},), positions, pages)

    def prefill(
        self,
        params: EagleParams,
        memory: KVCache,
        leaders: Sequences,
        start: Int[Array, ""] | Int[Array, " G"],
        chunk: int,
        cached: Int[Array, " G"] | None,
    ) -> KVCache:
        """The cache with the entries of one chunk of the prompts, whose features are in pages already."""
        view = chunk_view(leaders, start, chunk, cached, page_size=memory.page_size)
        return self._write(params, memory, view, jnp.zeros_like(leaders.length))

    @jax.named_scope("propose")
    def propose(
        self,
        speculation: Speculation,
        params: EagleParams,
        groups: Groups,
        copies: Copies | None,
        distribution: SamplingDistribution,
        *,
        page_size: int,
        keep_logits: bool = False,
    ) -> tuple[Drafts, KVCache]:
        """K draws a row, each from the distribution behind the last. Writes the entries of all but the last draft."""
        cache = self._catch_up(speculation, params, groups, copies, page_size=page_size)
        sequences = groups.sequences
        frontier_at = sequences.length - 1
        keys = row_keys(groups.requests.key, groups.cycle, speculation.rows, Purpose.DRAFT)
        generated = sequences.length - groups.per_row(groups.requests.prompt_length)
        distribution = distribution.at(speculation.draft_temperature)

        def draft_one(carry: Any, column: jax.Array) -> tuple[Any, Drawn]:
            cache, token, feature, context = carry
            law = distribution.within(context)
            positions = (frontier_at + column)[:, None]
            view = view_of(groups, token[:, None], positions, None, width=speculation.width, page_size=page_size)
            cache, x = self._step(params, cache, view, feature)
            logits = eagle_logits(self.config, params, x[:, 0])
            number = generated + 1 + column
            if self.config.prunes:
                logits = within_reach(law, number, logits)
            drawn = sample(law, column_keys(keys, column), number, logits, keep_logits=keep_logits)
            return (cache, drawn.token, x, law.after(drawn.token).context), drawn

        feature = self._features(cache, sequences.block_table, frontier_at[:, None] - 1)
        carry: Any = (cache, sequences.token_at(frontier_at), feature, distribution.context)
        (cache, *_), drawn = jax.lax.scan(draft_one, carry, jnp.arange(speculation.gamma))
        return Drafts(*jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), drawn[:3])), cache

    @jax.named_scope("propose")
    def propose_tree(
        self,
        speculation: Speculation,
        params: EagleParams,
        groups: Groups,
        copies: Copies | None,
        distribution: SamplingDistribution,
        *,
        page_size: int,
    ) -> tuple[TreeDrafts, KVCache]:
        """A tree of drafts by a step a depth, whose nodes take their parents' outputs for features."""
        tree, sequences = speculation.tree, groups.sequences
        assert tree is not None
        cache = self._catch_up(speculation, params, groups, copies, page_size=page_size)
        frontier_at = sequences.length - 1
        token, at = sequences.token_at(frontier_at)[:, None], frontier_at[:, None]
        view = view_of(groups, token, at, None, width=speculation.width, page_size=page_size)
        cache, x = self._step(params, cache, view, self._features(cache, sequences.block_table, at - 1))
        rows, heads = token.shape[0], ATTENTION.cache(self.config.layer).arrays
        scratch = {name: jnp.zeros((rows, tree.size, a.heads, a.dim), x.dtype) for name, a in heads.items()}
        outputs = jnp.zeros((rows, tree.size, x.shape[-1]), x.dtype).at[:, :1].set(x)

        def behind(level: TreeView) -> jax.Array:
            nonlocal scratch, outputs
            features = outputs[:, jnp.asarray([tree.parents[node] for node in level.nodes])]
            projection = project(self.config, params, level.tokens, features, level.positions)
            attended, scratch, _ = ATTENTION.over_tree(projection, cache.layers[0], scratch, level)
            x = conclude(self.config, params, features, attended)
            outputs = outputs.at[:, jnp.asarray(level.nodes)].set(x)
            return eagle_logits(self.config, params, x)

        distribution = distribution.at(speculation.draft_temperature)
        root = eagle_logits(self.config, params, x)
        prunes = self.config.prunes
        grown = grow(speculation, groups, distribution, root, behind, page_size=page_size, prunes=prunes)
        return TreeDrafts(*grown, ()), cache

    def keep_path(self, speculation: Speculation, memory: KVCache, scratch: Any, path: Path) -> KVCache:
        """The cache as it is: the next cycle writes the accepted tokens' entries, from the target's features."""
        return memory

    def _features(
        self, cache: KVCache, block_table: Int[Array, "R M"], positions: Int[Array, "R T"]
    ) -> Float[Array, "R T E"]:
        """The features that pages hold of these positions; any where they are below 0."""
        positions = jnp.maximum(positions, 0)
        pages = page_of(block_table, positions, cache.page_size)
        return cache.layers[0]["features"][pages, positions % cache.page_size, 0]

    def _write(self, params: EagleParams, cache: KVCache, view: BatchView, first: Int[Array, " R"]) -> KVCache:
        """The cache with the view's entries from each row's position `first` on; no query sees that of position 0."""
        features = self._features(cache, view.block_table, view.positions - 1)
        pages = jnp.where(view.positions >= first[:, None], view.write_pages, TRASH)
        view = dataclasses.replace(view, write_pages=pages)
        projection = project(self.config, params, view.tokens, features, view.positions)
        return dataclasses.replace(cache, layers=(ATTENTION.write(projection, cache.layers[0], view)[1],))

    def _catch_up(
        self, speculation: Speculation, params: EagleParams, groups: Groups, copies: Copies | None, *, page_size: int
    ) -> KVCache:
        """The cache with the copies made, and entries of all tokens before the frontier.

        At most `width` tokens are new since the last cycle, the frontier among them. Those of the prompt, in pages that
        may be shared with other groups, are there.
        """
        cache: KVCache = groups.memory.draft
        if copies is not None:
            cache = cache.copy_pages(copies)
        if speculation.width == 1:
            return cache
        sequences = groups.sequences
        positions = sequences.length[:, None] - 1 + jnp.arange(1 - speculation.width, 0)[None]
        tokens = jnp.take_along_axis(sequences.tokens, jnp.maximum(positions, 0), axis=1)
        view = view_of(groups, tokens, positions, None, width=speculation.width, page_size=page_size)
        return self._write(params, cache, view, groups.per_row(groups.requests.prompt_length))

    def _step(
        self, params: EagleParams, cache: KVCache, view: BatchView, features: Float[Array, "R 1 E"]
    ) -> tuple[KVCache, Float[Array, "R 1 E"]]:
        """Writes one entry a row and attends from it; returns the layer's outputs too."""
        view = dataclasses.replace(view, lengths=view.written())
        projection = project(self.config, params, view.tokens, features, view.positions)
        attended, layer, _ = ATTENTION(projection, cache.layers[0], None, view)
        x = conclude(self.config, params, features, attended)
        return dataclasses.replace(cache, layers=(layer,)), x
