"""The LM head and the draw from it, on a GPU: the kernel beside logits that are written and read again.

    python scripts/bench_head.py                       # the 1B draft's head by rows, an H200, a minute
    python scripts/bench_head.py --rows 8 --hidden 4096

One line for each number of rows: microseconds a step's head takes both ways (medians), what its weights' bytes take at
4.8 TB/s, how many tokens are the same (sums in another order part near ties), and the largest difference of the
log-probabilities of those that are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.decoding.distribution import SamplingDistribution, pack_bits, sample, sample_in_head
from smcjax.device import HOPPER
from smcjax.engine.run.programs import CUBLAS_PRODUCTS
from smcjax.matmul import Dense
from smcjax.pallas import uses_kernels

CALLS, WINDOWS = 16, 9


def median_time(program: Any, *arguments: Any) -> float:
    """Microseconds a call."""
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        jax.block_until_ready([program(*arguments) for _ in range(3)])
        times.append((time.perf_counter() - began) / (3 * CALLS) * 1e6)
    return statistics.median(times)


def by_logits(x: Any, weight: Any, keys: Any, distribution: SamplingDistribution) -> tuple[jax.Array, jax.Array]:
    drawn = sample(distribution, keys, jnp.ones(len(keys), jnp.int32), Dense(weight)(x, out=jnp.float32))
    return drawn.token, drawn.logprob


def by_kernel(x: Any, weight: Any, keys: Any, distribution: SamplingDistribution) -> tuple[jax.Array, jax.Array]:
    drawn = sample_in_head(distribution, keys, jnp.ones(len(keys), jnp.int32), x, weight, pack_bits(distribution.stops))
    return drawn.token, drawn.logprob


def measure(rows: int, weight: jax.Array) -> str:
    """A line of the table."""
    noise = jax.random.split(jax.random.key(rows), 3)
    x = jax.random.normal(noise[0], (rows, weight.shape[1]), weight.dtype)
    temperature = jax.random.uniform(noise[1], (rows,), minval=0.7, maxval=1.3)
    keys = jax.random.split(noise[2], rows)
    stops = jnp.zeros((rows, len(weight)), bool).at[:, 7].set(True)
    times, drawn = [], []
    for draw in (by_logits, by_kernel):

        def several(x: Any, weight: Any, keys: Any, temperature: Any, stops: Any, draw: Any = draw) -> Any:
            distribution = SamplingDistribution(temperature, stops, jnp.full(rows, 3), greedy=jnp.zeros(rows, bool))
            # In a loop, as XLA would else make one product of several.
            scales = 1 + jnp.arange(CALLS, dtype=x.dtype) / 64
            return jax.lax.map(lambda scale: draw(x * scale, weight, keys, distribution), scales)

        arguments = (x, weight, keys, temperature, stops)
        program = jax.jit(several).lower(*arguments).compile(CUBLAS_PRODUCTS)
        drawn.append(jax.tree.map(np.asarray, program(*arguments)))
        times.append(median_time(program, *arguments))
    (tokens, logprobs), (ours, our_logprobs) = drawn
    same = tokens == ours
    apart = np.abs(logprobs - our_logprobs)[same].max(initial=0)
    bound = weight.nbytes / HOPPER.bandwidth * 1e6
    return f"{rows:>5} {times[0]:>9.1f} {times[1]:>11.1f} {bound:>10.1f} {same.sum():>5}/{same.size:<5} {apart:>9.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 40, 64, 72, 96, 128, 192, 256])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128_256)
    args = parser.parse_args()
    if not uses_kernels():
        raise SystemExit("this needs a Hopper GPU (H100, H200): the kernel is made for it")
    weight = jax.random.normal(jax.random.key(0), (args.vocab, args.hidden), jnp.bfloat16) * 3 / args.hidden**0.5
    print(f"{'rows':>5} {'XLA, µs':>9} {'kernel, µs':>11} {'bytes, µs':>10} {'same':>11} {'log-prob':>9}")
    for rows in args.rows:
        print(measure(rows, weight), flush=True)


if __name__ == "__main__":
    main()
