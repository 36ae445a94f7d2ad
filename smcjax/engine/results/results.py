"""From an ended batch to what users read: text, reasons, weights, traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from smcjax.decoders import Decoding
from smcjax.decoding.decoder import Decoder, Report
from smcjax.decoding.sequences import Population
from smcjax.engine.requests.requests import Request
from smcjax.engine.results.outputs import CompletionOutput, Particle, RequestMetrics, RequestOutput, SMCOutput, Trace
from smcjax.engine.results.text import AnswerText, answer_text
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


@dataclasses.dataclass
class Times:
    """The times of a request's events, by the engine's `Clock`; 0: not yet."""

    arrived: float
    began: float  # first admitted
    first_seen: float = 0.0  # its first tokens
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the request's first admission to its end."""
        return self.ended - self.began


def assemble(
    request: Request,
    population: Population,
    infos: Sequence[Any],
    times: Times,
    decoder: Decoder[Any, Any, Any],
    tokenizer: Tokenizer | None,
    *,
    num_cached_tokens: int,
    preemptions: int,
    aborted: bool = False,
    refused: str | None = None,
    text_of: Callable[[Sequence[int]], str | None] | None = None,
) -> RequestOutput:
    """The output of a request from its population, one group as host arrays, and its own Info of every cycle.

    One that was `refused` when it had been admitted has that as its error, and no answer.
    `text_of` gives the text of an answer where that is known already, else None.
    """
    population = jax.tree.map(lambda leaf: leaf[0], population)
    start = len(request.token_ids)
    selected = int(population.selected)
    sequences = [
        population.tokens[row, start : population.length[row]].tolist() for row in range(len(population.tokens))
    ]
    error = refused
    if error is None and population.failed:
        error = _NO_WEIGHT if decoder.decoding.weighted else _NO_LAW
        error = _NO_VALUE if request.params.potentials else error
    if error is not None:
        completion = CompletionOutput(0, "", [], "error")
    else:
        completion = completion_of(request, sequences[selected], tokenizer, text_of)
    if aborted and error is None:
        completion = dataclasses.replace(completion, finish_reason="abort")
    if request.params.logprobs is not None and completion.finish_reason != "error":
        logprobs = population.logprobs[selected, start : start + len(completion.token_ids)]
        completion = dataclasses.replace(completion, logprobs=[float(x) for x in logprobs])
    kept = len(completion.token_ids)
    report = decoder.report(
        infos,
        start,
        kept,
        control=request.params.control,
        trace=request.trace,
        constrained=request.params.expression is not None or bool(request.params.potentials),
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
                    finish_reason=_reason(request, token_ids) if population.finished[row] else None,
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
            num_cached_tokens=num_cached_tokens,
            preemptions=preemptions,
            accepted=report.accepted,
            accepted_at=report.accepted_at,
        ),
        smc=weighted,
        error=error,
        decoding=decoder.decoding.name,
    )


def normalized(log_weights: np.ndarray) -> np.ndarray:
    """softmax of log weights [N], in float64; NaN where all of them are −inf."""
    weights = np.asarray(log_weights, np.float64)
    if not np.isfinite(weights.max()):
        return np.full(weights.shape, np.nan)
    weights = np.exp(weights - weights.max())
    return weights / weights.sum()


def aborted_in_the_queue(
    request: Request,
    decoding: Decoding,
    times: Times | None = None,
    text: str = "",
    token_ids: Sequence[int] = (),
    preemptions: int = 0,
) -> RequestOutput:
    """The output of a request that was aborted while it waited.

    One that had been preempted has `times`, and its reader may have got some of the answer.
    """
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.token_ids,
        outputs=[CompletionOutput(0, text, list(token_ids), "abort")],
        finished=True,
        metrics=RequestMetrics(
            cycles=0,
            resamples=0,
            generated_tokens=len(token_ids),
            drafted=0,
            seconds=0.0 if times is None else times.seconds,
            queue_seconds=0.0 if times is None else times.began - times.arrived,
            preemptions=preemptions,
        ),
        decoding=decoding.name,
    )


def _stops(request: Request, token_ids: list[int]) -> bool:
    """True where a stop token ended the sequence."""
    return bool(token_ids) and token_ids[-1] in request.stop_ids


def _reason(request: Request, token_ids: list[int]) -> str:
    """The reason why a finished sequence ended; a stop token at the cap counts as a stop.

    An answer of a given form is complete wherever it ends, also at the cap (`smcjax.decoding.constraints`).
    """
    return "stop" if request.automaton is not None or _stops(request, token_ids) else "length"


def completion_of(
    request: Request,
    token_ids: list[int],
    tokenizer: Tokenizer | None,
    text_of: Callable[[Sequence[int]], str | None] | None = None,
) -> CompletionOutput:
    reason = _reason(request, token_ids)
    if tokenizer is None:
        return CompletionOutput(0, "", token_ids, reason)
    shown = token_ids[:-1] if _stops(request, token_ids) else token_ids
    text = None if text_of is None else text_of(shown)
    if text is None:
        text = answer_text(tokenizer, request.token_ids, shown)
    stops = request.params.stop_strings
    cut = first_stop(text, stops)
    if cut is None:
        return CompletionOutput(0, text, token_ids, reason)
    end = cut + min(len(stop) for stop in stops if text.startswith(stop, cut))
    return CompletionOutput(0, text[:cut], _tokens_up_to(text[:end], shown, request, tokenizer), "stop")


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """The place where the first stop string begins, None without one."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found, default=None)


def _tokens_up_to(text: str, token_ids: list[int], request: Request, tokenizer: Tokenizer) -> list[int]:
    """The fewest leading tokens whose text begins with `text`, as that of all of them does."""
    answer, final = AnswerText(tokenizer, request.token_ids), 0
    for count, token in enumerate(token_ids, 1):
        final += len(answer.feed(token))
        if final >= len(text) or answer.rest().startswith(text[final:]):
            return token_ids[:count]
    return token_ids


def _trace(
    report: Report, request: Request, sequences: list[list[int]], selected: int, tokenizer: Tokenizer | None
) -> Trace | None:
    """The history that the report holds, with the rows' final texts."""
    if report.trace is None:
        return None
    texts = None if tokenizer is None else [answer_text(tokenizer, request.token_ids, row) for row in sequences]
    return Trace(**report.trace, texts=texts, selected=selected)
