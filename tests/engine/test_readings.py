"""Readings of a sparse target's blocks that take turns by a profile: they change, and no token of any seed does."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from smcjax import LLM, Auto, Autoregressive, Rejection, SamplingParams, SparseVerification
from smcjax.decoders import Decoding
from smcjax.engine.load import choice
from smcjax.engine.load.fingerprints import fingerprints
from smcjax.engine.schedule.page_budget import Footprint
from smcjax.planner import Planner, Profile, Switch, switch
from tests.checkpoints import Pair, write_model
from tests.engine.conftest import MAX_MODEL_LEN
from tests.engine.test_engine import sound
from tests.engine.test_nsa import OF_SPARSE, PARAMS, PROMPTS, in_short_chunks
from tests.planner.tables import measured
from tests.sizes import all_sizes

ALONE = Autoregressive()
FORKING = Rejection(2, n_candidates=2)  # candidates fork pages
SINGLE, MERGED = (
    dataclasses.replace(FORKING, sparse=SparseVerification(*how)) for how in (("per_query",), ("merged", 4, "dfs"))
)
TIMES: dict[Decoding, dict[int, float]] = {ALONE: {1: 9.0, 2: 9.0}, SINGLE: {1: 1.0, 2: 2.0}, MERGED: {1: 2.0, 2: 1.0}}
FIELDS: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2, "page_size": 4}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    where = tmp_path_factory.mktemp("sparse")
    target = write_model(where / "target", 272, 1, **OF_SPARSE)
    return Pair(target, write_model(where / "draft", 264, 2, hidden_size=12))


@pytest.fixture(scope="module")
def base(sparse: Pair) -> Iterator[LLM]:
    """By one reading."""
    with LLM(sparse.target, draft_model=sparse.draft, decoding=SINGLE, **FIELDS) as base:
        yield in_short_chunks(base)


@pytest.fixture(scope="module")
def fixed(base: LLM) -> list[list[int]]:
    """The answers by one reading."""
    return [output.outputs[0].token_ids for output in base.generate(PROMPTS, PARAMS, use_tqdm=False)]


def profile_of(base: LLM, times: dict[Decoding, dict[int, float]], path: Path) -> Path:
    """A profile file of the base's models, in which cycles take so many milliseconds by load."""
    whose = fingerprints(base.models)
    rows = tuple(measured(one, of_load, context=16) for one, of_load in times.items())
    Profile(whose.device, whose.model, whose.draft, rows, jax="0").save(path)
    return path


def answers(llm: LLM, asked: Sequence[SamplingParams] = PARAMS) -> list[list[int]]:
    """The answers to requests that arrive one by one, every few steps; pages are sound after each."""
    engine, names, found = in_short_chunks(llm).engine, list[str](), dict[str, list[int]]()
    todo = [llm.request(prompt, params) for prompt, params in zip(PROMPTS, asked, strict=True)]
    while todo or engine.busy:
        if todo:
            names.append(todo[0].request_id)
            engine.add_request(todo.pop(0))
        for _ in range(5):
            found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
            sound(engine)
    assert llm.metrics()["kv_pages_free"] == llm.metrics()["kv_pages_total"]
    return [found[name] for name in names]


@pytest.mark.slow
def test_the_load_decides_and_no_token_changes(base: LLM, fixed: list[list[int]], tmp_path: Path) -> None:
    """Single queries are read while one request runs, groups while two do, also where a request begins again."""
    few = 4 + Footprint.of(SINGLE, 4).worst_case(1, MAX_MODEL_LEN)
    path = profile_of(base, TIMES, tmp_path / "p.json")
    fields = {**FIELDS, "admission": "optimistic", "num_pages": few}
    with all_sizes(), LLM(share=base, decoding=Auto(profile=path), **fields) as llm:
        assert llm.decoding == SINGLE
        in_short_chunks(llm).warm_up(use_tqdm=False)  # or the first one runs in a batch for two
        compiled = llm.metrics()["compilations"]
        assert answers(llm) == fixed
        assert llm.metrics()["compilations"] == compiled
        cycles = llm.batch_cycles
        assert list(cycles) == [str(SINGLE), str(MERGED)]
        assert min(cycles.values()) > 3
        assert llm.metrics()["preemptions"] > 0


class Scripted(Switch):
    """Chooses at random, a few cycles at a time."""

    rng = random.Random(7)
    left = 0

    def choose(self, slots: int, context: float) -> Decoding:
        if not self.left:
            self._present, self.left = self.rng.choice(self.readings), self.rng.randint(1, 4)
        self.left -= 1
        assert self._present is not None
        return self._present


def in_turns(base: LLM, choices: tuple[Decoding, ...], where: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An `LLM` whose cycles have these readings by turns at random."""
    path = profile_of(base, {one: {1: 1.0} for one in choices}, where / "p.json")
    monkeypatch.setattr(choice, "Switch", Scripted)
    monkeypatch.setattr(choice, "readings", lambda *_: choices)
    monkeypatch.setattr(Planner, "best", lambda *_: choices[0])
    return LLM(share=base, decoding=Auto(profile=path), **FIELDS)


ASKED = [dataclasses.replace(one, temperature=0.0) if one.seed in (1, 4) else one for one in PARAMS]  # two are greedy


@pytest.fixture(scope="module")
def by_one_reading(base: LLM) -> list[list[int]]:
    """The answers to these, all cycles read alike."""
    return answers(base, ASKED)


@pytest.mark.slow
def test_readings_at_random_change_no_token(
    base: LLM, by_one_reading: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of two strict readings each cycle has, seeds have the tokens of one reading, twice.

    Prompts share cached pages.
    """
    with in_turns(base, (SINGLE, MERGED), tmp_path, monkeypatch) as llm:
        assert answers(llm, ASKED) == by_one_reading
        assert answers(llm, ASKED) == by_one_reading
        assert list(llm.batch_cycles) == [str(SINGLE), str(MERGED)]
        assert min(llm.batch_cycles.values()) > 3
        assert llm.metrics()["prefix_cache_hits"] > 0


@pytest.mark.slow
def test_no_reading_is_of_another_class(
    base: LLM, by_one_reading: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that shares blocks and one that reuses them are refused; among the others, the first changes tokens."""
    shared, reused = (
        dataclasses.replace(FORKING, sparse=one)
        for one in (SparseVerification("shared", 4), SparseVerification(schedule=2))
    )
    for others in ((SINGLE, shared), (SINGLE, reused), (FORKING, Rejection(4))):
        with pytest.raises(ValueError, match=r"^readings must give the same tokens"):
            in_turns(base, others, tmp_path, monkeypatch)
    monkeypatch.setattr(switch, "same_tokens", lambda *_: True)
    with in_turns(base, (SINGLE, shared), tmp_path, monkeypatch) as llm:
        assert answers(llm, ASKED) != by_one_reading
        assert min(llm.batch_cycles.values()) > 3


def test_one_decoder_is_chosen(base: LLM, tmp_path: Path, sparse: Pair) -> None:
    """The best in the mean over loads, whose tokens are those of the same decoder by name; alone it needs no draft."""
    times = {ALONE: {1: 9.0, 2: 1.0}, Rejection(2): {1: 1.0, 2: 1.6}, Rejection(3): {1: 2.0, 2: 9.0}}
    path = profile_of(base, times, tmp_path / "p.json")
    with LLM(share=base, decoding=Auto(profile=path), **FIELDS) as llm:
        assert llm.decoding == Rejection(2)
        assert llm.engine.runner.readings == (Rejection(2),)
        assert llm.batch_cycles == {str(Rejection(2)): 0}
    path = profile_of(base, {**times, ALONE: {1: 0.1, 2: 0.1}}, tmp_path / "q.json")
    with LLM(sparse.target, decoding=Auto(profile=path), **FIELDS) as llm:
        assert llm.decoding == ALONE
        assert llm.models.draft is None


def test_what_is_refused(base: LLM, tmp_path: Path, sparse: Pair) -> None:
    path = profile_of(base, {Rejection(3): {1: 1.0}}, tmp_path / "p.json")
    of_pair: dict[str, Any] = {"draft_model": sparse.draft}
    with pytest.raises(ValueError, match=r"^profile must be the path of a file, or None, got 3\.$"):
        Auto(profile=3)
    with pytest.raises(ValueError, match=r"^profile chooses among exact decoders, and a population is asked for"):
        LLM(sparse.target, decoding=Auto(n_particles=4, profile=path), **of_pair)
    with pytest.raises(ValueError, match=r"^profile has no strategy of the law 'exact' with gamma 7"):
        LLM(sparse.target, decoding=Auto(gamma=7, profile=path), **of_pair)
    with pytest.raises(ValueError, match=r"^profile '.*none' does not exist"):
        LLM(sparse.target, decoding=Auto(profile=tmp_path / "none"), **of_pair)
    with pytest.raises(ValueError, match=r"^profile is of another draft_model, or of this one in another dtype"):
        LLM(sparse.target, decoding=Auto(profile=path), draft_model=sparse.target)
