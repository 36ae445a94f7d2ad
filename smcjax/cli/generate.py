"""`smcjax generate`: one prompt, one answer, and what it took."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from smcjax.auto import CHOICES
from smcjax.cli.options import (
    add_decoding_options,
    add_model_options,
    add_sampling_options,
    check_models,
    check_output,
    decoding_from,
    llm_arguments,
    sampling_from,
)
from smcjax.cli.parser import text, whole
from smcjax.cli.stdin import read_prompt
from smcjax.engine.sampling_params import MAX_SEED
from smcjax.plain import short

if TYPE_CHECKING:
    from smcjax.engine.outputs import RequestOutput


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command."""
    parser = subparsers.add_parser("generate", help="answer a prompt", description=__doc__)
    parser.add_argument("prompt", type=text, help="the text to continue; - reads it from standard input")
    parser.add_argument("--seed", type=whole(0, MAX_SEED), default=0, help="of all randomness (0)")
    parser.add_argument("--trace", metavar="FILE", help="write ESS, weights and ancestors of every cycle as JSON")
    add_sampling_options(parser, max_tokens=128)
    add_decoding_options(parser, gamma=8)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Loads, generates, prints the text on stdout and the figures on stderr."""
    if args.trace is not None:
        _check_trace(args.trace, args.decoding)
    decoding = decoding_from(args, trace=args.trace is not None)
    params = sampling_from(args, decoding, seed=args.seed)
    check_models(args)
    prompt = read_prompt() if args.prompt == "-" else args.prompt

    from smcjax.engine.llm import LLM

    with LLM(args.model, decoding=decoding, max_num_seqs=1, **llm_arguments(args)) as llm:
        output = llm.generate(prompt, params, use_tqdm=False)[0]
    if output.error is not None:
        print(f"smcjax: error: {output.error}", file=sys.stderr)
        return 1
    print(output.outputs[0].text.strip("\n"), flush=True)
    print(summary(output), file=sys.stderr)
    if args.trace is not None:
        from smcjax.viz.trace_file import save_trace

        save_trace(args.trace, output)
        print(f"trace: {args.trace}  (draw it: smcjax viz {args.trace})", file=sys.stderr)
    return 0


def _check_trace(path: str, decoding: str) -> None:
    """Refuses what would fail only after the answer has been generated."""
    if not CHOICES[decoding].weighted:
        raise ValueError(f"--trace needs a population, got --decoding {decoding}; leave one of them out.")
    check_output("--trace", path)


def summary(output: RequestOutput) -> str:
    """One line of figures about an answer."""
    metrics, answer = output.metrics, output.outputs[0]
    parts = [
        f"{metrics.generated_tokens} tokens ({answer.finish_reason})",
        f"{metrics.tokens_per_second:.1f} tokens/s",
        f"{metrics.cycles} cycles",
    ]
    if metrics.mean_accepted_length is not None:
        parts.append(f"{metrics.mean_accepted_length:.2f} drafts accepted a cycle")
    if output.smc is not None:
        mean_ess = "–" if metrics.mean_ess is None else f"{metrics.mean_ess:.2f}"
        parts += [
            f"mean ESS {mean_ess} of {len(output.smc.particles)}",
            f"{metrics.resamples} resamplings",
            f"log evidence {output.smc.log_evidence:.2f}",
        ]
        if output.smc.control:
            parts.append(f"control {output.smc.control:.2f}")
        if output.smc.vote is not None:
            parts.append(f"vote {100 * output.smc.vote.share:.0f}% for {short(output.smc.vote.answer)}")
    return "[" + " · ".join(parts) + "]"
