"""Speculative sampling as one pure function of (params, state): every request advances by its own acceptance.

    propose    K tokens for each of N candidates from the draft, or a tree of tokens K deep
    score      all of them in one target forward
    decide     how many of the drafts are accepted, along which candidate or path, and the token behind them
    commit     that run to all rows of the request: its KV is there, or is copied from the tree's scratch; pages behind
               it are given back

The life is that of `smcjax.smc`: begin → prefill → start → step … step → conclude. The N rows of a request agree
between cycles, and share all pages. Shapes depend on the program only, so rows that accept nothing and rows that accept
all share a batch; nothing reads a value on the host. The draft's first forward of a cycle is over two tokens: after a
full acceptance it lacks the KV of the last draft, otherwise it writes again what is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smcjax.decoders import Rejection
from smcjax.decoding import admission
from smcjax.decoding import groups as decoding
from smcjax.decoding.constraints import extend
from smcjax.decoding.decoder import Decoder, Report
from smcjax.decoding.distribution import SamplingDistribution, distribution_of, processed_logits, sample
from smcjax.decoding.drafts.proposer import Drafts
from smcjax.decoding.groups import Groups, PairParams
from smcjax.decoding.program import Program as Program
from smcjax.decoding.program import by_implementation
from smcjax.decoding.sampling import Purpose, Softmax, draw, group_keys, row_keys
from smcjax.decoding.scores import by_group, scores
from smcjax.decoding.speculation import agree_on_pages, keep_path, propose, propose_tree, reserve, score, score_tree
from smcjax.kv import Copies
from smcjax.model.decoder import unembed
from smcjax.noise import uniforms
from smcjax.rejection.rules import TreeVerification, Verification, candidates, tree

State = Groups  # N rows a request, which agree between steps
RejectionProgram = Program[Rejection]
begin, conclude = admission.begin, admission.conclude


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Info(decoding.Info):
    """The report of one step. The block is the same for all rows of a group."""

    accepted: Int[Array, " G"]  # drafts, those behind an end among them


@by_implementation
def start(program: RejectionProgram, params: PairParams, state: State, last_hidden: Float[Array, "G E"]) -> State:
    """Draws the first token from the target, one for all rows of a request."""
    requests, groups = state.requests, state.running.shape[0]
    keys = row_keys(requests.key, state.cycle, 1, Purpose.FIRST)
    first = sample(
        _distribution(program, state, 1), keys, jnp.ones(groups, jnp.int32), unembed(params.target, last_hidden)
    )
    nothing = jnp.zeros(groups, jnp.int32)
    return _commit(program, state, first.token[:, None], first.logprob[:, None], nothing, jnp.isnan(first.logprob))


class Accepted(NamedTuple):
    """The run that each request takes of its drafts; C = K + 1 columns, of which those behind the run are stale."""

    row: Int[Array, " G"] | None  # whose pages hold the run's KV; None: a request has one row
    accepted: Int[Array, " G"]
    tokens: Int[Array, "G C"]
    target: Softmax  # [G, C, V]: of the target's processed logits, for each column
    law: Float[Array, "G V"]  # of the token behind the run


@by_implementation
def step(program: RejectionProgram, params: PairParams, state: State) -> tuple[State, Info]:
    """Advances every running request by 1 to K + 1 tokens."""
    accept = _along_candidates if program.speculation.tree is None else _along_tree
    state, copies = reserve(program, state)
    state, run = accept(program, params, state, copies)
    before, ran = state.sequences.length, state.running
    with jax.named_scope("decide"):
        following = draw(group_keys(state.requests.key, state.cycle, Purpose.NEXT), jnp.log(run.law))
    with jax.named_scope("commit"):
        at_end = jnp.arange(run.tokens.shape[1])[None] == run.accepted[:, None]
        tokens = jnp.where(at_end, following[:, None], run.tokens)
        # Greedy laws are certain; what is reported of their tokens is the probability at temperature 1.
        logprobs = run.target.log_at(tokens)
        # Queries beyond the limit have no KV: their laws mean nothing, and what they give is cut.
        counts = state.by_group(before)[:, 0] + run.accepted < state.requests.limit
        # A law is NaN for all tokens or for none: its softmax's mass is.
        broken = (jnp.isnan(run.law[:, 0]) & counts) | jnp.isnan(logprobs[:, 0])
        state = _commit(program, state, tokens, logprobs, run.accepted, broken)
        state = dataclasses.replace(state, cycle=state.cycle + ran.astype(jnp.int32))
        of_tokens = by_group(state, scores(run.target.logits, logprobs)) if "logprobs" in program.features else None
        # All rows of a request name the pages of the accepted one.
        source = None if run.row is None else state.per_row(run.row)
        state = agree_on_pages(program, state, source, before, ran)
    groups, columns = tokens.shape
    info = Info(
        ran=ran,
        done=~state.running,
        accepted=run.accepted,
        length=state.by_group(state.sequences.length),
        tokens=jnp.broadcast_to(tokens[:, None], (groups, program.rows, columns)),
        scores=of_tokens,
    )
    return state, info


def _along_candidates(
    program: RejectionProgram, params: PairParams, state: State, copies: Copies | None
) -> tuple[State, Accepted]:
    """Drafts N candidates, scores and judges them."""
    distribution = _distribution(program, state, program.rows)
    state, drafts = propose(program, params, state, distribution, copies, keep_logits=True)
    state, logits, _ = score(program, params, state, drafts.tokens, copies)
    with jax.named_scope("decide"):
        columns = range(logits.shape[1])
        earlier = distribution.before(drafts.tokens, [range(column) for column in columns])
        target = Softmax.of(_target_logits(state, distribution, logits, columns, earlier))
        verification = decide(program, state, target, drafts)
        row = jnp.arange(state.running.shape[0]) * program.rows + verification.candidate
        tokens = jnp.pad(drafts.tokens[row], ((0, 0), (0, 1)))
    of_rows = jax.tree.map(lambda x: x[row], target)
    source = None if program.rows == 1 else row
    return state, Accepted(source, verification.accepted, tokens, of_rows, verification.law)


def _along_tree(
    program: RejectionProgram, params: PairParams, state: State, copies: Copies | None
) -> tuple[State, Accepted]:
    """Drafts a tree, scores and judges it, and writes the accepted path's KV to pages."""
    shape = program.speculation.tree
    assert shape is not None
    distribution = _distribution(program, state, 1)
    state, drafts = propose_tree(program, params, state, distribution, copies)
    state, logits, kept = score_tree(program, params, state, drafts.tokens, copies)
    with jax.named_scope("decide"):
        earlier = distribution.before(drafts.tokens, shape.drafts_to(range(shape.size)))
        target = Softmax.of(_target_logits(state, distribution, logits, shape.depths, earlier))
        verification = decide_tree(program, state, target, drafts.logits, drafts.tokens)
    state = keep_path(program, state, drafts, kept, verification.node)
    path = jnp.asarray(shape.paths)[verification.node]
    count = jnp.asarray(shape.depths)[verification.node]
    tokens = jnp.pad(jnp.take_along_axis(drafts.tokens, path[:, 1:], axis=1), ((0, 0), (0, 1)))
    row = jnp.arange(path.shape[0])
    of_path = jax.tree.map(lambda x: x[row[:, None], path], target)
    return state, Accepted(None, count, tokens, of_path, verification.law)


def run(program: RejectionProgram, params: PairParams, state: State, num_steps: int) -> tuple[State, Info]:
    """Takes `num_steps` steps in one program; Info fields get a leading [num_steps] axis."""
    return jax.lax.scan(lambda state, _: step(program, params, state), state, length=num_steps)


def _distribution(program: RejectionProgram, state: State, rows: int) -> SamplingDistribution:
    """The distribution of the next token of each of `rows` rows a request, in either model."""
    return distribution_of(state, rows=rows, features=program.features)


def _target_logits(
    state: State,
    distribution: SamplingDistribution,
    logits: Float[Array, "R C V"],
    depths: Iterable[int],
    earlier: Int[Array, "R C most"] | None,
) -> Float[Array, "R C V"]:
    """Processed logits of the target behind each column, which stands so many tokens behind the frontier.

    `earlier` are those tokens, where laws depend on them (`SamplingDistribution.before`).
    """
    generated = state.sequences.length - state.per_row(state.requests.prompt_length)

    def processed(depth: jax.Array, logits: jax.Array, earlier: jax.Array | None) -> jax.Array:
        return processed_logits(distribution.behind(earlier), generated + 1 + depth, logits)

    return jax.vmap(processed, in_axes=(0, 1, 1), out_axes=1)(jnp.asarray(tuple(depths)), logits, earlier)


def _law(softmax: Softmax, greedy: Bool[Array, ""]) -> Float[Array, "*shape V"]:
    """Probabilities of processed logits; of a greedy request all on the likeliest token."""
    logits = softmax.logits
    likeliest = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=logits.dtype)
    likeliest = jnp.where(jnp.isnan(softmax.top)[..., None], jnp.nan, likeliest)
    return jnp.where(greedy, likeliest, softmax.probabilities())


def decide(
    program: RejectionProgram,
    state: State,
    target: Softmax,  # [R, C, V]
    drafts: Drafts,
) -> Verification:
    """Verifies the drafts of each request."""
    n, gamma = program.rows, program.speculation.gamma
    greedy = state.requests.temperature == 0
    keys = group_keys(state.requests.key, state.cycle, Purpose.ACCEPT)
    draft = None if drafts.deterministic else Softmax.of(drafts.whole(target.logits.shape[-1]))

    def one(
        key: jax.Array, greedy: jax.Array, target: Softmax, draft: Softmax | None, tokens: jax.Array
    ) -> Verification:
        p = _law(target, greedy)
        q = jax.nn.one_hot(tokens, p.shape[-1], dtype=p.dtype) if draft is None else _law(draft, greedy)
        return candidates(p, q, tokens, uniforms(key, (gamma, n)))

    return jax.vmap(one)(keys, greedy, *jax.tree.map(state.by_group, (target, draft, drafts.tokens)))


def decide_tree(
    program: RejectionProgram,
    state: State,
    target: Softmax,  # [G, M, V]
    draft_logits: Float[Array, "G inner V"],
    tokens: Int[Array, "G M"],
) -> TreeVerification:
    """Verifies the tree of each request. Siblings are draws from q, or the draft's likeliest tokens."""
    speculation = program.speculation
    shape = speculation.tree
    assert shape is not None
    greedy = state.requests.temperature == 0
    keys = group_keys(state.requests.key, state.cycle, Purpose.ACCEPT)

    def one(
        key: jax.Array, greedy: jax.Array, target: Softmax, draft: jax.Array, tokens: jax.Array
    ) -> TreeVerification:
        fixed = greedy | (speculation.siblings == "top")
        return tree(shape, _law(target, greedy), jax.nn.softmax(draft), tokens, uniforms(key, (shape.size - 1,)), fixed)

    return jax.vmap(one)(keys, greedy, target, draft_logits, tokens)


def _commit(
    program: RejectionProgram,
    state: State,
    tokens: Int[Array, "G C"],
    logprobs: Float[Array, "G C"],
    accepted: Int[Array, " G"],
    broken: Bool[Array, " G"],
) -> State:
    """Appends `accepted` + 1 tokens to all rows of the running requests; those with a broken law fail instead."""
    tokens, logprobs, last = state.per_row(tokens), state.per_row(logprobs), state.per_row(accepted)
    live = state.live & ~state.per_row(broken)
    sequences, _ = extend(state, tokens, logprobs, live, last=last)
    ended = state.by_group(sequences.finished)[:, 0]
    return dataclasses.replace(
        state,
        sequences=sequences,
        failed=state.failed | (state.running & broken),
        running=state.running & ~broken & ~ended,
    )


class RejectionDecoder(Decoder[Rejection, State, Info]):
    """Speculative sampling, whose rows of a group agree between steps."""

    begin = begin
    start = start
    step = step
    conclude = conclude

    def report(
        self,
        infos: Sequence[Info],
        prompt_length: int,
        kept: int,
        *,
        control: float | None = None,
        trace: bool = False,
        constrained: bool = False,
    ) -> Report:
        """Counts the drafts among the `kept` first tokens of the answer, and the cycles that reach each position."""
        ends = np.array([int(info.length[0]) - prompt_length for info in infos], int)  # all rows agree
        begins = np.array([1, *ends[:-1]], int)[: len(ends)]  # the first token is the target's
        within = np.clip(np.minimum(ends, kept) - begins, 0, None)
        lengths = np.minimum([int(info.accepted) for info in infos], within)
        reached = tuple(int((lengths > position).sum()) for position in range(self.speculation.gamma))
        return Report(accepted=int(lengths.sum()), accepted_at=reached)
