"""How long a prompt takes to be read, chunk by chunk, through the engine's own programs.

    python scripts/bench_prefill.py                          # Llama-3.2-1B / 3.1-8B shapes, an H200
    python scripts/bench_prefill.py --prompt-len 32768 --chunks 128 256 --implementations auto mosaic xla
    python scripts/bench_prefill.py --target-shape tiny-target --draft-shape tiny-draft --prompt-len 300

Both models read it, as before SMC. A chunk is timed by itself, waiting for each; the whole prompt with all its chunks
enqueued at once, as the engine does. The bound is the larger of weights over bandwidth and FLOPs over the datasheet's
989 TFLOP/s of bf16 (of another GPU or a CPU: the rate of a large product), chunk by chunk. Random weights and tokens;
the better of two repetitions.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from smcjax import smc
from smcjax.bench.cycle import Rates
from smcjax.bench.models import Models
from smcjax.bench.roofline import streamed_weights
from smcjax.bench.shapes import SHAPES
from smcjax.decoding.speculation import PairParams
from smcjax.device import this_device
from smcjax.engine.requests.batch import Batch
from smcjax.engine.run.programs import Programs, enable_compilation_cache
from smcjax.engine.run.runner import Chunk, Runner
from smcjax.engine.schedule.scheduler import ChunkLengths
from smcjax.model.config import ModelConfig
from smcjax.smc import SMC

REPETITIONS = 2


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to read a prompt."""

    chunk: int
    implementation: str
    cublas: bool  # products by cuBLAS, and not by XLA's own choice


class Prefill:
    """A runner that has the programs to read prompts of `length` tokens, one a lane."""

    def __init__(self, models: Models, params: PairParams, variant: Variant, length: int, requests: int) -> None:
        geometry = (length + 64, 16, variant.implementation)
        self.program = smc.SMCDecoder(SMC(8, 8), models.target_config, models.draft_config, *geometry)
        pages = 1 + requests * (self.program.max_pages + 1)
        self.runner = Runner(self.program, params, pages, Programs())
        self.chunk = variant.chunk
        self.runner.chunks = ChunkLengths(variant.chunk, variant.chunk)
        self.length, self.requests = length, requests
        jobs = {key: job for key, job in self.runner.jobs(requests, self.program).items() if key[-1] != "step"}
        if variant.cublas:
            jobs = {key: job._replace(cublas=True) for key, job in jobs.items()}
        self.runner.programs.compile("", jobs)

    def begin(self) -> None:
        """A batch whose prompts have not been read."""
        vocab_size = self.program.target.vocab_size
        geometry = {"max_model_len": self.program.max_model_len, "vocab_size": vocab_size}
        tokens = np.random.default_rng(0).integers(0, vocab_size, (self.requests, self.program.max_model_len))
        batch = dataclasses.replace(
            Batch.empty(self.requests, **geometry),
            prompts=tokens.astype(np.int32),
            prompt_length=np.full(self.requests, self.length, np.int32),
            limit=np.full(self.requests, self.length + 16, np.int32),
            present=np.ones(self.requests, bool),
        )
        self.runner.discard()
        self.runner.resize(self.requests, [-1] * self.requests)
        self.runner.join(batch, {})
        jax.block_until_ready(self.runner.state)

    def read(self, start_at: int) -> None:
        """Enqueues the chunk from there on."""
        self.runner.prefill(self.program, [Chunk(lane, start_at, self.chunk, 0, []) for lane in range(self.requests)])

    def seconds(self) -> tuple[list[float], float]:
        """Returns the least seconds of each chunk by itself, and of all chunks one after the other."""
        starts = range(0, self.length, self.chunk)
        alone = [float("inf")] * len(starts)
        together = float("inf")
        for _ in range(REPETITIONS):
            self.begin()
            for i, start_at in enumerate(starts):
                began = time.perf_counter()
                self.read(start_at)
                jax.block_until_ready(self.runner.state)
                alone[i] = min(alone[i], time.perf_counter() - began)
            self.begin()
            began = time.perf_counter()
            for start_at in starts:
                self.read(start_at)
            jax.block_until_ready(self.runner.state)
            together = min(together, time.perf_counter() - began)
        self.runner.discard()
        return alone, together


def bound(configs: Sequence[ModelConfig], rates: Rates, chunk: int, length: int, requests: int) -> float:
    """Seconds that reading takes at least: of each chunk and model, its weights' or its FLOPs'."""
    total = 0.0
    for config in configs:
        weights = streamed_weights(config) - config.vocab_size * config.hidden_size  # no logits
        for start_at in range(0, length, chunk):
            tokens = requests * min(chunk, length - start_at)
            seen = start_at + chunk / 2
            attention = 4 * config.num_layers * config.num_heads * config.head_dim * seen
            total += max(weights * config.itemsize / rates.bandwidth, tokens * (2 * weights + attention) / rates.flops)
    return total


def main() -> None:
    """Prints one line a variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--draft-shape", default="llama-3.2-1b", choices=SHAPES)
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128])
    parser.add_argument("--implementations", nargs="+", choices=("auto", "mosaic", "xla"), default=["auto"])
    parser.add_argument("--cublas", action="store_true", help="also with all products by cuBLAS")
    args = parser.parse_args()
    if min(args.prompt_len, args.requests, *args.chunks) < 1:
        parser.error("--prompt-len, --requests and --chunks must be 1 or more.")

    enable_compilation_cache()
    models = Models(args.target_shape, args.draft_shape)
    models.require_room(with_draft=True)
    configs = (models.target_config, models.draft_config)
    rates = Rates.measure(str(models.target_config.dtype))
    rates = dataclasses.replace(rates, flops=this_device().flops or rates.flops)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}; {args.requests} prompt(s) of {args.prompt_len}")
    print(f"{'':<22} {'ms: first':>9} {'middle':>8} {'last chunk':>10} {'whole':>9} {'bound':>8} {'tokens/s':>9}")
    for implementation in args.implementations:
        params = PairParams(models.target_params(implementation), models.draft_params(implementation))
        for chunk in args.chunks:
            for cublas in (False, True)[: 1 + args.cublas]:
                variant = Variant(min(chunk, args.prompt_len), implementation, cublas)
                alone, whole = Prefill(models, params, variant, args.prompt_len, args.requests).seconds()
                least = bound(configs, rates, variant.chunk, args.prompt_len, args.requests)
                first, middle, last = (1e3 * alone[i] for i in (0, len(alone) // 2, -1))
                print(
                    f"{f'{implementation}, {chunk}' + ', cuBLAS' * cublas:<22} {first:9.2f} {middle:8.2f} {last:10.2f} "
                    f"{1e3 * whole:9.1f} {1e3 * least:8.1f} {args.requests * args.prompt_len / whole:9,.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
