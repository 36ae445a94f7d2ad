"""A population's launches read the pages that they are to read, and lines are those made by hand."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import count_sparse_reads as count
import sparse_traffic as traffic
from bench_sparse_attention import Layer
from sparse_population import Population

from smcjax import SparseVerification
from smcjax.bench.dram import Calibration, MemoryCounterError, Traffic

LAYERS = 2
GROUPED = SparseVerification("merged", 4)


@functools.cache
def population() -> Population:
    """Two particles of three queries, with a page of their own each."""
    return Population(Layer(heads=2, kv_heads=1, dim=64, num_blocks=4, window=32), 512, 2, 3, 100, 0.5)


@functools.cache
def pools() -> Any:
    return traffic.pools_of(population(), LAYERS)


def attended(way: str, index: int, pages: int, of: Any = None) -> list[np.ndarray]:
    made = population()
    attend = jax.jit(functools.partial(traffic.attend, made, way))
    found = attend(
        of or pools(),
        made.view(GROUPED),
        jnp.asarray(made.selected),
        traffic.queries_of(made),
        jnp.int32(index),
        jnp.int32(pages),
    )
    return [np.asarray(x) for x in found]


def everything() -> int:
    return LAYERS * population().pages


@pytest.mark.parametrize("way", traffic.WAYS)
def test_a_layer_reads_its_own_pages(way: str) -> None:
    """The second layer's results are those of its pages alone, of few pages those of pools that repeat them.

    Controls: the first layer's, and all pages', are other results.
    """
    size = population().pages
    its = attended(way, 1, everything())
    assert len(its) == {"selection-window": 2, "layer": 3}.get(way, 1)
    alone = attended(way, 0, size, tuple(pool[size:] for pool in pools()))
    assert all(map(np.array_equal, its, alone))
    assert not any(map(np.array_equal, its, attended(way, 0, everything())))

    few = attended(way, 1, 2)
    repeated = tuple(pool[np.arange(everything()) % 2] for pool in pools())
    assert all(map(np.array_equal, few, attended(way, 1, everything(), repeated)))
    assert not any(map(np.array_equal, few, its))


def test_scores_or_none_the_output_is_one() -> None:
    (with_scores,), (without,) = (attended(way, 1, everything()) for way in traffic.WAYS[:2])
    np.testing.assert_allclose(with_scores, without, rtol=1e-6)


def test_results_are_those_of_the_last_call() -> None:
    """A program over two layers, three times, returns those of the sixth call, of the second layer."""
    made, way = population(), "layer"
    arguments = (made.view(GROUPED), jnp.asarray(made.selected))
    run = jax.jit(traffic.program(made, way, LAYERS, 3))
    q = traffic.queries_of(made)
    found = run(pools(), *arguments, q, jnp.int32(everything()))
    one = jax.jit(functools.partial(traffic.attend, made, way))
    last = (q * (1 + jnp.float32(5) / 64).astype(q.dtype), jnp.int32(5 % LAYERS), jnp.int32(everything()))
    for got, want in zip(found, one(pools(), *arguments, *last), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


class Counter:
    """A counter of a memory of 1 TB/s that moves 3 MB a call, and 1 MB where the L2 has KV."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def during(self, run: Callable[[], Any], *, calls: int, seconds: float) -> Traffic:
        self.results.append(run())
        assert calls == LAYERS * 2
        return Traffic((0.3, 0.1)[(len(self.results) - 1) % 2], 0.8, 1e-5)


def test_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way runs over all pages and over few; what remains is KV. They are written as they come."""
    counter = Counter()
    known = Calibration("reads", 1_000_000, Traffic(0.5, 1.0, 2e-6))
    monkeypatch.setattr(traffic, "MemoryCounter", lambda: counter)
    monkeypatch.setattr(traffic, "calibrations", lambda _: [known])
    monkeypatch.setattr(traffic, "measured", functools.partial(traffic.measured, layers=LAYERS, turns=2))
    ways = [(GROUPED, "compressed"), (GROUPED, "layer")]
    traffic.measure(population(), ways, tmp_path / "bytes.json")
    found = json.loads((tmp_path / "bytes.json").read_text())
    assert found["calibrations"][0]["known"] == 1_000_000
    reads = population().reads(GROUPED)
    for line, (_, way) in zip(found["lines"], ways, strict=True):
        assert (line["queries"], line["way"]) == (4, way)
        assert line["us"] == pytest.approx(10)
        assert (line["issued"], line["unique"]) == tuple(256 * slots for slots in reads.of_way(way))
        assert (line["moved"], line["other"]) == (pytest.approx(3e6), pytest.approx(1e6))
    assert reads.of_way("layer") == (reads.issued, reads.unique)
    assert reads.unique == sum(population().unique())
    all_pages, few = counter.results[:2]
    assert not np.array_equal(all_pages[0], few[0])
    said = capsys.readouterr().out
    ratio = 2e6 / found["lines"][1]["unique"]
    assert f"100% of the counter is {1.0:.3f} TB/s" in said
    assert said.splitlines()[-1].endswith(f"{3:8.1f}{1:8.1f}{2:8.1f} {ratio:6.2f}")


def test_kv_without_scores() -> None:
    """3 MB of 2 and 5 of 4: 8 of 6. Of groups of 1 one launch is missing."""
    lines = [
        traffic.Line(16, "compressed", 1.0, 1.0, 9_000_000, 2_000_000, 9e6, 1e6),
        traffic.Line(16, "compressed-no-scores", 1.0, 1.0, 9_000_000, 2_000_000, 4e6, 1e6),
        traffic.Line(16, "selection-window", 1.0, 1.0, 9_000_000, 4_000_000, 5.5e6, 0.5e6),
        traffic.Line(1, "selection-window", 1.0, 1.0, 9_000_000, 4_000_000, 5.5e6, 0.5e6),
    ]
    assert list(traffic.without_scores(lines)) == [(16, 8e6, pytest.approx(8 / 6))]


def test_refusals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU, and where the counter says no."""
    with pytest.raises(SystemExit) as refused:
        count.main(["--measure"])
    assert refused.value.code == 2
    assert "there is no Hopper GPU here; run it on one, or without --measure." in capsys.readouterr().err

    def measure(*_: Any) -> None:
        raise MemoryCounterError("NVML says no.")

    monkeypatch.setattr(count, "uses_kernels", lambda: True)
    monkeypatch.setattr(count, "measure", measure)
    with pytest.raises(SystemExit, match=r"^count_sparse_reads: NVML says no\.$"):
        count.main(["--measure", "--context", "1024"])
