"""`smcjax bench table`: the cycle over contexts, particles, draft lengths and batch sizes, in one process.

KV is synthetic. Cases that differ in nothing but their context take turns (`smcjax.bench.cycle.run_cases`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import statistics
from collections.abc import Sequence
from typing import Any

from smcjax.bench.cycle import WARMUP, Case, CycleResult
from smcjax.decoders import SMC, Autoregressive, Decoding
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
        this, other = ((one.decoding, one.groups, one.n_particles, one.gamma) for one in (result, first))
        if this == other and result.kv_bytes > first.kv_bytes:  # they differ in their contexts only
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


def _name(result: CycleResult) -> str:
    requests = "" if result.groups == 1 else f", {result.groups} requests"
    private = f", {result.private:,} of them private to each particle (no resampling)" if result.private else ""
    return f"{result.described}{requests}, {result.context:,} tokens{private}"
