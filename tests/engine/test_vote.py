"""The population's vote: who wins, by weight and not by heads, and what comes back of it through the engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy.special import softmax

from smcjax import LLM, SMC, SamplingParams
from smcjax.engine.vote import elect, marked_answer
from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm
from tests.engine.test_engine import fingerprint

INF = float("inf")
POPULATIONS = st.lists(
    st.tuples(st.sampled_from(["1", "2", "3", ""]), st.sampled_from([-INF, -30.0, -2.0, -1.0, 0.0])), min_size=1
)


def answer(text: str) -> str | None:
    return text or None


@given(POPULATIONS)
def test_the_heaviest_answer_wins(particles: list[tuple[str, float]]) -> None:
    texts, log_weights = [text for text, _ in particles], np.array([weight for _, weight in particles])
    if np.isneginf(log_weights).all():
        return  # such a request has failed before
    weights = softmax(log_weights)
    totals = {text: sum(w for t, w in zip(texts, weights, strict=True) if t == text) for text in texts if text}
    elected = elect(texts, log_weights, answer)
    if not any(totals.values()):
        assert elected is None
        return
    assert elected is not None
    assert elected.vote.share == pytest.approx(max(totals.values()))
    assert elected.vote.shares == pytest.approx({text: total for text, total in totals.items() if total > 0})
    assert list(elected.vote.shares.values()) == sorted(elected.vote.shares.values(), reverse=True)
    same = [w for t, w in zip(texts, weights, strict=True) if t == elected.vote.answer]
    assert texts[elected.row] == elected.vote.answer
    assert weights[elected.row] == max(same)
    shifted = elect(texts, log_weights + 700.0, answer)
    assert shifted is not None
    assert shifted.row == elected.row


def test_control_heads_are_not_weight() -> None:
    """Two light particles against a heavy one: counted by heads another answer would win."""
    texts, log_weights = ["a", "b", "b"], np.log([0.6, 0.2, 0.2])
    elected, by_heads = elect(texts, log_weights, answer), elect(texts, np.zeros(3), answer)
    assert elected is not None
    assert by_heads is not None
    assert (elected.row, elected.vote.answer) == (0, "a")
    assert (by_heads.row, by_heads.vote.answer) == (1, "b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3\n#### 7\n", "7"), ("#### 1,200 apples \n#### 8", "1,200 apples"), ("####\n5", None), ("none", None)],
)
def test_the_text_behind_the_mark(text: str, expected: str | None) -> None:
    assert marked_answer(text) == expected


class Rule:
    """A function that a test may change under way: what is voted by is no part of any program."""

    now: Callable[[str], Hashable] = staticmethod(marked_answer)

    def __call__(self, text: str) -> Hashable:
        return self.now(text)


@pytest.fixture(scope="module")
def rule() -> Rule:
    return Rule()


@pytest.fixture(scope="module")
def voting(pair: Pair, rule: Rule) -> Iterator[LLM]:
    smc = {"n_particles": 6, "control": 0.1, "select": "vote", "vote_by": rule}
    with smc_llm(pair, smc, max_num_seqs=2, max_model_len=32) as llm:
        yield llm


def answers(llm: LLM) -> list[Any]:
    params = [SamplingParams(seed=seed, max_tokens=12, temperature=0.8, ignore_eos=True) for seed in range(6)]
    return llm.generate(["ab", "c", "hello", "q", "xyz", "the"], params, use_tqdm=False)


def test_votes_of_a_population(voting: LLM, rule: Rule, pair: Pair) -> None:
    """The population, its weights and its evidence are those without a vote; only who answers is another."""
    with smc_llm(pair, {"n_particles": 6, "control": 0.1}, max_num_seqs=2, max_model_len=32) as llm:
        sampled = answers(llm)
    rule.now = lambda text: text[:2]
    voted = answers(voting)
    others = 0
    for one, other in zip(voted, sampled, strict=True):
        texts, weights = one.smc.trace.texts, softmax(one.smc.log_weights)
        totals = {text[:2]: 0.0 for text in texts}
        for text, weight in zip(texts, weights, strict=True):
            totals[text[:2]] += weight
        assert one.smc.vote.share == pytest.approx(max(totals.values()), rel=1e-6)
        assert one.outputs[0].text[:2] == one.smc.vote.answer == max(totals, key=lambda key: totals[key])
        assert one.outputs[0].token_ids == one.smc.particles[one.smc.selected].token_ids
        assert one.smc.trace.selected == one.smc.selected
        assert [p.token_ids for p in one.smc.particles] == [p.token_ids for p in other.smc.particles]
        assert one.smc.log_evidence == other.smc.log_evidence
        assert other.smc.vote is None
        others += one.smc.selected != other.smc.selected
    assert others > 0, "control: who is drawn is not always who wins"
    rule.now = marked_answer  # which no text of this pair has
    for one, other in zip(answers(voting), sampled, strict=True):
        assert fingerprint(one) == fingerprint(other), "one is drawn where nobody votes"
        assert one.smc.vote is None


def test_a_stream_ends_with_who_wins(voting: LLM, rule: Rule) -> None:
    rule.now = lambda text: text[:1]
    chunks = list(voting.generate_stream("hello", SamplingParams(seed=2, max_tokens=12)))
    output = chunks[-1].output
    assert output is not None
    assert output.smc is not None
    assert output.smc.vote is not None
    assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text


def test_a_function_that_fails_costs_its_request_alone(voting: LLM, rule: Rule) -> None:
    def fails(text: str) -> Hashable:
        raise RuntimeError("no such answer")

    def unhashable(text: str) -> Any:
        return [text]

    for wrong, message in ((unhashable, "TypeError: "), (fails, "RuntimeError: 'no such answer'")):
        rule.now = wrong
        [output] = voting.generate("ab", SamplingParams(seed=1, max_tokens=4), use_tqdm=False)
        assert output.error is not None
        assert output.error.startswith(f"vote_by failed for one of the particles: {message}")
        assert output.outputs[0].finish_reason == "error"
    rule.now = len
    [output] = voting.generate("ab", SamplingParams(seed=1, max_tokens=4), use_tqdm=False)
    assert output.error is None
    assert output.smc.vote.answer == len(output.outputs[0].text)


def test_refusals(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^vote_by must be a function from a text to an answer, or None, got 5"):
        SMC(select="vote", vote_by=5)
    with pytest.raises(ValueError, match=r"^vote_by is set and select is 'sample'; use select='vote', or leave it out"):
        SMC(vote_by=len)
    assert SMC(control=1.0).exact
    assert not SMC(control=1.0, select="vote").exact
    assert "vote" in str(SMC(select="vote"))
    for model in ("target", "draft"):
        source = Path(getattr(pair, model))
        (tmp_path / model).mkdir()
        for name in ("config.json", "model.safetensors"):
            (tmp_path / model / name).write_bytes((source / name).read_bytes())
    fields: dict[str, Any] = {
        "draft_model": tmp_path / "draft",
        "decoding": SMC(2, 2, select="vote"),
        "max_model_len": 32,
    }
    with pytest.raises(ValueError, match=r"^select is 'vote' and the model directory has no tokenizer"):
        LLM(tmp_path / "target", **fields)
