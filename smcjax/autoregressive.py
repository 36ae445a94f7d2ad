"""Autoregressive decoding: the target model alone, one token a step, exactly from its law. The baseline of all others.

The life is that of `smcjax.smc`: begin → prefill → start → step … step → conclude, with one row a group.
Temperature 0 is greedy; top_k and top_p are honoured (temperature, then k, then p).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from smcjax.decoders import Autoregressive as Autoregressive
from smcjax.decoding import admission
from smcjax.decoding.constraints import extend
from smcjax.decoding.cycle_view import view_of
from smcjax.decoding.decoder import Decoder
from smcjax.decoding.distribution import Drawn, SamplingDistribution, distribution_of, processed_logits, sample
from smcjax.decoding.drafts.next_token import Steps, next_token, plan_steps, prepare
from smcjax.decoding.groups import Groups, Info, PairParams
from smcjax.decoding.program import Program as Program
from smcjax.decoding.program import by_implementation
from smcjax.decoding.sampling import Purpose, row_keys
from smcjax.decoding.scores import by_group, scores
from smcjax.decoding.speculation import reserve
from smcjax.model.decoder import unembed

State = Groups  # one row a request
TargetProgram = Program[Autoregressive]
begin, prefill, conclude = admission.begin, admission.prefill, admission.conclude


@by_implementation
def start(program: TargetProgram, params: PairParams, state: State, last_hidden: Float[Array, "G E"]) -> State:
    """Draws each request's first token."""
    keys, number = _draw(state, Purpose.FIRST)
    distribution = distribution_of(state, rows=1, features=program.features)
    return _append(state, sample(distribution, keys, number, unembed(params.target, last_hidden)))


@by_implementation
def step(program: TargetProgram, params: PairParams, state: State) -> tuple[State, Info]:
    """Advances every running request by one token."""
    config, ran = program.target, state.running
    state, _ = reserve(program, state)  # no other row shares the page that is written
    position = state.sequences.length - 1
    tokens = state.sequences.token_at(position)[:, None]
    view = view_of(state, tokens, position[:, None], None, width=1, page_size=program.page_size)
    # The one query sees its own token too.
    view = dataclasses.replace(view, num_immutable=position + 1, sparse=program.speculation.sparse)
    distribution = distribution_of(state, rows=1, features=program.features)
    plan = plan_steps(config, params.target, view, distribution, columns=1, keep_logits="logprobs" in program.features)
    keys, number = _draw(state, Purpose.DRAFT)
    one = Steps(view.positions[None], view.write_pages[None], keys[None], number[None])
    one = prepare(config, params.target, view, one, distribution, plan)
    drawn, cache = next_token(config, params.target, state.memory.target, view, one, 0, distribution, plan)
    state = state.with_memory(target=cache)
    state = _append(state, drawn)
    state = dataclasses.replace(state, cycle=state.cycle + ran.astype(jnp.int32))
    length = state.sequences.length[:, None]
    info = Info(ran=ran, done=~state.running, tokens=drawn.token[:, None, None], length=length)
    if "logprobs" in program.features:
        law = _law(params, distribution, number, drawn)
        info = dataclasses.replace(info, scores=by_group(state, scores(law, drawn.logprob[:, None])))
    return state, info


def run(program: TargetProgram, params: PairParams, state: State, num_steps: int) -> tuple[State, Info]:
    """Takes `num_steps` steps in one program; Info fields get a leading [num_steps] axis."""
    return jax.lax.scan(lambda state, _: step(program, params, state), state, length=num_steps)


def _draw(state: State, purpose: Purpose) -> tuple[Key[Array, " G"], Int[Array, " G"]]:
    """Keys and numbers of the requests' next tokens."""
    requests = state.requests
    return row_keys(requests.key, state.cycle, 1, purpose), state.sequences.length - requests.prompt_length + 1


def _law(
    params: PairParams, distribution: SamplingDistribution, number: Int[Array, " G"], drawn: Drawn
) -> Float[Array, "G 1 V"]:
    """The processed logits that tokens were drawn from, which were asked for."""
    if drawn.logits is not None:
        return drawn.logits[:, None]
    assert drawn.deferred is not None
    return processed_logits(distribution, number, drawn.deferred.logits(params.target))[:, None]


def _append(state: State, drawn: Drawn) -> State:
    """Commits one token a request; where its log-probability is NaN the request fails instead."""
    broken = jnp.isnan(drawn.logprob)
    sequences, _ = extend(state, drawn.token[:, None], drawn.logprob[:, None], state.live & ~broken)
    return dataclasses.replace(
        state,
        sequences=sequences,
        failed=state.failed | (state.running & broken),
        running=state.running & ~broken & ~sequences.finished,
    )


class AutoregressiveDecoder(Decoder[Autoregressive, State, Info]):
    """Decoding by the target alone, as the engine holds it."""

    begin = begin
    start = start
    step = step
    conclude = conclude
