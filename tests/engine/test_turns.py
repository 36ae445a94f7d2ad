"""Decoders that take turns on one batch: answers keep their law, drafts are caught up, nothing is left behind."""

from __future__ import annotations

import collections
import dataclasses
import random
import re
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smcjax import LLM, SMC, Auto, Autoregressive, Rejection, RequestOutput, SamplingParams
from smcjax.decoders import Decoding
from smcjax.engine.fingerprints import fingerprints
from smcjax.engine.narrowing import can_advance
from smcjax.model import save_checkpoint
from smcjax.planner import Planner, Profile, Switch
from tests import exact
from tests.checkpoints import Pair
from tests.engine.conftest import MAX_MODEL_LEN
from tests.engine.test_engine import prompt, sound
from tests.helpers import Ask, tiny_pair
from tests.planner.tables import measured
from tests.sizes import all_sizes
from tests.smc.reference import language_model

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))

import soak

ALONE = Autoregressive()
STRATEGIES: tuple[Decoding, ...] = (ALONE, Rejection(3), Rejection(2, n_candidates=2))
WIDEST = Rejection(3, n_candidates=2)


class Scripted(Switch):
    """Chooses at random, a few cycles at a time, and keeps what it chose; hears nothing."""

    def __init__(self, strategies: tuple[Decoding, ...], seed: int) -> None:
        everything = Profile("", "", None, tuple(measured(one, {1: 1.0}) for one in strategies))
        super().__init__(Planner(everything), strategies)
        self._rng, self._left = random.Random(seed), 0
        self.chosen: list[Decoding] = []

    def choose(self, lanes: int, context: float, running: Collection[Hashable] = ()) -> Decoding:
        if not self._left:
            self._present, self._left = self._rng.choice(self.strategies), self._rng.randint(1, 6)
        self._left -= 1
        assert self._present is not None
        self.chosen.append(self._present)
        return self._present

    def heard(self, decoding: Decoding, accepted: Mapping[Hashable, int]) -> None:
        pass


def profile_of(base: LLM, strategies: tuple[Decoding, ...], path: Path, ms: Any = lambda one, load: 1.0) -> str:
    """A profile file of the base's models, in which cycles take `ms(strategy, load)`."""
    whose = fingerprints(base.models)
    rows = tuple(measured(one, {load: ms(one, load) for load in (1, 2, 4)}, 0.7, 32) for one in strategies)
    Profile(whose.device, whose.model, whose.draft, rows, jax="0").save(path)
    return str(path)


@pytest.fixture(scope="module")
def base(pair: Pair) -> Iterator[LLM]:
    with LLM(pair.target, draft_model=pair.draft, decoding=WIDEST, max_num_seqs=1, num_pages=40, page_size=4) as base:
        yield base


@pytest.fixture(scope="module")
def llm(base: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Two lanes, and a state that all of `STRATEGIES` fit."""
    with from_strategies(base, (ALONE, WIDEST), tmp_path_factory.mktemp("turns"), num_pages=60) as llm:
        yield llm


def from_strategies(base: LLM, strategies: tuple[Decoding, ...], where: Path, **changes: Any) -> LLM:
    """An `LLM` in whose profile each strategy is the fastest somewhere, so that none is left out."""
    loads = dict(zip(strategies, range(len(strategies)), strict=True))
    whose = fingerprints(base.models)
    rows = tuple(
        measured(one, {2**at: 1.0 if at == loads[one] else 50.0 for at in range(len(strategies))}, 0.7, 32)
        for one in strategies
    )
    Profile(whose.device, whose.model, whose.draft, rows, jax="0").save(where / "profile.json")
    fields: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2, "page_size": 4, **changes}
    return LLM(share=base, decoding="auto", profile=where / "profile.json", **fields)


def scripted(llm: LLM, seed: int, strategies: tuple[Decoding, ...] = STRATEGIES) -> Scripted:
    turns = llm.engine._turns
    assert turns is not None
    turns._switch = Scripted(strategies, seed)
    return turns._switch


def params(number: int, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"seed": number, "max_tokens": 6 + number * 5 % 17, "ignore_eos": number % 2 == 0}
    return SamplingParams(**{**fields, **changes})


def test_who_can_advance_whom() -> None:
    assert all(can_advance(one, WIDEST) for one in (*STRATEGIES, WIDEST, Rejection(tree=(2, 1, 1))))
    assert not can_advance(Rejection(4), WIDEST)
    assert not can_advance(Rejection(1, n_candidates=3), WIDEST)
    assert not can_advance(SMC(1, 1, control=1.0), WIDEST), "its rows go their own ways"
    assert not can_advance(ALONE, SMC(2, 2))


def test_the_state_holds_that_of_all(llm: LLM) -> None:
    assert llm.decoding == WIDEST
    turns = llm.engine._turns
    assert turns is not None
    assert turns.strategies == (ALONE, WIDEST)
    assert turns.leaves_the_draft_behind


def answers(llm: LLM, count: int, asked: Any, lag: int) -> dict[int, RequestOutput]:
    """Requests that arrive one by one, streamed; pages are sound after every step."""
    engine, names, outputs = llm.engine, dict[str, int](), dict[str, RequestOutput]()
    before, engine._lag = engine._lag, lag
    todo = list(range(count))
    try:
        while todo or engine.busy:
            if todo:
                number = todo.pop()
                request = llm.request(prompt(number), asked(number))
                engine.add_request(request, stream=True)
                names[request.request_id] = number
            outputs |= {output.request_id: output for output in engine.step()}
            sound(engine)
        for name in names:
            chunks = engine.chunks(name)
            assert [token for chunk in chunks for token in chunk.token_ids] == outputs[name].outputs[0].token_ids
            engine.forget(name)
    finally:
        engine._lag = before
    assert llm.metrics()["kv_pages_free"] == llm.metrics()["kv_pages_total"]
    return {number: outputs[name] for name, number in names.items()}


@pytest.mark.slow
def test_greedy_answers_are_the_targets_own(llm: LLM, base: LLM) -> None:
    """Whoever advances whom when, read at once or late: tokens and their log-probabilities."""
    asked = [params(number, temperature=0, logprobs=2) for number in range(8)]
    with LLM(share=base, decoding=ALONE, max_model_len=MAX_MODEL_LEN, max_num_seqs=2, page_size=4) as plain:
        theirs = plain.generate([prompt(number) for number in range(8)], asked, use_tqdm=False)
    for seed, lag in ((0, 0), (1, 2)):
        switch = scripted(llm, seed)
        mine = answers(llm, 8, lambda number: asked[number], lag)
        assert {*switch.chosen} == {*STRATEGIES}
        for number, other in enumerate(theirs):
            one, same = mine[number].outputs[0], other.outputs[0]
            assert one.token_ids == same.token_ids
            assert one.text == same.text
            assert one.logprobs == pytest.approx(same.logprobs, abs=1e-5)
            assert one.top_logprobs is not None
            assert [[top.token_id for top in place] for place in one.top_logprobs] == [
                [top.token_id for top in place] for place in same.top_logprobs or []
            ]


@pytest.mark.slow
def test_answers_have_their_form(llm: LLM) -> None:
    """A row's automaton goes along where rows are left out and made again, and where the draft catches up."""

    def asked(number: int) -> SamplingParams:
        form = {"type": "regex", "regex": "[ab]{3}c{2,9}d"} if number % 3 else None
        return params(number, max_tokens=16, ignore_eos=False, response_format=form)

    switch = scripted(llm, 3)
    outputs = answers(llm, 9, asked, 1)
    assert {*switch.chosen} == {*STRATEGIES}
    texts = {number: output.outputs[0].text for number, output in outputs.items()}
    assert {number for number, text in texts.items() if re.fullmatch("[ab]{3}c{2,9}d", text)} == {1, 2, 4, 5, 7, 8}


@pytest.mark.slow
def test_what_was_drafted_is_counted(llm: LLM) -> None:
    switch = scripted(llm, 5)
    output = llm.generate(prompt(1), params(1, max_tokens=24, ignore_eos=True), use_tqdm=False)[0].metrics
    of_request = switch.chosen[: output.cycles]
    assert output.drafted == sum(one.drafts_per_cycle for one in of_request)
    assert output.accepted is not None
    assert output.cycles <= output.generated_tokens - output.accepted <= output.cycles + 1
    assert output.accepted == sum(output.accepted_at or ())


@pytest.mark.slow
def test_nothing_is_left_behind_and_nothing_compiles_twice(llm: LLM) -> None:
    """150 requests, some aborted, while decoders change every few cycles."""
    scripted(llm, 9)
    soak.warm(llm, ["a", "bc", "a longer prompt"])
    report = soak.soak(llm, 150, ["a", "bc", "a longer prompt"])
    assert (report.ended, report.errors, report.compiled, report.pages_missing) == (150, 0, 0, 0)
    assert report.aborted > 5
    assert report.grown_bytes < 1 << 20


@pytest.mark.slow
def test_a_draft_that_was_left_behind_catches_up(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target drafts for itself, so every greedy draft is accepted if the draft has seen all tokens; else not."""
    strategies = (ALONE, Rejection(3))
    greedy = params(0, temperature=0, max_tokens=40, ignore_eos=True)

    def refused(llm: LLM, seed: int) -> int:
        """Drafts that were not accepted, those of last cycles aside, which are cut."""
        switch, missed = scripted(llm, seed, strategies), 0
        heard = type(switch).heard
        counted: list[int] = []

        def listen(_: Switch, by: Decoding, accepted: Mapping[Hashable, int]) -> None:
            counted.extend(by.speculation.gamma - one for one in accepted.values())

        monkeypatch.setattr(type(switch), "heard", listen)
        for number in range(4):
            llm.generate(prompt(number), greedy, use_tqdm=False)
            missed += sum(count > 0 for count in counted[:-1])
            counted.clear()
        monkeypatch.setattr(type(switch), "heard", heard)
        assert {*switch.chosen} == {*strategies}
        return missed

    with (
        LLM(pair.target, draft_model=pair.target, decoding=Rejection(3), max_num_seqs=1, num_pages=40) as base,
        from_strategies(base, strategies, tmp_path) as llm,
    ):
        for lag in (0, 1):
            monkeypatch.setattr(llm.engine, "_lag", lag)
            assert refused(llm, lag) == 0
        monkeypatch.setattr(llm.engine.runner, "catch_up", lambda lacking: None)
        assert refused(llm, 0) > 5, "control"


@pytest.mark.slow
def test_the_law_of_answers(tmp_path: Path) -> None:
    """χ² of 2,048 seeded requests while decoders change at random; the control is a law half as warm again."""
    vocabulary, ask, samples = 4, Ask((1, 2), max_tokens=4), 2048
    models, seen = tiny_pair(vocabulary), collections.Counter[tuple[int, ...]]()
    for name in ("target", "draft"):
        weights = getattr(models.params, name)
        save_checkpoint(getattr(models, name), weights, tmp_path / name, dtype="float32")
    strategies: tuple[Decoding, ...] = (ALONE, Rejection(1), Rejection(2, n_candidates=2))
    fields: dict[str, Any] = {"max_model_len": 16, "page_size": 4}
    paths = {"model": str(tmp_path / "target"), "draft_model": str(tmp_path / "draft"), "dtype": "float32"}
    with (
        LLM(**paths, decoding=Rejection(1), max_num_seqs=1, num_pages=20, **fields) as base,
        from_strategies(base, strategies, tmp_path, **{**fields, "max_num_seqs": 64}) as llm,
    ):
        switch = scripted(llm, 3, strategies)
        each = [SamplingParams(seed=seed, max_tokens=ask.max_tokens, ignore_eos=True) for seed in range(samples)]
        for output in llm.generate([{"prompt_token_ids": list(ask.prompt)}] * samples, each, use_tqdm=False):
            seen[tuple(output.outputs[0].token_ids)] += 1
        assert {*switch.chosen} == {*strategies}
    after = language_model(models.target, models.params.target, 16)

    def chi_square(temperature: float) -> tuple[float, int]:
        return exact.chi_square(seen, exact.outcomes(after, dataclasses.replace(ask, temperature=temperature), 16))

    value, bins = chi_square(1.0)
    assert bins > 8
    assert value < bins + 4.5 * np.sqrt(2 * bins) + 5, (value, bins)
    value, bins = chi_square(1.5)
    assert value > bins + 15 * np.sqrt(2 * bins), "control"


def by_load(one: Decoding, load: int) -> float:
    """Drafting is fastest alone, and from two requests on much slower than the target alone."""
    return 1.0 if not one.drafts else 1.2 if load == 1 else 9.0


@pytest.mark.slow
def test_the_load_decides(base: LLM, tmp_path: Path) -> None:
    """One request drafts, two do not; whoever is left alone drafts again once the rest after the switch is over."""
    strategies = (ALONE, Rejection(3))
    path = profile_of(base, strategies, tmp_path / "p.json", by_load)
    with (
        all_sizes(),
        LLM(share=base, decoding="auto", profile=path, max_model_len=48, max_num_seqs=2, page_size=4) as llm,
    ):
        assert llm.decoding == Rejection(3)
        long, short = params(1, max_tokens=44, ignore_eos=True), params(2, max_tokens=20, ignore_eos=True)
        [one] = llm.generate("a", long, use_tqdm=False)
        assert one.metrics.drafted == 3 * one.metrics.cycles
        engine = llm.engine
        assert engine._turns is not None
        engine._turns._switch = Switch(Planner(Profile.load(path)), strategies)
        both = llm.generate(["a", "b"], [long, short], use_tqdm=False)
        assert both[1].metrics.drafted == 0
        assert 0 < both[0].metrics.drafted < 3 * both[0].metrics.cycles
        assert llm.metrics()["strategy_switches"] == 1


def test_what_is_refused(base: LLM, tmp_path: Path, pair: Pair) -> None:
    path = profile_of(base, (ALONE, Rejection(3)), tmp_path / "p.json", by_load)
    only = profile_of(base, (Rejection(3),), tmp_path / "q.json")
    with pytest.raises(ValueError, match=r"^profile is '.*' and decoding is rejection, K=4, which needs none"):
        LLM(pair.target, draft_model=pair.draft, decoding=Rejection(), profile=path)
    with pytest.raises(ValueError, match=r"^profile chooses among exact decoders, and a population is asked for"):
        LLM(pair.target, draft_model=pair.draft, decoding=Auto(n_particles=4), profile=path)
    with pytest.raises(ValueError, match=r"^profile has no strategy of the law 'exact' with gamma 7"):
        LLM(pair.target, draft_model=pair.draft, decoding=Auto(gamma=7), profile=only)
    with pytest.raises(ValueError, match=r"^admission is 'optimistic', under which .* 2 decoders take turns"):
        LLM(share=base, decoding="auto", profile=path, admission="optimistic", max_model_len=48, page_size=4)
    with pytest.raises(ValueError, match=r"^profile '.*none' does not exist"):
        LLM(pair.target, draft_model=pair.draft, decoding="auto", profile=tmp_path / "none")
    with pytest.raises(ValueError, match=r"^profile is of another draft_model, or of this one in another dtype"):
        LLM(pair.target, draft_model=pair.target, decoding="auto", profile=only)


def test_one_strategy_takes_no_turns(base: LLM, tmp_path: Path, pair: Pair) -> None:
    """Where one is always fastest it is the decoder, and a target alone needs no draft."""
    path = profile_of(base, (ALONE, Rejection(3)), tmp_path / "p.json", lambda one, load: 9.0 if one.drafts else 1.0)
    with LLM(pair.target, decoding="auto", profile=path, max_model_len=48, max_num_seqs=1) as llm:
        assert llm.decoding == ALONE
        assert llm.engine._turns is None
        assert llm.models.draft is None
