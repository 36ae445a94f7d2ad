"""The answers to one HTTP request while they are under way: started, read, counted, and given up with their reader."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Response

from smcjax.engine.async_llm import ChunkStream
from smcjax.engine.results.outputs import RequestOutput, StreamChunk
from smcjax.server.errors import APIError, dumps, refusal, unavailable
from smcjax.server.models import VirtualModel
from smcjax.server.replies.events import Record
from smcjax.server.replies.population import Cycles, end_of, population_of
from smcjax.server.replies.shapes import Emitted, Shapes
from smcjax.server.requests.sampling import echo_logprobs
from smcjax.server.requests.schemas import Ask, StreamOptions
from smcjax.server.state import Served


class Answers:
    """n answers to each prompt of a request, choice p·n + i being the i-th of prompt p."""

    def __init__(
        self,
        served: Served,
        ask: Ask,
        shapes: Shapes,
        model: VirtualModel,
        routed: str | None,
        streams: list[ChunkStream],
        echoes: list[str | None],
    ) -> None:
        self.id = f"{shapes.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._ask, self._shapes, self._model = ask, shapes, model
        self._routed, self._streams = routed, streams
        self._served = served
        self._tokenizer = model.llm.llm.tokenizer
        self._began = time.perf_counter()
        self._generated = [0] * len(streams)  # tokens that have come, by choice
        self._outputs: list[RequestOutput | None] = [None] * len(streams)
        traced = ask.smc is not None and (ask.smc.trace or ask.smc.events)
        self._record: Record | None = served.records.open(self.id) if traced else None
        texts, ends = served.token_texts(model), frozenset(streams[0].request.stop_ids)
        self._emitted_of = [
            Emitted(
                index,
                texts,
                stream.request.token_ids,
                ends=ends,
                echo=echo,
                echo_logprobs=echo_logprobs(ask),
                prompt_logprobs=ask.prompt_logprobs,
            )
            for index, (stream, echo) in enumerate(zip(streams, echoes, strict=True))
        ]
        self._cycles = [Cycles(self._tokenizer, stream.request.token_ids) for stream in streams]

    def __len__(self) -> int:
        """The number of choices."""
        return len(self._streams)

    async def close(self) -> None:
        """Gives up what has not ended."""
        for stream in self._streams:
            await stream.aclose()
        if self._record is not None:
            self._record.end()

    def waiting(self) -> str:
        """Returns the SSE comment of an idle stream: "compiling" while programs are compiled for it, else "ping"."""
        return "compiling" if any(stream.lacks_programs for stream in self._streams) else "ping"

    async def reply(self) -> Response:
        """The whole reply. Raises APIError where an answer fails, which ends the others."""
        try:
            async with aclosing(self._chunks()) as chunks:
                async for _ in chunks:
                    pass
        finally:
            await self.close()
        return await self._served.beside(0, self._whole)

    def _whole(self) -> Response:
        outputs = [output for output in self._outputs if output is not None]
        choices = [self._shapes.choice(*one) for one in zip(self._emitted_of, outputs, strict=True)]
        head, rest = self._head(self._shapes.reply_object), {"usage": self._usage(), **self._smc(*outputs)}
        # One by one, for no thread goes on while one of them is written.
        text = f'{dumps(head)[:-1]},"choices":[{",".join(map(dumps, choices))}],{dumps(rest)[1:]}'
        return Response(text, media_type="application/json")

    async def _chunks(self) -> AsyncGenerator[tuple[int, StreamChunk, dict[str, Any] | None]]:
        """Chunks of all choices as they come: the choice, the chunk, and the event of its cycle if there is one."""
        async with aclosing(self._several() if len(self) > 1 else self._only()) as coming:
            async for choice, chunk in coming:
                if isinstance(chunk, Exception):
                    raise _lost(chunk)
                yield choice, chunk, self._noted(choice, chunk)

    async def _only(self) -> AsyncGenerator[tuple[int, StreamChunk | Exception]]:
        """Yields the chunks of the only choice, and the error that ended them if one did."""
        try:
            async for chunk in self._streams[0]:
                yield 0, chunk
        except Exception as error:
            yield 0, error

    async def _several(self) -> AsyncGenerator[tuple[int, StreamChunk | Exception]]:
        """Yields the chunks of all choices, or the error that ended one; a task reads each, as each waits by itself."""
        coming: asyncio.Queue[tuple[int, StreamChunk | Exception]] = asyncio.Queue(1)  # a slow reader holds all up

        async def read(choice: int) -> None:
            try:
                async for chunk in self._streams[choice]:
                    await coming.put((choice, chunk))
            except Exception as error:
                await coming.put((choice, error))

        readers = [asyncio.create_task(read(choice)) for choice in range(len(self))]
        try:
            missing = len(self)
            while missing:
                choice, chunk = await coming.get()
                yield choice, chunk
                missing -= not isinstance(chunk, Exception) and chunk.finished
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def _noted(self, choice: int, chunk: StreamChunk) -> dict[str, Any] | None:
        """Takes a chunk into account; returns its cycle's event."""
        if chunk.token_ids and not self._generated[choice]:
            self._served.metrics.first_token(self._model, time.perf_counter() - self._began)
        self._generated[choice] += len(chunk.token_ids)
        event = None
        if chunk.cycle is not None and self._record is not None:
            event = {"choice": choice, **self._cycles[choice].event(chunk.cycle)}
            self._record.add(event)
        if chunk.output is not None:
            output = self._outputs[choice] = chunk.output
            self._served.metrics.ended(self._model, output, time.perf_counter() - self._began)
            _require_answer(output)
            if self._record is not None:
                self._record.add({"choice": choice, "end": end_of(output)})
        return event

    def _usage(self) -> dict[str, Any]:
        """Tokens of prompts, each counted once however many answers it has, and of the answers so far."""
        firsts = range(0, len(self), self._ask.choices)
        prompts = sum(len(self._streams[choice].request.token_ids) for choice in firsts)
        ended = [self._outputs[choice] for choice in firsts]
        cached = sum(output.metrics.num_cached_tokens for output in ended if output is not None)
        completion = sum(self._generated)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": completion,
            "total_tokens": prompts + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        """The fields that a reply and each of its chunks begin with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._model.fingerprint,
        }

    def _smc(self, *outputs: RequestOutput) -> dict[str, Any]:
        """{"smc": …} with the decoder and the populations, or {} where neither was asked for.

        One population stands there itself, several in a list "choices".
        """
        if self._ask.smc is None and self._routed is None:
            return {}
        found: dict[str, Any] = {**self._model.description(), "routed": self._routed}
        if self._streams[0].request.automaton is not None:  # docs/how-to/structured-output.md
            found["law"] = "given the form" if self._model.decoding.weighted else "locally masked"
        if self._ask.smc is not None:
            populations = [population_of(output, self._ask.smc, self._tokenizer) for output in outputs]
            found |= {"choices": populations} if len(populations) > 1 else populations[0] if populations else {}
        return {"smc": found}

    async def stream(self) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a streamed reply. Ends all that is under way when it is closed."""
        options = self._ask.stream_options or StreamOptions()
        head = self._head(self._shapes.chunk_object)
        try:
            async with aclosing(self._chunks()) as chunks:
                async for choice, chunk, event in chunks:
                    emitted = self._emitted_of[choice]
                    if chunk.prompt_logprobs is not None:  # as many as the prompt has tokens
                        pieces = await self._served.beside(0, self._shapes.pieces, emitted, chunk)
                    else:
                        pieces = self._shapes.pieces(emitted, chunk)
                    emitted.first = False
                    for piece in pieces:
                        reply = {**head, "choices": [piece]}
                        if piece is pieces[-1]:
                            reply |= self._told(chunk, event)
                        if options.include_usage or options.continuous_usage_stats:
                            reply["usage"] = self._usage() if options.continuous_usage_stats else None
                        yield reply
            if options.include_usage:
                yield {**head, "choices": [], "usage": self._usage()}
        finally:
            await self.close()

    def _told(self, chunk: StreamChunk, event: dict[str, Any] | None) -> dict[str, Any]:
        """{"smc": …} of a streamed chunk: its cycle, the population with the last one, or {}."""
        if chunk.output is not None:
            return self._smc(chunk.output)
        wanted = self._ask.smc is not None and self._ask.smc.events
        return {"smc": {"cycle": event}} if wanted and event is not None else {}


def _require_answer(output: RequestOutput) -> None:
    """Raises APIError for a request that ended without an answer."""
    if output.error is not None:
        raise APIError(500, f"{output.error}.", code="model_error")
    if output.outputs[0].finish_reason == "abort":
        raise APIError(503, "the request was aborted; ask again.", code="aborted")


def _lost(error: Exception) -> APIError:
    """An error of the engine's, which has ended the request."""
    if isinstance(error, RuntimeError) and "is closed" in str(error):
        return unavailable("the server is shutting down; ask another one.")
    return refusal(error)
