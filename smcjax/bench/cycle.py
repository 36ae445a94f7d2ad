"""`smcjax bench cycle`: time of the very step that `LLM.generate` runs, against the memory roofline.

The limit first. At a batch of one request a cycle is bound by streaming weights: K draft forwards and one target
forward, whatever the tokens are. So random weights are fair, and the figure of merit is the share of that bound. The
step runs with paging and resampling on, through the engine's own programs; a window of cycles is enqueued without
waiting, so the host's dispatch is in the figure only where the device waits for it.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.bench.models import Models, own_pages, random_memory
from smcjax.bench.roofline import Phase, cycle_phases
from smcjax.decoders import Decoding
from smcjax.decoding.drafts.draft_model import DraftModel
from smcjax.decoding.groups import PairParams
from smcjax.device import on_cpu, this_device
from smcjax.engine.load.loading import check_pages, make_decoder, scores_bytes
from smcjax.engine.requests.batch import Batch
from smcjax.engine.run.memory import Budget, memory_of_each, weight_bytes
from smcjax.engine.run.programs import Programs, Wanted, compile_together, enable_compilation_cache
from smcjax.engine.run.runner import Chunk, Runner
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.model.params import Params
from smcjax.noise import key_of

logger = logging.getLogger("smcjax")

WARMUP = 4  # the first runs of a program on a GPU are eager, then record the graph
# Fields of a result that are its case's, and its models'.
_OF_CASE = ("groups", "context", "private", "max_model_len", "page_size", "implementation", "synthetic_kv")
_OF_MODELS = ("quantization", "attention", "target_layers", "tensor_parallel_size", "separate_draft")


@dataclasses.dataclass(frozen=True)
class Case:
    """A case to time. Every window starts afresh from prompts of `context` tokens.

    Of the context, each particle has its own copy of the last `private` tokens;
    the others are shared. `synthetic_kv` fills the pages with random numbers instead of running the prompt, but
    for its last chunk, through the models: the step reads and writes the same pages and cannot tell.
    """

    decoding: Decoding
    groups: int = 1
    context: int = 256
    private: int = 0
    max_model_len: int = 1024
    page_size: int = 16
    implementation: str = "auto"
    synthetic_kv: bool = False
    windows: int = 5
    cycles_per_window: int = 16

    def __post_init__(self) -> None:
        advance = self.decoding.tokens_per_cycle
        needed = self.context + 1 + (WARMUP + self.cycles_per_window) * advance
        if needed > self.max_model_len:
            raise ValueError(
                f"context {self.context} and {WARMUP + self.cycles_per_window} cycles of {advance} tokens exceed "
                f"max_model_len {self.max_model_len}; raise max_model_len or lower context."
            )
        if not 0 <= self.private < self.context or (self.private and (self.decoding.agrees or not self.synthetic_kv)):
            raise ValueError(
                f"private must be 0, or less than context {self.context} with SMC and synthetic KV, got {self.private}."
            )

    @property
    def num_pages(self) -> int:
        """Pages that the requests can need from their prompts on, and the trash page."""
        shared = self.context - self.private
        return 1 + self.groups * Footprint.of(self.decoding, self.page_size).worst_case(shared, self.max_model_len)


@dataclasses.dataclass(frozen=True)
class CycleResult:
    """One benchmark, self-describing."""

    device: str
    decoding: str  # `Decoding.name`
    described: str  # the decoder and its options, in a few words
    groups: int
    n_particles: int
    gamma: int
    context: int
    private: int  # of the context, tokens that each particle has pages of its own for
    max_model_len: int
    page_size: int
    implementation: str  # "auto": with the GPU kernels where they apply; "xla": without
    quantization: str | None
    draft_quantization: str | None
    attention: str | None  # the target's; None: its shape's own
    target_layers: int | None  # of the target's, as many; None: all
    tensor_parallel_size: int  # bytes and rooflines are one device's
    draft_tensor_parallel_size: int
    separate_draft: bool  # two devices, of which one drafts and one scores: bytes and rooflines are the busier one's
    collectives: str | None  # "peers": devices write into each other's memory where they can; "xla": by XLA alone
    synthetic_kv: bool
    weight_bytes: int  # a cycle
    kv_bytes: int  # a cycle, that must be read at least
    held_weight_bytes: int  # on the device
    held_kv_bytes: int
    held_workspace_bytes: int  # of several devices that write into each other's memory
    scratch_bytes: int  # of the program that needs most
    bandwidth: float  # bytes/s of the roofline
    read_bandwidth: float | None  # bytes/s that a large reduction reads, measured; None: not measured, as on a CPU
    flop_rate: float  # FLOP/s, measured
    weight_roofline_ms: float
    roofline_ms: float  # with KV and FLOPs
    ms: float  # a cycle, median of windows
    ms_windows: list[float]
    tokens_per_second: float  # all requests together: one answer's tokens each; of rejection if all drafts are accepted
    weight_roofline_fraction: float
    roofline_fraction: float
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Rates:
    """The roofline's two slopes on one device."""

    bandwidth: float  # bytes/s, of the datasheet where it is known
    flops: float  # FLOP/s, measured
    read: float | None = None  # bytes/s, measured on a GPU alone: tables of records compare cards by it

    @classmethod
    def measure(cls, dtype: str, bandwidth: float | None = None) -> Rates:
        """Measures the default device, in products of `dtype`; `bandwidth` overrides the datasheet's."""
        known = bandwidth or this_device().bandwidth
        read = None if on_cpu() else measure_read_bandwidth()
        return cls(known or measure_bandwidth(), measure_flop_rate(dtype), read)


def measure_bandwidth() -> float:
    """Bytes per second of a large copy, read plus written: the stand-in where no datasheet figure is known."""
    x = jax.random.normal(key_of(0), (1 << (24 if on_cpu() else 26),), jnp.float32)
    add = jax.jit(lambda x: x + 1.0)
    return 2 * x.nbytes / _median_seconds(lambda: add(x))


def measure_read_bandwidth(rows: int = 1 << 16, sums: int = 8) -> float:
    """Bytes per second of sums over the rows of a large matrix, one enqueued behind the other."""
    x = jax.random.normal(key_of(0), (rows, 1 << 12), jnp.float32)
    add = jax.jit(lambda x: x.sum(axis=1))
    return sums * x.nbytes / _median_seconds(lambda: [add(x) for _ in range(sums)])


def measure_flop_rate(dtype: str) -> float:
    """FLOP per second of large matrix products on random data, one enqueued behind the other."""
    n, products = 512 if on_cpu() else 8192, 8
    x = jax.random.normal(key_of(0), (n, n), dtype)
    multiply = jax.jit(lambda x: x @ x)
    return products * 2 * n**3 / _median_seconds(lambda: [multiply(x) for _ in range(products)])


def _median_seconds(call: Any) -> float:
    times, repeats = [], 7
    for _ in range(2 * repeats):  # the first half brings the clocks up
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times[repeats:])


def described(case: Case) -> str:
    """A case in a few words."""
    requests = "1 request" if case.groups == 1 else f"{case.groups} requests"
    private = f", of which {case.private:,} private" if case.private else ""
    return f"{case.decoding}, {requests}, context {case.context:,}{private}"


def budget_of(models: Models, case: Case) -> Budget:
    """Counts the bytes that weights, workspace and KV will take of the default device, or of each of several."""
    weights = {models.target: weight_bytes(models.held_target, models.quantization)}
    page_bytes = models.held_target.page_bytes(case.page_size)
    if case.decoding.drafts:
        weights[models.draft] = weight_bytes(models.held_draft, models.draft_quantization)
        page_bytes += models.held_draft.page_bytes(case.page_size)
    return Budget(
        memory_of_each(models.devices),
        weights,
        case.num_pages * page_bytes,
        case.num_pages,
        case.page_size,
        models.workspace_bytes(case.implementation),
        scores_bytes(
            models.local_target,
            case.decoding,
            requests=case.groups,
            max_model_len=case.max_model_len,
            page_size=case.page_size,
            implementation=case.implementation,
        ),
    )


def require_room(models: Models, case: Case) -> None:
    """Logs what the case will take, before it is taken. Raises ValueError where it does not fit or pages cut blocks."""
    check_pages(models.target_config, case.page_size)
    models.require_room(with_draft=case.decoding.drafts)
    budget = budget_of(models, case)
    logger.info("%s: %s", described(case), budget)
    if budget.left < 0:
        raise ValueError(
            f"the KV of {case.groups} request(s) of {case.context} tokens, up to max_model_len {case.max_model_len}, "
            f"takes {budget.kv / 2**30:.1f} GiB and {(budget.left + budget.kv) / 2**30:.1f} are left beside the "
            "weights; lower requests, context, max_model_len or n_particles."
        )


class Bench:
    """One case on given weights: `compile`, then `measure`. Takes memory for its KV in windows only."""

    def __init__(self, models: Models, case: Case, target_params: Params, draft_params: Params | None) -> None:
        self.models, self.case = models, case
        geometry = (case.max_model_len, case.page_size, case.implementation)
        decoder = make_decoder(
            case.decoding, models.local_target, models.local_draft, *geometry, disaggregated=models.separate_draft
        )
        params = PairParams(target_params, draft_params)
        programs = Programs(models.workspace_bytes(case.implementation))
        self.runner = Runner(decoder, params, case.num_pages, programs, models.sharded)
        self.batch = random_batch(case.groups, case.context, case.max_model_len, models.target_config.vocab_size)

    def wanted(self) -> Wanted:
        """The programs that the windows call, to be compiled."""
        jobs = self.runner.jobs(self.case.groups, self.runner.program)
        called = {key: job for key, job in jobs.items() if key[-1] != "prefill" or key[-3:-1] == self._chunk}
        return Wanted(self.runner.programs, f"for {described(self.case)}", called)

    @property
    def _chunk(self) -> tuple[int, int]:
        """Prompts that one program reads together, and tokens of each."""
        return self.case.groups, self.runner.chunks.together

    def compile(self) -> None:
        """Compiles these programs. Raises ValueError where one does not fit, before KV is taken."""
        compile_together([self.wanted()])

    def measure(self, rates: Rates) -> CycleResult:
        """Times all windows and returns their result."""
        return self.result([self.time_window() for _ in range(self.case.windows)], rates)

    def time_window(self) -> float:
        """Milliseconds a cycle over one window, after the prompt and warm-up. Frees the KV afterwards."""
        try:
            self.start()
            return self._time_cycles()
        finally:
            self.runner.discard()

    def start(self) -> None:
        """Takes memory full of random numbers and puts the batch into it, its first tokens drawn."""
        runner, case = self.runner, self.case
        size, length = self._chunk
        runner.take_memory(random_memory)
        runner.resize(size, [-1] * size)
        runner.join(self.batch, {})
        if case.private:
            runner.state = own_pages(runner.state, (case.context - case.private) // case.page_size)
        first = max(0, case.context - length) if case.synthetic_kv else 0
        for at in range(first, case.context, length):
            runner.prefill(runner.program, [Chunk(slot, at, length, 0, []) for slot in range(size)])

    def _time_cycles(self) -> float:
        runner, cycles = self.runner, self.case.cycles_per_window
        for _ in range(WARMUP):
            info, _ = runner.step(runner.program)
        jax.block_until_ready(info.done)
        began = time.perf_counter()
        for _ in range(cycles):
            info, _ = runner.step(runner.program)
        jax.block_until_ready(runner.state)
        elapsed = time.perf_counter() - began
        if np.asarray(info.done).any():
            raise RuntimeError("a request ended inside the benchmark: its weights broke, so the timing says nothing")
        return elapsed / cycles * 1e3

    def _phases(self) -> list[Phase]:
        models, case = self.models, self.case
        return cycle_phases(
            models.held_target,
            models.held_draft,
            case.decoding.speculation,
            groups=case.groups,
            context=case.context,
            private=case.private,
            quantization=models.quantization,
            draft_quantization=models.draft_quantization,
        )

    def result(self, window_ms: list[float], rates: Rates) -> CycleResult:
        """Makes the result of windows that took `window_ms` milliseconds a cycle, beside the rooflines at `rates`."""
        models, case, phases = self.models, self.case, self._phases()
        budget = budget_of(models, case)
        ms = statistics.median(window_ms)
        busy = [phases]
        if models.separate_draft:
            busy = [[phase for phase in phases if (phase.name == "verify") == scores] for scores in (False, True)]
        phases = max(busy, key=lambda own: sum(phase.seconds(rates.bandwidth, rates.flops) for phase in own))
        weights = sum(phase.times * phase.weight_bytes for phase in phases)
        roofline = sum(phase.seconds(rates.bandwidth, rates.flops) for phase in phases) * 1e3
        weight_roofline = weights / rates.bandwidth * 1e3
        return CycleResult(
            device=jax.devices()[0].device_kind,
            decoding=case.decoding.name,
            described=str(case.decoding),
            n_particles=case.decoding.rows,
            gamma=case.decoding.speculation.gamma,
            **{name: getattr(case, name) for name in _OF_CASE},
            **{name: getattr(models, name) for name in _OF_MODELS},
            draft_quantization=models.draft_quantization if case.decoding.drafts else None,
            draft_tensor_parallel_size=models.tensor_parallel_size if models.draft_divided else 1,
            collectives=models.collectives_of(case.implementation),
            weight_bytes=weights,
            kv_bytes=sum(phase.times * phase.kv_bytes for phase in phases),
            held_weight_bytes=sum(budget.weights.values()),
            held_kv_bytes=budget.kv,
            held_workspace_bytes=budget.workspace,
            scratch_bytes=self.runner.programs.scratch_bytes,
            bandwidth=rates.bandwidth,
            read_bandwidth=rates.read,
            flop_rate=rates.flops,
            weight_roofline_ms=weight_roofline,
            roofline_ms=roofline,
            ms=ms,
            ms_windows=window_ms,
            tokens_per_second=case.groups * case.decoding.tokens_per_cycle / ms * 1e3,
            weight_roofline_fraction=weight_roofline / ms,
            roofline_fraction=roofline / ms,
            compile_seconds=self.runner.programs.seconds,
        )


def run_cases(
    models: Models,
    cases: Sequence[Case],
    *,
    bandwidth: float | None = None,
    on_result: Callable[[str], None] = lambda _: None,
) -> list[CycleResult]:
    """Times the cases, of one implementation, on one set of weights; `on_result` hears one line each as they end.

    Programs are compiled side by side. Then each case takes its KV, is timed and gives the KV back, so that nothing
    else runs or takes memory beside a measurement. Cases that differ in nothing but their context take turns, a window
    each: clocks fall as a device warms up, and what a longer context adds is the difference of windows that followed
    each other. Raises ValueError for what does not fit the device, before it is taken.
    """
    enable_compilation_cache()
    with_draft = any(case.decoding.drafts for case in cases)
    for case in cases:
        if case.decoding.drafts:
            DraftModel(models.draft_config).check(models.target_config)
        require_room(models, case)
    (implementation,) = {case.implementation for case in cases}
    target = models.target_params(implementation)
    draft = models.draft_params(implementation) if with_draft else None
    rates = Rates.measure(models.target_config.dtype, bandwidth)
    benches = [Bench(models, case, target, draft) for case in cases]
    compile_together([bench.wanted() for bench in benches])
    compared: dict[tuple[object, ...], list[Bench]] = {}
    for bench in benches:
        case, decoding = bench.case, bench.case.decoding
        but_context = (decoding.name, case.groups, decoding.rows, decoding.tokens_per_cycle, case.windows)
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


def random_batch(groups: int, context: int, max_model_len: int, vocab_size: int) -> Batch:
    """Random prompts; no stop tokens, so that every cycle is a full one."""
    batch = Batch.empty(groups, max_model_len=max_model_len, vocab_size=vocab_size)
    batch.prompts[:, :context] = np.random.default_rng(0).integers(0, vocab_size, (groups, context))
    batch.prompt_length[:] = context
    batch.limit[:] = max_model_len
    batch.seed[:] = np.arange(groups)
    batch.present[:] = True
    return batch
