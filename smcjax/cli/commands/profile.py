"""`smcjax profile`: measures a pair on this machine's device, for `decoding="auto"` to choose by.

For each strategy (the target alone; rejection of several K and numbers of candidates, or the decoders that are named)
it times cycles at every number of running requests and every context, on real prompts, and counts tokens a cycle. The
profile goes to one JSON file, which `LLM(decoding=Auto(profile=FILE))` and `--profile FILE` read. Strategies that the
budget, or the memory, does not reach are left out whole.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from smcjax.cli.bench_options import BATCH, COUNT, CYCLES, LENGTH
from smcjax.cli.commands.batch import read_lines
from smcjax.cli.options import (
    add_model_options,
    add_quiet_option,
    add_task_option,
    check_models,
    check_output,
    check_task,
    llm_arguments,
    one_decoder,
    remark,
)
from smcjax.cli.parser import above, whole
from smcjax.decoders import Autoregressive, Rejection
from smcjax.decoders.written import Written
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from smcjax.engine.requests.requests import Prompt


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("profile", help="measure a pair here, to choose a decoder by", description=__doc__)
    parser.add_argument("-o", "--output", metavar="FILE", default="profile.json", help="(profile.json)")
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--requests", type=BATCH, nargs="+", default=[1, 2, 4, 8], metavar="G", help="running at once (1 2 4 8)"
    )
    what.add_argument(
        "--contexts", type=LENGTH, nargs="+", metavar="T", help="tokens of each (128); of recall's documents too (2048)"
    )
    what.add_argument(
        "--decoding",
        dest="decodings",
        type=one_decoder,
        nargs="+",
        metavar="DECODER",
        help="beside the target alone, as 'Rejection(gamma=4)' (rejection with 1 candidate, on a GPU 8 as well, and "
        "K = 2, 4, 8)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--cycles", type=CYCLES, default=10, help="timed cycles of a window (10)")
    how.add_argument("--windows", type=whole(1, 1000), default=3, help="windows, of which times are the median (3)")
    how.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: of this process's cores, where others use them"
    )
    how.add_argument("--budget", type=above(0, 1e6), metavar="SECONDS", help="leave out what takes longer (no end)")
    how.add_argument("--input-file", metavar="FILE", help="prompts, JSONL as of generate (default: the task's)")
    how.add_argument("-n", "--num-prompts", type=COUNT, default=16, help="of the task (16); of recall at each context")
    how.add_argument("--max-tokens", type=LENGTH, default=96, help="of the answers to them (96)")
    how.add_argument("--temperature", type=float, default=0.7, help="0.7")
    how.add_argument("--seed", type=whole(0, MAX_SEED), default=11, help="of prompts and answers (11)")
    add_task_option(how)
    add_quiet_option(parser)
    add_model_options(parser)
    parser.set_defaults(run=run, decoding=Written(Rejection, {}), context=None)


def run(args: argparse.Namespace) -> int:
    """Measures, writes the file, and prints its tables."""
    check_output("--output", args.output, args.input_file)
    given = _prompts_given(args)
    contexts = args.contexts or [2048 if args.task == "recall" else 128]
    if args.task == "recall" and not given:
        args.context = min(contexts)
    check_task(args, "--contexts")
    if args.model is not None and args.draft_model is None and args.draft_drop_layers is None:
        args.decoding = Written(Autoregressive, {})
    check_models(args)
    has_draft = args.decoding.kind is Rejection

    from smcjax.bench.profile import Plan, Profiler, strategies
    from smcjax.device import on_cpu
    from smcjax.engine.run.memory import require_devices
    from smcjax.planner.report import markdown
    from smcjax.tasks.questions import questions

    require_devices()
    if args.clock == "cpu" and not on_cpu():
        raise ValueError("--clock cpu is for cycles on a CPU, and this device is none; leave it out.")
    counts = [1] if on_cpu() or args.draft_model == "ngram" else [1, 8]
    usual = [Rejection(gamma, n_candidates=count) for gamma in (2, 4, 8) for count in counts]
    chosen = strategies((args.decodings or usual) if has_draft else ())
    for decoding in chosen:
        decoding.check(SamplingParams(temperature=args.temperature))
    plan = Plan(
        chosen,
        loads=tuple(sorted({*args.requests})),
        contexts=tuple(sorted({*contexts})),
        cycles=args.cycles,
        windows=args.windows,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        budget=args.budget,
        clock=args.clock,
    )
    arguments = {"model": args.model, **llm_arguments(args)}
    if not has_draft:
        arguments["draft_model"] = None
    with Profiler(plan, arguments, (lambda _: None) if args.quiet else remark) as profiler:
        prompts: list[Prompt] = list(given)
        if not prompts:
            for length in plan.contexts if args.task == "recall" else (0,):
                asked = questions(args.task, args.seed, args.num_prompts, context=length)
                prompts += [question.prompt for question in asked]
        profile = profiler.measure(prompts)
    profile.save(args.output)
    print(f"{profile.device}, jax {profile.jax}; {args.output}\n")
    print(markdown(profile))
    for one in profile.left_out:
        print(f"\nLeft out: {one['strategy']} ({one['why']}).")
    return 0


def _prompts_given(args: argparse.Namespace) -> list[Any]:
    """The prompts of --input-file; none without one."""
    if args.input_file is None:
        return []
    lines = read_lines(args.input_file, SamplingParams(), Autoregressive())
    for line in lines:
        if not isinstance(line.content, str):
            raise ValueError(
                f"--input-file {args.input_file} line {line.number} has messages, and a profile takes prompts; "
                "write its text as prompt."
            )
    return [line.content for line in lines]
