"""`smcjax generate`: one prompt, one answer, and what it took; or a file of requests, one a line.

The prompt is an argument, a file, or standard input where that is piped. A terminal shows the answer as it becomes
certain: what all particles that may still answer begin with.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from smcjax.auto import Choice
from smcjax.cli.answers import Doubt, answer, summary
from smcjax.cli.commands.batch import answer_lines, read_lines, write_results
from smcjax.cli.form_options import add_form_options, check_form, form_from
from smcjax.cli.options import (
    add_decoding_options,
    add_model_options,
    add_quiet_option,
    add_sampling_options,
    check_models,
    check_output,
    decoding_from,
    one_shot_arguments,
    resolved,
    sampling_from,
    shows_progress,
)
from smcjax.cli.parser import text, whole
from smcjax.cli.stdin import read_prompt, stdin_is_piped
from smcjax.engine.requests.sampling_params import MAX_SEED

if TYPE_CHECKING:
    from smcjax.engine.requests.sampling_params import SamplingParams


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("generate", help="answer a prompt, or a file of them", description=__doc__)
    parser.add_argument(
        "prompt", type=text, nargs="?", help="the text to continue; - or nothing, in a pipe, reads standard input"
    )
    add_model_options(parser)
    parser.add_argument(
        "--input-file",
        metavar="FILE",
        help='JSONL, a request a line: "prompt" or "messages", and optionally "id" and sampling fields; -: stdin',
    )
    parser.add_argument("--output-file", metavar="FILE", help="JSONL, a result a line, in order (standard output)")
    parser.add_argument(
        "--max-num-seqs", type=whole(1, 4096), metavar="G", help="requests of --input-file in a batch (8)"
    )
    parser.add_argument("--seed", type=whole(0, MAX_SEED), default=0, help="of all randomness (0)")
    parser.add_argument("--trace", metavar="FILE", help="write ESS, weights and ancestors of every cycle as JSON")
    add_quiet_option(parser)
    add_sampling_options(parser, max_tokens=128)
    add_form_options(parser)
    add_decoding_options(parser, gamma=8)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Checks everything, loads, generates, prints the text on stdout and the figures on stderr."""
    _check_sources(args)
    if args.trace is not None:
        if args.decoding is not None and not args.decoding.kind.weighted:
            name = args.decoding.kind.name
            raise ValueError(f"--trace needs a population, got --decoding {name}; leave one of them out.")
        check_output("--trace", args.trace)
    if args.output_file is not None:
        check_output("--output-file", args.output_file, args.input_file)
    decoding = decoding_from(args, trace=args.trace is not None)
    # Requests of a file have seeds that follow one another, unless they bring their own.
    seed = args.seed if args.input_file is None else None
    params = sampling_from(args, decoding, seed=seed, response_format=form_from(args))
    check_form(params)
    check_models(args)
    if args.input_file is not None:
        return _run_lines(args, decoding, params)
    prompt = read_prompt() if args.prompt in (None, "-") else args.prompt

    from smcjax.engine.llm import LLM

    decoding = resolved(args, decoding, [params])
    with LLM(args.model, decoding=decoding, max_num_seqs=1, **one_shot_arguments(args)) as llm:
        _, output = answer(llm, prompt, params)
    assert output is not None  # only an abort would leave none
    if output.error is not None:
        print(f"smcjax: error: {output.error}", file=sys.stderr)
        return 1
    if not args.quiet:
        print(summary(output), file=sys.stderr)
        # The evidence of an answer with a form is the form's.
        Doubt(bundled=args.model is None and params.expression is None, power=decoding.power).consider(output)
    if args.trace is not None:
        from smcjax.viz.trace_file import save_trace

        save_trace(args.trace, output)
        if not args.quiet:
            print(f"trace: {args.trace}  (draw it: smcjax viz {args.trace})", file=sys.stderr)
    return 0


def _run_lines(args: argparse.Namespace, decoding: Choice, params: SamplingParams) -> int:
    """Answers a file of requests. Returns 1 where one failed as it ran; the results say which."""
    lines = read_lines(args.input_file, params, decoding)

    from smcjax.engine.llm import LLM

    batch = min(args.max_num_seqs or 8, len(lines))
    decoding = resolved(args, decoding, [line.params for line in lines])
    with LLM(args.model, decoding=decoding, max_num_seqs=batch, seed=args.seed, **one_shot_arguments(args)) as llm:
        outputs = answer_lines(llm, args.input_file, lines, progress=shows_progress(args))
    write_results(args.output_file, lines, outputs)
    failed = [line.number for line, output in zip(lines, outputs, strict=True) if output.error is not None]
    if not args.quiet:
        tokens = sum(output.metrics.generated_tokens for output in outputs)
        print(f"[{len(outputs)} requests · {tokens} tokens · {len(failed)} failed]", file=sys.stderr)
        doubt = Doubt(bundled=args.model is None, power=decoding.power)
        for line, output in zip(lines, outputs, strict=True):
            if line.params.expression is None:
                doubt.consider(output, f"the prompt of line {line.number}")
    if failed:
        print(f"smcjax: error: line {failed[0]} failed, of {len(failed)}; its result says why.", file=sys.stderr)
    return 1 if failed else 0


def _check_sources(args: argparse.Namespace) -> None:
    """Refuses two places that a prompt may come from, none, and options that only a file of requests has."""
    places = {"prompt": args.prompt, "--input-file": args.input_file}
    given = [place for place, value in places.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} are given, each with what to answer; leave one of them out.")
    if not given and not stdin_is_piped():
        raise ValueError("there is no prompt; give one, - for standard input, or --input-file.")
    if args.input_file is None:
        for option, value in (("--output-file", args.output_file), ("--max-num-seqs", args.max_num_seqs)):
            if value is not None:
                raise ValueError(f"{option} goes with --input-file, which is not given; leave it out.")
    elif args.trace is not None:
        raise ValueError("--trace is of one prompt, got --input-file; leave one of them out.")
