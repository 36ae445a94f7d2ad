"""The command line: parsing, exit codes, and errors as one sentence.

Exit codes: 0 done, 1 failed, 2 wrong usage. With --debug, errors keep their traceback.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from smcjax import __version__
from smcjax.cli import bench, chat, doctor, evaluate, generate, viz
from smcjax.cli.options import add_debug_option
from smcjax.cli.parser import Parser
from smcjax.errors import CheckpointError


def make_parser() -> argparse.ArgumentParser:
    """All commands. Importing them is cheap: JAX is imported when one runs."""
    parser = Parser(prog="smcjax", description="LLM inference by Sequential Monte Carlo speculative decoding, in JAX.")
    parser.add_argument("--version", action="version", version=f"smcjax {__version__}")
    parser.add_argument("--debug", action="store_true", help="errors with their traceback")
    subparsers = parser.add_commands("command", "command")
    for command in (generate, chat, evaluate, bench, viz, doctor):
        command.add_parser(subparsers)
    for subparser in subparsers.choices.values():
        add_debug_option(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; the entry point of `smcjax`."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("smcjax").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal is no reason to lose an answer
    try:
        code = args.run(args)
        sys.stdout.flush()  # here, where a reader that has gone away is still our business
        return code
    except KeyboardInterrupt:
        print("smcjax: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
        if args.debug:
            raise
        print(f"smcjax: error: {_sentence(error)}", file=sys.stderr)
        usage = isinstance(error, ValueError) and not isinstance(error, CheckpointError)
        return 2 if usage else 1


def _sentence(error: Exception) -> str:
    """One line without what XLA appends."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else text[:499] + "…"
