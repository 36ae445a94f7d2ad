"""`smcjax eval`: accuracy on freshly generated questions, with a 95% interval.

Words are word problems, one answer each. Recall asks about facts in a long document, for a model such as
`scripts/training/train_recall.py` makes: --context says how many tokens document and answers have, and every line of
answer is judged by itself.
"""

from __future__ import annotations

import argparse

from smcjax.cli.bench_options import add_figures_options, check_files, write_figures
from smcjax.cli.options import (
    add_decoding_options,
    add_model_options,
    add_sampling_options,
    add_task_options,
    check_models,
    check_task,
    decoding_from,
    one_shot_arguments,
    resolved,
    sampling_from,
    shows_progress,
)
from smcjax.cli.parser import whole
from smcjax.engine.requests.sampling_params import MAX_SEED
from smcjax.tasks.questions import JUDGED, LONGEST_ANSWER, questions


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("eval", help="accuracy on word problems or long documents", description=__doc__)
    add_task_options(parser)
    parser.add_argument("-n", "--num-problems", type=whole(1, 1_000_000), default=200, help="problems (200)")
    parser.add_argument("--seed", type=whole(0, MAX_SEED), default=123, help="of problems and all randomness (123)")
    parser.add_argument("--max-num-seqs", type=whole(1, 4096), default=16, help="requests in a batch (16)")
    add_figures_options(parser)
    add_sampling_options(parser, max_tokens=None)
    add_decoding_options(parser, gamma=4)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generates questions of the evaluation split, answers them, prints the figures."""
    check_files(args)
    check_task(args)
    if args.max_tokens is None:
        args.max_tokens = LONGEST_ANSWER[args.task]
    if args.max_model_len is None and args.task == "recall":
        args.max_model_len = args.context
    decoding = decoding_from(args)
    params = sampling_from(args, decoding)
    check_models(args)

    from smcjax.bench.accuracy import evaluate
    from smcjax.bench.record import this_machine
    from smcjax.engine.llm import LLM

    with LLM(
        args.model,
        decoding=resolved(args, decoding, [params]),
        max_num_seqs=min(args.max_num_seqs, args.num_problems),
        seed=args.seed,
        **one_shot_arguments(args),
    ) as llm:
        asked = questions(args.task, args.seed, args.num_problems, context=args.context)
        evaluation = evaluate(llm, asked, params, seed=args.seed, use_tqdm=shows_progress(args))
        chosen = llm.decoding
    report = evaluation.report()
    print(
        f"accuracy  {100 * report['accuracy']:.1f}%  (95% interval {100 * report['ci_low']:.1f} to "
        f"{100 * report['ci_high']:.1f})  {report['n']} {JUDGED[args.task]}, {chosen}, temperature {args.temperature}"
    )
    by_kind, paced = evaluation.by_kind, evaluation.tokens_per_cycle_by_kind
    if by_kind:
        each = (f"{kind} {100 * share:.1f}%, {paced[kind]:.2f} tokens a cycle" for kind, share in by_kind.items())
        print("of them   " + "; ".join(each))
    print(f"speed     {report['tokens_per_second']:.0f} tokens/s, {report['tokens_per_cycle']:.2f} tokens a cycle")
    if report["warned"]:
        print(
            f"warnings  {report['warned']} of {len(evaluation.parts)} answers, among them {report['warned_wrong']} of "
            f"the {report['wrong']} that are wrong"
        )
    write_figures(
        args,
        [{"decoder": str(chosen), **report, "by_kind": by_kind, "tokens_per_cycle_by_kind": paced}],
        this_machine(),
    )
    return 0
