"""Accuracy of an `LLM` on freshly generated questions, with its uncertainty."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from smcjax.engine.sampling_params import MAX_SEED, SamplingParams
from smcjax.tasks.intervals import clustered_interval
from smcjax.tasks.questions import Question

if TYPE_CHECKING:
    from smcjax.engine.llm import LLM
    from smcjax.engine.outputs import RequestOutput


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One run over all questions."""

    parts: list[list[bool]]  # a verdict on each part of each question
    outputs: list[RequestOutput]
    seconds: float  # wall time, compilation excluded
    generated_tokens: int
    cycles: int
    steps: int  # of the engine: cycles of all requests that run, together
    preemptions: int

    @property
    def correct(self) -> list[bool]:
        """The verdicts on all parts, question by question."""
        return [right for parts in self.parts for right in parts]

    @property
    def accuracy(self) -> float:
        """Share of parts answered correctly."""
        return sum(self.correct) / len(self.correct)

    def report(self) -> dict[str, float]:
        """Figures that `smcjax eval --json` prints: accuracy with its 95% interval, speed, tokens a cycle.

        The interval takes questions for independent, not their parts.
        """
        low, high = clustered_interval(self.parts)
        return {
            "accuracy": self.accuracy,
            "ci_low": low,
            "ci_high": high,
            "n": len(self.correct),
            "tokens_per_second": self.generated_tokens / self.seconds,
            "tokens_per_cycle": self.generated_tokens / max(self.cycles, 1),
            "generated_tokens": self.generated_tokens,
            "cycles": self.cycles,
            "steps": self.steps,
            "preemptions": self.preemptions,
            "errors": sum(output.error is not None for output in self.outputs),
            "seconds": self.seconds,
        }


def evaluate(
    llm: LLM, questions: list[Question], params: SamplingParams, *, seed: int, use_tqdm: bool = True
) -> Evaluation:
    """Asks `llm` every question once. Each has a seed of its own, so results do not depend on the batching."""
    each = [dataclasses.replace(params, seed=(seed * 1_000_003 + index) & MAX_SEED) for index in range(len(questions))]
    before, began = llm.metrics(), time.perf_counter()
    outputs = llm.generate([question.prompt for question in questions], each, use_tqdm=use_tqdm)
    seconds, after = time.perf_counter() - began, llm.metrics()
    spent = {name: after[name] - before[name] for name in ("compile_seconds", "steps", "preemptions")}
    return Evaluation(
        parts=[question.right(output.outputs[0].text) for question, output in zip(questions, outputs, strict=True)],
        outputs=outputs,
        seconds=seconds - spent["compile_seconds"],
        generated_tokens=sum(output.metrics.generated_tokens for output in outputs),
        cycles=sum(output.metrics.cycles for output in outputs),
        steps=int(spent["steps"]),
        preemptions=int(spent["preemptions"]),
    )
