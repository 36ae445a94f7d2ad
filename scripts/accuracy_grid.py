"""Accuracy of SMC over N and K beside the target and the draft alone, all on the same problems.

    python scripts/accuracy_grid.py -n 2000                       # minutes on one H200; prints a Markdown table
    python scripts/accuracy_grid.py -n 40 --particles 1 4 --gammas 4 --max-num-seqs 8     # a glimpse on a CPU

Every row answers the same freshly generated problems of the evaluation split with the same request seeds. The
difference to the target's own sampling is paired, with a 95% interval (Agresti & Min 2005).
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import numpy as np

from smcjax import LLM, SMC, Autoregressive, SamplingParams
from smcjax.bench.accuracy import Evaluation, evaluate
from smcjax.engine.loading import bundled_model
from smcjax.tasks.intervals import paired_difference_interval
from smcjax.tasks.word_problems import Problem, generate


def main() -> None:
    """Evaluates every decoder and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2000, help="problems")
    parser.add_argument("--seed", type=int, default=7, help="of the problems and of all randomness")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--particles", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-num-seqs", type=int, default=1000)
    parser.add_argument("--max-model-len", type=int, default=320, help="longest question and answer: 185 + 121 tokens")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, help="write every outcome here, after every row")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    problems = generate(args.seed, args.n, "eval")
    rows: list[tuple[str, Evaluation]] = []

    def answer(name: str, model: str | None, decoding: SMC | Autoregressive) -> Evaluation:
        evaluation = _evaluate(args, problems, model, decoding)
        rows.append((name, evaluation))
        if args.json is not None:
            args.json.write_text(json.dumps({name: evaluation.correct for name, evaluation in rows}))
        report = evaluation.report()
        print(f"{name:<14} {100 * report['accuracy']:5.1f}%  {report['tokens_per_second']:8.0f} tokens/s", flush=True)
        return evaluation

    target = answer("target alone", None, Autoregressive())
    answer("draft alone", str(bundled_model("draft")), Autoregressive())
    for n_particles in args.particles:
        for gamma in args.gammas:
            answer(f"N={n_particles} K={gamma}", None, SMC(n_particles=n_particles, gamma=gamma))

    print("\n| decoder | accuracy | 95% interval | minus target alone (paired, points) | tokens a cycle | mean ESS |")
    print("|---|---|---|---|---|---|")
    for name, evaluation in rows:
        print(_table_row(name, evaluation, target))


def _evaluate(
    args: argparse.Namespace, problems: list[Problem], model: str | None, decoding: SMC | Autoregressive
) -> Evaluation:
    with LLM(
        model,
        decoding=decoding,
        dtype=args.dtype,
        max_num_seqs=min(args.max_num_seqs, args.n),
        max_model_len=args.max_model_len,
    ) as llm:
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
        return evaluate(llm, problems, params, seed=args.seed, use_tqdm=False)


def _table_row(name: str, evaluation: Evaluation, target: Evaluation) -> str:
    report = evaluation.report()
    difference = "–"
    if evaluation is not target:
        observed, low, high = paired_difference_interval(evaluation.correct, target.correct)
        difference = f"{100 * observed:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    ess = [output.metrics.mean_ess for output in evaluation.outputs if output.metrics.mean_ess is not None]
    return (
        f"| {name} | {100 * report['accuracy']:.1f}% | {100 * report['ci_low']:.1f} to {100 * report['ci_high']:.1f} "
        f"| {difference} | {report['tokens_per_cycle']:.2f} | {f'{np.mean(ess):.2f}' if ess else '–'} |"
    )


if __name__ == "__main__":
    main()
