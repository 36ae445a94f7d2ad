"""The command line: parsing, exit codes, and errors as one sentence.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. With --debug, errors keep their traceback.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from smcjax import __version__
from smcjax.cli.commands import bench, chat, doctor, evaluate, generate, profile, serve, tune_draft, tune_twist, viz
from smcjax.cli.failures import PLUGIN_LOG, InputLineError, refuses, sentence, without_traceback
from smcjax.cli.options import add_debug_option
from smcjax.cli.parser import Parser
from smcjax.cli.wording import in_options
from smcjax.errors import ExtraMissing


def make_parser() -> argparse.ArgumentParser:
    """All commands. Importing them is cheap: JAX is imported when one runs."""
    parser = Parser(prog="smcjax", description="LLM inference by Sequential Monte Carlo speculative decoding, in JAX.")
    parser.add_argument("--version", action="version", version=f"smcjax {__version__}")
    parser.add_argument("--debug", action="store_true", help="errors with their traceback")
    subparsers = parser.add_commands("command", "command")
    for command in (generate, chat, serve, evaluate, bench, profile, tune_draft, tune_twist, viz, doctor):
        command.add_parser(subparsers)
    for subparser in subparsers.choices.values():
        add_debug_option(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. `smcjax.cli.process` is about the process around it."""
    args, code = None, 1
    failed: Exception | None = None
    try:
        args = make_parser().parse_args(argv)
        logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
        logging.getLogger("smcjax").setLevel(logging.ERROR if getattr(args, "quiet", False) else logging.INFO)
        if not args.debug:
            logging.getLogger(PLUGIN_LOG).addFilter(without_traceback)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # an ASCII terminal is no reason to lose an answer
        _require_directory()
        code = args.run(args)
    except SystemExit as ended:  # argparse: --help, wrong usage
        code = int(ended.code or 0)
    except KeyboardInterrupt:
        print("smcjax: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args is not None and args.debug and not isinstance(error, BrokenPipeError):
            raise
        failed = error
    failed = _flush() or failed  # here, where a reader that has gone away is still our business
    if failed is None:
        return code
    if not isinstance(failed, BrokenPipeError):  # whose reader has gone: no message would be read
        print(f"smcjax: error: {_worded(failed, args)}", file=sys.stderr)
    return 2 if refuses(failed) and not isinstance(failed, ExtraMissing) else 1


def _worded(error: Exception, args: argparse.Namespace | None) -> str:
    """The error's sentence; where it refuses an argument, by the name of the command's option."""
    text = sentence(error)
    if args is None or not refuses(error) or isinstance(error, InputLineError):
        return text
    return in_options(text, vars(args).keys())


def _require_directory() -> None:
    """Raises RuntimeError where the current directory has been removed: half of what is imported asks for it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RuntimeError("the current directory no longer exists; change to another one.") from None


def _flush() -> OSError | None:
    """Writes what is left for standard output; where that fails it is dropped, or it would fail again at the end."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None
