"""The next token of each row: a forward over its newest tokens, and a draw from the distribution that it predicts.

There are three ways to one distribution: all of it in one persistent kernel (`smcjax.pallas.decode_step.op`); layer by
layer, and behind the last the head and the draw in one kernel (`smcjax.pallas.head.sampled_head`); or logits, and then
the draw. Only the last writes logits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Int, Key, UInt

from smcjax.decoding.distribution import (
    DeferredLogits,
    Drawn,
    SamplingDistribution,
    pack_bits,
    sample,
    sample_in_head,
)
from smcjax.decoding.drafts.fused_step import FusedStepPlan, fused_step_shape, norms_of, plan_fused_steps, weights_of
from smcjax.kv import KVCache
from smcjax.matmul import is_packed
from smcjax.model.config import ModelConfig
from smcjax.model.decoder import rope_angles, unembed
from smcjax.model.paged import paged_hidden_states, plan_attention
from smcjax.model.params import Params
from smcjax.model.view import BatchView
from smcjax.noise import words_of
from smcjax.pallas.decode_step import op as decode_step
from smcjax.pallas.head.sampled_head import sampled_head


@dataclasses.dataclass(frozen=True)
class Steps:
    """K draws a row that follow each other, and all that is known of them before the first: everything but tokens."""

    positions: Int[Array, "K R T"]  # of each step's T new tokens, as `BatchView` has them
    write_pages: Int[Array, "K R T"]
    keys: Key[Array, "K R"]
    token_number: Int[Array, "K R"]  # of the token to be drawn, from 1
    fused: tuple[decode_step.Shape, decode_step.Tables] | None = None  # the kernel's arguments; None: layer by layer


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plans shared by all draft steps of a cycle, fused and layer by layer. XLA removes the unused one."""

    attention: Any  # `plan_attention`
    fused: FusedStepPlan | None = None  # None where no step may be fused
    keep_logits: bool = False
    stop_words: UInt[Array, "R words"] | None = None  # stop tokens, 32 to a word; None where no kernel draws
    draws_in_head: bool = False  # layer by layer: whether the head's kernel draws


def plan_steps(
    config: ModelConfig,
    params: Params,
    view: BatchView,
    distribution: SamplingDistribution,
    *,
    columns: int,
    keep_logits: bool = False,
) -> Plan:
    """Plans steps of 1 to `columns` tokens a row over the tables of `view`, whose own tokens are not read."""
    attention = plan_attention(config, params, view, columns=columns)
    hidden = jax.ShapeDtypeStruct((view.block_table.shape[0], config.hidden_size), params.embed.dtype)
    by_kernel = distribution.follows_logits and not keep_logits and not is_packed(params.unembed)
    by_kernel = by_kernel and sampled_head.kernel_for(hidden, params.unembed) is not None
    shapes = [fused_step_shape(config, params, view, width) for width in range(1, columns + 1)]
    fitting = [shape for shape in shapes if shape is not None]
    fused = None
    if distribution.follows_logits and fitting:
        fused = plan_fused_steps(config, params, view, fitting)
    words = pack_bits(distribution.stops) if by_kernel or fused is not None else None
    return Plan(attention, fused, keep_logits, words, by_kernel)


def prepare(
    config: ModelConfig, params: Params, view: BatchView, steps: Steps, distribution: SamplingDistribution, plan: Plan
) -> Steps:
    """Returns `steps` with tables for the fused kernel where that takes them, made in a few launches for all K."""
    if plan.fused is None or plan.stop_words is None:
        return steps
    columns = steps.positions.shape[2]
    shape = fused_step_shape(config, params, view, columns)
    if shape is None:
        return steps
    angles = rope_angles(config.layer(0).rope, config.head_dim, steps.positions.reshape(-1, columns))
    cos, sin = (x.reshape(*steps.positions.shape, -1) for x in angles)
    draws = decode_step.Draws(
        keys=words_of(steps.keys),
        temperature=distribution.temperature,
        noise_scale=distribution.noise_scale(),
        forbidden=plan.stop_words,
        forbids=steps.token_number <= distribution.minimum[None],
    )
    slots = steps.write_pages * view.page_size + steps.positions % view.page_size
    tables = decode_step.make_tables(shape, cos, sin, steps.positions, slots, draws)
    return dataclasses.replace(steps, fused=(shape, tables))


def next_token(
    config: ModelConfig,
    params: Params,
    cache: KVCache,
    view: BatchView,
    steps: Steps,
    step: Int[Array, ""] | int,
    distribution: SamplingDistribution,
    plan: Plan,
    begin: decode_step.Embedded | None = None,
) -> tuple[Drawn, KVCache]:
    """A token for each row after the T new ones of this step, `view.tokens`, and the cache with their KV written.

    `step` from 0 to K − 1 is which of `steps`, which were prepared with this `plan` and `distribution`; it says where
    the tokens stand. `begin` is what `beginning` says of them. The log-probability is f32, NaN where a logit is.
    """
    if steps.fused is not None and plan.fused is not None:
        shape, tables = steps.fused
        if distribution.features:
            tables = decode_step.with_forbidden(
                shape, tables, pack_bits(distribution.forbidden(steps.token_number[step]))
            )
        if view.copies is not None:
            cache = cache.copy_pages(view.copies)
        weights, tasks = weights_of(params, plan.fused.norms, plan.fused.scales), plan.fused.tasks[shape.rows]
        if begin is None:
            begin = decode_step.embedded(weights.embed, weights.norms[0], view.tokens)
        done = decode_step.decode_step(shape, weights, begin, step, tables, tasks, cache.keys, cache.values)
        deferred = None
        if plan.keep_logits:
            deferred = DeferredLogits.from_residual(params, done.residual, config.rms_norm_eps)
        drawn = Drawn(done.token, done.logprob, deferred=deferred, following=done.following)
        return drawn, cache.replace(keys=done.keys, values=done.values)
    view = dataclasses.replace(view, positions=steps.positions[step], write_pages=steps.write_pages[step])
    hidden, cache = paged_hidden_states(config, params, cache, view, plan.attention)
    keys, number = steps.keys[step], steps.token_number[step]
    if plan.draws_in_head and plan.stop_words is not None:
        return sample_in_head(distribution, keys, number, hidden[:, -1], params.unembed, plan.stop_words), cache
    logits = unembed(params, hidden[:, -1])
    return sample(distribution, keys, number, logits, keep_logits=plan.keep_logits), cache


def beginning(params: Params, steps: Steps, drawn: Drawn) -> decode_step.Embedded | None:
    """The beginning of fused `steps` whose only new tokens are `drawn`; None where steps go layer by layer."""
    if steps.fused is None:
        return None
    if drawn.following is not None:
        return drawn.following
    return decode_step.embedded(params.embed, norms_of(params)[0], drawn.token)
