"""`smcjax bench decoders`: exact decoders and SMC beside each other, on the same problems with the same request seeds.

Accuracy is on freshly generated questions, unless told otherwise word problems of the bundled pair; a cycle is one
target forward, so tokens a cycle say what a decoder would gain where cycles cost the same, tokens a second what it
gains on this machine, and device-seconds a question what an answer costs where many are asked: time of the one GPU, or
of a CPU's cores together, to which other work beside does not add.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from smcjax.bench.accuracy import Evaluation, evaluate
from smcjax.decoders import Autoregressive, Decoding, Rejection
from smcjax.engine.llm import LLM
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.markdown import table
from smcjax.model.files.hub import bundled_model
from smcjax.tasks.intervals import clustered_difference_interval
from smcjax.tasks.questions import Question

TARGET = "target alone"
DRAFT = "draft alone"


@dataclasses.dataclass(frozen=True)
class Contender:
    """One decoder of a pair, or with `of_draft` of its draft alone; of several `answers` the majority's counts."""

    name: str
    decoding: Decoding
    of_draft: bool = False
    answers: int = 1

    @property
    def exact(self) -> bool:
        """True where the contender's answers are distributed exactly as the target's."""
        return self.decoding.exact and not self.of_draft and self.answers == 1

    def models(self, target: str | None, draft: str | None) -> dict[str, Any]:
        """Arguments of `LLM` for a pair; None for both is the bundled one."""
        if self.of_draft:
            return {"model": draft or str(bundled_model("draft"))}
        return {"model": target, "draft_model": draft if self.decoding.drafts else None}


def contenders(decodings: Sequence[Decoding], answers: Sequence[int] = ()) -> list[Contender]:
    """The target alone, first; the draft alone; then these, a rejection followed by the majority of several `answers`.

    The target alone selects blocks by the schedule of the first decoder that has one.
    """
    schedules = (one.speculation.sparse.of_single_queries for one in decodings if one.speculation.sparse is not None)
    alone = Autoregressive(next((schedule for schedule in schedules if schedule is not None), None))
    result = [Contender(TARGET, alone), Contender(DRAFT, Autoregressive(), of_draft=True)]
    for one in decodings:
        result.append(Contender(str(one), one))
        if isinstance(one, Rejection):
            result += [Contender(f"majority of {n} answers of {one}", one, answers=n) for n in answers]
    return result


def compare(
    chosen: Sequence[Contender],
    asked: list[Question],
    params: SamplingParams,
    *,
    seed: int,
    model: str | None = None,
    draft_model: str | None = None,
    on_result: Callable[[dict[str, Any]], None] = lambda _: None,
    **llm: Any,
) -> list[dict[str, Any]]:
    """A row for each, the first being what the others' accuracies are compared with, pairwise by what is judged.

    `model` and `draft_model` None: the bundled pair. `llm` are further arguments of `LLM`. Intervals are at 95% and
    take questions for independent: Wilson's of accuracies, Agresti and Min's of differences, Student's where a question
    has several parts.
    """
    rows: list[dict[str, Any]] = []
    first: Evaluation | None = None
    for contender in chosen:
        with LLM(**contender.models(model, draft_model), decoding=contender.decoding, **llm) as engine:
            # Compiles what is needed, so that the time of a CPU's cores is that of answers.
            evaluate(engine, asked[: llm.get("max_num_seqs", 8)], params, seed=seed + 1, use_tqdm=False)
            evaluation = evaluate(engine, asked, params, seed=seed, answers=contender.answers, use_tqdm=False)
        first = first or evaluation
        difference, low, high = clustered_difference_interval(evaluation.parts, first.parts)
        metrics = [output.metrics for output in evaluation.outputs]
        accepted = [one.mean_accepted_length for one in metrics if one.mean_accepted_length is not None]
        ess = [one.mean_ess for one in metrics if one.mean_ess is not None]
        evidence = [one.smc.log_evidence for one in evaluation.outputs if one.smc is not None and one.error is None]
        rows.append(
            {
                "decoder": contender.name,
                "exact": contender.exact,
                **evaluation.report(),
                "difference": difference,
                "difference_low": low,
                "difference_high": high,
                "mean_accepted_length": float(np.mean(accepted)) if accepted else None,
                "mean_ess": float(np.mean(ess)) if ess else None,
                "mean_log_evidence": float(np.mean(evidence)) if evidence else None,
            }
        )
        on_result(rows[-1])
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    heads = ["decoder", "accuracy, 95% interval", "minus the first row (paired, points)", "tokens a cycle"]
    heads += ["tokens/s here", "device-seconds a question", "drafts accepted a cycle", "mean ESS", "mean log Ẑ"]
    lines = []
    for number, row in enumerate(rows):
        ends = (100 * row[name] for name in ("difference", "difference_low", "difference_high"))
        difference = "{:+.1f} ({:+.1f} to {:+.1f})".format(*ends) if number else "–"
        accuracy = (100 * row[name] for name in ("accuracy", "ci_low", "ci_high"))
        others = (
            "–" if row[name] is None else f"{row[name]:.2f}"
            for name in ("mean_accepted_length", "mean_ess", "mean_log_evidence")
        )
        cells = (
            row["decoder"] + (" (exact)" if row["exact"] else ""),
            "{:.1f}% ({:.1f} to {:.1f})".format(*accuracy),
            difference,
            f"{row['tokens_per_cycle']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['device_seconds_per_question']:.3f}",
            *others,
        )
        lines.append(cells)
    return table(heads, lines)
