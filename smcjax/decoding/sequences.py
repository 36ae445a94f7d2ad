"""Requests in flight and the token rows that serve them, as every decoder keeps them on the device.

A *group* is one request in flight; a *row* is one sequence of it (one particle, or the only one). Rows of a group are
consecutive: R = G·N, group of row r = r // N.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from smcjax.kv import TRASH, page_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """The parameters of each group's request. All are traced: no value here ever recompiles a program."""

    prompt_length: Int[Array, " G"]  # ≥ 1
    limit: Int[Array, " G"]  # prompt + generated tokens at which a row is cut: min(max_model_len, prompt + max_tokens)
    min_tokens: Int[Array, " G"]  # stop tokens are impossible within the first `min_tokens` generated
    temperature: Float[Array, " G"]  # 0 = greedy, where a decoder allows it
    top_k: Int[Array, " G"]  # ≥ V = off
    top_p: Float[Array, " G"]  # 1 = off
    stops: Bool[Array, "G V"]  # token ids that end a row
    control: Float[Array, " G"]  # c of SMC; below 0: the decoder's
    key: Key[Array, " G"]
    # `smcjax.decoding.adjustments.Adjustments` of the logits, for programs with that feature; None: there are none.
    adjustments: Any = None
    # [G] int32, each request's place in `Memory.automata`, −1: none. None: no request has one.
    automaton: Any = None
    # [G, P] bool, which of `Program.requested_potentials` each has; None outside of programs that know of any.
    potentials: Any = None

    @classmethod
    def alike(
        cls,
        key: Key[Array, ""],
        prompt_length: Int[Array, " G"],
        *,
        vocab_size: int,
        max_tokens: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> Requests:
        """G requests that differ in their prompts and keys (split from `key`) only; nothing truncated."""
        prompt_length = jnp.asarray(prompt_length, jnp.int32)
        groups = prompt_length.shape[0]
        stops = jnp.zeros(vocab_size, bool).at[jnp.asarray(stop_token_ids, jnp.int32)].set(True)
        return cls(
            prompt_length=prompt_length,
            limit=prompt_length + max_tokens,
            min_tokens=jnp.full(groups, min_tokens, jnp.int32),
            temperature=jnp.full(groups, temperature, jnp.float32),
            top_k=jnp.full(groups, vocab_size, jnp.int32),
            top_p=jnp.ones(groups, jnp.float32),
            stops=jnp.broadcast_to(stops, (groups, vocab_size)),
            control=jnp.full(groups, -1, jnp.float32),
            key=jax.random.split(key, groups),
        )

    def within(self, max_model_len: int) -> Requests:
        """Returns the requests with limits of at most `max_model_len` tokens: no row may outgrow its buffers."""
        return dataclasses.replace(self, limit=jnp.minimum(self.limit, max_model_len))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Token rows. T_max holds the longest sequence and one block beyond it, so a block is always written whole."""

    tokens: Int[Array, "R T_max"]  # prompt and generated tokens; beyond `length` stale
    length: Int[Array, " R"]  # committed tokens, the frontier (newest, no KV yet) included
    finished: Bool[Array, " R"]
    logprobs: Float[Array, "R T_max"]  # log p_T of each generated token
    block_table: Int[Array, "R M"]
    # [R] int32, the state of each row's automaton behind its tokens (`smcjax.decoding.constraints`); None: no request
    # has one.
    automaton: Any = None

    @classmethod
    def create(cls, num_rows: int, *, max_tokens: int, max_pages: int) -> Sequences:
        """Empty rows, finished, with no pages."""
        return cls(
            tokens=jnp.zeros((num_rows, max_tokens), jnp.int32),
            length=jnp.ones(num_rows, jnp.int32),
            finished=jnp.ones(num_rows, bool),
            logprobs=jnp.zeros((num_rows, max_tokens), jnp.float32),
            block_table=jnp.full((num_rows, max_pages), TRASH, jnp.int32),
        )

    def token_at(self, position: Int[Array, " R"]) -> Int[Array, " R"]:
        """The token at one position of each row; out-of-range positions are clipped."""
        position = jnp.clip(position, 0, self.tokens.shape[1] - 1)
        return jnp.take_along_axis(self.tokens, position[:, None], axis=1)[:, 0]

    def write_pages(
        self, positions: Int[Array, "R T"], writable: Bool[Array, "R T"], page_size: int
    ) -> Int[Array, "R T"]:
        """Physical page for the KV at `positions`, the trash page where nothing may be written."""
        return jnp.where(writable, page_of(self.block_table, positions, page_size), TRASH)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Population:
    """The weighted rows of ended groups: N each (N = 1 and weight 1 for decoders without weights)."""

    tokens: Int[Array, "G N T_max"]
    length: Int[Array, "G N"]
    finished: Bool[Array, "G N"]
    logprobs: Float[Array, "G N T_max"]
    log_weight: Float[Array, "G N"]  # since the last resampling
    log_evidence: Float[Array, " G"]
    selected: Int[Array, " G"]  # the row that answers
    failed: Bool[Array, " G"]
    log_text_potential: Float[Array, "G N"] | None = None  # what the weights have of text potentials


def population(
    sequences: Sequences,
    *,
    log_weight: Float[Array, "G N"],
    log_evidence: Float[Array, " G"],
    selected: Int[Array, " G"],
    failed: Bool[Array, " G"],
    log_text_potential: Float[Array, "G N"] | None = None,
) -> Population:
    """Rows [R, …] arranged by group [G, N, …]."""

    def by_group(rows: jax.Array) -> jax.Array:
        return rows.reshape(*log_weight.shape, *rows.shape[1:])

    return Population(
        tokens=by_group(sequences.tokens),
        length=by_group(sequences.length),
        finished=by_group(sequences.finished),
        logprobs=by_group(sequences.logprobs),
        log_weight=log_weight,
        log_evidence=log_evidence,
        selected=selected,
        failed=failed,
        log_text_potential=log_text_potential,
    )


@dataclasses.dataclass(frozen=True)
class Block:
    """The part of a block of C new tokens that each row keeps."""

    counted: Bool[Array, "R C"]  # columns that belong to the row: up to its first stop token or its cap
    ended: Bool[Array, " R"]  # a stop token or the cap is among them


def cut_block(
    tokens: Int[Array, "R C"],
    stops: Bool[Array, "R V"],
    length: Int[Array, " R"],
    limit: Int[Array, " R"],
    *,
    last: Int[Array, " R"] | None = None,
) -> Block:
    """Cuts blocks at the first stop token or at the cap, whichever is earlier in the row.

    `length` is the rows' length before the block, so column j makes the row `length + j + 1` long. Tokens past the
    cut are neither part of the output nor of the weight (docs/explanation/algorithm.md, "Ends"); nor are those past
    column `last`.
    """
    columns = tokens.shape[1]
    is_stop = jnp.take_along_axis(stops, tokens, axis=1)
    at_cap = length[:, None] + jnp.arange(1, columns + 1, dtype=jnp.int32)[None] >= limit[:, None]
    ends = is_stop | at_cap
    within = jnp.ones_like(ends) if last is None else jnp.arange(columns, dtype=last.dtype)[None] <= last[:, None]
    ended_before = jnp.cumsum(ends, axis=1, dtype=jnp.int32) - ends.astype(jnp.int32) > 0
    return Block(counted=~ended_before & within, ended=(ends & within).any(axis=1))


def append(
    sequences: Sequences,
    tokens: Int[Array, "R C"],
    logprobs: Float[Array, "R C"],
    block: Block,
    live: Bool[Array, " R"],
) -> Sequences:
    """Commits a block to the live rows; the others stay as they are."""
    return dataclasses.replace(
        put_behind(sequences, tokens, logprobs, live),
        length=jnp.where(live, sequences.length + jnp.sum(block.counted, axis=1, dtype=jnp.int32), sequences.length),
        finished=sequences.finished | (live & block.ended),
    )


def put_behind(
    sequences: Sequences, tokens: Int[Array, "R C"], logprobs: Float[Array, "R C"], live: Bool[Array, " R"]
) -> Sequences:
    """Writes C tokens and log-probabilities behind the committed ones of the live rows, whose lengths stay."""
    rows, columns = tokens.shape
    row = jnp.arange(rows)[:, None]
    position = sequences.length[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]
    position = jnp.where(live[:, None], position, sequences.tokens.shape[1])  # out of range: dropped
    return dataclasses.replace(
        sequences,
        tokens=sequences.tokens.at[row, position].set(tokens, mode="drop"),
        logprobs=sequences.logprobs.at[row, position].set(logprobs, mode="drop"),
    )
