"""The benchmarks of sparse cycles and their quality: rows, bytes by the specification's table, and that they run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import bench_sparse as bench
import bench_sparse_quality as quality
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_rows as rows
import timed_rows as timed
from replayed_sets import watched, watching
from sparse_cycle_bytes import issued_bytes

from smcjax import SMC, Autoregressive, Rejection, SparseVerification
from smcjax.bench.cycle import Models
from smcjax.bench.table import synthetic_case
from smcjax.cli.bench_options import ON_CPU
from smcjax.sparse.nsa import NSA
from tests.bench.sparse_population import Layer, Population

pytestmark = pytest.mark.all_sizes


@pytest.mark.parametrize(
    ("context", "naive", "merged", "shared"),
    [(8192, 75, 16.8, 8.4), (32_768, 132, 23.1, 14.7), (65_536, 208, 31.5, 23.1)],
)
def test_issued_bytes(context: int, naive: float, merged: float, shared: float) -> None:
    """A layer of the 8B model, nine queries, neighbours that share three quarters of their blocks; in MB."""
    config = Models("llama-3.1-8b", "llama-3.2-1b", attention="nsa-shared").target_config
    config = dataclasses.replace(config, num_layers=1)
    for sparse, expected in (
        (None, naive),
        (SparseVerification("merged", 9), merged),
        (SparseVerification("shared", 9), shared),
    ):
        found = issued_bytes(config, Rejection(8, sparse=sparse), context, 0.75)
        assert found / 1e6 == pytest.approx(expected, rel=0.012)
    alone = issued_bytes(config, Autoregressive(), context, 0.75)
    assert alone * 9 == issued_bytes(config, Rejection(8), context, 0.75)
    dense = dataclasses.replace(Models("llama-3.1-8b", "llama-3.2-1b").target_config, num_layers=1)
    assert issued_bytes(dense, Rejection(8), context, 0.75) == 4096 * context


@pytest.mark.parametrize(("overlap", "of_all"), [(0.7, 30.4 / 64), (0.75, 0.4375), (0.9, 0.325)])
def test_a_groups_union_is_the_reviews_formula(overlap: float, of_all: float) -> None:
    """Blocks of four queries' union, of the 64 that they load one by one: the review's three worked examples."""
    config = Models("llama-3.1-8b", "llama-3.2-1b", attention="nsa-shared").target_config
    config = dataclasses.replace(config, num_layers=1)
    four = Rejection(3, sparse=SparseVerification("merged", 4))
    more = issued_bytes(config, four, 65_536, overlap) - issued_bytes(config, four, 65_536, 1.0)
    assert (16 + more / (4096 * 64)) / 64 == pytest.approx(of_all, abs=1e-7)  # bytes are whole


def test_a_population_reads_little_that_is_not_unique() -> None:
    """SMC, N = 8 and K = 8 at 64 Ki positions: by the layer's own tasks within 1.3 times what differs; and by formula.

    Control: compressed tokens are read once a group, so groups of 16 read too much.
    """
    config = Models("llama-3.1-8b", "llama-3.2-1b", attention="nsa-shared").target_config
    config, layer, own = dataclasses.replace(config, num_layers=1, num_heads=4, num_kv_heads=1), Layer(4, 1), 256
    population = Population(layer, 65_536, 8, 9, own, 0.75)
    ratios = []
    for group in (72, 16):
        sparse = SparseVerification("merged", group)
        reads = population.reads(sparse)
        assert 4095 <= reads.compressed / -(-72 // group) <= 4096 * 1.1
        ratios.append(reads.issued / reads.unique)
        formula = issued_bytes(config, SMC(8, 8, sparse=sparse), 65_536, 0.75, own)
        assert formula == pytest.approx(reads.issued * layer.slot, rel=0.1)
    assert 1 <= ratios[0] <= 1.3 < ratios[1]


def test_rows() -> None:
    names = {name: [line.name for line in lines(8, 32, rows.DRAFTS)] for name, lines in rows.BENCHMARKS.items()}
    assert names["spacing"] == [f"spacing {spacing}" for spacing in (1, 2, 4, 8, 32)]
    assert names["groups"] == [f"merged by {size}" for size in (1, 2, 4, 8, 9)]
    assert names["verify"][:4] == ["one by one", "merged", "merged, first layer selects", "by XLA"]
    nodes = [line.decoding.speculation.scored for line in rows.verify_lines(8, 32, ())[4:]]
    assert nodes == [4, 40, 40]  # of the review: 1 + 3 + 9 + 27
    assert names["cycles"][:3] == ["dense, target alone", "sparse, target alone", "dense, speculation, free drafts"]
    assert len(set(names["cycles"])) == 2 + 5 * len(rows.DRAFTS) + 2
    assert rows.calibrated(8) == tuple(map(bool, rows.CALIBRATED))
    assert [index for index, selects in enumerate(rows.calibrated(32)) if selects] == [0, 1, 2, 3, 24, 25, 26, 27]
    assert all(rows.calibrated(layers)[0] for layers in range(1, 40))
    alone = rows.spacing_lines(8, 1, ())
    assert [line.decoding.speculation.sparse for line in alone] == [SparseVerification("merged", 9)]


def updates(contexts: np.ndarray) -> list[int]:
    """Compressed tokens that are complete in each of 16 cycles of nine positions, of requests that gain one a cycle."""
    found = []
    for cycle in range(16):
        positions = jnp.asarray(contexts[:, None] + cycle + np.arange(9))
        _, complete = NSA().new_compressed_tokens(
            SimpleNamespace(positions=positions, write_pages=jnp.ones_like(positions))
        )
        found.append(int(complete.sum()))
    return found


def test_requests_of_a_batch_update_at_different_times() -> None:
    """About as many requests complete one in each cycle, 9 cycles of 16 each. Control: those of one length, at once."""
    assert set(updates(timed.contexts_of(65_536, 8))) == {4, 5}
    assert set(updates(np.full(8, 65_536))) == {0, 8}
    for requests in (1, 2, 3, 8, 32):
        contexts = timed.contexts_of(65_536, requests)
        assert contexts[0] == 65_536
        assert np.ptp(contexts) < 16
        assert sum(updates(contexts)) == 9 * requests


def test_a_row_begins_without_reading_prompts() -> None:
    """Its requests run from the first cycle on, at lengths of their own; all programs but a cycle's are of integers.

    Control: the engine has one that reads prompts, and requests that have joined do not run yet.
    """
    models = Models(*ON_CPU, attention=rows.SPARSE)
    (line,) = (line for line in rows.cycle_lines(8, 2, ["lookup"]) if line.name == "sparse, merged, free drafts")
    case = synthetic_case(line.decoding, 8, 256, page_size=16, implementation="auto", windows=1, cycles=16)
    row = timed.LineBench(line, models, case, models.target_params("auto"), {})
    jobs = row.wanted().jobs
    assert sorted(key[-1] for key in jobs) == ["empty", "join", "step"]
    assert any(key[-1] == "prefill" for key in row.runner.jobs(8, row.runner.program))
    row.runner.programs.compile("to begin", {key: job for key, job in jobs.items() if key[-1] != "step"})
    row.start()
    state = row.runner.state
    np.testing.assert_array_equal(state.sequences.length, 257 - 2 * np.arange(8))
    assert state.running.all()
    row.runner.join(row.batch, {})
    assert not row.runner.state.running.any()
    row.runner.discard()


@pytest.mark.slow
def test_replayed_sets_are_counted_without_a_program() -> None:
    """A row says of its next cycle what a program gives back that takes it; only other rows have one.

    Control: those of other positions.
    """
    models, lines = Models(*ON_CPU, attention=rows.SPARSE), rows.cycle_lines(8, 2, ["lookup"])
    (plain,) = (line for line in lines if line.name == "sparse, merged, free drafts")
    weights = models.target_params("auto")

    def row(line: rows.Line) -> timed.LineBench:
        case = synthetic_case(line.decoding, 2, 2048, page_size=64, implementation="auto", windows=1, cycles=16)
        return timed.LineBench(line, models, case, weights, {}, counts=True)

    assert "count" in {key[-1] for key in row(plain).wanted().jobs}
    replayed = row(plain.with_sets([0.75])[1])
    jobs = replayed.wanted().jobs
    assert "count" not in {key[-1] for key in jobs}
    (step,) = (job for key, job in replayed.runner.jobs(2, replayed.runner.program).items() if key[-1] == "step")
    reads = step._replace(function=watched(step.function, replayed._replay, gives_sets=True), identity=None)
    with watching():  # until all programs are traced, some when they are called
        replayed.runner.programs.compile("to begin and to read", {**jobs, "reads": reads})
        replayed.start()
        replayed.runner.step(replayed.runner.program)
        said = replayed._count()
        _, read = replayed.runner.programs["reads"](replayed.runner.params, replayed.runner.state)
    np.testing.assert_array_equal(said.positions, read.positions)
    blocks = said.selected.shape[-1]
    np.testing.assert_array_equal(said.selected, read.selected[..., :blocks])
    assert not read.selected[..., blocks:].any()
    assert not np.array_equal(replayed._replay.counted(said.positions - 32).selected, read.selected[..., :blocks])
    replayed.runner.discard()


def test_acceptance_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    """From given fractions; the first of them for fewer drafts; none for what rejects nothing."""
    args = bench.arguments(["cycles", "--tiny", "--gamma", "3", "--reached", "0.5", "0.25", "0.125"])
    reached, source = bench.replayed(args)
    assert (reached, source) == ([0.5, 0.25, 0.125], "as given")
    assert bench.tokens_per_round(Rejection(2), reached) == 1.75
    assert bench.tokens_per_round(SMC(4, 3, control=0), reached) == 4
    assert bench.tokens_per_round(Autoregressive(), reached) == 1
    with pytest.raises(SystemExit):
        bench.arguments(["cycles", "--tiny", "--gamma", "4", "--reached", "0.5"])
    assert "--reached must have a fraction for each of 4 drafts, got 1." in capsys.readouterr().err


def test_agreement_and_thirds() -> None:
    assert quality.agreement([[1, 2, 3, 4], [5]], [[1, 2, 9, 4], [5]]) == (0.8, 1.5)
    assert quality.agreement([[1, 2]], [[1, 2, 3]]) == (2 / 3, 2.0)
    assert quality.thirds([[True] * 2 + [False] * 4, [True, True, True]]) == [1.0, 1 / 3, 1 / 3]
    found = quality.contenders(["merged", "per_query"], [4, 8], [1, 2], 3)
    assert len(found) == 2 * (1 + 2 + 1)
    assert all(one.speculation.sparse is None or measure.exact for one, measure in found)
    assert quality.contenders(["merged"], [4], [(True, False)], 3)[1] == (
        Rejection(3, sparse=SparseVerification("merged", 4, schedule=(True, False))),
        Autoregressive(SparseVerification(schedule=(True, False))),
    )
    assert found[4][0] == found[4][1] == Autoregressive(SparseVerification(schedule=2))


@pytest.mark.slow
def test_it_runs_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--save", str(tmp_path / "out.json"))
    assert bench.main(["verify", "--tiny", "--quantization", "int8", "--gamma", "2", "--only", "merged", *files]) == 0
    out = capsys.readouterr().out
    assert "Acceptance is assumed, 0.8 of each draft" in out
    assert "of a verification" in out
    lines = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [line["name"] for line in lines] == ["merged", "merged, first layer selects"]
    assert all(line["ms"] > 0 and 0 < line["unique_bytes"] <= line["issued_bytes"] for line in lines)
