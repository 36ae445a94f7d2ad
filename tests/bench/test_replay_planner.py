"""The replay of traces at measured times: every token is counted once, nothing is gained where there is nothing to."""

from __future__ import annotations

import collections
import json
import random
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from smcjax import LLM, Rejection, SamplingParams
from smcjax.decoders import Decoding
from smcjax.engine.turns import Turns
from smcjax.model.folding import folded_shapes
from smcjax.planner import Cell, Planner, Rule, Switch
from smcjax.planner.laws import as_json
from smcjax.rejection.rules import candidates
from tests.passes import with_llvm_passes
from tests.planner.tables import ALONE, LOADS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import replay_planner as replay
import time_strategies
import trace_acceptance
from replay_planner import Phase, Times

LONG = Rejection(8)
KERNELS = ("pallas_call", "core_map", "run_state", "run_scoped")  # whose loops go by the tokens that requests have
FACTS = dict.fromkeys(("device", "model", "draft", "jax", "smcjax", "commit", "date"), "")
CERTAIN = {"a": [[1.0] * 45] * 4}  # every draft is accepted


def times(ms: Mapping[Decoding, Mapping[int, float]], chunk_ms: float = 0.0) -> Times:
    cells = {one: [Cell(load, 1024, each) for load, each in by.items()] for one, by in ms.items()}
    return Times(FACTS, cells, 128, dict.fromkeys(LOADS, chunk_ms))


def planner(of: Times, traces: replay.Traces) -> Planner:
    return Planner(replay.profile_of(of, traces, 1))


def found(
    of: Times,
    traces: replay.Traces,
    asked: Sequence[Sequence[Phase]],
    among: Sequence[Decoding],
    rule: Rule | None = None,
) -> list[replay.Outcome]:
    return replay.replayed(of, planner(of, traces), asked, among, rule or Rule())


STRATEGIES: tuple[Decoding, ...] = (ALONE, Rejection(2), Rejection(4), LONG)
TABLE = {
    one: {load: 4 + one.speculation.gamma + 0.1 * load * one.tokens_per_cycle for load in LOADS} for one in STRATEGIES
}
MIXED = {"a": [[0.99] * 40] * 4, "b": [[0.6, 0.9] * 20] * 4}


@given(st.integers(0, 99), st.integers(2, 70))
def test_every_token_is_counted_once(seed: int, tokens: int) -> None:
    """Whoever decodes: as many tokens as are asked for, as many requests, and the same again by the seed."""
    asked = [replay.phases(MIXED, (1, 3), 2.0, tokens, seed)]
    wanted = sum(tokens * len(phase.requests) for phase in asked[0])
    outcomes = found(times(TABLE), MIXED, asked, STRATEGIES)
    assert len(outcomes) == len(STRATEGIES) + 1
    for one in outcomes:
        (took,) = one.contender.rounds
        assert sum(each.tokens for each in took) == wanted
        assert [len(each.requests) for each in took] == [len(phase.requests) for phase in asked[0]]
        assert all(second > 0 for each in took for second in each.requests)
    assert asked == [replay.phases(MIXED, (1, 3), 2.0, tokens, seed)]
    again = found(times(TABLE), MIXED, asked, STRATEGIES)
    assert [one.contender.rounds for one in again] == [one.contender.rounds for one in outcomes]


@given(st.lists(st.booleans(), max_size=20), st.integers(0, 20), st.integers(1, 8))
def test_fewer_drafts_are_more_of_them_cut(coins: list[bool], at: int, gamma: int) -> None:
    """A cycle of fewer drafts accepts what one of more does, up to their number."""
    assert replay.accepted(coins, at, gamma) == min(gamma, replay.accepted(coins, at, 20))


def test_equal_strategies_gain_nothing() -> None:
    """A cycle that takes time by its tokens, all of which are accepted: nothing to gain, also with hindsight."""
    equal = {one: dict.fromkeys(LOADS, float(one.tokens_per_cycle)) for one in (Rejection(2), Rejection(4), LONG)}
    # The first token, and 45 that cycles of 3, 5 and 9 tokens make to the last.
    phase = Phase("a", 2, ((True,) * 45,) * 2)
    known = planner(times(equal), CERTAIN)
    outcomes = replay.replayed(times(equal), known, [[phase]] * 3, tuple(equal), Rule(), lag=0)
    assert [seconds(one) for one in outcomes] == pytest.approx([3 * 45e-3] * 4)
    numbers = replay.report(outcomes, [[phase]] * 3)
    assert numbers["phases"] == {one.contender.name: {"a": pytest.approx(92 / 45e-3)} for one in outcomes}
    assert numbers["gain"] == pytest.approx(0)
    assert numbers["hindsight"] == pytest.approx(0)
    assert numbers["single requests"] == pytest.approx((0, 0, 0))
    assert numbers["switches"] == [0, 0, 0]


def seconds(one: replay.Outcome) -> float:
    return sum(took.counted for some in one.contender.rounds for took in some)


@pytest.mark.parametrize("always", STRATEGIES)
def test_one_strategy_alone_gains_nothing(always: Decoding) -> None:
    """The control: by load among one is that one, to the last cycle."""
    asked = [replay.phases(MIXED, (1, 4), 2.0, 50, seed) for seed in (1, 2)]
    *fixed, planned = found(times(TABLE), MIXED, asked, (always,))
    same = next(one for one in fixed if one.contender.name == str(always))
    assert planned.contender.rounds == same.contender.rounds
    assert planned.switches == [0, 0]
    assert replay.overall(planned.contender) <= max(replay.overall(one.contender) for one in fixed)


def test_an_order_that_turns_gains_what_it_should() -> None:
    """The figures of one H100 that docs/planner.md has, as if of drafts that are all accepted: by hand.

    Cycles of nine tokens gave 2,639 tokens/s at 8 requests and 3,578 at 32, the target alone 1,377 and 4,082.
    """
    speeds = {LONG: {8: 2639, 32: 3578}, ALONE: {8: 1377, 32: 4082}}
    ms = {
        one: {load: 1e3 * load * one.tokens_per_cycle / speed for load, speed in by.items()}
        for one, by in speeds.items()
    }
    few, many = (Phase(str(load), load, ((True,) * 90,) * load) for load in (8, 32))
    asked = [[few, many, few, many]]
    outcomes = found(times(ms), CERTAIN, asked, (ALONE, LONG))
    # 90 tokens by cycles, and one cycle more that is enqueued before the last one's report has come.
    cycles = {LONG: 11, ALONE: 91}
    took = {one: [1e-3 * cycles[one] * ms[one][load] for load in (8, 32)] for one in (LONG, ALONE)}
    by_hand = 2 * (took[LONG][0] + took[ALONE][1])
    assert [seconds(one) for one in outcomes] == pytest.approx([2 * sum(took[LONG]), 2 * sum(took[ALONE]), by_hand])
    assert outcomes[-1].switches == [3]
    numbers = replay.report(outcomes, asked)
    assert numbers["gain"] == pytest.approx(2 * min(map(sum, took.values())) / by_hand - 1)
    assert numbers["gain"] == pytest.approx(numbers["hindsight"])
    assert numbers["gain"] > 0.05
    deaf = found(times(ms), CERTAIN, asked, (ALONE, LONG), Rule(margin=9.0))
    assert replay.report(deaf, asked)["gain"] <= 0, "control: who asks for too much stays with what was best first"


class Scripted(Switch):
    """The target alone, but in every tenth cycle."""

    cycle = 0

    def choose(self, lanes: int, context: float, running: object = ()) -> Decoding:
        self.cycle += 1
        return LONG if self.cycle % 10 == 0 else ALONE

    def heard(self, decoding: Decoding, accepted: Mapping[Hashable, int]) -> None:
        pass


@pytest.mark.parametrize(("chunk", "chunks"), [(128, 1), (4, 5)])
def test_catching_up_is_charged(chunk: int, chunks: int) -> None:
    """Nine cycles without drafts leave nine tokens, one of a report that is late, and the frontier's to be read.

    The engine reckons with nine tokens of the late cycle, the most that it may have made.
    """
    of = Times(FACTS, times({ALONE: {1: 1.0}, LONG: {1: 1.0}}).cells, chunk, {1: 100.0})
    known = planner(of, CERTAIN)
    engine = replay.Engine(of, known, 1024, 1, Turns(Scripted(known, (ALONE, LONG))))
    engine.run(Phase("a", 1, ((False,) * 19,)))
    assert engine.catching_up == pytest.approx(2 * 0.1 * chunks)
    assert engine.seconds == pytest.approx(2 * 0.1 * chunks + 1e-3 * 20)
    assert engine.cycles == {ALONE: 18, LONG: 2}


def test_coins_have_the_law_of_rejection() -> None:
    """A position's token is x and an accepted draft with probability min(p, q): α of x is that over p(x).

    By the rule itself, on a grid of uniforms, weighted by who is drafted. Control: min(1, p/q) is not it.
    """
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    uniforms = (jnp.arange(1000) + 0.5) / 1000

    def taken(draft: int, uniform: jax.Array) -> jax.Array:
        laws = jnp.asarray(np.stack([p, p]))[None], jnp.asarray(q)[None, None]
        return candidates(*laws, jnp.array([[draft]]), uniform[None, None]).accepted

    joint = np.array([q[x] * float(jax.vmap(lambda u, x=x: taken(x, u))(uniforms).mean()) for x in range(3)])
    np.testing.assert_allclose(joint, np.minimum(p, q), atol=2e-3)
    np.testing.assert_allclose(joint / p, np.minimum(1, q / p), atol=1e-2)
    assert np.abs(joint / p - np.minimum(1, p / q)).max() > 0.1


def test_the_kept_traces() -> None:
    """Both kinds, enough of them, whose drafts are accepted nearly always and less often."""
    kinds = json.loads(replay.TRACES.read_text())["kinds"]
    means = {kind: np.mean([alpha for row in rows for alpha in row]) for kind, rows in kinds.items()}
    assert means["words"] > 0.98 > 0.9 > means["letters"] > 0.6
    assert all(0 <= alpha <= 1 for rows in kinds.values() for row in rows for alpha in row)
    counts, replays = replay.halves(kinds)
    assert {kind: (len(counts[kind]), len(replays[kind])) for kind in kinds} == dict.fromkeys(kinds, (32, 32))


@pytest.mark.slow
def test_traces_are_what_the_engine_accepts() -> None:
    """Tokens a cycle of rejection on the traces' prompts, by the traces and by the engine."""
    kinds = json.loads(replay.TRACES.read_text())["kinds"]
    sizes: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "compile_at_start": False}
    with with_llvm_passes(), LLM(decoding=Rejection(4), **sizes) as llm:
        for kind, prompts in trace_acceptance.KINDS.items():
            params = [SamplingParams(max_tokens=96, temperature=0.7, seed=number) for number in range(32)]
            outputs = [one.metrics for one in llm.generate(prompts(5001, 32), params, use_tqdm=False)]
            tokens = sum(one.generated_tokens - 1 for one in outputs) / sum(one.cycles for one in outputs)
            traced = replay.counted(Rejection(4), {kind: kinds[kind]}, 1)
            assert traced.tokens_per_cycle == pytest.approx(tokens, rel=0.05), kind


@pytest.mark.slow
def test_times_of_tiny_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of all strategies at each load, which the replay reads; a load that was cut off is left out."""
    path = tmp_path / "times.jsonl"
    asked_for = {"requests": "1 2", "wave": "1", "gammas": "2", "context": "32", "windows": "2", "cycles": "2"}
    arguments = [part for name, value in asked_for.items() for part in (f"--{name}", *value.split())]
    monkeypatch.setattr(sys, "argv", ["", "--tiny", *arguments, "-o", str(path)])
    assert time_strategies.main() == 0
    lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines[1:]]
    assert collections.Counter(one["requests"] for one in rows) == {1: 3, 2: 3}
    assert [one.get("decoding") for one in rows[:3]] == [as_json(ALONE), as_json(Rejection(2)), None]
    of = Times.load(path)
    assert {one: [cell.requests for cell in some] for one, some in of.cells.items()} == {
        one: [1, 2] for one in (ALONE, Rejection(2))
    }
    assert of.chunk > 1
    assert of.catching_up_ms(2) > 0
    asked = [replay.phases(MIXED, (1, 2), 1.0, 9, 1)]
    assert found(of, MIXED, asked, tuple(of.cells))[-1].contender.rounds
    path.write_text("\n".join(lines[:-1]) + "\n")
    assert {len(some) for some in Times.load(path).cells.values()} == {1}


def test_no_cycle_takes_turns_by_data() -> None:
    """A cycle's program has loops of a known number of turns only, so that its time is not what is accepted.

    Control: a loop that data end is seen.
    """
    models = time_strategies.Models(*time_strategies.ON_GPU, target_layers=1)
    shapes = [folded_shapes(config, jnp.bfloat16) for config in (models.target_config, models.draft_config)]
    plan = time_strategies.Plan((2, 8), 1024, 1, 1, implementation="mosaic")
    jobs = [job for key, job in time_strategies.Load(plan, models, 4, *shapes).jobs().items() if key[-1] == "step"]
    assert len(jobs) == 3
    for job in jobs:
        assert not decided_by_data(jax.make_jaxpr(job.function)(*job.arguments).jaxpr)
    ends = jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: x + 1, x))(0)
    assert decided_by_data(ends.jaxpr) == {"while"}


def decided_by_data(program: object) -> set[str]:
    """The kinds of loops and branches in a program, kernels aside, whose turns data decide."""
    seen = set[str]()
    for equation in program.eqns:  # type: ignore[attr-defined]
        name = equation.primitive.name
        if name in KERNELS:
            continue
        if name in ("while", "cond"):
            seen.add(name)
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    seen |= decided_by_data(inner)
    return seen


def test_answers_are_as_long_as_asked() -> None:
    coins = replay.answer([[1.0, 0.0], [1.0]], 7, random.Random(1))
    assert len(coins) == 6
    assert {*replay.answer([[1.0]], 9, random.Random(2))} == {True}
