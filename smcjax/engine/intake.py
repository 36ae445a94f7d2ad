"""Where requests come in: prompts and parameters are checked, tokenized and numbered, before any work starts."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from smcjax.engine.requests.requests import (
    Prompt,
    Request,
    automaton_of,
    check_room,
    check_token_ids,
    limit_of,
    tokenize,
    told_apart,
)
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.plain import short
from smcjax.structured.automaton import Automata, Undecided
from smcjax.tokenizer.tokenizer import Tokenizer


class Intake:
    """Makes the requests of one engine, numbered in the order in which they pass the checks. Any thread may ask.

    Args:
        decoder: the `smcjax.decoding.decoder.Decoder` that answers.
        tokenizer: for text; None where the model has none.
        eos_token_ids: tokens that end every answer, unless a request ignores them.
        footprint: pages that a request may need.
        num_pages: KV pages that there are, the trash page included.
        seed: of requests that bring none, with their number.
        automata: of forms, which another intake of the same tokenizer keeps; None: its own.
    """

    def __init__(
        self,
        decoder: Any,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        footprint: Footprint,
        num_pages: int,
        seed: int,
        automata: Automata | None = None,
    ) -> None:
        self._decoder, self._tokenizer, self._eos_token_ids = decoder, tokenizer, eos_token_ids
        self._vocab_size, self._footprint, self._num_pages = decoder.target.vocab_size, footprint, num_pages
        self.automata = Automata(tokenizer, self._vocab_size) if automata is None else automata
        self._numbering = threading.Lock()
        self._seed = seed
        self.count = 0  # of requests so far

    def requests(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], checked_by: Sequence[Intake]
    ) -> list[Request]:
        """Requests of prompts with parameters each, which the intake of the decoder that is to answer each checks.

        Raises ValueError that names the first wrong one's index. Numbers are given to all of them or to none.
        """
        requests = []
        for one in params:
            self._prepare(one)
        for index, (prompt, one, intake) in enumerate(zip(prompts, params, checked_by, strict=True)):
            try:
                requests.append(intake._request(prompt, one))
            except ValueError as error:
                raise ValueError(f"request {index}: {error}") from None
        return self._numbered(requests, [one.seed for one in params])

    def choices(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int | None], checked_by: Intake
    ) -> list[Request]:
        """A request for each of `seeds`, all of one prompt and one `params`, whose own seed is left aside.

        They are checked as by `requests`. Raises ValueError for what cannot run.
        """
        if not isinstance(prompt, str | Mapping):
            raise ValueError(f"prompt must be text or {{'prompt_token_ids': [...]}}, got {short(prompt)}.")
        self._prepare(params)
        return self._numbered([checked_by._request(prompt, params)] * len(seeds), seeds)

    def has_prepared(self, params: SamplingParams) -> bool:
        """True where the form that a request asks for is known already, as its automaton or by why it has none.

        Neither this nor a request with such parameters waits for a compilation.
        """
        if params.expression is None:
            return True
        params, named = told_apart(params, self._tokenizer, self._vocab_size)
        assert params.expression is not None
        return self.automata.keeps(params.expression, self._stop_ids(params, named))

    def prepare(self, params: SamplingParams) -> None:
        """Makes the automaton of the form that a request asks for, which may take seconds, if it asks for one.

        Raises ValueError where there is none. Any thread may call this before others have to wait for it.
        """
        params, named = told_apart(params, self._tokenizer, self._vocab_size)
        automaton_of(params, self.automata, self._stop_ids(params, named))

    def _prepare(self, params: SamplingParams) -> None:
        """Prepares a request. What is wrong with it for good is said when it is checked, in its turn."""
        try:
            self.prepare(params)
        except Undecided:  # or it would be compiled again then
            raise
        except ValueError:
            pass

    def _stop_ids(self, params: SamplingParams, named: tuple[int, ...]) -> tuple[int, ...]:
        return named if params.ignore_eos else (*self._eos_token_ids, *named)

    def _numbered(self, requests: Sequence[Request], seeds: Sequence[int | None]) -> list[Request]:
        """The checked requests, one call, with the next numbers and these seeds, by the numbers where there is none."""
        with self._numbering:
            first = self.count
            self.count += len(requests)
        numbered = []
        for number, (request, own) in enumerate(zip(requests, seeds, strict=True), first):
            seed = own if own is not None else (self._seed + number) & MAX_SEED
            numbered.append(dataclasses.replace(request, request_id=str(number), call=str(first), seed=seed))
        return numbered

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A checked request without a number. No thread waits for another's long text to be cut into tokens."""
        vocab_size, most = self._vocab_size, self._num_pages - 1
        text, token_ids = tokenize(prompt, self._tokenizer, vocab_size, self._decoder.max_model_len)
        params, named = told_apart(params, self._tokenizer, vocab_size)
        check_token_ids(params, vocab_size)
        self._decoder.check(params)
        stop_ids = self._stop_ids(params, named)
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
