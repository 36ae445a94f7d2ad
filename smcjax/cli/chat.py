"""`smcjax chat`: a conversation in the terminal. An empty line or end of input ends it."""

from __future__ import annotations

import argparse
import sys

from smcjax.cli.failures import refuses
from smcjax.cli.generate import summary
from smcjax.cli.options import (
    add_decoding_options,
    add_model_options,
    add_sampling_options,
    check_models,
    decoding_from,
    llm_arguments,
    sampling_from,
)
from smcjax.cli.parser import whole
from smcjax.cli.stdin import read_line, require_stdin
from smcjax.engine.sampling_params import MAX_SEED


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declares the command."""
    parser = subparsers.add_parser("chat", help="converse in the terminal", description=__doc__)
    parser.add_argument("--seed", type=whole(0, MAX_SEED), default=0, help="of all randomness (0)")
    add_sampling_options(parser, max_tokens=256)
    add_decoding_options(parser, gamma=8)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads a line, answers it with all that was said before, and so on."""
    decoding = decoding_from(args)
    params = sampling_from(args, decoding)
    check_models(args)
    require_stdin()

    from smcjax.engine.llm import LLM

    with LLM(args.model, decoding=decoding, max_num_seqs=1, seed=args.seed, **llm_arguments(args)) as llm:
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise ValueError(
                f"--model must have a tokenizer with a chat template, got {args.model}; use smcjax generate."
            )
        messages: list[dict[str, str]] = []
        while line := read_line():
            messages.append({"role": "user", "content": line})
            try:
                output = llm.chat(messages, params, use_tqdm=False)[0]
            except ValueError as error:  # too long by now, say: the conversation goes on without this line
                if not refuses(error):
                    raise
                messages.pop()
                print(f"smcjax: error: {error}", file=sys.stderr)
                continue
            if output.error is not None:
                print(f"smcjax: error: {output.error}", file=sys.stderr)
                return 1
            text = output.outputs[0].text.strip("\n")
            messages.append({"role": "assistant", "content": text})
            print(text, flush=True)
            print(summary(output), file=sys.stderr)
    return 0
