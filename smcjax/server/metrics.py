"""Figures for Prometheus: of requests as they end, and of the engines when they are asked for; also by vLLM's names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from smcjax.engine.results.outputs import RequestOutput
from smcjax.server.models import Models, VirtualModel

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_LABEL = "model_name"

# Counters of `LLM.metrics`: our name, vLLM's if it has one, and what it counts.
_COUNTERS = {
    "requests": ("smcjax_requests_ended", None, "Requests that have ended, in any way"),
    "steps": ("smcjax_steps", None, "Engine steps"),
    "cycles": ("smcjax_cycles", None, "Cycles of requests that have ended"),
    "resamples": ("smcjax_resamples", None, "Resamplings of populations that have ended"),
    "generated_tokens": ("smcjax_generated_tokens", "vllm:generation_tokens", "Tokens of answers"),
    "preemptions": ("smcjax_preemptions", "vllm:num_preemptions", "Requests that gave their pages up"),
    "prefix_cache_queries": ("smcjax_prefix_cache_queries", "vllm:prefix_cache_queries", "Prompt tokens looked up"),
    "prefix_cache_hits": ("smcjax_prefix_cache_hits", "vllm:prefix_cache_hits", "Prompt tokens found cached"),
    "compilations": ("smcjax_compilations", None, "Compiled programs"),
    "compile_seconds": ("smcjax_compile_seconds", None, "Seconds spent compiling"),
    "waited_seconds": (
        "smcjax_waited_seconds",
        None,
        "Seconds between asking for results of the device and having them, other threads' turns included",
    ),
}
_GAUGES = {
    "num_running": ("smcjax_requests_running", "vllm:num_requests_running", "Requests that run"),
    "num_waiting": ("smcjax_requests_waiting", "vllm:num_requests_waiting", "Requests that wait"),
    "kv_pages_total": ("smcjax_kv_pages", None, "KV pages"),
    "kv_pages_free": ("smcjax_kv_pages_free", None, "KV pages that no request uses"),
    "kv_pages_cached": ("smcjax_kv_pages_cached", None, "KV pages that the prefix cache keeps"),
}


class Metrics:
    """The figures of one server."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._registry = CollectorRegistry()
        self._engines = _Engines()
        self._registry.register(self._engines)

        def seconds(ours: str, theirs: str, text: str) -> list[Histogram]:
            names = (f"smcjax_{ours}", f"vllm:{theirs}")
            return [Histogram(name, text, [_LABEL], registry=self._registry, buckets=_SECONDS) for name in names]

        def counts(ours: str, theirs: str, text: str, *labels: str) -> list[Counter]:
            names = (f"smcjax_{ours}", f"vllm:{theirs}")
            return [Counter(name, text, [_LABEL, *labels], registry=self._registry) for name in names]

        first = "time_to_first_token_seconds"
        self._first = seconds(first, first, "Until the first token that is certain")
        self._whole = seconds("request_seconds", "e2e_request_latency_seconds", "From a request's arrival to its end")
        self._prompt_tokens = counts("prompt_tokens", "prompt_tokens", "Tokens of prompts")
        answered = "Requests that were answered"
        self._endings = counts("requests_answered", "request_success", answered, "finished_reason")

    def first_token(self, model: VirtualModel, seconds: float) -> None:
        """Counts a request whose first token has come."""
        for histogram in self._first:
            histogram.labels(model.name).observe(seconds)

    def ended(self, model: VirtualModel, output: RequestOutput, seconds: float) -> None:
        """Counts a request that has ended."""
        for histogram in self._whole:
            histogram.labels(model.name).observe(seconds)
        for counter in self._prompt_tokens:
            counter.labels(model.name).inc(len(output.prompt_token_ids))
        for counter in self._endings:
            counter.labels(model.name, output.outputs[0].finish_reason).inc()

    async def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        models = self._models.all
        figures = await asyncio.gather(*(model.llm.metrics() for model in models))
        self._engines.figures = {model.name: one for model, one in zip(models, figures, strict=True)}
        self._engines.batch_cycles = {model.name: model.llm.llm.batch_cycles for model in models}
        return generate_latest(self._registry)


class _Engines(Collector):
    """The engines' own figures, by model, as they were when they were last asked."""

    def __init__(self) -> None:
        self.figures: Mapping[str, Mapping[str, float]] = {}
        self.batch_cycles: Mapping[str, Mapping[str, int]] = {}  # by the decoder that had them

    def collect(self) -> Iterable[Metric]:
        for kind, names in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for key, (ours, theirs, text) in names.items():
                for name in (ours, theirs):
                    if name is not None:
                        family = kind(name, text, labels=[_LABEL])
                        for model, figures in self.figures.items():
                            family.add_metric([model], figures[key])
                        yield family
        cycles = CounterMetricFamily(
            "smcjax_batch_cycles", "Cycles of a whole batch, by the decoder that had them", labels=[_LABEL, "decoder"]
        )
        for model, counts in self.batch_cycles.items():
            for decoder, count in counts.items():
                cycles.add_metric([model, decoder], count)
        yield cycles
        used = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV pages in use, from 0 to 1", labels=[_LABEL])
        for model, figures in self.figures.items():
            used.add_metric([model], 1 - figures["kv_pages_free"] / figures["kv_pages_total"])
        yield used
