"""Options for the form of an answer: `SamplingParams.response_format` as one types it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from smcjax.cli.parser import text
from smcjax.cli.stdin import read_file
from smcjax.files import MIB
from smcjax.structured.response_format import GRAMMAR_DEPTH

if TYPE_CHECKING:
    from smcjax.engine.requests.sampling_params import SamplingParams

FILE_BYTES = 4 * MIB


def add_form_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options, of which one may be given, and one beside --grammar."""
    options = parser.add_argument_group("form of the answer")
    group = options.add_mutually_exclusive_group()
    group.add_argument("--regex", type=text, metavar="REGEX", help="what the whole answer matches")
    group.add_argument("--json-schema", metavar="FILE", help="the answer is JSON of the schema in this file")
    group.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    group.add_argument(
        "--grammar",
        metavar="FILE",
        help="the answer is derived by the grammar in this file, Lark's notation or GBNF (extra structured)",
    )
    options.add_argument(
        "--max-depth", type=int, metavar="N", help=f"levels of nesting of --grammar (default: {GRAMMAR_DEPTH})"
    )


def form_from(args: argparse.Namespace) -> dict[str, Any] | None:
    """The form that the options ask for, None without one. Raises ValueError for options and files that cannot be."""
    if args.grammar is not None:
        depth = {} if args.max_depth is None else {"max_depth": args.max_depth}
        return {"type": "grammar", "grammar": read_file("--grammar", args.grammar, FILE_BYTES), **depth}
    if args.max_depth is not None:
        raise ValueError(
            f"--max-depth is {args.max_depth}, and there is no --grammar whose nesting it limits; give one, or leave "
            "it out."
        )
    if args.regex is not None:
        return {"type": "regex", "regex": args.regex}
    if args.json_object:
        return {"type": "json_object"}
    if args.json_schema is None:
        return None
    try:
        schema = json.loads(read_file("--json-schema", args.json_schema, FILE_BYTES))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--json-schema {args.json_schema} is no JSON ({error.msg} in line {error.lineno}); mend it."
        ) from None
    except RecursionError:
        raise ValueError(f"--json-schema {args.json_schema} is nested too deeply; flatten it.") from None
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def check_form(params: SamplingParams) -> None:
    """Raises ValueError for a form that no model can keep: here, since a model takes its time to load."""
    expression = params.expression
    if expression is not None:
        from smcjax.structured.automaton import check_expression  # NumPy, which `smcjax --help` has no need of

        check_expression(expression)
