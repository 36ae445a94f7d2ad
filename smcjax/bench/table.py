"""`smcjax bench table`: the cycle over contexts, particles, draft lengths and batch sizes, in one process.

Weights are made once and serve all cases, whose programs are compiled side by side. Then each case takes its KV, is
timed and gives the KV back, so that nothing else runs or takes memory beside a measurement. KV is synthetic. Cases that
differ in nothing but their context take turns, a window each: clocks fall as a device warms up, and what a longer
context adds is the difference of windows that followed each other.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from smcjax.bench.cycle import WARMUP, Bench, Case, CycleResult, Rates, described, require_pair, require_room
from smcjax.bench.models import Models
from smcjax.decoders import SMC, Autoregressive, Decoding
from smcjax.engine.run.programs import compile_together, enable_compilation_cache
from smcjax.markdown import table

CONTEXTS = (256, 4096, 16_384, 32_768)
REQUESTS = (2, 4, 8, 16, 32)
REQUESTS_CONTEXT = 1024


def synthetic_case(
    decoding: Decoding,
    groups: int,
    context: int,
    private: int = 0,
    *,
    page_size: int = 16,
    implementation: str = "auto",
    windows: int = 5,
    cycles: int = 12,
) -> Case:
    """A case on random KV, in a max_model_len that has room for the cycles: a multiple of 256, at least 1,024."""
    room = (WARMUP + cycles) * decoding.tokens_per_cycle + 1
    return Case(
        decoding,
        groups=groups,
        context=context,
        private=private,
        max_model_len=max(1024, -(-(context + room) // 256) * 256),
        page_size=page_size,
        implementation=implementation,
        synthetic_kv=True,
        windows=windows,
        cycles_per_window=cycles,
    )


def standard_cases(
    *,
    n_particles: int = 8,
    gamma: int = 8,
    contexts: Sequence[int] = CONTEXTS,
    requests: Sequence[int] = REQUESTS,
    requests_context: int = REQUESTS_CONTEXT,
    **how: Any,
) -> list[Case]:
    """The rows of the table; the first is what added milliseconds are counted from.

    Contexts at one request; the second context with its later half private to each particle; twice the particles;
    twice the draft length; several requests; the target alone. Private pages would be shared again after the first
    resampling, so that case never resamples (ess_threshold=0); the program is the same. `how` is that of
    `synthetic_case`.
    """
    case: Any = functools.partial(synthetic_case, **how)
    base = SMC(n_particles=n_particles, gamma=gamma, control=0)
    cases = [case(base, 1, context) for context in contexts]
    if len(contexts) > 1:
        half = contexts[1] // 2
        cases.insert(2, case(dataclasses.replace(base, ess_threshold=0.0), 1, contexts[1], half))
    cases.append(case(dataclasses.replace(base, n_particles=2 * n_particles), 1, contexts[0]))
    cases.append(case(dataclasses.replace(base, gamma=2 * gamma), 1, contexts[0]))
    cases += [case(base, groups, requests_context) for groups in requests]
    cases.append(case(Autoregressive(), 1, contexts[0]))
    return cases


def run_cases(
    models: Models, cases: Sequence[Case], *, bandwidth: float | None = None, on_result: Callable[[str], None]
) -> list[CycleResult]:
    """Times the cases, of one implementation, on one set of weights; `on_result` hears one line each as they end."""
    enable_compilation_cache()
    with_draft = any(case.decoding.drafts for case in cases)
    for case in cases:
        require_pair(models, case)
        require_room(models, case)
    (implementation,) = {case.implementation for case in cases}
    target = models.target_params(implementation)
    draft = models.draft_params(implementation) if with_draft else None
    rates = Rates.measure(models.target_config.dtype, bandwidth)
    benches = [Bench(models, case, target, draft) for case in cases]
    compile_together([bench.wanted() for bench in benches])
    compared: dict[tuple[object, ...], list[Bench]] = {}
    for bench in benches:
        case = bench.case
        but_context = (case.decoding.name, case.groups, case.rows, case.advance, case.windows)
        compared.setdefault(but_context, []).append(bench)
    results: dict[Bench, CycleResult] = {}
    for together in compared.values():
        results |= zip(together, _in_turns(together, rates, on_result), strict=True)
    return [results[bench] for bench in benches]


def _in_turns(benches: Sequence[Bench], rates: Rates, on_result: Callable[[str], None]) -> list[CycleResult]:
    """Times cases that take turns, a window each."""
    began = time.perf_counter()
    rounds = [[bench.time_window() for bench in benches] for _ in range(benches[0].case.windows)]
    each = (time.perf_counter() - began) / len(benches)
    results = []
    for bench, windows in zip(benches, zip(*rounds, strict=True), strict=True):
        results.append(bench.result(list(windows), rates))
        on_result(f"{described(bench.case)}: {results[-1].ms:.2f} ms ({each:.1f} s)")
    return results


def markdown(results: Sequence[CycleResult]) -> str:
    """The table. Added milliseconds, and their bound by bytes, are over the first row, for its decoding and batch.

    Added milliseconds are the median over windows of the difference.
    """
    first = results[0]
    heads = ["case", "max_model_len", "ms a cycle", "tokens/s", "of the weight roofline", "of the roofline"]
    heads += [f"ms added over {first.context:,} tokens", "bound of the addition, ms"]
    rows = []
    for result in results:
        added = bound = "–"
        if _comparable(result, first) and result.kv_bytes > first.kv_bytes:
            added = f"{statistics.median(map(operator.sub, result.ms_windows, first.ms_windows)):.2f}"
            bound = f"{(result.kv_bytes - first.kv_bytes) / result.bandwidth * 1e3:.2f}"
        cells = (
            _name(result),
            f"{result.max_model_len:,}",
            f"{result.ms:.2f}",
            f"{result.tokens_per_second:,.0f}",
            f"{100 * result.weight_roofline_fraction:.1f}%",
            f"{100 * result.roofline_fraction:.1f}%",
            added,
            bound,
        )
        rows.append(cells)
    return table(heads, rows)


def _comparable(result: CycleResult, first: CycleResult) -> bool:
    """True where the two results differ in their contexts only."""
    fields = ("decoding", "groups", "n_particles", "gamma")
    return all(getattr(result, field) == getattr(first, field) for field in fields)


def _name(result: CycleResult) -> str:
    requests = "" if result.groups == 1 else f", {result.groups} requests"
    private = f", {result.private:,} of them private to each particle (no resampling)" if result.private else ""
    return f"{result.described}{requests}, {result.context:,} tokens{private}"
