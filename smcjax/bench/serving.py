"""`smcjax bench throughput|latency`: the engine under a stream of requests, on random weights.

Requests arrive at given times (all at once, or a Poisson process of a rate), with random prompts and answers of a fixed
length. The clock starts with the first arrival; programs are compiled before. Names of figures are those of vLLM's
serving benchmark: TTFT is the time to the first token that the reader gets, which here is the first certain one; the
first tokens of the particles themselves are drawn earlier (`first_cycle`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from smcjax.bench.latency import Followed, arrivals, cells_of, figures_of
from smcjax.bench.models import Models
from smcjax.decoders import Decoding
from smcjax.decoding.groups import PairParams
from smcjax.engine.engine import Engine
from smcjax.engine.load.loading import check_pages, make_decoder
from smcjax.engine.requests.requests import Request
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.engine.results.outputs import RequestOutput
from smcjax.engine.run.programs import Programs, enable_compilation_cache
from smcjax.engine.run.runner import Runner
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.markdown import table
from smcjax.tokenizer.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Load:
    """A load on the engine: `request_rate` requests arrive a second on average, at infinity all at once."""

    decoding: Decoding
    num_prompts: int = 32
    input_len: int = 256
    output_len: int = 128
    request_rate: float = math.inf
    max_num_seqs: int = 8
    page_size: int = 16
    implementation: str = "auto"
    overlap: bool | None = None
    seed: int = 0

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.input_len + self.output_len


@dataclasses.dataclass
class Served(Followed):
    """One request, which begins when it arrives, and what it came to."""

    output: RequestOutput = dataclasses.field(kw_only=True)


def make_engine(models: Models, load: Load) -> Engine:
    """Builds an engine (`build_engine`), compiles it and serves one batch, as first runs are slower."""
    engine = build_engine(models, load)
    engine.warm_up(use_tqdm=True)
    # Other prompts than those that are measured: their KV would be in the prefix cache.
    short = dataclasses.replace(load, num_prompts=load.max_num_seqs, request_rate=math.inf, seed=load.seed + 1)
    serve(engine, make_requests(models, short))
    return engine


def build_engine(models: Models, load: Load, tokenizer: Tokenizer | None = None) -> Engine:
    """An engine on random weights with memory for `max_num_seqs` requests.

    Raises ValueError for pages that cut blocks and where the weights alone do not fit the device.
    """
    enable_compilation_cache()
    check_pages(models.target_config, load.page_size)
    models.require_room(with_draft=load.decoding.drafts)
    footprint = Footprint.of(load.decoding, load.page_size)
    pages = 1 + load.max_num_seqs * footprint.worst_case(load.input_len, load.max_model_len)
    geometry = (load.max_model_len, load.page_size, load.implementation)
    decoder = make_decoder(load.decoding, models.local_target, models.local_draft, *geometry)
    draft_params = models.draft_params(load.implementation) if load.decoding.drafts else None
    params = PairParams(models.target_params(load.implementation), draft_params)
    programs = Programs(models.workspace_bytes(load.implementation))
    runner = Runner(decoder, params, pages, programs, models.sharded)
    return Engine(runner, max_num_seqs=load.max_num_seqs, tokenizer=tokenizer, overlap=load.overlap)


def make_requests(models: Models, load: Load) -> list[tuple[float, Request]]:
    """Arrival times in seconds, ascending from 0, and what arrives."""
    rng = np.random.default_rng(load.seed)
    times = arrivals(rng, load.num_prompts, load.request_rate)
    pages = Footprint.of(load.decoding, load.page_size).worst_case(load.input_len, load.max_model_len)
    requests = []
    for number, arrival in enumerate(times):
        token_ids = rng.integers(0, models.target_config.vocab_size, load.input_len).tolist()
        params = SamplingParams(max_tokens=load.output_len, ignore_eos=True)
        request = Request(str(number), None, token_ids, params, load.max_model_len, (), number, pages)
        requests.append((arrival, request))
    return requests


def serve(
    engine: Engine, requests: Sequence[tuple[float, Request]], on_ended: Callable[[int], None] = lambda _: None
) -> list[Served]:
    """Plays the arrivals against the clock; `on_ended(count)` hears of requests that ended."""
    waiting = list(requests)[::-1]
    followed: dict[str, Followed] = {}
    served = []
    began = time.perf_counter()
    while waiting or engine.busy:
        now = time.perf_counter() - began
        while waiting and waiting[-1][0] <= now:
            at, request = waiting.pop()
            followed[request.request_id] = Followed(at, input_tokens=len(request.token_ids))
            engine.add_request(request, stream=True)
        if not engine.busy:
            time.sleep(max(0.0, waiting[-1][0] - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - began
        for name, one in followed.items():
            tokens = sum(len(chunk.token_ids) for chunk in engine.chunks(name))
            if tokens:
                one.received.append(now)
                one.output_tokens += tokens
        for output in outputs:
            engine.forget(output.request_id)
            one = dataclasses.replace(followed.pop(output.request_id), ended=now)
            served.append(Served(**vars(one), output=output))
        on_ended(len(outputs))
    return served


def figures(load: Load, served: Sequence[Served]) -> dict[str, Any]:
    """The figures under vLLM's names, milliseconds where they say so; None of what never happened.

    Such are gaps between chunks where every answer came in one.
    """
    duration = max(one.ended for one in served)
    ended = [one for one in served if one.output.outputs[0].finish_reason in ("stop", "length")]
    metrics = [one.output.metrics for one in ended]
    return {
        "device": jax.devices()[0].device_kind,
        "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
        "max_num_seqs": load.max_num_seqs,
        "num_prompts": load.num_prompts,
        **figures_of(
            duration,
            ended,
            {
                "first_cycle": [one.first_token_seconds + one.queue_seconds for one in metrics],
                "queue": [one.queue_seconds for one in metrics],
            },
        ),
    }


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """A row a load."""
    heads = ["requests/s asked", "requests/s", "output tok/s"]
    heads += ["TTFT, ms: median, p99", "first cycle", "between chunks", "queue", "whole request"]
    names = ("ttft", "first_cycle", "itl", "queue", "e2el")
    return table(heads, ([one["request_rate"], *cells_of(one, *names)] for one in results))
