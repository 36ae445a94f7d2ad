"""Products of one request's verification, 9 rows, and of up to 32: the kernel of few rows beside XLA's own.

    python scripts/bench_few_rows.py                   # a minute and a half on an H200; a table last
    python scripts/bench_few_rows.py --sweep           # other tunings, too
    python scripts/bench_few_rows.py --tiny            # on a CPU, interpreted: that it runs

Shapes are Llama-3.1-8B's. XLA's products are as the model has them: o and down with what they are added to, gate_up
with SwiGLU as a launch of its own, all by Triton, whose parts of the inner dimension XLA adds up by further launches.
`layer` is all four, each of what the one before it has made.

A program has every product of `COPIES` layers, whose weights are distinct, so that no W sits in the L2; x does, as in a
model. Times are wall times of whole programs (CUDA graphs) over their products, medians, and JAX's profiler's of all
launches of a product, without what lies between them. Each result is compared with float64 and computed again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from profile_cycle import read_kernels

from smcjax.device import HOPPER, on_cpu, this_device
from smcjax.pallas import PendingNorm, swiglu
from smcjax.pallas.layer.skinny_gemm import product_mosaic, product_reference, swiglu_product_mosaic
from smcjax.pallas.layer.skinny_gemm_tuning import Tuning, default_tuning, objection

COPIES = 8  # of a layer
ENQUEUED = 4  # programs without waiting, so that the host is not in the figure
WINDOWS = 12
SAMPLE = 128  # columns at either end of a result that are compared
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Shape:
    """W [rows, columns], and what the product is part of."""

    rows: int
    columns: int
    adds: bool = False
    swiglu: bool = False
    f32: bool = False  # results

    @property
    def out(self) -> Any:
        """The dtype that is asked for; None: that of x."""
        return jnp.float32 if self.f32 else None

    @property
    def parts(self) -> int:
        """Rows of W that make a result."""
        return 2 if self.swiglu else 1

    @property
    def outputs(self) -> int:
        """Results of a row of x."""
        return self.rows // self.parts

    @property
    def nbytes(self) -> int:
        """Bytes of W."""
        return self.rows * self.columns * 2

    def tuning(self, rows: int) -> Tuning:
        """The tuning that is chosen for so many rows of x."""
        return default_tuning(rows, self.outputs, self.columns, self.parts)


SHAPES = {
    "qkv": Shape(6144, 4096),
    "o": Shape(4096, 4096, adds=True),
    "gate_up": Shape(28672, 4096, swiglu=True),
    "down": Shape(4096, 14336, adds=True),
    "head": Shape(128256, 4096, f32=True),
}
TINY = {
    "qkv": Shape(192, 128),
    "o": Shape(128, 128, adds=True),
    "gate_up": Shape(512, 128, swiglu=True),
    "down": Shape(128, 256, adds=True),
    "head": Shape(1280, 128, f32=True),
}
OF_LAYER = ("qkv", "o", "gate_up", "down")


@dataclasses.dataclass
class Row:
    """One line of the table."""

    shape: str
    rows: int  # of x
    method: str
    note: str
    wall: float  # µs a product, or a layer
    bound: float  # µs, of W's bytes at the device's nominal rate
    launches: dict[str, float] = dataclasses.field(default_factory=dict)  # µs a product by kernel
    error: float = float("nan")  # of the largest number
    repeats: bool = True

    def __str__(self) -> str:
        launches = " + ".join(f"{name} {us:.1f}" for name, us in self.launches.items())
        device = f"{sum(self.launches.values()):7.1f}" if self.launches else f"{'':7}"
        wrong = "" if self.repeats else " NOT REPEATABLE"
        return (
            f"{self.shape:<8} {self.rows:>4} {self.method:<5} {self.wall:7.1f} {device} {self.bound:7.1f} "
            f"{self.error:8.1e}  {self.note}{wrong}  {launches}"
        )


Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (x, W, what it is added to)


def ours(shape: Shape, tuning: Tuning | None = None) -> Product:
    """A product by the kernel."""
    how: dict[str, Any] = {"tuning": tuning, "interpret": plgpu.InterpretGPUParams() if on_cpu() else None}
    if shape.swiglu:
        return lambda x, w, _: swiglu_product_mosaic(x, w, EPS, **how)
    return lambda x, w, add_to: product_mosaic(x, w, add_to=add_to if shape.adds else None, out=shape.out, **how)


def xlas(shape: Shape) -> Product:
    """A product by XLA, as the model has it."""
    if shape.swiglu:
        return lambda x, w, _: swiglu(product_reference(x, w), PendingNorm(x, EPS))
    return lambda x, w, add_to: product_reference(x, w, add_to=add_to if shape.adds else None, out=shape.out)


def alone(product: Product) -> Callable[..., Any]:
    """A program of one product for each of W's copies, one after the other; all results are read."""

    def program(x: jax.Array, weights: list[jax.Array], add_to: jax.Array) -> list[jax.Array]:
        results = []
        for w in weights:
            y = product(x, w, add_to)
            x, y = jax.lax.optimization_barrier((x, y))
            results.append(y)
        return results

    return program


def layers(products: dict[str, Product]) -> Callable[..., Any]:
    """A program of whole layers without attention, each product of what the one before it has made."""

    def program(x: jax.Array, weights: list[dict[str, jax.Array]], _: jax.Array) -> list[jax.Array]:
        results = []
        for of in weights:
            qkv = products["qkv"](x, of["qkv"], x)
            x = products["o"](qkv[:, : x.shape[1]], of["o"], x)
            x = products["down"](products["gate_up"](x, of["gate_up"], x), of["down"], x)
            results.append(x)
        return results

    return program


def weights_of(shape: Shape, seed: int) -> jax.Array:
    """W of random values between −1 and 1, times 1.7/√K so that results are as large as x."""

    @jax.jit
    def make(seed: jax.Array) -> jax.Array:
        i = jax.lax.iota(jnp.uint32, shape.rows * shape.columns) * jnp.uint32(2654435761) + seed
        i = (i ^ (i >> 15)) * jnp.uint32(2246822519)
        i = (i ^ (i >> 13)) * jnp.uint32(3266489917)
        value = (i ^ (i >> 16)).astype(jnp.float32) * 2.0**-31 - 1
        return (value * 1.7 * shape.columns**-0.5).astype(jnp.bfloat16).reshape(shape.rows, shape.columns)

    return make(jnp.uint32(77 * seed + 1))


def error_of(got: jax.Array, x: jax.Array, w: jax.Array, add_to: jax.Array, shape: Shape) -> float:
    """Largest difference from float64 at both ends of y, relative to its largest number."""
    width = min(SAMPLE, shape.outputs // 2)
    columns = np.r_[0:width, shape.outputs - width : shape.outputs]
    x64 = np.asarray(x, np.float64)
    want = x64 @ np.asarray(w[columns], np.float64).T
    if shape.swiglu:
        scale = 1 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + EPS)
        gate, up = want * scale, x64 @ np.asarray(w[columns + shape.outputs], np.float64).T * scale
        want = gate / (1 + np.exp(-gate)) * up
    if shape.adds:
        want = want + np.asarray(add_to[:, columns], np.float64)
    return float(np.abs(np.asarray(got[:, columns], np.float64) - want).max() / np.abs(want).max())


def variants(shape: Shape, rows: int) -> Iterator[tuple[str, Tuning]]:
    """Tunings beside the chosen one, each otherwise in one respect, that apply."""
    chosen = shape.tuning(rows)
    changes: list[dict[str, Any]] = [
        *({"stages": chosen.stages + more} for more in (-2, -1, 1, 3)),
        {"tile_k": 2 * chosen.tile_k, "stages": max(2, chosen.stages // 2)},
        {"tile_k": chosen.tile_k // 2, "stages": 2 * chosen.stages},
        {"rows": chosen.rows // 2, "passes": 2 * chosen.passes},
        {"rows": chosen.rows * 2, "passes": chosen.passes // 2, "tile_k": chosen.tile_k // 2},
    ]
    seen = {chosen}
    for change in changes:
        tuning = dataclasses.replace(chosen, **change)
        reason = objection(tuning, rows, shape.outputs, shape.columns, shape.parts) if tuning.passes else "no pass"
        if tuning not in seen and tuning.stages > 0 and reason is None:
            seen.add(tuning)
            yield ", ".join(f"{name} {value}" for name, value in change.items()), tuning


class Bench:
    """Weights of a device, and what is timed with them."""

    def __init__(self, shapes: dict[str, Shape], copies: int) -> None:
        self.shapes, self.copies = shapes, copies
        self.weights = {
            name: [weights_of(shape, 10 * i + j) for i in range(copies if name in OF_LAYER else 1)]
            for j, (name, shape) in enumerate(shapes.items())
        }
        self.found: list[Row] = []

    def inputs(self, name: str, rows: int) -> tuple[jax.Array, Any, jax.Array]:
        """x, weights and what is added to."""
        draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        if name == "layer":
            weights: Any = [{each: self.weights[each][i] for each in OF_LAYER} for i in range(self.copies)]
            return draw(jax.random.key(1), (rows, self.shapes["qkv"].columns)), weights, jnp.zeros(())
        shape = self.shapes[name]
        add_to = draw(jax.random.key(2), (rows, shape.outputs))
        return draw(jax.random.key(1), (rows, shape.columns)), self.weights[name], add_to

    def compiled(self, program: Callable[..., Any], name: str, rows: int) -> Any:
        """The program for these inputs."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.inputs(name, rows))
        return jax.jit(program).lower(*abstract).compile()

    def measure(self, compiled: Any, name: str, rows: int, method: str, note: str) -> None:
        """Times a program, compares its first result, and prints a line."""
        inputs = self.inputs(name, rows)
        out = jax.block_until_ready(compiled(*inputs))
        again = compiled(*inputs)
        repeats = all(bool(jnp.array_equal(a, b)) for a, b in zip(out, again, strict=True))
        times = []
        for _ in range(0 if on_cpu() else WINDOWS):
            began = time.perf_counter()
            for _ in range(ENQUEUED):
                out = compiled(*inputs)
            jax.block_until_ready(out)
            times.append((time.perf_counter() - began) / (ENQUEUED * len(inputs[1])))
        wall = statistics.median(times[len(times) // 3 :]) * 1e6 if times else float("nan")
        shapes = [self.shapes[each] for each in (OF_LAYER if name == "layer" else (name,))]
        bound = sum(shape.nbytes for shape in shapes) / HOPPER.bandwidth * 1e6
        row = Row(name, rows, method, note, wall, bound, repeats=repeats)
        if name != "layer":
            x, weights, add_to = inputs
            row.error = error_of(out[0], x, weights[0], add_to, self.shapes[name])
        if not on_cpu():
            row.launches = self._launches(compiled, inputs)
        self.found.append(row)
        print(row, flush=True)

    def _launches(self, compiled: Any, inputs: Any) -> dict[str, float]:
        """Microseconds a product, or a layer, by kernel."""
        runs = 3
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                for _ in range(runs):
                    jax.block_until_ready(compiled(*inputs))
            durations: dict[str, list[float]] = defaultdict(list)
            for kernel in read_kernels(Path(directory), {}):
                durations[kernel.name].append(kernel.microseconds)
        of_each = runs * len(inputs[1])
        return {name: statistics.median(each) * len(each) / of_each for name, each in durations.items()}


class Planned(NamedTuple):
    """A program to measure."""

    name: str
    rows: int
    method: str
    note: str
    program: Callable[..., Any]


def planned(bench: Bench, names: list[str], rows: int, sweeps: bool) -> list[Planned]:
    """XLA's products and layer, the kernel's with chosen tunings, and with others."""
    first, then = [], []
    for name in names:
        shape, tuning = bench.shapes[name], bench.shapes[name].tuning(rows)
        note = "{} rows × {} columns, {} stages, {} passes".format(*dataclasses.astuple(tuning))
        first.append(Planned(name, rows, "ours", note, alone(ours(shape, tuning))))
        for note, other in variants(shape, rows) if sweeps else ():
            then.append(Planned(name, rows, "ours", note, alone(ours(shape, other))))
        first.append(Planned(name, rows, "XLA", "", alone(xlas(shape))))
    for method, how in (("XLA", xlas), ("ours", ours)):
        first.append(Planned("layer", rows, method, "", of_layers(bench, how)))
    return first + then


def run(bench: Bench, names: list[str], rows: list[int], sweep: bool) -> None:
    """Measures one program after the other; XLA's are compiled alone, for that times kernels too."""
    plans = [case for number in rows for case in planned(bench, names, number, sweep and number == rows[0])]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = {
            place: pool.submit(bench.compiled, case.program, case.name, case.rows)
            for place, case in enumerate(plans)
            if case.method == "ours"
        }
        for place, case in enumerate(plans):
            compiled = jobs[place].result() if place in jobs else bench.compiled(case.program, case.name, case.rows)
            bench.measure(compiled, case.name, case.rows, case.method, case.note)


def of_layers(bench: Bench, product: Callable[[Shape], Product]) -> Callable[..., Any]:
    """Whole layers by one way of multiplying."""
    return layers({name: product(bench.shapes[name]) for name in OF_LAYER})


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[9, 16, 32], help="of x; --sweep is for the first")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--sweep", action="store_true", help="other tunings than those that are chosen, too")
    parser.add_argument("--tiny", action="store_true", help="small matrices, interpreted where there is no GPU")
    parser.add_argument("--json", type=Path, help="file for all rows")
    args = parser.parse_args()
    began = time.perf_counter()
    bench = Bench(TINY if args.tiny else SHAPES, 1 if args.tiny else COPIES)
    run(bench, args.shapes, args.rows, args.sweep)
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in bench.found], indent=1) + "\n")
    print(f"\n{this_device().kind}, {time.perf_counter() - began:.0f} s; µs a product, of a layer µs a layer")
    print(f"{'':<8} {'rows':>4} {'':<5} {'wall':>7} {'device':>7} {'bytes':>7} {'error':>8}")
    for row in sorted(bench.found, key=lambda row: (row.shape, row.rows, row.method != "XLA", row.wall)):
        print(row)


if __name__ == "__main__":
    main()
