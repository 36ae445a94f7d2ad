"""Accuracy of an `LLM` on freshly generated questions, with its uncertainty."""

from __future__ import annotations

import dataclasses
import operator
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from smcjax.device import on_cpu
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from smcjax.tasks.intervals import clustered_interval
from smcjax.tasks.questions import Question
from smcjax.tasks.word_problems import ANSWER_MARK

if TYPE_CHECKING:
    from smcjax.engine.llm import LLM
    from smcjax.engine.results.outputs import RequestOutput


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One run over all questions."""

    parts: list[list[bool]]  # a verdict on each part of each question
    kinds: list[str]  # of each question (`Question.kind`)
    outputs: list[RequestOutput]  # of each question all answers, one after the other
    seconds: float  # wall time, compilation excluded
    device_seconds: float  # the same; on a CPU the time of all cores together, and there of compilation too
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

    @property
    def warned(self) -> list[bool]:
        """For each question, whether one of its answers came with a warning (`RequestOutput.smc.warning`)."""
        told = [output.smc is not None and output.smc.warning is not None for output in self.outputs]
        answers = len(told) // len(self.parts)
        return [any(told[begin : begin + answers]) for begin in range(0, len(told), answers)]

    @property
    def by_kind(self) -> dict[str, float]:
        """Accuracy on the questions of each kind; nothing where all are of one."""
        found: dict[str, list[bool]] = {}
        for kind, parts in sorted(zip(self.kinds, self.parts, strict=True)):
            found.setdefault(kind, []).extend(parts)
        return {kind: sum(right) / len(right) for kind, right in found.items()} if len(found) > 1 else {}

    @property
    def tokens_per_cycle_by_kind(self) -> dict[str, float]:
        """Tokens a cycle of the answers to each kind, which say how many drafts are accepted; of the same kinds."""
        tokens, cycles = Counter[str](), Counter[str]()
        answers = len(self.outputs) // len(self.kinds)
        for number, output in enumerate(self.outputs):
            kind = self.kinds[number // answers]
            tokens[kind] += output.metrics.generated_tokens
            cycles[kind] += output.metrics.cycles
        return {kind: tokens[kind] / max(cycles[kind], 1) for kind in self.by_kind}

    def report(self) -> dict[str, float]:
        """Figures that `smcjax eval` prints: accuracy with its 95% interval, speed, tokens a cycle, warnings.

        The interval takes questions for independent, not their parts.
        """
        low, high = clustered_interval(self.parts)
        warned, wrong = self.warned, [not all(parts) for parts in self.parts]
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
            "warned": sum(warned),
            "wrong": sum(wrong),
            "warned_wrong": sum(map(operator.and_, warned, wrong)),
            "errors": sum(output.error is not None for output in self.outputs),
            "seconds": self.seconds,
            "device_seconds_per_question": self.device_seconds / len(self.parts),
        }


def majority(texts: Sequence[str]) -> str:
    """A text with the answer behind "####" that most texts give, the first of equal ones; where none gives any, the
    first (self-consistency: Wang et al. 2022, arXiv 2203.11171)."""
    answers = [text.partition(ANSWER_MARK)[2].partition("\n")[0].strip() for text in texts]
    counts = Counter(filter(None, answers))
    return texts[answers.index(counts.most_common(1)[0][0])] if counts else texts[0]


def evaluate(
    llm: LLM,
    questions: list[Question],
    params: SamplingParams,
    *,
    seed: int,
    answers: int = 1,
    use_tqdm: bool = True,
) -> Evaluation:
    """Asks `llm` every question, `answers` times, of which the majority's is judged.

    Each request has a seed of its own, so results do not depend on the batching; the first answers to all questions
    have the seeds that they have alone.
    """
    places = [(number, index) for index in range(len(questions)) for number in range(answers)]
    each = [
        dataclasses.replace(params, seed=(seed * 1_000_003 + index + number * 500_009) & MAX_SEED)
        for number, index in places
    ]
    before, began, used = llm.metrics(), time.perf_counter(), time.process_time()
    outputs = llm.generate([questions[index].prompt for _, index in places], each, use_tqdm=use_tqdm)
    seconds, used, after = time.perf_counter() - began, time.process_time() - used, llm.metrics()
    texts = [output.outputs[0].text for output in outputs]
    chosen = [majority(texts[begin : begin + answers]) for begin in range(0, len(texts), answers)]
    spent = {name: after[name] - before[name] for name in ("compile_seconds", "steps", "preemptions")}
    seconds -= spent["compile_seconds"]
    return Evaluation(
        parts=[question.right(text) for question, text in zip(questions, chosen, strict=True)],
        kinds=[question.kind for question in questions],
        outputs=outputs,
        seconds=seconds,
        device_seconds=used if on_cpu() else seconds,
        generated_tokens=sum(output.metrics.generated_tokens for output in outputs),
        cycles=sum(output.metrics.cycles for output in outputs),
        steps=int(spent["steps"]),
        preemptions=int(spent["preemptions"]),
    )
