"""`smcjax profile`: measures a pair on this machine's device, for `decoding="auto"` to choose by.

For each strategy (the target alone; rejection of each K and number of candidates, along a tree; SMC if asked for) it
times cycles at every number of running requests and every context, on real prompts, and counts tokens a cycle. The
profile goes to one JSON file, which `LLM(decoding="auto", profile=FILE)` and `--profile FILE` read. Strategies that the
budget, or the memory, does not reach are left out whole.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import TYPE_CHECKING, Any

from smcjax.cli.batch import read_lines
from smcjax.cli.bench_options import BATCH, COUNT, CYCLES, DRAFTS, LENGTH, ROWS
from smcjax.cli.options import (
    add_model_options,
    add_quiet_option,
    add_task_options,
    check_models,
    check_output,
    check_task,
    llm_arguments,
    refresh_schedule,
)
from smcjax.cli.parser import above, share, whole
from smcjax.decoders import Autoregressive, Decoding
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from smcjax.sparse.verification import GROUP, MAX_QUERIES, MODES, SparseVerification

if TYPE_CHECKING:
    from smcjax.engine.requests.requests import Prompt


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command."""
    parser = subparsers.add_parser("profile", help="measure a pair here, to choose a decoder by", description=__doc__)
    parser.add_argument("-o", "--output", metavar="FILE", default="profile.json", help="(profile.json)")
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--requests", type=BATCH, nargs="+", default=[1, 2, 4, 8], metavar="G", help="running at once (1 2 4 8)"
    )
    what.add_argument("--contexts", type=LENGTH, nargs="+", default=[128], metavar="T", help="tokens of each (128)")
    what.add_argument("--gammas", type=DRAFTS, nargs="+", default=[2, 4, 8], metavar="K", help="draft tokens (2 4 8)")
    what.add_argument("--candidates", type=ROWS, nargs="+", metavar="N", help="of rejection (1 on a CPU, 1 8 on a GPU)")
    what.add_argument("--tree", type=int, nargs="+", metavar="N", help="rejection along a tree: children per depth")
    what.add_argument("--particles", type=ROWS, nargs="*", default=[], metavar="N", help="of SMC (none)")
    what.add_argument("--controls", type=share, nargs="+", default=[0.0], metavar="C", help="of SMC (0)")
    what.add_argument(
        "--sparse-modes", choices=MODES, nargs="+", help="of a sparse target: how queries read blocks (per_query)"
    )
    what.add_argument(
        "--sparse-groups", type=whole(1, MAX_QUERIES), nargs="+", metavar="C", help=f"that read together ({GROUP})"
    )
    what.add_argument(
        "--refreshes",
        type=refresh_schedule,
        nargs="+",
        metavar="R",
        help="spacings of sparse layers that select, or 1 or 0 for each layer, as 1,0,1 (1)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--cycles", type=CYCLES, default=16, help="timed cycles of a window (16)")
    how.add_argument("--windows", type=whole(1, 1000), default=3, help="windows, of which times are the median (3)")
    how.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: of this process's cores, where others use them"
    )
    how.add_argument("--budget", type=above(0, 1e6), metavar="SECONDS", help="leave out what takes longer (no end)")
    how.add_argument("--input-file", metavar="FILE", help="prompts, JSONL as of generate (default: the task's)")
    how.add_argument("-n", "--num-prompts", type=COUNT, default=16, help="of the task (16)")
    how.add_argument("--max-tokens", type=LENGTH, default=96, help="of the answers to them (96)")
    how.add_argument("--temperature", type=float, default=0.7, help="0.7")
    how.add_argument("--seed", type=whole(0, MAX_SEED), default=11, help="of prompts and answers (11)")
    add_task_options(how)
    add_quiet_option(parser)
    add_model_options(parser)
    parser.set_defaults(run=run, decoding="rejection")


def run(args: argparse.Namespace) -> int:
    """Measures, writes the file, and prints its tables."""
    check_output("--output", args.output)
    given = _prompts_given(args)
    context = args.context
    check_task(args)
    if args.model is not None and args.draft_model is None and args.draft_drop_layers is None:
        args.decoding = "autoregressive"
    if args.separate_draft:
        raise ValueError(
            "--separate-draft is for pipelined SMC, which profile does not measure; leave it out: other decoders run "
            "on two such devices as on one."
        )
    check_models(args)
    has_draft = args.decoding == "rejection"

    from smcjax.bench.profile import Plan, Profiler, strategies
    from smcjax.device import on_cpu
    from smcjax.engine.run.memory import require_devices
    from smcjax.planner.report import markdown
    from smcjax.tasks.questions import questions

    require_devices()
    if args.clock == "cpu" and not on_cpu():
        raise ValueError("--clock cpu is for cycles on a CPU, and this device is none; leave it out.")
    chosen = strategies(
        gammas=args.gammas,
        candidates=args.candidates or ([1] if on_cpu() or args.draft_model == "ngram" else [1, 8]),
        particles=args.particles,
        controls=args.controls,
        tree=args.tree,
        sparse=_sparse(args),
        has_draft=has_draft,
    )
    _check_temperature(args.temperature, chosen)
    plan = Plan(
        chosen,
        loads=tuple(sorted({*args.requests})),
        contexts=tuple(sorted({*args.contexts})),
        cycles=args.cycles,
        windows=args.windows,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        budget=args.budget,
        clock=args.clock,
    )

    def on_line(line: str) -> None:
        if not args.quiet:
            print(line, file=sys.stderr, flush=True)

    arguments = {"model": args.model, **llm_arguments(args)}
    del arguments["admission"]
    if not has_draft:
        arguments["draft_model"] = None
    with Profiler(plan, arguments, on_line) as profiler:
        prompts: list[Prompt] = list(given)
        if not prompts:
            asked = questions(args.task, args.seed, args.num_prompts, context=context or args.context or 2048)
            prompts = [question.prompt for question in asked]
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


def _sparse(args: argparse.Namespace) -> list[SparseVerification | None]:
    """The ways to verify; None alone for dense targets."""
    if args.sparse_modes is None and args.refreshes is None:
        if args.sparse_groups is not None:
            raise ValueError("--sparse-groups are about --sparse-modes, and there are none; give some.")
        return [None]
    modes, groups = args.sparse_modes or ["per_query"], args.sparse_groups or [GROUP]
    found = [
        SparseVerification(mode, group if mode != "per_query" else 1, schedule=None if refresh == 1 else refresh)
        for refresh, mode, group in itertools.product(args.refreshes or [1], modes, groups)
    ]
    return list(dict.fromkeys(found))


def _check_temperature(temperature: float, chosen: tuple[Decoding, ...]) -> None:
    params = SamplingParams(temperature=temperature)
    for one in chosen:
        one.check(params)
