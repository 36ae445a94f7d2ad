"""Prepares requests: checks, tokenizes and numbers prompts and parameters before any work starts."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from smcjax.checks import short
from smcjax.engine.requests.requests import (
    Prompt,
    Request,
    automaton_of,
    check_room,
    check_token_ids,
    limit_of,
    split_stops,
    tokenize,
)
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.structured.automaton import Automata, Undecided
from smcjax.tokenizer.tokenizer import Tokenizer


class RequestPreparer:
    """Makes the requests of one engine, numbered in the order in which they pass the checks. Thread-safe.

    Args:
        decoder: the `smcjax.decoding.decoder.Decoder` that answers.
        tokenizer: for text; None where the model has none.
        eos_token_ids: tokens that end every answer, unless a request ignores them.
        num_pages: KV pages of the device, the trash page included.
        seed: base seed; a request without a seed has this plus its number.
        automata: compiled response formats, of another preparer with the same tokenizer; None: its own.
    """

    def __init__(
        self,
        decoder: Any,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        num_pages: int,
        seed: int,
        automata: Automata | None = None,
    ) -> None:
        self._decoder, self._tokenizer, self._eos_token_ids = decoder, tokenizer, eos_token_ids
        self._vocab_size, self._num_pages = decoder.target.vocab_size, num_pages
        self._footprint = Footprint.of(decoder.decoding, decoder.page_size)
        self.automata = Automata(tokenizer, self._vocab_size) if automata is None else automata
        self._numbering = threading.Lock()
        self._seed = seed
        self.count = 0  # of requests so far

    def requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], checked_by: Sequence[RequestPreparer]
    ) -> list[Request]:
        """One request a prompt. Preparer i of `checked_by`, that of the answering decoder, checks prompt i.

        Raises ValueError with the index of the first invalid request; then none of them is numbered.
        """
        requests = []
        for one in params:
            self._prepare(one)
        for index, (prompt, one, preparer) in enumerate(zip(prompts, params, checked_by, strict=True)):
            try:
                requests.append(preparer._prepare_request(prompt, one))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None
        return self._numbered(requests, [one.seed for one in params])

    def choices(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int | None], checked_by: RequestPreparer
    ) -> list[Request]:
        """One request a seed, all of one prompt and one `params`; `params.seed` is ignored.

        They are checked as by `requests`. Raises ValueError if they cannot run.
        """
        if not isinstance(prompt, str | Mapping):
            raise ValueError(f"prompt must be text or {{'prompt_token_ids': [...]}}, got {short(prompt)}.")
        self._prepare(params)
        return self._numbered([checked_by._prepare_request(prompt, params)] * len(seeds), seeds)

    def has_prepared(self, params: SamplingParams) -> bool:
        """True if the response format is compiled, or known to be invalid, or if there is none.

        Then a request with these parameters does not wait for a compilation. This method never does.
        """
        if params.expression is None:
            return True
        params, stop_ids = self._with_stop_ids(params)
        assert params.expression is not None
        return self.automata.keeps(params.expression, stop_ids)

    def prepare(self, params: SamplingParams) -> None:
        """Compiles the response format of `params`, if any, to an automaton; that may take seconds.

        Raises ValueError for a format without an automaton. Any thread may call this ahead of the request.
        """
        params, stop_ids = self._with_stop_ids(params)
        automaton_of(params, self.automata, stop_ids)

    def _prepare(self, params: SamplingParams) -> None:
        """Compiles the response format of `params`. `_prepare_request` reports an invalid format, with its index."""
        try:
            self.prepare(params)
        except Undecided:  # `_prepare_request` would compile it again
            raise
        except ValueError:
            pass

    def _with_stop_ids(self, params: SamplingParams) -> tuple[SamplingParams, tuple[int, ...]]:
        """The parameters with those stop strings that are text, and the ids of all tokens that end an answer."""
        params, named = split_stops(params, self._tokenizer, self._vocab_size)
        return params, named if params.ignore_eos else (*self._eos_token_ids, *named)

    def _numbered(self, requests: Sequence[Request], seeds: Sequence[int | None]) -> list[Request]:
        """Numbers the checked requests of one call. A request without a seed gets one from its number."""
        with self._numbering:
            first = self.count
            self.count += len(requests)
        numbered = []
        for number, (request, own) in enumerate(zip(requests, seeds, strict=True), first):
            seed = own if own is not None else (self._seed + number) & MAX_SEED
            numbered.append(dataclasses.replace(request, request_id=str(number), call=str(first), seed=seed))
        return numbered

    def _prepare_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A checked request without a number. It takes no lock, so long texts are tokenized in parallel."""
        vocab_size, most = self._vocab_size, self._num_pages - 1
        text, token_ids = tokenize(prompt, self._tokenizer, vocab_size, self._decoder.max_model_len)
        params, stop_ids = self._with_stop_ids(params)
        check_token_ids(params, vocab_size)
        self._decoder.check(params)
        if params.text_potentials and self._tokenizer is None:
            raise ValueError(
                "a TextPotential needs the text of answers, and the model directory has no tokenizer; use a potential "
                "of tokens (smcjax.smc.Potential)."
            )
        if params.min_tokens > 0 and len(set(stop_ids)) >= vocab_size:
            raise ValueError(f"min_tokens is {params.min_tokens} and every token is a stop token; lower it to 0.")
        limit = limit_of(token_ids, params, self._decoder.max_model_len)
        automaton = automaton_of(params, self.automata, stop_ids)
        if automaton is not None:
            check_room(automaton, limit - len(token_ids))
        pages = self._footprint.worst_case(len(token_ids), limit)
        if pages > most:
            decoding = self._decoder.decoding
            fewer = "max_tokens" if decoding.rows == 1 else f"max_tokens or {decoding.rows_argument}"
            raise ValueError(f"it may need {pages} KV pages and there are {most}; raise num_pages, or lower {fewer}.")
        return Request(
            request_id="",
            prompt=text,
            token_ids=token_ids,
            params=params,
            limit=limit,
            stop_ids=stop_ids,
            seed=0,
            worst_case_pages=pages,
            automaton=automaton,
            trace=params.trace,
        )
