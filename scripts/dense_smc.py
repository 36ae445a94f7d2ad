"""SMC under a control and exact decoders on whole populations, outside of the engine.

Both share everything but the decision of a cycle, so that what differs between them is the decision. Rows keep
their keys and values in contiguous arrays, every row of a batch runs until the last group has ended, and one program a
step serves all controls: what serves a measurement, not a server.

A cycle drafts K tokens a row, scores them in one forward of the target, and decides:

    `Control`  drafts are kept or rejected by c (`smcjax.smc.control`), rows are resampled where their ESS is low
    `Exact`    recursive rejection along N candidates (`smcjax.rejection.rules`), whose rows agree

Answers have a fixed number of tokens, the first of them drawn with the prompt, as in the engine.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smcjax.model.config import ModelConfig
from smcjax.model.decoder import hidden_states, unembed
from smcjax.model.params import Params
from smcjax.pallas import implementations
from smcjax.pallas.attention.reference import attention, sees
from smcjax.rejection.rules import candidates
from smcjax.smc.acceptance import Distributions, RejectionControl, block_of, decide
from smcjax.smc.control import at
from smcjax.smc.resampling import resample
from smcjax.smc.weights import effective_sample_size


class Model(Protocol):
    """The laws of the next token, with a state of R rows that a forward over new tokens changes. Hashable."""

    def begun(self, rows: int, slots: int) -> Any:
        """The state of rows without tokens; its leaves have R entries."""
        ...

    def behind(
        self, params: Any, state: Any, tokens: Int[Array, "R C"], places: Int[Array, "R C"]
    ) -> tuple[Float[Array, "R C V"], Any]:
        """log p of the token behind each of C tokens, at these places of their rows, and the state that knows them."""
        ...


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A decoder of `smcjax.model` at a temperature, whose state is the keys and values of each layer."""

    config: ModelConfig
    vocabulary: int
    temperature: float

    def begun(self, rows: int, slots: int) -> Any:
        """Keys and values, 0, [R, S, Hkv, D] a layer."""
        shape = (rows, slots, self.config.num_kv_heads, self.config.head_dim)
        return [tuple(jnp.zeros(shape, self.config.dtype) for _ in range(2)) for _ in range(self.config.num_layers)]

    def behind(
        self, params: Params, state: Any, tokens: Int[Array, "R C"], places: Int[Array, "R C"]
    ) -> tuple[Float[Array, "R C V"], Any]:
        """Attends to the row's slots up to each place; slots behind may hold anything finite."""
        rows = jnp.arange(tokens.shape[0])[:, None]
        held = list(state)

        def attend(index: int, projection: Any) -> jax.Array:
            kind: Any = self.config.layer(index).attention  # softmax over all earlier keys, or a window of them
            q, *new = projection.heads()
            keys, values = (old.at[rows, places].set(one) for old, one in zip(held[index], new, strict=True))
            held[index] = (keys, values)
            visible = sees(jnp.arange(keys.shape[1]), places[:, :, None], kind.window)
            return attention(q, keys, values, visible, scale=kind.scale)

        with implementations("xla"):
            states = hidden_states(self.config, params, tokens, places, attend)
        logits = unembed(params, states)[..., : self.vocabulary]
        return jax.nn.log_softmax(logits / self.temperature, axis=-1), held


@dataclasses.dataclass(frozen=True)
class Pair:
    """Target and draft with their weights."""

    target: Model
    target_params: Any
    draft: Model
    draft_params: Any


class Cycle(NamedTuple):
    """The laws and drafts of G groups of N rows, R = G·N, about which a decision is made."""

    log_p: Float[Array, "R C V"]  # C = K + 1
    log_q: Float[Array, "R K V"]
    drafts: Int[Array, "R K"]
    left: Int[Array, " R"]  # tokens until a row's answer is whole
    log_weight: Float[Array, "G N"]


class Decision(NamedTuple):
    """New rows, each a copy of a row with some tokens more."""

    source: Int[Array, " R"]
    tokens: Int[Array, "R C"]
    kept: Int[Array, " R"]  # of the tokens
    logprobs: Float[Array, "R C"]  # log p of the tokens
    log_weight: Float[Array, "G N"]
    log_evidence: Float[Array, " G"]  # what moves into log Ẑ


@dataclasses.dataclass(frozen=True)
class Control:
    """SMC under control c, resampled systematically where the ESS is below half of N."""

    c: float = 0.0


def controlled(cycle: Cycle, control: Float[Array, " R"], key: jax.Array) -> Decision:
    """Keeps, rejects, weighs and resamples as the engine does at power 1."""
    groups, n = cycle.log_weight.shape
    coins, tokens_key, resampling = jax.random.split(key, 3)
    uniforms = jax.random.uniform(coins, cycle.drafts.shape, cycle.log_p.dtype)
    normalizer = jnp.zeros(cycle.log_p.shape[:2], cycle.log_p.dtype)
    rule, laws = RejectionControl(control), Distributions(cycle.log_p, cycle.log_q, normalizer, cycle.log_p)
    accepted, logits = decide(rule, laws, cycle.drafts, uniforms)
    block = block_of(rule, laws, cycle.drafts, accepted, jax.random.categorical(tokens_key, logits))
    kept = jnp.minimum(accepted + 1, cycle.left)
    counted = jnp.arange(block.tokens.shape[1]) < kept[:, None]
    log_weight = cycle.log_weight + jnp.sum(jnp.where(counted, block.increments, 0), axis=1).reshape(groups, n)
    running = (cycle.left - kept).reshape(groups, n).any(axis=1)
    poor = running & (effective_sample_size(log_weight) < 0.5 * n)
    drawn = resample(resampling, log_weight)
    own = jnp.where(poor[:, None], drawn, jnp.arange(n))
    source = (own + n * jnp.arange(groups)[:, None]).reshape(-1)
    mean = jax.nn.logsumexp(log_weight, axis=1) - jnp.log(n)
    return Decision(
        source,
        block.tokens[source],
        kept[source],
        at(cycle.log_p, block.tokens)[source],
        jnp.where(poor[:, None], 0, log_weight),
        jnp.where(poor, mean, 0),
    )


@dataclasses.dataclass(frozen=True)
class Exact:
    """Speculative sampling along the candidates that a group's rows are, which agree between cycles."""


def exact(cycle: Cycle, key: jax.Array) -> Decision:
    """Gives all rows of a group the accepted candidate's tokens."""
    groups, n = cycle.log_weight.shape
    gamma = cycle.drafts.shape[1]
    coins, tokens_key = jax.random.split(key)
    uniforms = jax.random.uniform(coins, (groups, gamma, n), cycle.log_p.dtype)
    p, q = (jnp.exp(x).reshape(groups, n, *x.shape[1:]) for x in (cycle.log_p, cycle.log_q))
    verdict = jax.vmap(candidates)(p, q, cycle.drafts.reshape(groups, n, gamma), uniforms)
    following = jax.random.categorical(tokens_key, jnp.log(verdict.law))
    source = jnp.repeat(verdict.candidate + n * jnp.arange(groups), n)
    accepted = jnp.repeat(verdict.accepted, n)
    drafts = jnp.pad(cycle.drafts[source], ((0, 0), (0, 1)))
    tokens = jnp.where(jnp.arange(gamma + 1) == accepted[:, None], jnp.repeat(following, n)[:, None], drafts)
    return Decision(
        source,
        tokens,
        jnp.minimum(accepted + 1, cycle.left),
        at(cycle.log_p[source], tokens),
        cycle.log_weight,
        jnp.zeros(groups, cycle.log_p.dtype),
    )


@dataclasses.dataclass
class Result:
    """Whole answers of G groups of N rows."""

    answers: np.ndarray  # [G, N, tokens]
    logprobs: np.ndarray  # [G, N, tokens], log p
    log_weight: np.ndarray  # [G, N]
    log_evidence: np.ndarray  # [G]
    cycles: np.ndarray  # [G]

    @property
    def weights(self) -> np.ndarray:
        """Normalised over each group."""
        weights = np.exp(self.log_weight - self.log_weight.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)


class Rows(NamedTuple):
    """The state of R rows between cycles."""

    tokens: Int[Array, "R T"]
    length: Int[Array, " R"]
    logprobs: Float[Array, "R T"]  # log p of each token; 0 in the prompt
    target: Any
    draft: Any


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def _read(model: Model, params: Any, state: Any, tokens: jax.Array) -> Any:
    """The state that knows prompts; places behind a row's length are read too, and overwritten later."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.behind(params, state, tokens, places)[1]


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=(2,))
def _propose(
    model: Model, params: Any, state: Any, recent: jax.Array, length_and_key: Any, gamma: int
) -> tuple[jax.Array, jax.Array, Any]:
    """K drafts and their laws. The first forward is over two tokens: the last draft was never read by the draft."""
    length, key = length_and_key
    log_law, state = model.behind(params, state, recent, length[:, None] + jnp.arange(-2, 0))
    first = log_law[:, -1]

    def one(carry: Any, key: jax.Array) -> Any:
        (state, log_law), place = carry
        token = jax.random.categorical(key, log_law)
        following, state = model.behind(params, state, token[:, None], place[:, None])
        return ((state, following[:, 0]), place + 1), (token, log_law)

    # The last draft is read as well, which nothing needs, so that one loop serves all.
    carry, (drafts, laws) = jax.lax.scan(one, ((state, first), length), jax.random.split(key, gamma))
    return drafts.T, jnp.swapaxes(laws, 0, 1), carry[0][0]


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def _score(
    model: Model, params: Any, state: Any, last: jax.Array, drafts: jax.Array, length: jax.Array
) -> tuple[jax.Array, Any]:
    """The target's laws behind the newest token and each draft, [R, K + 1, V]."""
    tokens = jnp.concatenate([last[:, None], drafts], axis=1)
    return model.behind(params, state, tokens, length[:, None] - 1 + jnp.arange(tokens.shape[1]))


@functools.partial(jax.jit, static_argnums=(0,))
def _decide(method: type, control: jax.Array, cycle: Cycle, key: jax.Array) -> Decision:
    """One program for all controls."""
    if method is Control:
        return controlled(cycle, jnp.broadcast_to(control, cycle.left.shape), key)
    return exact(cycle, key)


@functools.partial(jax.jit, donate_argnums=(0,))
def _commit(rows: Rows, decision: Decision) -> Rows:
    """Copies the sources and adds their tokens."""
    copied: Rows = jax.tree.map(lambda leaf: leaf[decision.source], rows)
    column = jnp.arange(decision.tokens.shape[1])
    counted = column < decision.kept[:, None]
    place = jnp.where(counted, copied.length[:, None] + column, copied.tokens.shape[1])
    index = jnp.arange(len(copied.length))[:, None]
    return copied._replace(
        tokens=copied.tokens.at[index, place].set(decision.tokens, mode="drop"),
        logprobs=copied.logprobs.at[index, place].set(decision.logprobs, mode="drop"),
        length=copied.length + decision.kept,
    )


def begun(
    pair: Pair,
    prompts: np.ndarray,
    lengths: np.ndarray,
    n: int,
    room: int,
    key: jax.Array,
    *,
    agree: bool = False,
    drafts: bool = True,
) -> Rows:
    """N rows of each prompt [G, P], with an answer's first token drawn from the target; one for all that `agree`."""
    tokens = jnp.asarray(np.repeat(prompts, n, axis=0), jnp.int32)
    length = jnp.asarray(np.repeat(lengths, n), jnp.int32)
    index, slots = jnp.arange(len(length)), prompts.shape[1] + room
    target = _read(pair.target, pair.target_params, pair.target.begun(len(length), slots), tokens)
    last, none = tokens[index, length - 1], jnp.zeros((len(length), 0), jnp.int32)
    log_p, target = _score(pair.target, pair.target_params, target, last, none, length)
    law = log_p[:, 0]
    first = jax.random.categorical(key, law)
    if agree:
        first = jnp.repeat(first[::n], n)
    draft = None
    if drafts:
        draft = _read(pair.draft, pair.draft_params, pair.draft.begun(len(length), slots), tokens)
    padded = jnp.pad(tokens, ((0, 0), (0, room))).at[index, length].set(first)
    logprobs = jnp.zeros(padded.shape, law.dtype).at[index, length].set(at(law, first))
    return Rows(padded, length + 1, logprobs, target, draft)


def run(
    pair: Pair,
    method: Control | Exact,
    prompts: np.ndarray,
    lengths: np.ndarray,
    *,
    n: int,
    gamma: int,
    tokens: int,
    seed: int,
    room: int | None = None,
) -> Result:
    """Answers of `tokens` tokens to G prompts [G, P], of these lengths and at least two tokens each.

    `room` is the tokens that rows have room for behind the prompt, where programs of several runs are to be the same.
    """
    groups = len(prompts)
    keys = iter(jax.random.split(jax.random.key(seed), 3 * tokens + 1))
    room = room or tokens + gamma + 2
    rows = begun(pair, prompts, lengths, n, room, next(keys), agree=isinstance(method, Exact))
    end = jnp.asarray(np.repeat(lengths, n), jnp.int32) + tokens
    log_weight, log_evidence = jnp.zeros((groups, n)), np.zeros(groups)
    cycles = np.zeros(groups, int)
    control = jnp.float32(getattr(method, "c", 0.0))
    while (running := np.asarray(rows.length < end).reshape(groups, n).any(axis=1)).any():
        cycles += running
        index = jnp.arange(len(end))
        recent = jnp.stack([rows.tokens[index, rows.length - back] for back in (2, 1)], axis=1)
        drafts, log_q, draft = _propose(
            pair.draft, pair.draft_params, rows.draft, recent, (rows.length, next(keys)), gamma
        )
        log_p, target = _score(pair.target, pair.target_params, rows.target, recent[:, 1], drafts, rows.length)
        cycle = Cycle(log_p, log_q, drafts, end - rows.length, log_weight)
        decision = _decide(type(method), control, cycle, next(keys))
        del cycle, log_p, log_q
        rows = _commit(rows._replace(target=target, draft=draft), decision)
        log_weight, log_evidence = decision.log_weight, log_evidence + np.asarray(decision.log_evidence, float)
    last = np.asarray(jax.nn.logsumexp(log_weight, axis=1) - jnp.log(n), float)
    return _result(rows, lengths, n, tokens, np.asarray(log_weight), log_evidence + last, cycles)


def sampled(
    pair: Pair, prompts: np.ndarray, lengths: np.ndarray, *, n: int, tokens: int, seed: int, room: int | None = None
) -> Result:
    """N answers of the target alone to each prompt, token by token: what all others are compared with."""
    groups = len(prompts)
    keys = jax.random.split(jax.random.key(seed), tokens)
    rows = begun(pair, prompts, lengths, n, room or tokens + 1, keys[0], drafts=False)
    index = jnp.arange(groups * n)
    for key in keys[1:]:
        newest = rows.tokens[index, rows.length - 1]
        log_p, target = _score(
            pair.target, pair.target_params, rows.target, newest, jnp.zeros((len(index), 0), jnp.int32), rows.length
        )
        token = jax.random.categorical(key, log_p[:, 0])
        one = jnp.ones_like(rows.length)
        decision = Decision(index, token[:, None], one, at(log_p, token[:, None]), jnp.zeros(()), jnp.zeros(()))
        rows = _commit(rows._replace(target=target), decision)
    return _result(rows, lengths, n, tokens, np.zeros((groups, n)), np.zeros(groups), np.full(groups, tokens))


def _result(
    rows: Rows,
    lengths: np.ndarray,
    n: int,
    tokens: int,
    log_weight: np.ndarray,
    log_evidence: np.ndarray,
    cycles: np.ndarray,
) -> Result:
    groups = len(lengths)
    places = np.repeat(lengths, n)[:, None] + np.arange(tokens)
    answers, logprobs = (
        np.take_along_axis(np.asarray(x), places, axis=1).reshape(groups, n, tokens)
        for x in (rows.tokens, rows.logprobs)
    )
    return Result(answers, logprobs, log_weight, log_evidence, cycles)
