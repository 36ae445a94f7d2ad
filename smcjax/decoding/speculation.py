"""What decoders with a draft have in common: room for a block, K drafts a row, and the target's scores of them.

    prefill    a chunk of the prompts in both models
    reserve    pages of their own for the positions that live rows are about to write
    propose    K tokens a row from the draft model
    score      all of them in one target forward

Every shape depends on the program only; nothing reads a value on the host. Rows of groups that are frozen go through
the forwards like all others, write to the trash page, and change nothing.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoders import Speculation
from smcjax.decoding.next_token import Drawn, Law, Steps, beginning, law_logits, next_token, plan, prepare
from smcjax.decoding.prefill import leaders_of, prefill_chunk
from smcjax.decoding.sampling import Purpose, column_keys, row_keys
from smcjax.decoding.sequences import Bounded, Requests, Sequences
from smcjax.kv import TRASH, Copies, KVCache, PagePool, make_room
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import unembed
from smcjax.model.paged import create_cache, paged_hidden_states, plan_attention
from smcjax.model.params import Params
from smcjax.model.view import BatchView
from smcjax.pallas.decode_step import Embedded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PairParams:
    """Weights of both models."""

    target: Params
    draft: Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """What outlives a batch of requests: the pages of both models under one allocator."""

    pool: PagePool
    target: KVCache
    draft: KVCache

    @classmethod
    def create(cls, program: PairProgram, params: PairParams, num_pages: int) -> Memory:
        """Empty memory of `num_pages` pages, the trash page included, in each model's dtype."""
        return cls(
            pool=PagePool.create(num_pages),
            target=create_cache(program.target, params.target, num_pages=num_pages, page_size=program.page_size),
            draft=create_cache(program.draft, params.draft, num_pages=num_pages, page_size=program.page_size),
        )


class PairProgram(Bounded):
    """What a decoder's program says of a pair. Raises ValueError for models of different vocabularies."""

    target: ModelConfig
    draft: ModelConfig
    implementation: str

    @property
    @abc.abstractmethod
    def speculation(self) -> Speculation:
        """What the draft and the target's forward need to know."""

    @property
    def block(self) -> int:
        """C, tokens of a block."""
        return self.speculation.width

    def __post_init__(self) -> None:
        require_one_vocabulary(self.target, self.draft)


class PairState(Protocol):
    """G groups of N rows in flight: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def requests(self) -> Requests: ...
    @property
    def sequences(self) -> Sequences: ...
    @property
    def cycle(self) -> Int[Array, " G"]: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def live(self) -> Bool[Array, " R"]: ...
    def per_row(self, per_group: Array) -> Array:
        """A [G, …] array repeated for every row."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """What the draft proposes."""

    tokens: Int[Array, "R K"]
    logprobs: Float[Array, "R K"]  # log q of each
    logits: Float[Array, "R K V"] | None = None  # whose softmax q is, where it was asked for


def require_one_vocabulary(target: ModelConfig, draft: ModelConfig) -> None:
    """Raises ValueError for models of different vocabularies."""
    if target.vocab_size != draft.vocab_size:
        raise ValueError(
            f"target and draft must have one vocabulary, got {target.vocab_size} and "
            f"{draft.vocab_size} ids; trim the padded one with smcjax.model.vocabulary.trim_vocabulary."
        )


def prefill[S: PairState](
    program: PairProgram,
    params: PairParams,
    state: S,
    start_at: Int[Array, ""] | Int[Array, " G"],
    chunk: int,
    last_hidden: Float[Array, "G E"],
    cached: Int[Array, " G"] | None = None,
) -> tuple[S, Float[Array, "G E"]]:
    """Writes both models' KV of one chunk of the prompts; returns the target's hidden state at each prompt's end.

    The first `cached` tokens of each prompt have theirs already (None: 0).
    """
    memory = state.memory
    leaders = leaders_of(state.sequences, last_hidden.shape[0])
    target, last_hidden = prefill_chunk(
        program.target,
        params.target,
        memory.target,
        leaders,
        start_at,
        chunk,
        last_hidden,
        program.implementation,
        cached,
    )
    unused = jnp.zeros((last_hidden.shape[0], program.draft.hidden_size), params.draft.embed.dtype)
    draft, _ = prefill_chunk(
        program.draft, params.draft, memory.draft, leaders, start_at, chunk, unused, program.implementation, cached
    )
    memory = dataclasses.replace(memory, target=target, draft=draft)
    return dataclasses.replace(state, memory=memory), last_hidden


@jax.named_scope("reserve")
def reserve(program: PairProgram, state: PairState) -> tuple[Sequences, PagePool, Copies | None]:
    """Pages of their own for the positions that live rows are about to write.

    Also returns which shared part-filled pages each model's first forward is to copy.
    """
    sequences, width = state.sequences, program.speculation.width
    first = sequences.length - 1  # the frontier
    # The cap's own token is never scored after, so nothing past it needs a page.
    last = jnp.minimum(first + width - 1, state.per_row(state.requests.limit) - 1)
    room = make_room(
        state.memory.pool,
        sequences.block_table,
        first,
        last,
        state.live,
        page_size=program.page_size,
        max_width=width,
        group=program.speculation.rows,
    )
    # Pages of one token are never part-filled.
    copies = Copies(room.copy_from, room.copy_to) if program.page_size > 1 else None
    return dataclasses.replace(sequences, block_table=room.block_table), room.pool, copies


def _pages(program: PairProgram, state: PairState, positions: Int[Array, "R T"]) -> Int[Array, "R T"]:
    """Where the KV of these positions goes; nowhere for rows that are not live and positions beyond the cap."""
    within = positions < state.per_row(state.requests.limit)[:, None]
    return state.sequences.write_pages(positions, state.live[:, None] & within, program.page_size)


def _reach(program: PairProgram, state: PairState) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """How many slots of each row hold KV by the end of the cycle, and how many every query of the cycle sees.

    Before the first forward a row holds KV up to its frontier; the column before that is the first that a query
    stands at. Rows that are not live reach nothing.
    """
    frontier_at = state.sequences.length - 1
    end = jnp.minimum(frontier_at + program.speculation.width, state.per_row(state.requests.limit))
    return jnp.where(state.live, end, 0), frontier_at


# The newest draft, where the next step begins with it (`beginning`), and how many of the steps were taken.
DraftCarry = tuple[KVCache, jax.Array, Embedded | None, jax.Array]


@jax.named_scope("propose")
def propose(
    program: PairProgram,
    params: Params,
    state: PairState,
    copies: Copies | None,
    law: Law,
    *,
    keeps_laws: bool = False,
) -> tuple[Drafts, KVCache]:
    """Draws K draft tokens a row from `law`, whose temperature may be overruled by the program's draft_temperature.

    `params` are the draft's. Writes the draft KV of all but the last, and of that too where the token behind it is not
    deferred. `keeps_laws` asks for the laws that were drawn from, whole.
    """
    speculation, sequences = program.speculation, state.sequences
    rows, gamma = speculation.rows, speculation.gamma
    frontier_at = sequences.length - 1
    keys = row_keys(state.requests.key, state.cycle, rows, Purpose.DRAFT)
    if speculation.draft_temperature is not None:
        temperature = jnp.full_like(law.temperature, speculation.draft_temperature)
        law = dataclasses.replace(law, temperature=temperature)

    generated = sequences.length - state.per_row(state.requests.prompt_length)
    config = program.draft
    together = plan(
        config,
        params,
        sequences.block_table,
        *_reach(program, state),
        law,
        rows=rows,
        columns=2 if speculation.defers else 1,
        page_size=program.page_size,
        implementation=program.implementation,
        keeps_laws=keeps_laws,
    )

    def prepared(columns: Int[Array, " K"], positions: Int[Array, "K R T"], pages: Int[Array, "K R T"]) -> Steps:
        """Steps that draw the tokens of these columns."""
        drawn = jax.vmap(lambda column: column_keys(keys, column))(columns)
        return prepare(
            config,
            params,
            Steps(positions, pages, drawn, token_number=generated + 1 + columns[:, None]),
            law,
            plan=together,
            rows=rows,
            page_size=program.page_size,
            implementation=program.implementation,
        )

    def forward(
        cache: KVCache,
        tokens: jax.Array,
        steps: Steps,
        step: int | jax.Array,
        begin: Embedded | None = None,
        copies: Copies | None = None,
    ) -> tuple[Drawn, KVCache]:
        return next_token(
            config,
            params,
            cache,
            tokens,
            sequences.block_table,
            steps,
            step,
            law,
            plan=together,
            begin=begin,
            copies=copies,
            implementation=program.implementation,
        )

    # The head: the frontier, and before it `prev` where the draft lacks that one's KV.
    frontier = sequences.token_at(frontier_at)
    positions = frontier_at[:, None]
    pages = _pages(program, state, positions)
    tokens = frontier[:, None]
    if speculation.defers:
        # At group start `prev` is the last prompt token: its KV is there, perhaps shared with other groups.
        at_start = sequences.length == state.per_row(state.requests.prompt_length) + 1
        previous = jnp.where(at_start[:, None], TRASH, _pages(program, state, positions - 1))
        tokens = jnp.stack([sequences.token_at(frontier_at - 1), frontier], axis=1)
        positions = jnp.concatenate([positions - 1, positions], axis=1)
        pages = jnp.concatenate([previous, pages], axis=1)
    head = prepared(jnp.zeros(1, jnp.int32), positions[None], pages[None])
    first, cache = forward(state.memory.draft, tokens, head, 0, copies=copies)

    def whole(drawn: Drawn, first_column: int) -> Drawn:
        """Drawn by column [C, R, …], with logits where there is only what makes them: one product for all."""
        if drawn.head is None:
            return drawn
        number = generated + 1 + first_column + jnp.arange(drawn.token.shape[0])[:, None]
        logits = jax.vmap(functools.partial(law_logits, law))(number, drawn.head.logits(params))
        return drawn._replace(logits=logits, head=None)

    def joined(others: Drawn | None) -> Drafts:
        """By row, the first column before the others, which come by column."""
        drawn = jax.tree.map(lambda leaf: leaf[None], first._replace(following=None))
        if others is not None:
            if (drawn.head is None) != (others.head is None):  # the two come by different ways
                drawn, others = whole(drawn, 0), whole(others, 1)
            drawn = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), drawn, others)
        return Drafts(*jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), whole(drawn, 0)[:3]))

    # The others, and last the forward of the last draft where its KV is wanted now; what would follow it is not.
    after = speculation.bonus and not speculation.defers
    columns = jnp.arange(1, gamma + after)
    if not columns.size:
        return joined(None), cache
    ahead = frontier_at[:, None] + columns  # [R, K]
    rest = prepared(columns, ahead.T[:, :, None], _pages(program, state, ahead).T[:, :, None])

    def draft_one(carry: DraftCarry, _: None) -> tuple[DraftCarry, Drawn]:
        cache, token, begin, step = carry
        drawn, cache = forward(cache, token[:, None], rest, step, begin)
        return (cache, drawn.token, drawn.following, step + 1), drawn._replace(following=None)

    # Steps of few launches are unrolled: counting, and putting results in their places, are launches as well.
    unroll = rest.one_kernel is not None
    carry = (cache, first.token, beginning(params, rest, first), jnp.int32(0))
    (cache, token, begin, _), others = jax.lax.scan(draft_one, carry, length=gamma - 1, unroll=unroll)
    if after:
        _, cache = forward(cache, token[:, None], rest, gamma - 1, begin)
    return joined(others), cache


def score(
    program: PairProgram,
    params: Params,
    state: PairState,
    copies: Copies | None,
    drafts: Int[Array, "R K"],
) -> tuple[Float[Array, "R C V"], KVCache]:
    """The target's logits behind each of [frontier, d₀ …], C = width tokens a row, whose KV it writes."""
    speculation, sequences = program.speculation, state.sequences
    width, config = speculation.width, program.target
    frontier_at = sequences.length - 1
    tokens = jnp.concatenate([sequences.token_at(frontier_at)[:, None], drafts[:, : width - 1]], axis=1)
    positions = frontier_at[:, None] + jnp.arange(width)
    view = BatchView(
        tokens,
        positions,
        sequences.block_table,
        _pages(program, state, positions),
        *_reach(program, state),
        copies,
        rows=speculation.rows,
        page_size=program.page_size,
    )
    plans = plan_attention(config, params, view, columns=width)
    hidden, cache = paged_hidden_states(config, params, state.memory.target, view, plans)
    return unembed(params, hidden), cache
