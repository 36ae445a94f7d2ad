"""`smcjax eval`: accuracy on freshly generated word problems, with a 95% interval."""

from __future__ import annotations

import argparse
import json

from smcjax.cli.options import (
    add_decoding_options,
    add_model_options,
    add_sampling_options,
    decoding_from,
    described,
    llm_arguments,
    sampling_from,
)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command."""
    parser = subparsers.add_parser("eval", help="accuracy on word problems", description=__doc__)
    parser.add_argument("-n", "--num-problems", type=int, default=200, help="problems (200)")
    parser.add_argument("--seed", type=int, default=123, help="of the problems and of all randomness (123)")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="requests in a batch (16)")
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    add_sampling_options(parser, max_tokens=160)
    add_decoding_options(parser, n_particles=8, gamma=4)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generates problems of the evaluation split, answers them, prints the figures."""
    from smcjax.bench.accuracy import evaluate
    from smcjax.engine.llm import LLM
    from smcjax.tasks.word_problems import generate

    if not 1 <= args.num_problems <= 1_000_000:
        raise ValueError(f"-n must be from 1 to 1000000, got {args.num_problems}.")
    decoding = decoding_from(args)
    params = sampling_from(args, decoding)
    with LLM(
        args.model,
        decoding=decoding,
        max_num_seqs=min(args.max_num_seqs, args.num_problems),
        seed=args.seed,
        **llm_arguments(args),
    ) as llm:
        problems = generate(args.seed, args.num_problems, "eval")
        evaluation = evaluate(llm, problems, params, seed=args.seed)
    report = evaluation.report()
    print(
        f"accuracy  {100 * report['accuracy']:.1f}%  (95% interval {100 * report['ci_low']:.1f} to "
        f"{100 * report['ci_high']:.1f})  {report['n']} problems, {described(decoding)}, temperature {args.temperature}"
    )
    print(f"speed     {report['tokens_per_second']:.0f} tokens/s, {report['tokens_per_cycle']:.2f} tokens a cycle")
    if args.json:
        print(json.dumps(report))
    return 0
