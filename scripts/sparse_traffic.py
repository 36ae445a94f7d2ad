"""Bytes that a GPU's memory moves in the attention of a population's sparse layer: launches, and their counter.

A program goes over the pages of eight layers again and again, far more than the L2 holds, so that no call finds there
what the last one has read. All of what it moves is counted: KV, and scores, shares of results, tasks, queries. So each
program also runs with tasks whose units are those of few pages, which the L2 holds: then all is moved but KV.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from sparse_population import Population, handed_to

from smcjax.bench.dram import SECONDS, Calibration, MemoryCounter, calibrations
from smcjax.device import this_device
from smcjax.model.view import BatchView
from smcjax.pallas.sparse.grouped_attention import Branch, Tasks
from smcjax.sparse import groups as nsa_groups
from smcjax.sparse.verification import SparseVerification

WAYS = ("compressed", "compressed-no-scores", "selection-window", "layer")
LAYERS, TURNS = 8, 8  # that a program goes over, and how often
HOT_PAGES = 8  # whose units stand for all where KV is to come from the L2

Pools = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # keys, values, those of compressed tokens; of all layers


def pools_of(population: Population, layers: int) -> Pools:
    """Random keys and values of so many layers, whose pages follow each other."""
    layer = population.layer

    @jax.jit
    def made(key: jax.Array) -> Pools:
        def pool(key: jax.Array, slots: int) -> jax.Array:
            return jax.random.normal(key, (layers * population.pages, slots, layer.kv_heads, layer.dim), jnp.bfloat16)

        slots = (layer.page_size, layer.page_size, layer.compressed_page, layer.compressed_page)
        keys, values, *compressed = map(pool, jax.random.split(key, 4), slots)
        return keys, values, compressed[0], compressed[1]

    return made(jax.random.key(0))


def queries_of(population: Population) -> jax.Array:
    """Random queries of all rows."""
    shape = (*population.positions.shape, population.layer.heads, population.layer.dim)
    return jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)


def attend(
    population: Population,
    way: str,
    pools: Pools,
    view: BatchView,
    selected: jax.Array,
    q: jax.Array,
    index: jax.Array,
    pages: jax.Array,
) -> tuple[jax.Array, ...]:
    """Results of one of `WAYS` in the layer of this index, whose tasks name units of the first `pages` alone."""
    keys, values, *compressed = pools
    found: list[jax.Array] = []
    with redirected(index * population.pages, pages, keeps=way != "compressed-no-scores"):
        if way != "selection-window":
            routed = nsa_groups.rows_routed(population.kind, q, (compressed[0], compressed[1]), view, view.positions)
            found += [routed.output] + ([] if routed.selected is None else [routed.selected])
        if way in ("selection-window", "layer"):
            pairs = (keys, values, keys, values)
            chosen = nsa_groups.Chosen(selected)
            parts, _ = nsa_groups.rows_by_groups(population.kind, q, pairs, None, view, chosen, view.positions)
            found += [part.out for part in parts]
    return tuple(found)


def program(population: Population, way: str, layers: int, turns: int) -> Callable[..., tuple[jax.Array, ...]]:
    """Makes a program that goes over `layers`, `turns` times."""

    def run(pools: Pools, view: BatchView, selected: jax.Array, q: jax.Array, pages: jax.Array) -> Any:
        def once(number: jax.Array, _: Any) -> tuple[jax.Array, ...]:
            # As in a model, tasks of the selection are made for each layer, and those of spans once for all.
            number, chosen = jax.lax.optimization_barrier((number, selected))
            changed = q * (1 + number / 64).astype(q.dtype)
            return attend(population, way, pools, view, chosen, changed, number % layers, pages)

        results = jax.eval_shape(once, jnp.int32(0), None)
        empty = tuple(jnp.zeros(result.shape, result.dtype) for result in results)
        return jax.lax.fori_loop(0, layers * turns, once, empty)

    return run


def redirected(first: jax.Array, pages: jax.Array, *, keeps: bool) -> contextlib.AbstractContextManager[None]:
    """Lets tasks name the units of pages from `first` on, around within `pages`; without `keeps` no scores are kept."""
    run_scores, run_branches = nsa_groups.grouped_scores, nsa_groups.grouped_branches

    def within(tasks: Tasks, pool: jax.Array, unit: int) -> Tasks:
        in_page = pool.shape[1] // unit
        return tasks._replace(unit=(tasks.unit + first * in_page) % (pages * in_page))

    def scores(q: Any, keys: Any, values: Any, tasks: Tasks, groups: Any, *bounds: Any, unit: int, slots: int) -> Any:
        tasks = within(tasks, keys, unit)
        if keeps:
            return run_scores(q, keys, values, tasks, groups, *bounds, unit=unit, slots=slots)
        branch = Branch(keys, values, tasks, *bounds)
        (part,) = run_branches(q, (branch,), groups, units=(unit,))
        return part, jnp.zeros((*q.shape[:3], slots)), None

    def branches(q: Any, of: tuple[Branch, ...], groups: Any, *, units: tuple[int, ...], **options: Any) -> Any:
        of = tuple(
            one._replace(tasks=within(one.tasks, one.key_pages, unit)) for one, unit in zip(of, units, strict=True)
        )
        return run_branches(q, of, groups, units=units, **options)

    return handed_to(scores, branches)


@dataclasses.dataclass(frozen=True)
class Line:
    """Bytes and time of one call of a way."""

    queries: int  # of a group
    way: str
    us: float
    busy: float  # part of the multiprocessors that had work
    issued: int
    unique: int
    moved: float  # by the counter
    other: float  # the same where KV comes from the L2

    @property
    def kv(self) -> float:
        return self.moved - self.other

    def __str__(self) -> str:
        mb = (f"{number / 1e6:8.1f}" for number in (self.issued, self.unique, self.moved, self.other, self.kv))
        return f"{self.queries:4} {self.way:<22} {self.us:8.1f} {''.join(mb)} {self.kv / self.unique:6.2f}"


def measured(
    counter: MemoryCounter,
    scale: float,
    population: Population,
    ways: Sequence[tuple[SparseVerification, str]],
    *,
    layers: int = LAYERS,
    turns: int = TURNS,
    seconds: float = SECONDS,
) -> Iterator[Line]:
    """Yields the figures of each way as they come; `scale` is what `smcjax.bench.dram` calls so."""
    rest = (jnp.asarray(population.selected), queries_of(population))
    pools, slot = pools_of(population, layers), population.layer.slot
    everything, hot = jnp.int32(layers * population.pages), jnp.int32(HOT_PAGES)
    views = [population.view(sparse) for sparse, _ in ways]
    with ThreadPoolExecutor() as threads:
        compiling = []
        for view, (_, way) in zip(views, ways, strict=True):  # traced one by one: what kernels are is set meanwhile
            lowered = jax.jit(program(population, way, layers, turns)).lower(pools, view, *rest, everything)
            compiling.append(threads.submit(lowered.compile))
        reads = {sparse: population.reads(sparse) for sparse, _ in ways}
        programs = [future.result() for future in compiling]
    for (sparse, way), view, compiled in zip(ways, views, programs, strict=True):
        runs = [functools.partial(compiled, pools, view, *rest, pages) for pages in (everything, hot)]
        found = [counter.during(run, calls=layers * turns, seconds=seconds) for run in runs]
        issued, unique = (slot * number for number in reads[sparse].of_way(way))
        moved, other = (one.bytes(scale) for one in found)
        yield Line(sparse.queries, way, found[0].seconds * 1e6, found[0].busy, issued, unique, moved, other)


def measure(population: Population, ways: Sequence[tuple[SparseVerification, str]], path: Path | None) -> None:
    """Prints calibrations and lines, and writes them as they come."""
    lines: list[Line] = []

    def write(calibrated: list[Calibration]) -> None:
        if path is not None:
            about: dict[str, Any] = {"device": this_device().kind, "jax": jax.__version__, "layers": LAYERS}
            about |= {"calibrations": [dataclasses.asdict(one) for one in calibrated]}
            path.write_text(json.dumps(about | {"lines": [dataclasses.asdict(one) for one in lines]}, indent=1) + "\n")

    with MemoryCounter() as counter:
        calibrated = calibrations(counter)
        scale, sheet = calibrated[0].scale, this_device().bandwidth
        print(f"{this_device().kind}, jax {jax.__version__}: 100% of the counter is {scale / 1e12:.3f} TB/s", end="")
        print(f", of the data sheet's {sheet / 1e12:.2f}" if sheet else "")
        for one in calibrated:
            mb, share = one.traffic.bytes(scale) / 1e6, one.traffic.share
            print(f"  {one.name}: {one.known / 1e6:.1f} MB a call, counted {mb:.1f} MB, {share:.1%} of the bandwidth")
        write(calibrated)
        kept = population.positions.size * population.layer.heads * population.context // population.layer.kernel_stride
        print(f"MB a layer; scores that are kept: {4 * kept / 1e6:.1f} MB written, and as many read")
        columns = "".join(f"{name:>8}" for name in ("issued", "unique", "moved", "other", "KV"))
        print(f"{'C':>4} {'':<22} {'µs':>8} {columns}  ratio", flush=True)
        for line in measured(counter, scale, population, ways):
            lines.append(line)
            print(line, flush=True)
            write(calibrated)
    for size, kv, ratio in without_scores(lines):
        print(f"groups of {size}, no scores: {kv / 1e6:.1f} MB of KV a layer, {ratio:.2f} times what differs")


def without_scores(lines: Sequence[Line]) -> Iterator[tuple[int, float, float]]:
    """Yields, by group, bytes of KV and how often they are what differs, where no kept scores drive KV out of the L2.

    A layer's launches one by one, for groups of which both were measured.
    """
    found = {(line.queries, line.way): line for line in lines}
    for size in dict.fromkeys(line.queries for line in lines):
        both = [found[size, way] for way in WAYS[1:3] if (size, way) in found]
        if len(both) == 2:
            kv, unique = (sum(numbers) for numbers in zip(*((line.kv, line.unique) for line in both), strict=True))
            yield size, kv, kv / unique
