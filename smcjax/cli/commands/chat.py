"""`smcjax chat`: a conversation in the terminal, or a line of piped input each. Everything said before is remembered.

/reset forgets the conversation, /help lists these words, /exit and the end of input end it. In a terminal lines can be
edited and recalled, answers appear as they become certain, and Ctrl-C ends an answer or a line, not the conversation.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from typing import TYPE_CHECKING

from smcjax.cli.answers import Doubt, answer, summary
from smcjax.cli.failures import refuses
from smcjax.cli.interrupts import ends_answer, ends_line
from smcjax.cli.options import (
    add_decoding_options,
    add_model_options,
    add_quiet_option,
    add_sampling_options,
    check_models,
    decoding_from,
    one_shot_arguments,
    resolved,
    sampling_from,
)
from smcjax.cli.parser import whole
from smcjax.cli.stdin import edit_lines, read_line, require_stdin
from smcjax.cli.wording import in_options
from smcjax.engine.requests.sampling_params import MAX_SEED

if TYPE_CHECKING:
    from smcjax.engine.llm import LLM
    from smcjax.engine.requests.sampling_params import SamplingParams

HELP = """\
/reset  forget what was said
/help   this list
/exit   end the conversation; so does the end of input (Ctrl-D)
Ctrl-C  end the answer that is being written; twice, the program"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("chat", help="converse in the terminal", description=__doc__)
    parser.add_argument("--seed", type=whole(0, MAX_SEED), default=0, help="of all randomness (0)")
    add_quiet_option(parser)
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

    decoding = resolved(args, decoding, [params])
    with LLM(args.model, decoding=decoding, max_num_seqs=1, seed=args.seed, **one_shot_arguments(args)) as llm:
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise ValueError(
                f"--model must have a tokenizer with a chat template, got {args.model}; use smcjax generate."
            )
        return _Conversation(args, llm, params, decoding.power).run()


class _Conversation:
    """Keeps what was said so far, and by whom."""

    def __init__(self, args: argparse.Namespace, llm: LLM, params: SamplingParams, power: float) -> None:
        self._llm, self._params = llm, params
        self._options, self._quiet = vars(args).keys(), args.quiet
        self._interactive = sys.stdin.isatty()
        self._doubt = Doubt(bundled=args.model is None, power=power)
        self._messages: list[dict[str, str]] = []

    def run(self) -> int:
        """Converses until it is told to end, and returns the exit code."""
        if self._interactive:
            edit_lines()
            self._remark("/help lists what else can be typed.")
        while (line := self._line()) is not None and line != "/exit":
            if line == "/reset":
                self._messages.clear()
                self._remark("The conversation begins anew.")
            elif line == "/help":
                print(HELP, file=sys.stderr)
            elif re.fullmatch(r"/\w+", line):
                print(f"smcjax: error: {line} is no command; /help lists them.", file=sys.stderr)
            elif line and not self._reply(line):
                return 1
        return 0

    def _line(self) -> str | None:
        """The next line; one that is interrupted is empty. Only in a terminal is there a reader who may go on."""
        if not self._interactive:
            return read_line()
        try:
            with ends_line():
                return read_line()
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends the conversation)", file=sys.stderr)
            return ""

    def _reply(self, line: str) -> bool:
        """Answers a line, and returns False where the request failed as it ran."""
        self._messages.append({"role": "user", "content": line})
        try:
            with ends_answer() if self._interactive else contextlib.nullcontext() as stopped:
                text, output = answer(self._llm, self._llm.chat_prompt(self._messages), self._params, stopped=stopped)
        except ValueError as error:  # too long by now, say: the conversation goes on without this line
            if not refuses(error):
                raise
            self._messages.pop()
            print(f"smcjax: error: {in_options(str(error), self._options)}", file=sys.stderr)
            return True
        if output is not None and output.error is not None:
            print(f"smcjax: error: {output.error}", file=sys.stderr)
            return False
        self._messages.append({"role": "assistant", "content": text})
        if output is None:
            self._remark("(interrupted)")
        elif not self._quiet:
            print(summary(output), file=sys.stderr)
            self._doubt.consider(output)
        return True

    def _remark(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr)
