"""`smcjax bench cycle`: time of the very step that `LLM.generate` runs, against the memory roofline.

The limit first. At a batch of one request a cycle is bound by streaming weights: K draft forwards and one target
forward, whatever the tokens are. So random weights are fair, and the figure of merit is the share of that bound. The
step runs with paging and resampling on, through the engine's own programs; a window of cycles is enqueued without
waiting, so the host's dispatch is in the figure only where the device waits for it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax import autoregressive, smc
from smcjax.bench.roofline import BANDWIDTH, Phase, autoregressive_phases, cycle_phases
from smcjax.bench.shapes import SHAPES
from smcjax.engine.batch import Batch, BatchRunner
from smcjax.engine.memory import device_memory, worst_case_pages
from smcjax.engine.programs import Programs
from smcjax.model.config import ModelConfig
from smcjax.model.params import Params, init_params, param_shapes
from smcjax.smc import SMC

WARMUP = 4  # the first runs of a program on a GPU are eager, then record the graph


@dataclasses.dataclass(frozen=True)
class CycleResult:
    """One benchmark, self-describing."""

    device: str
    decoding: str
    groups: int
    n_particles: int
    gamma: int
    context: int
    max_model_len: int
    page_size: int
    implementation: str  # "auto": with the GPU kernels where they apply; "xla": without
    weight_bytes: int  # a cycle
    kv_bytes: int  # a cycle, unique
    bandwidth: float  # bytes/s of the roofline
    flop_rate: float  # FLOP/s, measured
    weight_roofline_ms: float
    roofline_ms: float  # with KV and FLOPs
    ms: float  # a cycle, median of windows
    ms_windows: list[float]
    tokens_per_second: float  # all requests together: one answer's tokens each
    weight_roofline_fraction: float
    roofline_fraction: float
    compile_seconds: float


def measure_bandwidth() -> float:
    """Bytes per second of a large copy, read plus written: the stand-in where no datasheet figure is known."""
    x = jax.random.normal(jax.random.key(0), (1 << 26,), jnp.float32)
    add = jax.jit(lambda x: x + 1.0)
    return 2 * x.nbytes / _median_seconds(lambda: add(x))


def measure_flop_rate(dtype: str) -> float:
    """FLOP per second of a large matrix product on random data."""
    n = 8192 if jax.default_backend() == "gpu" else 1024
    x = jax.random.normal(jax.random.key(0), (n, n), dtype)
    multiply = jax.jit(lambda x: x @ x)
    return 2 * n**3 / _median_seconds(lambda: multiply(x))


def _median_seconds(call: Any, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def random_params(config: ModelConfig, seed: int) -> Params:
    """Random weights made on the device, leaf by leaf."""
    return init_params(config, jax.random.key(seed), config.dtype)


def bench_cycle(
    *,
    target: str,
    draft: str,
    decoding: SMC | None,
    groups: int = 1,
    context: int = 256,
    max_model_len: int = 1024,
    page_size: int = 16,
    implementation: str = "auto",
    windows: int = 5,
    cycles_per_window: int = 16,
    bandwidth: float | None = None,
) -> CycleResult:
    """Times the step of `decoding` (None: target only) on random weights of the named shapes.

    Every window starts afresh from prompts of `context` tokens. Raises ValueError for shapes that are not known and
    windows that do not fit `max_model_len`.
    """
    for name in (target, draft):
        if name not in SHAPES:
            raise ValueError(f"shape {name!r} is unknown; use one of {', '.join(SHAPES)}.")
    advance = 1 if decoding is None else decoding.tokens_per_cycle
    if context + 1 + (WARMUP + cycles_per_window) * advance > max_model_len:
        raise ValueError(
            f"context {context} and {WARMUP + cycles_per_window} cycles of {advance} tokens exceed max_model_len "
            f"{max_model_len}; raise max_model_len or lower context."
        )
    target_config, draft_config = SHAPES[target], SHAPES[draft]
    _require_room(target_config, *(() if decoding is None else (draft_config,)))
    phases: list[Phase]
    if decoding is None:
        alone = autoregressive.Program(target_config, max_model_len, page_size, implementation)
        runner = make_runner(autoregressive, alone, random_params(target_config, 0), groups, 1)
        phases = autoregressive_phases(target_config, groups=groups, context=context)
    else:
        program = smc.Program(decoding, target_config, draft_config, max_model_len, page_size, implementation)
        params = smc.PairParams(random_params(target_config, 0), random_params(draft_config, 1))
        runner = make_runner(smc, program, params, groups, decoding.n_particles)
        phases = cycle_phases(target_config, draft_config, decoding, groups=groups, context=context)

    batch = random_batch(groups, context, max_model_len, target_config.vocab_size)
    runner.compile(batch, runner.program)
    window_ms = [_time_window(runner, batch, cycles_per_window) for _ in range(windows)]
    ms = statistics.median(window_ms)

    device = jax.devices()[0].device_kind
    bandwidth = bandwidth or BANDWIDTH.get(device) or measure_bandwidth()
    flop_rate = measure_flop_rate(target_config.dtype)
    weight_bytes = sum(phase.times * phase.weight_bytes for phase in phases)
    roofline = sum(phase.seconds(bandwidth, flop_rate) for phase in phases) * 1e3
    weight_roofline = weight_bytes / bandwidth * 1e3
    return CycleResult(
        device=device,
        decoding="autoregressive" if decoding is None else "smc",
        groups=groups,
        n_particles=1 if decoding is None else decoding.n_particles,
        gamma=0 if decoding is None else decoding.gamma,
        context=context,
        max_model_len=max_model_len,
        page_size=page_size,
        implementation=implementation,
        weight_bytes=weight_bytes,
        kv_bytes=sum(phase.times * phase.kv_bytes for phase in phases),
        bandwidth=bandwidth,
        flop_rate=flop_rate,
        weight_roofline_ms=weight_roofline,
        roofline_ms=roofline,
        ms=ms,
        ms_windows=window_ms,
        tokens_per_second=groups * advance / ms * 1e3,
        weight_roofline_fraction=weight_roofline / ms,
        roofline_fraction=roofline / ms,
        compile_seconds=runner.programs.seconds,
    )


def _require_room(*configs: ModelConfig) -> None:
    """Raises ValueError where the weights alone are more than the device's memory."""
    needed = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for config in configs
        for leaf in jax.tree.leaves(param_shapes(config, config.dtype))
    )
    if needed > device_memory():
        held = device_memory() / 1e9
        raise ValueError(
            f"the weights of these shapes take {needed / 1e9:.1f} GB and the device has {held:.1f} GB; "
            "use smaller ones, such as tiny-target and tiny-draft."
        )


def make_runner(decoder: Any, program: Any, params: Any, groups: int, rows: int) -> BatchRunner:
    """Programs and memory for `groups` requests of `rows` rows, each as long as `max_model_len`."""
    pages = 1 + groups * worst_case_pages(1, program.max_model_len, rows, program.page_size)
    return BatchRunner(decoder, program, params, pages, Programs())


def random_batch(groups: int, context: int, max_model_len: int, vocab_size: int) -> Batch:
    """Random prompts; no stop tokens, so that every cycle is a full one."""
    batch = Batch.empty(groups, max_model_len=max_model_len, vocab_size=vocab_size)
    batch.prompts[:, :context] = np.random.default_rng(0).integers(0, vocab_size, (groups, context))
    batch.prompt_length[:] = context
    batch.limit[:] = max_model_len
    batch.seed[:] = np.arange(groups)
    batch.present[:] = True
    return batch


def _time_window(runner: BatchRunner, batch: Batch, cycles: int) -> float:
    """Milliseconds a cycle over one window, after prefill and warm-up."""
    state = runner.prefilled(batch, runner.program)
    step = runner.programs[runner.program, batch.size, "step"]
    for _ in range(WARMUP):
        state, info = step(runner.params, state)
    jax.block_until_ready(info.done)
    began = time.perf_counter()
    for _ in range(cycles):
        state, info = step(runner.params, state)
    jax.block_until_ready(state)
    elapsed = time.perf_counter() - began
    if np.asarray(info.done).any():
        raise RuntimeError("a population ended inside the benchmark: its weights broke, so the timing means nothing")
    runner.conclude(batch, runner.program, state)
    return elapsed / cycles * 1e3
