"""What `decoding="auto"` chooses: by what is asked for, without a device; then through `LLM`, seed for seed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from smcjax import LLM, SMC, Auto, Autoregressive, Rejection, SamplingParams, SparseVerification
from smcjax.auto import CHOICES, Routed, left_to_exact
from smcjax.decoders import DECODINGS, Decoding
from smcjax.engine.load.choice import Planned
from smcjax.planner import Cell, Counted, Measured, law_of
from tests.checkpoints import write_pair
from tests.planner.tables import measured, profile

pytestmark = pytest.mark.all_sizes

SPARSE = SparseVerification("merged", 4)
POPULATIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n_particles": 4}, {"n_particles": 4}),
    ({"n_particles": 8, "gamma": 3}, {"gamma": 3}),
    ({"power": 2.0}, {"power": 2.0}),
    ({"evidence": True}, {}),
    ({"trace": True}, {"trace": True}),
    ({"select": "sample"}, {}),
    ({"select": "best"}, {"select": "best"}),
    ({"control": 0.0}, {"control": 0.0}),
    ({"evidence": True, "sparse": SPARSE}, {"sparse": SPARSE}),
]


@pytest.mark.parametrize(("requested", "chosen"), POPULATIONS, ids=str)
def test_a_population_is_smc_under_a_control(requested: dict[str, Any], chosen: dict[str, Any]) -> None:
    auto = Auto(**requested)
    assert auto.wants_population
    for has_draft in (False, True):
        made = auto.choose(has_draft=has_draft, candidates_pay=True)
        assert made == SMC(**chosen)
    assert SMC().control == 0.1


@pytest.mark.parametrize("requested", [{}, {"gamma": 6}, {"sparse": SPARSE}], ids=str)
def test_one_plain_answer_is_exact(requested: dict[str, Any]) -> None:
    auto = Auto(**requested)
    assert not auto.wants_population
    assert auto.choose(has_draft=True, candidates_pay=False) == Rejection(**requested)
    assert auto.choose(has_draft=True, candidates_pay=True) == Rejection(**requested, n_candidates=8)
    assert auto.choose(has_draft=True, candidates_pay=True).exact
    if not requested:
        assert auto.choose(has_draft=False, candidates_pay=True) == Autoregressive()


def test_the_rule_where_no_decoder_is_named() -> None:
    """SMC, and an exact decoder with the same way of reading blocks, which alone takes deterministic drafts."""
    rule, under_control = Routed(), Routed(SMC(4, 4, sparse=SPARSE))
    assert rule.choose(has_draft=True) == (SMC(), Rejection())
    assert rule.choose(has_draft=True, deterministic_drafts=True) == (Rejection(),)
    assert rule.choose(has_draft=False) == under_control.choose(has_draft=False) == (Autoregressive(),)
    assert under_control.choose(has_draft=True) == (SMC(4, 4, sparse=SPARSE), Rejection(sparse=SPARSE))
    shared = SparseVerification("shared", schedule=2)
    approximate = Routed(SMC(sparse=shared, approximate=True))
    assert approximate.choose(has_draft=True)[1] == Autoregressive()
    assert approximate.choose(has_draft=False) == (Autoregressive(SparseVerification(schedule=2)),)


LEFT: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"logprobs": 3, "stop": "x", "min_tokens": 2}, None),
    ({"temperature": 0}, "temperature is 0, which an exact decoder answers"),
    ({"temperature": 0.005}, "temperature is 0.005, too low for weights, and an exact decoder has none"),
    ({"top_p": 0.9}, "top_k or top_p cuts the distribution, which an exact decoder honours"),
    ({"top_k": 3}, "top_k or top_p cuts the distribution, which an exact decoder honours"),
    ({"frequency_penalty": 1.0}, "frequency_penalty changes the distribution, which an exact decoder honours"),
    ({"logit_bias": {1: 1.0}}, "logit_bias changes the distribution, which an exact decoder honours"),
    ({"temperature": 0, "control": 0.1}, None),
]


@pytest.mark.parametrize(("requested", "why"), LEFT, ids=str)
def test_what_is_left_to_an_exact_decoder(requested: dict[str, Any], why: str | None) -> None:
    """What SMC refuses and exact decoders honour, and nothing else; who asks for a control asks for SMC."""
    params = SamplingParams(**requested)
    assert left_to_exact(SMC(), params) == why
    assert left_to_exact(Rejection(), params) is None
    if why is not None:
        Rejection().check(params)
        Autoregressive().check(params)
        Routed().check(params)
        assert Routed().resolved([params, params], has_draft=True) == Rejection()
    assert Routed().resolved([params, SamplingParams()], has_draft=True) == Routed()
    assert Routed().resolved([params], has_draft=False) == Routed()
    with pytest.raises(ValueError, match=r"^temperature is 0, where every draft token"):
        Routed().check(SamplingParams(temperature=0, control=0.1))


def test_requests_are_checked_as_the_choice_checks_them() -> None:
    Auto().check(SamplingParams(temperature=0))
    with pytest.raises(ValueError, match=r"^temperature is 0, where"):
        Auto(n_particles=4).check(SamplingParams(temperature=0))
    with pytest.raises(ValueError, match=r"^evidence must be True or False, got 1"):
        Auto(evidence=1)
    with pytest.raises(ValueError, match=r"^gamma is 6 and there is no draft; give draft_model, or leave gamma out"):
        Auto(gamma=6).choose(has_draft=False, candidates_pay=False)
    with pytest.raises(ValueError, match=r"^gamma must be a whole number from 1 to 64, got 0"):
        Auto(gamma=0)


def test_the_registry() -> None:
    """Every decoder by its name, and "auto", which is none."""
    assert {**DECODINGS, "auto": Auto} == CHOICES
    assert all(choice.name == name for name, choice in CHOICES.items())


MERGED, SHARED = SparseVerification("merged", 4), SparseVerification("shared", 4)
SPACED = SparseVerification("merged", 4, schedule=2)
MEASURED: tuple[Decoding, ...] = (
    Autoregressive(),
    Autoregressive(SparseVerification(schedule=2)),
    Rejection(2),
    Rejection(4),
    Rejection(4, sparse=MERGED),
    Rejection(4, sparse=SHARED),
    Rejection(4, sparse=SPACED),
    SMC(8, 8),
    SMC(8, 8, control=1.0),
)


@pytest.mark.parametrize(
    ("requested", "has_draft", "candidates"),
    [
        ({}, True, [Autoregressive(), Rejection(2), Rejection(4), Rejection(4, sparse=MERGED)]),
        ({}, False, [Autoregressive()]),
        ({"gamma": 2}, True, [Autoregressive(), Rejection(2)]),
        ({"sparse": MERGED}, True, [Autoregressive(), Rejection(4, sparse=MERGED)]),
        ({"sparse": SPACED}, True, [Autoregressive(SparseVerification(schedule=2)), Rejection(4, sparse=SPACED)]),
        (
            {"sparse": SparseVerification(schedule=2)},
            True,
            [Autoregressive(SparseVerification(schedule=2)), Rejection(4, sparse=SPACED)],
        ),
    ],
    ids=str,
)
def test_candidates_of_a_profile(requested: dict[str, Any], has_draft: bool, candidates: list[Decoding]) -> None:
    """Exact ones of the law that is asked for: never SMC, never shared."""
    made = profile(*(measured(one, {1: 1.0}) for one in MEASURED))
    assert Auto(**requested).candidates(made, has_draft=has_draft) == candidates
    assert len({law_of(one) for one in candidates}) == 1


def test_the_choice_is_for_the_loads_and_contexts_of_an_llm(tmp_path: Path) -> None:
    """Many requests or long ones make another one the best, where an `LLM` may have them."""
    few, many, long, alike = Rejection(2), Rejection(4), Rejection(6), Rejection(4, sparse=MERGED)
    times: dict[Decoding, dict[tuple[int, int], float]] = {
        few: {(1, 64): 1.0, (1, 4096): 9.0, (8, 64): 9.0, (8, 4096): 9.0},
        many: {(1, 64): 4.0, (1, 4096): 9.0, (8, 64): 1.0, (8, 4096): 9.0},
        long: {(1, 64): 8.0, (1, 4096): 1.0, (8, 64): 8.0, (8, 4096): 1.0},
        alike: {(1, 64): 3.5, (1, 4096): 9.0, (8, 64): 2.0, (8, 4096): 9.0},
    }
    cells = {one: tuple(Cell(*place, ms) for place, ms in of.items()) for one, of in times.items()}
    profile(*(Measured(one, (Counted(64, 2.0),), of) for one, of in cells.items())).save(tmp_path / "p.json")

    def planned(requested: Auto, max_num_seqs: int, max_model_len: int) -> tuple[Decoding, tuple[Decoding, ...]]:
        sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
        found = Planned(dataclasses.replace(requested, profile=tmp_path / "p.json"), has_draft=True, **sizes)
        return found.decoding, found.readings

    assert planned(Auto(), 1, 64) == (few, (few,))
    assert planned(Auto(), 64, 64) == (many, (many, alike)), "the other reading is the faster one alone"
    assert planned(Auto(), 64, 9999) == (long, (long,))
    assert planned(Auto(sparse=MERGED), 64, 9999) == (alike, (alike,)), "a reading that is asked for stays"


def test_what_no_profile_answers() -> None:
    made = profile(measured(Rejection(4), {1: 1.0}))
    with pytest.raises(ValueError, match=r"^profile chooses among exact decoders, and a population is asked for"):
        Auto(evidence=True).candidates(made, has_draft=True)
    for one in (made, profile(measured(Autoregressive(), {1: 1.0}), *made.strategies)):  # as smcjax profile measures
        with pytest.raises(ValueError, match=r"^profile has no strategy of the law 'exact' with gamma 3 that"):
            Auto(gamma=3).candidates(one, has_draft=True)
    with pytest.raises(ValueError, match=r"^profile has no strategy of the law 'exact' that this LLM can use"):
        Auto().candidates(made, has_draft=False)


def answer(decoding: Any, tmp_path: Path, *, draft: bool = True) -> tuple[Any, Any]:
    pair = write_pair(tmp_path)
    fields: dict[str, Any] = {"draft_model": pair.draft} if draft else {}
    with LLM(pair.target, decoding=decoding, max_model_len=32, max_num_seqs=1, page_size=4, **fields) as llm:
        [output] = llm.generate("ab", SamplingParams(seed=3, max_tokens=12), use_tqdm=False)
        return llm.decoding, output.outputs[0].token_ids


@pytest.mark.slow
def test_an_llm_says_what_it_chose(tmp_path: Path) -> None:
    """On a CPU, where one candidate is fastest."""
    (speculating, tokens), (alone, others) = answer("auto", tmp_path), answer("auto", tmp_path, draft=False)
    assert (speculating, alone) == (Rejection(), Autoregressive())
    assert tokens != others, "the choice shows"


def test_a_population_needs_a_draft(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model is set and draft_model is not"):
        answer(Auto(n_particles=2), tmp_path, draft=False)
