"""Drafts of a small language model: K forwards a cycle, the first over the tokens whose KV it lacks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from smcjax.decoders import Speculation
from smcjax.decoding.cycle_view import head_view, pages_at
from smcjax.decoding.distribution import Drawn, SamplingDistribution, processed_logits
from smcjax.decoding.drafts.next_token import Steps, beginning, next_token, plan_steps, prepare
from smcjax.decoding.drafts.proposer import Drafts
from smcjax.decoding.drafts.tree_drafts import Path, TreeDrafts, draft_tree, keep_path
from smcjax.decoding.groups import Groups
from smcjax.decoding.prefill import prefill_chunk
from smcjax.decoding.sampling import Purpose, column_keys, row_keys
from smcjax.decoding.sequences import Sequences
from smcjax.kv import Copies, KVCache
from smcjax.model.config import ModelConfig
from smcjax.model.paged import create_cache, reads_by_kernels
from smcjax.model.params import Params
from smcjax.pallas.decode_step.op import Embedded

# The newest draft, where the next step begins with it (`beginning`), how many of the steps were taken, and the
# context of the distribution that the newest draft was drawn from.
_Carry = tuple[KVCache, jax.Array, Embedded | None, jax.Array, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A draft model as a `Proposer`. Its memory is a KV cache over the target's pages."""

    config: ModelConfig
    full_support: ClassVar[bool] = True
    branches: ClassVar[bool] = True
    aux_layers: ClassVar[tuple[int, ...]] = ()

    def __str__(self) -> str:
        return "a draft model"

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page in the draft model's cache."""
        return self.config.page_bytes(page_size)

    def check(self, target: ModelConfig) -> None:
        """Raises ValueError unless the target has the draft's vocabulary."""
        if target.vocab_size != self.config.vocab_size:
            raise ValueError(
                f"target and draft must have one vocabulary, got {target.vocab_size} and {self.config.vocab_size} ids; "
                "trim the padded one with smcjax.model.vocabulary.trim_vocabulary."
            )

    def create_memory(self, params: Params, num_pages: int, page_size: int) -> KVCache:
        """An empty cache in the weights' dtype."""
        return create_cache(self.config, params, num_pages=num_pages, page_size=page_size)

    def prefills_by_kernels(self, memory: KVCache, columns: int) -> bool:
        """True where kernels read the KV of a chunk of `columns` tokens."""
        return reads_by_kernels(self.config, memory, columns=columns)

    def prefill(
        self,
        params: Params,
        memory: KVCache,
        leaders: Sequences,
        start: Int[Array, ""] | Int[Array, " G"],
        chunk: int,
        cached: Int[Array, " G"] | None,
    ) -> KVCache:
        """The cache with the KV of one chunk of the prompts."""
        unread = jnp.zeros((leaders.length.shape[0], self.config.hidden_size), params.embed.dtype)
        return prefill_chunk(self.config, params, memory, leaders, start, chunk, unread, cached)[0]

    @jax.named_scope("propose")
    def propose(
        self,
        speculation: Speculation,
        params: Params,
        groups: Groups,
        copies: Copies | None,
        distribution: SamplingDistribution,
        *,
        page_size: int,
        keep_logits: bool = False,
    ) -> tuple[Drafts, KVCache]:
        """K draws a row, each from the distribution behind the last; the draft temperature may overrule its own.

        Writes the KV of all drafts but the last, and of that too where the token behind it is not deferred.
        """
        config, sequences, gamma = self.config, groups.sequences, speculation.gamma
        frontier_at = sequences.length - 1
        keys = row_keys(groups.requests.key, groups.cycle, speculation.rows, Purpose.DRAFT)
        generated = sequences.length - groups.per_row(groups.requests.prompt_length)
        distribution = distribution.at(speculation.draft_temperature)

        view = head_view(speculation, groups, copies, page_size=page_size)
        tokens, positions, pages = view.tokens, view.positions, view.write_pages
        plan = plan_steps(config, params, view, distribution, columns=tokens.shape[1], keep_logits=keep_logits)

        def prepared(columns: Int[Array, " K"], positions: Int[Array, "K R T"], pages: Int[Array, "K R T"]) -> Steps:
            """Steps that draw the tokens of these columns."""
            drawn = jax.vmap(lambda column: column_keys(keys, column))(columns)
            steps = Steps(positions, pages, drawn, token_number=generated[None] + 1 + columns[:, None])
            return prepare(config, params, view, steps, distribution, plan)

        head = prepared(jnp.zeros(1, jnp.int32), positions[None], pages[None])
        first, cache = next_token(config, params, groups.memory.draft, view, head, 0, distribution, plan)

        # Columns 1…K−1. Without deferral one more forward writes the last draft's KV; its token is discarded.
        after = speculation.bonus and not speculation.defers
        columns = jnp.arange(1, gamma + after)
        if not columns.size:
            return _joined(params, distribution, generated, first, None), cache
        ahead = frontier_at[:, None] + columns[None]  # [R, K]
        rest = prepared(columns, ahead.T[:, :, None], pages_at(groups, ahead, page_size).T[:, :, None])

        def forward(
            cache: KVCache,
            token: jax.Array,
            step: int | jax.Array,
            begin: Embedded | None,
            law: SamplingDistribution,
        ) -> tuple[Drawn, KVCache]:
            one = dataclasses.replace(view, tokens=token[:, None], copies=None)
            return next_token(config, params, cache, one, rest, step, law, plan, begin)

        def draft_one(carry: _Carry, _: None) -> tuple[_Carry, Drawn]:
            cache, token, begin, step, context = carry
            law = distribution.within(context).after(token)
            drawn, cache = forward(cache, token, step, begin, law)
            return (cache, drawn.token, drawn.following, step + 1, law.context), drawn._replace(following=None)

        # Steps of few launches are unrolled: counting, and putting results in their places, are launches as well.
        unroll = rest.fused is not None
        carry = (cache, first.token, beginning(params, rest, first), jnp.int32(0), distribution.context)
        (cache, token, begin, _, _), others = jax.lax.scan(draft_one, carry, length=gamma - 1, unroll=unroll)
        if after:
            _, cache = forward(cache, token, gamma - 1, begin, distribution)
        return _joined(params, distribution, generated, first, others), cache

    @jax.named_scope("propose")
    def propose_tree(
        self,
        speculation: Speculation,
        params: Params,
        groups: Groups,
        copies: Copies | None,
        distribution: SamplingDistribution,
        *,
        page_size: int,
    ) -> tuple[TreeDrafts, KVCache]:
        """A tree of drafts by a forward a depth: `smcjax.decoding.drafts.tree_drafts.draft_tree`."""
        return draft_tree(
            self.config,
            speculation,
            params,
            groups,
            copies,
            distribution.at(speculation.draft_temperature),
            page_size=page_size,
        )

    def keep_path(self, speculation: Speculation, memory: KVCache, scratch: Any, path: Path) -> KVCache:
        """The cache with the KV that accepted drafts have: `smcjax.decoding.drafts.tree_drafts.keep_path`."""
        return keep_path(self.config, speculation, memory, scratch, path)


def _joined(
    params: Params,
    distribution: SamplingDistribution,
    generated: Int[Array, " R"],
    first: Drawn,
    others: Drawn | None,
) -> Drafts:
    """The drafts by row: the first column before the others, which come by column."""

    def with_logits(drawn: Drawn, first_column: int) -> Drawn:
        """Makes the deferred logits of columns [C, R, …] by one product."""
        if drawn.deferred is None:
            return drawn
        number = generated[None] + 1 + first_column + jnp.arange(drawn.token.shape[0])[:, None]
        logits = drawn.deferred.logits(params)
        if not distribution.features:
            processed = functools.partial(processed_logits, distribution)
            return drawn._replace(logits=jax.vmap(processed)(number, logits), deferred=None)
        behind = [first.token] if others is None else [first.token, *others.token]
        laws = [distribution]
        for token in behind[:-1]:
            laws.append(laws[-1].after(token))
        contexts = [law.context for law in laws[first_column : first_column + drawn.token.shape[0]]]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *contexts)

        def of_column(number: jax.Array, logits: jax.Array, context: tuple[Any, ...]) -> jax.Array:
            return processed_logits(distribution.within(context), number, logits)

        return drawn._replace(logits=jax.vmap(of_column)(number, logits, stacked), deferred=None)

    drawn = jax.tree.map(lambda leaf: leaf[None], first._replace(following=None))
    if others is not None:
        if (drawn.deferred is None) != (others.deferred is None):  # one is fused and the other is not
            drawn, others = with_logits(drawn, 0), with_logits(others, 1)
        drawn = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), drawn, others)
    return Drafts(*jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), with_logits(drawn, 0)[:3]))
