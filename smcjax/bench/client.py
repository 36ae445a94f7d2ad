"""`smcjax bench serve`: a server of OpenAI's interface, this one or another, under a stream of completions.

Requests arrive at given times (all at once, or a Poisson process of a rate), word problems as prompts, answers
streamed. Times are the client's own, names of figures those of vLLM's serving benchmark, tokens those that the server
counts (`stream_options.include_usage`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import numpy as np

from smcjax.bench.latency import Followed, arrivals, cells_of, figures_of
from smcjax.markdown import table
from smcjax.tasks.questions import questions

TIMEOUT_SECONDS = 600.0  # without a byte: the first request may wait for compilation


@dataclasses.dataclass(frozen=True)
class ClientLoad:
    """A load on a server: `request_rate` requests arrive a second on average, at infinity all at once.

    base_url: with or without /v1; model: None for the first that the server lists; max_concurrency: requests under way
    at most, None: any number.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = None
    num_prompts: int = 64
    max_tokens: int = 128
    temperature: float = 0.7
    request_rate: float = math.inf
    max_concurrency: int | None = None
    seed: int = 0

    @property
    def url(self) -> str:
        """The interface's own address."""
        base = self.base_url.rstrip("/")
        return base if base.endswith("/v1") else f"{base}/v1"


async def run(load: ClientLoad, on_ended: Callable[[], None] = lambda: None) -> tuple[str, list[Followed]]:
    """Sends the load; returns the model's name and each request, in the order of arrival.

    A request begins when it arrives, or later where too many are under way; the server counts its tokens.
    Raises RuntimeError for a server that cannot be reached or lists no models. Requests that fail say so themselves.
    """
    headers = {"authorization": f"Bearer {load.api_key}"} if load.api_key is not None else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.num_prompts)
    times = arrivals(np.random.default_rng(load.seed), load.num_prompts, load.request_rate)
    prompts = [question.prompt for question in questions("words", load.seed, load.num_prompts)]
    slots = asyncio.Semaphore(load.max_concurrency or load.num_prompts)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=TIMEOUT_SECONDS) as client:
        model = await _model(client, load)
        began = time.perf_counter()

        async def one(number: int, at: float) -> Followed:
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
            async with slots:
                answered = Followed(time.perf_counter() - began)
                try:
                    await _answer(client, load, model, prompts[number], number, answered, began)
                except (httpx.HTTPError, _Refused) as error:
                    answered.error = str(error) or type(error).__name__
                answered.ended = time.perf_counter() - began
            on_ended()
            return answered

        return model, await asyncio.gather(*(one(*each) for each in enumerate(times)))


class _Refused(Exception):
    """A server's own error about one request."""


async def _model(client: httpx.AsyncClient, load: ClientLoad) -> str:
    """The name to ask for; that the server is there is known then."""
    try:
        reply = await client.get(f"{load.url}/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RuntimeError(
            f"no server answers at {load.base_url} ({error}); start one, or name another by --base-url."
        ) from None
    if reply.status_code != 200:
        raise RuntimeError(f"{load.url}/models answers {reply.status_code}: {_message(reply.text)}")
    listed = [str(entry["id"]) for entry in reply.json()["data"]]
    if load.model is not None and load.model not in listed:
        raise RuntimeError(f"the server has no model {load.model}; use one of {', '.join(listed)}.")
    return load.model or listed[0]


async def _answer(
    client: httpx.AsyncClient,
    load: ClientLoad,
    model: str,
    prompt: str,
    number: int,
    answered: Followed,
    began: float,
) -> None:
    """Sends one request and follows its stream."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": load.seed + number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", f"{load.url}/completions", json=body) as reply:
        if reply.status_code != 200:
            raise _Refused(f"{reply.status_code}: {_message((await reply.aread()).decode(errors='replace'))}")
        async for event in _events(reply):
            if "error" in event:
                raise _Refused(_message(json.dumps(event)))
            if any(choice.get("text") for choice in event.get("choices", ())):
                answered.received.append(time.perf_counter() - began)
            usage = event.get("usage")
            if usage:
                answered.input_tokens = usage["prompt_tokens"]
                answered.output_tokens = usage["completion_tokens"]


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of events."""
    async for line in reply.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _message(text: str) -> str:
    """The message of an error in OpenAI's shape, or the text itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def figures(load: ClientLoad, model: str, requests: Sequence[Followed]) -> dict[str, Any]:
    """The figures under vLLM's names, milliseconds where they say so; None of what never happened."""
    duration = max(one.ended for one in requests)
    ended = [one for one in requests if one.error is None and one.received]
    return {
        "model": model,
        "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
        "max_concurrency": load.max_concurrency,
        "num_prompts": load.num_prompts,
        "failed": sum(one.error is not None for one in requests),
        **figures_of(duration, ended),
    }


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """A row a load."""
    heads = ["model", "requests/s asked", "completed", "requests/s", "output tok/s"]
    heads += ["TTFT, ms: median, p99", "between chunks", "whole request"]
    rows = []
    for one in results:
        completed = f"{one['completed']} of {one['num_prompts']}"
        rows.append([one["model"], one["request_rate"], completed, *cells_of(one, "ttft", "itl", "e2el")])
    return table(heads, rows)
