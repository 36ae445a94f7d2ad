"""The results of requests, as plain host data: nothing here holds on to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from smcjax.checks import short


class TokenLogprob(NamedTuple):
    """A token that might stand at a position, with its log-probability there."""

    token_id: int
    logprob: float


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """The answer of a request."""

    index: int
    text: str  # without EOS or stop token, cut at the first stop string
    token_ids: list[int]  # with the EOS or stop token that ended them
    finish_reason: str  # "stop" | "length" | "error" | "abort"
    logprobs: list[float] | None = None  # log p_T of each token, when asked for
    # Per token the likeliest ones at its place, in order, as many as were asked for, or as are possible there.
    top_logprobs: list[list[TokenLogprob]] | None = None


@dataclasses.dataclass(frozen=True)
class Particle:
    """One weighted sequence of the final population."""

    token_ids: list[int]
    log_weight: float  # since the last resampling; softmax over the population is the selection law
    finish_reason: str | None  # None: not at its end when the choice was made (its text may hold a stop string)
    text: str  # as `CompletionOutput.text` is of the particle that answers; "" without a tokenizer
    weight: float  # softmax of the log weights; NaN where the request has failed


@dataclasses.dataclass(frozen=True, eq=False)  # arrays do not compare to a bool
class Trace:
    """One entry per cycle C ≥ 1 that the request took part in: those of its `Cycle`s."""

    ess: np.ndarray  # [C] float32
    resampled: np.ndarray  # [C] bool
    ancestors: np.ndarray  # [C, N] int32, the row itself where nothing was resampled
    log_weights: np.ndarray  # [C, N] float32, before resampling
    lengths: np.ndarray  # [C, N] int32, generated tokens after the cycle
    finished: np.ndarray  # [C, N] bool, after the cycle
    texts: list[str] | None = None  # [N] final texts, where there is a tokenizer
    selected: int = 0  # the row that answered
    tokens: Sequence[list[list[int]]] = ()  # [C][N] what each row went on with, before resampling
    log_evidences: np.ndarray | None = None  # [C] float64, log Ẑ as if the request ended after the cycle


@dataclasses.dataclass(frozen=True, eq=False)  # arrays do not compare to a bool
class SMCOutput:
    """The population behind an answer."""

    log_evidence: float  # log Ẑ, the closing term included
    particles: list[Particle]
    log_weights: np.ndarray  # [N] float32, after the last resampling
    selected: int  # index of the particle that answered
    control: float | None  # c of the request or the decoder; None where the decoder has a rule of its own about drafts
    warning: str | None = None  # a sentence where evidence fell faster than `WARNING_RATE` a token
    trace: Trace | None = None


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Counts and times of one request."""

    cycles: int  # decoding steps, the first token's draw not counted
    resamples: int
    generated_tokens: int  # of the answer
    drafted: int  # tokens that the draft has proposed: K for each particle or candidate in every cycle, kept or not
    seconds: float  # from its first admission to its end; times are without what was compiled meanwhile
    mean_ess: float | None = None  # over cycles; None without a population
    queue_seconds: float = 0.0  # from its arrival to its first admission
    first_token_seconds: float = 0.0  # from its first admission until the host saw its first tokens; 0: never
    num_cached_tokens: int = 0  # of the prompt, their KV taken from the prefix cache when it was last admitted
    preemptions: int = 0  # how often it gave its pages up and began again; the counts above are those of the last run
    # Tokens of the answer that are the draft's, by whichever rule or candidate of `Rejection`; else None. The others
    # are the target's: the first, and one behind the drafts of each cycle that is not cut before it, so accepted <
    # generated_tokens ≤ accepted + cycles + 1. What lies behind a stop token, a stop string, the cap or an abort is no
    # token of the answer.
    accepted: int | None = None
    accepted_at: tuple[int, ...] | None = None  # [K] cycles whose draft at each position is in the answer

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answer over `seconds`."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens of the answer that are the draft's, a cycle; None but for `Rejection`, or where no cycle ran.

        The last cycle counts like the others, though the answer's end may cut it.
        """
        return None if self.accepted is None or not self.cycles else self.accepted / self.cycles


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """All of one request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    smc: SMCOutput | None = None
    error: str | None = None  # why, where finish_reason is "error"
    # log p of the prompt's tokens, and the likeliest ones at their places, when asked for; None for the first token.
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[list[TokenLogprob] | None] | None = None
    decoding: str = ""  # the decoder that ran: "smc", "rejection" or "autoregressive"

    def __repr__(self) -> str:
        """A line: the request, how it was answered, and the text as far as 80 characters go."""
        answer = self.outputs[0]
        result = f"error={short(self.error)}" if self.error is not None else f"text={short(answer.text)}"
        return (
            f"RequestOutput(request_id={self.request_id!r}, decoding={self.decoding!r}, {result}, "
            f"finish_reason={answer.finish_reason!r}, {len(answer.token_ids)} tokens)"
        )


@dataclasses.dataclass(frozen=True, eq=False)  # arrays do not compare to a bool
class Cycle:
    """One cycle of a request as it runs, over its N rows. Cycle 0 draws the first tokens.

    With `a` the ancestor of row i, row i's tokens after the cycle are those of row `a` before it and then
    `blocks[a][: lengths[i] - (length of row a before it)]`.
    """

    index: int  # 0, 1, 2 …; a request that was preempted goes on where its reader was
    blocks: list[list[int]]  # [N] tokens that each row was given, before resampling, up to its first stop token
    lengths: np.ndarray  # [N] int32, generated tokens after the cycle
    ancestors: np.ndarray  # [N] int32, the row itself where nothing was resampled
    finished: np.ndarray  # [N] bool, after the cycle
    log_weights: np.ndarray | None = None  # [N] float32, before resampling; None: of cycle 0, or without a population
    ess: float | None = None  # likewise
    resampled: bool = False
    log_evidence: float | None = None  # log Ẑ as if the request ended after the cycle; None as above
    # [N] float32: what the weights after the cycle have of text potentials; None where no request in the batch has one.
    log_potentials: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """A piece of an answer, final: the chunks of a request make up its text and its token ids."""

    text: str
    token_ids: list[int]
    finished: bool  # the last one
    output: RequestOutput | None = None  # the whole of it, with the last one
    logprobs: list[float] | None = None  # of `token_ids`, when asked for; up to rounding those of the whole answer
    top_logprobs: list[list[TokenLogprob]] | None = None
    # As in `RequestOutput`, with one chunk, as soon as the prompt is read.
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[list[TokenLogprob] | None] | None = None
    cycle: Cycle | None = None  # of requests that are traced: each cycle comes with one chunk, in order
