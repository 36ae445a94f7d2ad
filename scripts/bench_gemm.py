"""Small-M matrix products of a verify forward on a GPU: XLA's choice, cuBLASLt, and the streaming kernel.

    python scripts/bench_gemm.py                  # a few minutes on an H200; a table last
    python scripts/bench_gemm.py --sweep          # the kernel's tunings only
    python scripts/bench_gemm.py --tokens 72 --shapes o down

y[M, N] = x[M, K] · W[N, K]ᵀ in bf16. Calls rotate over weights of more than 200 MB, so that no W sits in the L2; x
does, as it does in a model, where the preceding kernel has just written it. Each call of a program depends on the one
before.
Times are wall times of whole programs (CUDA graphs) over their calls; medians.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from smcjax.device import HOPPER

ENQUEUED = 4  # programs without waiting, so that the host is not in the figure
REPETITIONS = 12


@dataclasses.dataclass(frozen=True)
class Shape:
    """W [rows, columns]; with swiglu also the product fused with silu(gate) · up."""

    rows: int
    columns: int
    f32: bool = False
    swiglu: bool = False

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * 2

    @property
    def copies(self) -> int:
        return max(1, -(-256_000_000 // self.nbytes))

    @property
    def calls(self) -> int:
        """In one program."""
        return self.copies * max(1, round(24 * 50e6 / self.nbytes / self.copies))


SHAPES = {
    "qkv": Shape(6144, 4096),
    "o": Shape(4096, 4096),
    "gate_up": Shape(28672, 4096),
    "swiglu": Shape(28672, 4096, swiglu=True),
    "down": Shape(4096, 14336),
    "head": Shape(128256, 4096, f32=True),
}
TOKENS = [8, 16, 72, 144]
METHODS = ["torch", "xla", "cublaslt", "mosaic"]  # the third is XLA without Triton


def report(name: str, tokens: int, method: str, microseconds: float, error: float, note: str = "") -> None:
    """One result, as a line for the parent process."""
    row = {"shape": name, "tokens": tokens, "method": method, "us": microseconds, "error": error, "note": note}
    print("RESULT " + json.dumps(row), flush=True)


# ---------------------------------------------------------------------------------------------------------------- JAX

XLA_OPTIONS = {"xla": {}, "cublaslt": {"xla_gpu_enable_triton_gemm": False}}


def jax_weights(shape: Shape) -> list[Any]:
    """Copies of W, of random values between −1 and 1 times 1/√K."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def weights(seed: jax.Array) -> jax.Array:
        i = jax.lax.iota(jnp.uint32, shape.rows * shape.columns) * jnp.uint32(2654435761) + seed
        i = (i ^ (i >> 15)) * jnp.uint32(2246822519)
        i = (i ^ (i >> 13)) * jnp.uint32(3266489917)
        value = (i ^ (i >> 16)).astype(jnp.float32) * 2.0**-31 - 1
        return (value * shape.columns**-0.5).astype(jnp.bfloat16).reshape(shape.rows, shape.columns)

    return [weights(jnp.uint32(77 * i + 1)) for i in range(shape.copies)]


def plain(x: Any, w: Any, shape: Shape) -> Any:
    """Multiplies the way that the model's `linear` and `unembed` do; with swiglu, applies the activation too."""
    import jax
    import jax.numpy as jnp

    dtype = jnp.float32 if shape.f32 else None
    y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    if shape.swiglu:
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.nn.silu(gate) * up
    return y


def jax_error(x: Any, w: Any, got: Any, shape: Shape) -> float:
    """Largest difference from f64 in 256 columns of y, relative to its largest value."""
    import numpy as np

    width = got.shape[1]
    columns = np.r_[0:128, width - 128 : width]
    product = np.asarray(x, np.float64) @ np.asarray(w[columns], np.float64).T
    if shape.swiglu:
        up = np.asarray(x, np.float64) @ np.asarray(w[columns + width], np.float64).T
        product = product / (1 + np.exp(-product)) * up
    return float(np.abs(np.asarray(got[:, columns], np.float64) - product).max() / np.abs(product).max())


def jax_program(product: Callable[[Any, Any], Any], shape: Shape) -> Any:
    """`shape.calls` products, one after the other; all are returned, since what nobody reads is never computed."""
    import jax

    def program(x: Any, weights: list[Any]) -> list[Any]:
        results = []
        for i in range(shape.calls):
            y = product(x, weights[i % len(weights)])
            x, y = jax.lax.optimization_barrier((x, y))
            results.append(y)
        return results

    return jax.jit(program)


def jax_time(compiled: Callable[..., Any], x: Any, weights: list[Any], shape: Shape) -> tuple[Any, float]:
    """First result, and microseconds a call."""
    import jax

    times = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        for _ in range(ENQUEUED):
            out = compiled(x, weights)
        jax.block_until_ready(out)
        times.append(time.perf_counter() - began)
    return out[0], statistics.median(times[3:]) / (ENQUEUED * shape.calls) * 1e6


def _case(warpgroups: int, stages: int, splits: int = 1, **more: Any) -> dict[str, Any]:
    return {"warpgroups": warpgroups, "stages": stages, "splits": splits, **more}


SWEEP: dict[str, list[dict[str, Any]]] = {
    "qkv": [
        _case(2, 5, 2),
        _case(2, 4, 2, share=2, token_stages=6),
        _case(3, 4, 4, partials=True),
        _case(3, 4, 4, partials=True, share=2, token_stages=6),
    ],
    "o": [
        _case(2, 4, 4, partials=True),
        _case(2, 4, 4, partials=True, share=2, token_stages=6),
        _case(1, 6, 2),
        _case(1, 6, 2, share=2, token_stages=8),
    ],
    "gate_up": [
        _case(4, 3),
        _case(4, 3, stagger=False),
        _case(4, 3, share=2, token_stages=6),
        _case(4, 3, share=4, token_stages=5),
    ],
    "swiglu": [
        _case(2, 3, products=2),
        _case(2, 3, products=2, share=2, token_stages=6),
    ],
    "down": [
        _case(4, 3, 8, partials=True),
        _case(4, 3, 8, partials=True, share=2, token_stages=5),
        _case(2, 5, 4, partials=True, share=2, token_stages=8),
    ],
    "head": [_case(4, 3), _case(2, 5, share=2, token_stages=8)],
}


def tunings(name: str, m: int, sweep: bool) -> list[Any]:
    """The kernel's tunings to try."""
    from stream_matmul import Tuning, objection

    if not sweep:
        return [None]
    shape = SHAPES[name]
    found = [Tuning(**case) for case in SWEEP[name]]
    sizes = {"tokens": m, "columns": shape.columns, "rows": shape.rows}

    def applies(tuning: Any) -> bool:
        return (
            objection(tuning, **sizes, itemsize=4 if shape.f32 or tuning.partials else 2, swiglu=shape.swiglu) is None
        )

    return [tuning for tuning in found if applies(tuning)]


def label(tuning: Any) -> str:
    if tuning is None:
        return "default"
    text = f"{tuning.rows} rows/{tuning.warpgroups} wg, {tuning.tile_k}×{tuning.stages}"
    text += f", split {tuning.splits}" if tuning.splits > 1 else ""
    text += f", share {tuning.share}×{tuning.x_stages}" if tuning.share > 1 else ""
    text += "" if tuning.stagger else ", in step"
    return text + "".join(f", {name}" for name in ("partials", "early") if getattr(tuning, name))


def run_jax(shapes: list[str], tokens: list[int], methods: list[str], sweep: bool, budget: float) -> None:
    """Compiles everything, XLA's programs alone since that times kernels too; then times one by one."""
    import jax
    import jax.numpy as jnp
    from stream_matmul import stream_matmul

    began = time.perf_counter()

    def build(product: Callable[[Any, Any], Any], name: str, m: int, options: dict[str, Any]) -> Any:
        shape = SHAPES[name]
        x = jax.ShapeDtypeStruct((m, shape.columns), jnp.bfloat16)
        w = jax.ShapeDtypeStruct((shape.rows, shape.columns), jnp.bfloat16)
        return jax_program(product, shape).lower(x, [w] * shape.copies).compile(compiler_options=options)

    jobs: list[tuple[str, int, str, str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for m in tokens:
            for name in shapes:
                shape = SHAPES[name]
                for method in [method for method in methods if method in XLA_OPTIONS]:
                    compiled = build(functools.partial(plain, shape=shape), name, m, XLA_OPTIONS[method])
                    jobs.append((name, m, method, "", compiled))
        print(f"XLA compiled after {time.perf_counter() - began:.0f} s", flush=True)
        for m in tokens:
            for name in shapes:
                shape = SHAPES[name]
                for tuning in tunings(name, m, sweep) if "mosaic" in methods else []:
                    product = functools.partial(
                        stream_matmul,
                        swiglu=shape.swiglu,
                        out_dtype=jnp.float32 if shape.f32 else None,
                        tuning=tuning,
                    )
                    jobs.append((name, m, "mosaic", label(tuning), pool.submit(build, product, name, m, {})))
        for name in shapes:
            weights = jax_weights(SHAPES[name])
            for m in tokens:
                x = jax.random.normal(jax.random.key(1), (m, SHAPES[name].columns), jnp.bfloat16)
                for job in [job for job in jobs if job[:2] == (name, m)]:
                    _, _, method, note, compiled = job
                    try:
                        if isinstance(compiled, concurrent.futures.Future):
                            compiled = compiled.result(timeout=max(1.0, budget - (time.perf_counter() - began)))
                        got, us = jax_time(compiled, x, weights, SHAPES[name])
                        if not bool(jnp.array_equal(got, compiled(x, weights)[0])):
                            note += " NOT REPEATABLE"
                        report(name, m, method, us, jax_error(x, weights[0], got, SHAPES[name]), note)
                    except Exception as problem:
                        print(f"FAILED {name} {m} {method} {note}: {str(problem)[:200]}", flush=True)
            del weights


# -------------------------------------------------------------------------------------------------------------- torch


def run_torch(shapes: list[str], tokens: list[int]) -> None:
    """`torch.nn.functional.linear` with cuBLASLt in a CUDA graph; its output is bf16 always."""
    import torch

    torch.backends.cuda.preferred_blas_library("cublaslt")
    for name in shapes:
        shape = SHAPES[name]
        if shape.swiglu:
            continue
        weights = [
            torch.randn(shape.rows, shape.columns, dtype=torch.bfloat16, device="cuda") * shape.columns**-0.5
            for _ in range(shape.copies)
        ]
        for m in tokens:
            x = torch.randn(m, shape.columns, dtype=torch.bfloat16, device="cuda")
            torch.nn.functional.linear(x, weights[0])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = [torch.nn.functional.linear(x, weights[i % shape.copies]) for i in range(shape.calls)]
            times = []
            for _ in range(REPETITIONS):
                began = time.perf_counter()
                for _ in range(ENQUEUED):
                    graph.replay()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            want = x.float() @ weights[0].float().T
            error = float((got[0].float() - want).abs().max() / want.abs().max())
            us = statistics.median(times[3:]) / (ENQUEUED * shape.calls) * 1e6
            report(name, m, "torch", us, error)
            del want, got, graph
        del weights


# --------------------------------------------------------------------------------------------------------------- main


def line(row: dict[str, Any]) -> str:
    rate = SHAPES[row["shape"]].nbytes / row["us"] * 1e6
    return (
        f"{row['shape']:<8} {row['tokens']:>4} {row['method']:<9} {row['us']:7.1f} {rate / 1e9:5.0f} "
        f"{rate / HOPPER.bandwidth:11.1%} {row['error']:8.1e}  {row['note']}"
    )


def main() -> None:
    """Runs JAX and torch in processes of their own and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--sweep", action="store_true", help="several tunings of the kernel")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a process")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        if options.methods == ["torch"]:
            run_torch(options.shapes, options.tokens)
        else:
            run_jax(options.shapes, options.tokens, options.methods, options.sweep, options.limit)
        return

    results: list[dict[str, Any]] = []
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for methods in (["torch"], ["xla", "cublaslt", "mosaic"]):
        chosen = [method for method in methods if method in options.methods]
        if not chosen:
            continue
        command = [sys.executable, __file__, "--child", "--methods", *chosen, "--limit", str(options.limit)]
        command += ["--tokens", *map(str, options.tokens), "--shapes", *options.shapes]
        command += ["--sweep"] if options.sweep else []
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            timer = threading.Timer(options.limit, child.kill)  # a kernel that hangs must not hang this
            timer.start()
            for text in child.stdout:
                if text.startswith("RESULT "):
                    results.append(json.loads(text.removeprefix("RESULT ")))
                    print(line(results[-1]), flush=True)
                else:
                    print(text, end="", flush=True)
            timer.cancel()
    print(f"\n{'shape':<8} {'M':>4} {'method':<9} {'µs':>7} {'GB/s':>5} {'of 4.8 TB/s':>11} {'error':>8}")
    for row in sorted(results, key=lambda r: (list(SHAPES).index(r["shape"]), r["tokens"], r["us"])):
        print(line(row))


if __name__ == "__main__":
    main()
