"""From an ended batch to what users read: text, reasons, weights, traces."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from smcjax.decoders import Decoding
from smcjax.decoding.decoder import Report
from smcjax.decoding.sequences import Population
from smcjax.engine.requests.requests import Request
from smcjax.engine.results.completion import completion_of, normalized, reason_of
from smcjax.engine.results.outputs import CompletionOutput, Particle, RequestMetrics, RequestOutput, SMCOutput, Trace
from smcjax.engine.results.running import Running
from smcjax.engine.results.text import answer_text
from smcjax.tokenizer.tokenizer import Tokenizer

_NO_WEIGHT = (
    "no particle has a usable weight left (all are zero, or the model gave NaN); "
    "check the model's weights and the dtype"
)
_NO_VALUE = (
    "no particle has a usable weight left: potentials gave −inf to all of them, or NaN or +inf to one; steer earlier "
    "or more mildly, or take more particles"
)
_NO_LAW = "the model gave NaN in place of probabilities; check its weights and the dtype"


def assemble(running: Running, population: Population, tokenizer: Tokenizer | None) -> RequestOutput:
    """The output of a request from its population, one group as host arrays, and its record.

    One that was refused when it had been admitted has that as its error, and no answer.
    """
    request, decoder, infos, times = running.request, running.decoder, running.infos, running.times
    params, prefix = request.params, running.stable_prefix
    population = jax.tree.map(lambda leaf: leaf[0], population)
    start = len(request.token_ids)
    selected = int(population.selected)
    sequences = [
        population.tokens[row, start : population.length[row]].tolist() for row in range(len(population.tokens))
    ]
    error = running.refused
    if error is None and population.failed:
        error = _NO_WEIGHT if decoder.decoding.weighted else _NO_LAW
        error = _NO_VALUE if params.potentials else error
    if error is not None:
        completion = CompletionOutput(0, "", [], "error")
    else:
        text_of = None if prefix is None else prefix.text_of
        completion = completion_of(request, sequences[selected], tokenizer, text_of)
        if running.aborted:
            completion = dataclasses.replace(completion, finish_reason="abort")
    kept = len(completion.token_ids)
    if prefix is not None and kept < len(prefix.token_ids) and (running.aborted or error is not None):
        # The group had begun again, or failed: the answer is what was emitted.
        completion = dataclasses.replace(completion, text=prefix.text, token_ids=list(prefix.token_ids))
        kept = len(prefix.token_ids)
    elif error is None and params.logprobs is not None:
        logprobs = population.logprobs[selected, start : start + kept]
        completion = dataclasses.replace(completion, logprobs=[float(x) for x in logprobs])
        if params.logprobs:
            scored = running.scores(selected, 0, kept)
            completion = dataclasses.replace(completion, top_logprobs=[] if scored is None else scored.top)
    report = decoder.report(
        infos,
        start,
        kept,
        control=params.control,
        trace=request.trace,
        constrained=params.expression is not None or bool(params.potentials),
    )
    weighted = None
    if decoder.decoding.weighted:
        weights = normalized(np.asarray(population.log_weight))
        weighted = SMCOutput(
            log_evidence=float(population.log_evidence),
            particles=[
                Particle(
                    token_ids=token_ids,
                    log_weight=float(population.log_weight[row]),
                    finish_reason=reason_of(request, token_ids) if population.finished[row] else None,
                    text=completion_of(request, token_ids, tokenizer).text,
                    weight=float(weights[row]),
                )
                for row, token_ids in enumerate(sequences)
            ],
            log_weights=np.array(population.log_weight),
            selected=selected,
            control=report.control,
            warning=report.warning,
            trace=_trace(report, request, sequences, selected, tokenizer),
        )
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.token_ids,
        outputs=[completion],
        finished=True,
        metrics=RequestMetrics(
            cycles=len(infos),
            resamples=report.resamples,
            generated_tokens=kept,
            drafted=len(infos) * decoder.decoding.drafts_per_cycle,
            seconds=times.seconds,
            mean_ess=report.mean_ess,
            queue_seconds=times.began - times.arrived,
            first_token_seconds=max(times.first_seen - times.began, 0.0),
            num_cached_tokens=running.group.cached,
            preemptions=running.preemptions,
            accepted=report.accepted,
            accepted_at=report.accepted_at,
        ),
        smc=weighted,
        error=error,
        decoding=decoder.decoding.name,
        **running.prompt_fields(),
    )


def aborted_in_the_queue(request: Request, decoding: Decoding, running: Running | None) -> RequestOutput:
    """The output of a request that was aborted while it waited.

    One that had been preempted has a record, and its reader may have got some of the answer.
    """
    prefix = None if running is None else running.stable_prefix
    text, token_ids = ("", []) if prefix is None else (prefix.text, list(prefix.token_ids))
    times: dict[str, Any] = {"seconds": 0.0}
    if running is not None:
        queued = running.times.began - running.times.arrived
        times = {"seconds": running.times.seconds, "queue_seconds": queued, "preemptions": running.preemptions}
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.token_ids,
        outputs=[CompletionOutput(0, text, token_ids, "abort")],
        finished=True,
        metrics=RequestMetrics(cycles=0, resamples=0, generated_tokens=len(token_ids), drafted=0, **times),
        decoding=decoding.name,
    )


def _trace(
    report: Report, request: Request, sequences: list[list[int]], selected: int, tokenizer: Tokenizer | None
) -> Trace | None:
    """The history that the report holds, with the rows' final texts."""
    if report.trace is None:
        return None
    texts = None if tokenizer is None else [answer_text(tokenizer, request.token_ids, row) for row in sequences]
    return Trace(**report.trace, texts=texts, selected=selected)
