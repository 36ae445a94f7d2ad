"""Describes measurements: strategies, prompts of a length, and what is said where something does not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from smcjax import LLM, Autoregressive, Rejection, SparseVerification
from smcjax.bench import profile
from smcjax.bench.profile import Plan, Profiler, strategies
from smcjax.decoders import Decoding
from smcjax.engine.load.fingerprints import fingerprints
from smcjax.planner import Cell, Counted, Measured, Planner, Profile
from smcjax.planner.report import markdown
from tests.checkpoints import Pair, write_model, write_pair
from tests.engine.test_nsa import OF_SPARSE

SMALL = Plan((Autoregressive(), Rejection(2)), loads=(1, 2), contexts=(8,), cycles=2, windows=2, max_tokens=12)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def models(pair: Pair, **changes: Any) -> dict[str, Any]:
    return {"model": pair.target, "draft_model": pair.draft, "page_size": 4, **changes}


def test_strategies_of_sparse_targets() -> None:
    """The target alone once a schedule."""
    merged, reusing = SparseVerification("merged", 4), SparseVerification("merged", 4, schedule=2)
    given = [Rejection(2, sparse=one) for one in (merged, reusing)]
    assert strategies(given) == (Autoregressive(), Autoregressive(SparseVerification(schedule=2)), *given)


def test_loads_are_sizes_of_batches() -> None:
    assert Plan((Autoregressive(),), loads=(1, 2, 4, 6)).loads == (1, 2, 4, 6)
    with pytest.raises(ValueError, match=r"^requests must be powers of two, but for the largest, as .* got 3; leave"):
        Plan((Autoregressive(),), loads=(1, 3, 8))


def test_prompts_count_at_the_nearest_context() -> None:
    """In logarithm; a context that no prompt is nearest to has none. Control: nearest in tokens would be another."""
    prompts = [[1] * length for length in (600, 3, 1000, 9)]
    assert profile._by_context((8, 512, 2048, 9000), prompts) == {8: [prompts[1], prompts[3]], 512: prompts[:3:2]}
    assert profile._nearest((512, 2048), 1100) == 2048, "1,100 is nearer to 512 in tokens"


@pytest.mark.slow
def test_measuring(pair: Pair) -> None:
    heard: list[str] = []
    with Profiler(dataclasses.replace(SMALL, loads=(1,), contexts=(2, 8)), models(pair), heard.append) as profiler:
        made = profiler.measure(["a", "bc", "abcdefgh"])
        whose = fingerprints(profiler._base.models)
    assert (made.device, made.model, made.draft) == (whose.device, whose.model, whose.draft)
    assert made.settings["page_size"] == 4
    assert [one.decoding for one in made.strategies] == list(SMALL.strategies)
    alone, drafting = made.strategies
    assert [one.prompts for one in alone.counted] == [(1.0, 1.0), (1.0,)]
    assert [(one.context, len(one.prompts)) for one in drafting.counted] == [(2, 2), (8, 1)]
    assert all(1 <= one.tokens_per_cycle <= 3 for one in drafting.counted)
    assert [(cell.requests, cell.context, len(cell.windows)) for cell in alone.cells] == [(1, 2, 2), (1, 8, 2)]
    assert all(cell.ms > 0 for one in made.strategies for cell in one.cells)
    assert len(heard) == 2 * 2 * 2
    assert "[2/2] rejection, K=2: 1 running, 2 tokens:" in heard[4]
    assert "[2/2] rejection, K=2: 8 tokens: " in heard[7]
    assert Planner(made).strategies("exact") == [alone.decoding, drafting.decoding]


def sparse(**how: Any) -> SparseVerification:
    return SparseVerification("merged", **how)


SPARSE: tuple[Decoding, ...] = (
    Rejection(tree=(2, 1), sparse=sparse(group=2, order="dfs")),
    Rejection(tree=(2, 1), sparse=sparse(group=2, order="position")),
    Rejection(tree=(3,), order="dfs", sparse=sparse(group=3)),
    Rejection(2, sparse=sparse(group=3, schedule=2)),
)


@pytest.fixture(scope="module")
def sparse_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    where = tmp_path_factory.mktemp("sparse")
    target = write_model(where / "target", 272, 1, num_layers=2, **OF_SPARSE)
    return Pair(target, write_model(where / "draft", 264, 2, hidden_size=12))


def test_trees_groups_orders_and_schedules_of_a_sparse_target(
    sparse_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is measured under a name of its own, ranked in its class at each context, and read back."""

    def measured(profiler: Profiler, name: str, decoding: Any, prompts: Any) -> Measured:
        counted, cells = zip(*((Counted(at, 1.0), Cell(1, at, 1.0)) for at in profiler.plan.contexts), strict=True)
        return Measured(decoding, counted, cells)

    monkeypatch.setattr(Profiler, "_strategy", measured)
    plan = dataclasses.replace(SMALL, strategies=strategies(SPARSE), loads=(1,), contexts=(4, 32), windows=1)
    with Profiler(plan, models(sparse_pair)) as profiler:
        made = profiler.measure(["ab", "a" * 32])
    assert not made.left_out
    assert [one.decoding for one in made.strategies[2:]] == [*SPARSE]
    assert len({str(one.decoding) for one in made.strategies}) == 6
    assert [[one.context for one in strategy.counted] for strategy in made.strategies] == [[4, 32]] * 6
    planner, text = Planner(made), markdown(made)
    assert planner.strategies("exact") == [Autoregressive(), *SPARSE[:3]]
    assert planner.strategies("exact, blocks by schedule 2") == [made.strategies[1].decoding, SPARSE[3]]
    assert text.count("Best over the loads") == 2 * 2
    assert all(f"| {one} |" in text for one in SPARSE)
    made.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == made


def test_a_schedule_that_does_not_fit_is_refused_before_anything_is_measured(sparse_pair: Pair) -> None:
    plan = dataclasses.replace(SMALL, strategies=(Rejection(2), Rejection(2, sparse=sparse(schedule=(True,) * 3))))
    with pytest.raises(ValueError, match=r"^schedule must have a flag for each of the target's sparse layers, 2 in"):
        Profiler(plan, models(sparse_pair))


def test_all_strategies_have_pages_of_one_size(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody says how large they are: what is usual for all of them, and what the profile says."""
    asked = []
    monkeypatch.setattr(profile, "default_page_size", lambda decodings, *_: asked.append(decodings) or 8)
    seen = []

    def measured(profiler: Profiler, name: str, decoding: Any, prompts: Any) -> Measured:
        seen.append(profiler._own["page_size"])
        return Measured(decoding, (Counted(8, 1.0),), (Cell(1, 8, 1.0),))

    monkeypatch.setattr(Profiler, "_strategy", measured)
    with Profiler(SMALL, models(pair, page_size=None)) as profiler:
        assert profiler.measure(["a"]).settings["page_size"] == 8
    assert (asked, seen) == ([SMALL.strategies], [8, 8])


@pytest.mark.slow
def test_what_is_left_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that memory has no room for, and what the budget does not reach: whole strategies, with the reason."""
    strategies = (Autoregressive(), Rejection(2, n_candidates=8), Rejection(2, n_candidates=2))
    with Profiler(dataclasses.replace(SMALL, strategies=strategies), models(pair, num_pages=29)) as profiler:
        cell, times = profiler._cell, iter((1.0, 2.0))

        def measured(llm: LLM, prompts: Any, context: int, load: int) -> Cell:
            return cell(llm, prompts, context, load) if llm.decoding.drafts else Cell(load, context, next(times))

        monkeypatch.setattr(profiler, "_cell", measured)
        made = profiler.measure(["a"])
    assert [one.decoding for one in made.strategies] == [Autoregressive()]
    largest, larger = made.left_out
    assert largest["strategy"] == "rejection, K=2, 8 candidates"
    assert largest["why"].startswith("one request of 8 tokens cannot run: it may need 29 KV pages and there are 28")
    assert larger["why"] == "2 running may need 34 KV pages and there are 28"
    with (
        Profiler(dataclasses.replace(SMALL, budget=1e-9), models(pair)) as profiler,
        pytest.raises(ValueError, match=r"^no strategy could be measured \(the budget of 1e-09 s was used up\); raise"),
    ):
        profiler.measure(["a"])
    with pytest.raises(ValueError, match=r"^contexts of 1000 tokens grow to \d+ while they are timed and the longest"):
        Profiler(dataclasses.replace(SMALL, contexts=(1000,)), models(pair))


def test_strategies_read_as_an_engine_would(sparse_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody says how: the profile says it of each, as engines by load read as it says."""
    merged = SparseVerification("merged", 2)
    monkeypatch.setattr(
        profile, "default_sparse_mode", lambda decoding, *_: dataclasses.replace(decoding, sparse=merged)
    )
    read = []

    def measured(profiler: Profiler, name: str, decoding: Any, prompts: Any) -> Measured:
        read.append(decoding.speculation.sparse)
        return Measured(decoding, (Counted(8, 1.0),), (Cell(1, 8, 1.0),))

    monkeypatch.setattr(Profiler, "_strategy", measured)
    plan = dataclasses.replace(SMALL, strategies=(Rejection(2), Rejection(3)))
    with Profiler(plan, models(sparse_pair)) as profiler:
        assert [one.decoding for one in profiler.measure(["a"]).strategies] == [
            Rejection(gamma, sparse=merged) for gamma in (2, 3)
        ]
    assert read == [merged, merged]
