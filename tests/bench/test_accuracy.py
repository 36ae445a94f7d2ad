"""`evaluate` against an engine whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smcjax import CompletionOutput, RequestOutput, SamplingParams
from smcjax.bench.accuracy import evaluate, majority
from smcjax.engine.results.outputs import RequestMetrics, SMCOutput
from smcjax.tasks import recall
from smcjax.tasks.intervals import wilson_interval
from smcjax.tasks.questions import questions
from smcjax.tasks.word_problems import generate


class Oracle:
    """Answers the first `right` problems, and counts compilation that must not be timed."""

    def __init__(self, right: int, problems: list[Any]) -> None:
        self.right, self.problems = right, problems
        self.params: list[SamplingParams] = []
        self.compiled = 0.0
        self.warned = {1, 14, 15}  # answers that come with a warning

    def metrics(self) -> dict[str, float]:
        answered = -self.compiled  # 0 or 100
        return {"compile_seconds": self.compiled, "steps": 5 + answered, "preemptions": 2 + answered / 50}

    def generate(self, prompts: list[str], params: list[SamplingParams], *, use_tqdm: bool) -> list[RequestOutput]:
        assert prompts == [problem.question for problem in self.problems]
        self.params, self.compiled = params, -100.0  # as if 100 seconds more had been spent on answers
        outputs = []
        for index, problem in enumerate(self.problems):
            text = problem.solution if index < self.right else "#### 100000"
            answer = CompletionOutput(0, text, [1] * 10, "stop")
            cycles = 3 if problem.steps == 2 else 5
            metrics = RequestMetrics(cycles=cycles, resamples=0, generated_tokens=10, drafted=0, seconds=1.0)
            error = "broken" if index == len(self.problems) - 1 else None
            warning = "it fell" if index in self.warned else None
            smc = SMCOutput(0.0, [], np.zeros(1, np.float32), 0, 0.0, warning=warning)
            outputs.append(RequestOutput(str(index), None, [], [answer], True, metrics, smc, error))
        return outputs


def test_the_report() -> None:
    problems = generate(7, 20, "eval")
    oracle = Oracle(13, problems)
    base = SamplingParams(max_tokens=50, temperature=0.3)
    evaluation = evaluate(oracle, questions("words", 7, 20), base, seed=9, use_tqdm=False)
    report = evaluation.report()
    low, high = wilson_interval(13, 20)
    assert evaluation.correct == [True] * 13 + [False] * 7
    assert (report["accuracy"], report["ci_low"], report["ci_high"], report["n"]) == (13 / 20, low, high, 20)
    assert low < 13 / 20 < high
    cycles = sum(3 if problem.steps == 2 else 5 for problem in problems)
    assert report["tokens_per_cycle"] == 200 / cycles
    assert report["seconds"] == pytest.approx(100, abs=1)
    assert report["tokens_per_second"] == pytest.approx(2.0, rel=0.02)
    assert (report["generated_tokens"], report["cycles"], report["errors"]) == (200, cycles, 1)
    assert (report["steps"], report["preemptions"]) == (100, 2)
    assert (report["warned"], report["wrong"], report["warned_wrong"]) == (3, 7, 2)
    of_two = [index < 13 for index, problem in enumerate(problems) if problem.steps == 2]
    assert list(evaluation.by_kind) == [f"{steps} steps" for steps in sorted({one.steps for one in problems})]
    assert evaluation.by_kind["2 steps"] == sum(of_two) / len(of_two)
    counts = {kind: sum(f"{one.steps} steps" == kind for one in problems) for kind in evaluation.by_kind}
    assert sum(share * counts[kind] for kind, share in evaluation.by_kind.items()) == pytest.approx(13)
    assert evaluation.tokens_per_cycle_by_kind == {
        kind: 10 / 3 if kind == "2 steps" else 2.0 for kind in evaluation.by_kind
    }
    assert len({one.seed for one in oracle.params}) == 20
    assert {(one.max_tokens, one.temperature) for one in oracle.params} == {(50, 0.3)}


class Voters(Oracle):
    """Answers each question as `texts` has it, one after the other."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(0, [])
        self.texts = texts

    def generate(self, prompts: list[str], params: list[SamplingParams], *, use_tqdm: bool) -> list[RequestOutput]:
        self.params = params
        metrics = RequestMetrics(cycles=4, resamples=0, generated_tokens=10, drafted=0, seconds=1.0)
        return [
            RequestOutput("", None, [], [CompletionOutput(0, text, [1], "stop")], True, metrics) for text in self.texts
        ]


def test_majorities() -> None:
    """A majority is the answer with most counts, the first of equal ones, and where there is none the first text."""
    first, second = (problem.answer for problem in generate(7, 2, "eval"))
    wrong = first + second + 1
    texts = [f"#### {wrong}", f"#### {first}", f"so #### {first}", f"#### {second}", f"#### {wrong}", "none"]
    oracle = Voters(texts)
    asked = questions("words", 7, 2)
    evaluation = evaluate(oracle, asked, SamplingParams(), seed=9, answers=3, use_tqdm=False)
    assert evaluation.correct == [True, True]
    assert evaluation.report()["n"] == 2
    assert evaluation.report()["generated_tokens"] == 60
    seeds = [one.seed for one in oracle.params]
    assert len(set(seeds)) == 6
    alone = Voters([f"#### {wrong}", f"#### {second}"])
    assert evaluate(alone, asked, SamplingParams(), seed=9, use_tqdm=False).correct == [False, True]
    assert [one.seed for one in alone.params] == [seeds[0], seeds[3]]
    assert majority(["a", "b"]) == "a"
    assert majority(["####\n5", "a #### 1,200 apples \n#### 8", "#### 8", "#### 1,200 apples"]).startswith("a")


def test_lines_of_answer_are_judged_each() -> None:
    """Questions about a document: their lines count each, and a wrong or missing one alone is wrong."""
    one, two = recall.generate(3, 2, "eval", 512)
    asked = questions("recall", 3, 2, context=512)
    assert [question.prompt for question in asked] == [one.prompt, two.prompt]
    assert asked[0].right("\n".join(one.answers)) == [True] * len(one.answers)
    assert asked[1].right("\n".join(one.answers)) == [False] * len(two.answers)
    assert asked[0].right("\n".join(one.answers[:-1])) == [True] * (len(one.answers) - 1) + [False]
