"""`smcjax bench serve`: a server of OpenAI's interface under load, from the client's side."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys

from smcjax.cli.bench_options import COUNT, add_figures_options, check_files, write_figures
from smcjax.cli.commands.serve import KEY_VARIABLE
from smcjax.cli.options import add_debug_option
from smcjax.cli.parser import above, text, whole
from smcjax.engine.requests.sampling_params import MAX_SEED
from smcjax.errors import extra_missing

KEY_VARIABLES = (KEY_VARIABLE, "OPENAI_API_KEY")


def add_parser(benchmarks: argparse._SubParsersAction) -> None:
    parser = benchmarks.add_parser("serve", help="a server over HTTP: latencies and tokens/s", description=__doc__)
    parser.add_argument(
        "--base-url", type=text, default="http://127.0.0.1:8000", metavar="URL", help="(http://127.0.0.1:8000)"
    )
    parser.add_argument("--model", type=text, metavar="NAME", help="a model of the server's (its first)")
    parser.add_argument("--api-key", type=text, metavar="KEY", help=f"(${KEY_VARIABLES[0]}, ${KEY_VARIABLES[1]})")
    parser.add_argument("-n", "--num-prompts", type=COUNT, default=64, help="requests, word problems (64)")
    parser.add_argument("--max-tokens", type=whole(1, 1 << 20), default=128, help="of an answer (128)")
    parser.add_argument("--temperature", type=above(0, 1e3), default=0.7, help="0.7")
    parser.add_argument(
        "--request-rate",
        type=above(0, math.inf),
        nargs="+",
        default=[math.inf],
        metavar="R",
        help="a second, one row each (all at once)",
    )
    parser.add_argument("--max-concurrency", type=COUNT, metavar="C", help="requests under way at most (all)")
    parser.add_argument("--seed", type=whole(0, MAX_SEED // 2), default=0, help="of arrivals, prompts and answers (0)")
    add_figures_options(parser)
    add_debug_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sends the load at each rate; a table, and the first failure of each row on stderr."""
    check_files(args)
    try:
        from smcjax.bench import client
    except ModuleNotFoundError as error:
        raise RuntimeError(extra_missing("smcjax bench serve", str(error.name), "serve") + ".") from None
    keys = [args.api_key, *map(os.environ.get, KEY_VARIABLES)]
    results = []
    for rate in args.request_rate:
        load = client.ClientLoad(
            args.base_url,
            args.model,
            next((key for key in keys if key), None),
            args.num_prompts,
            args.max_tokens,
            args.temperature,
            rate,
            args.max_concurrency,
            args.seed,
        )
        model, requests = asyncio.run(client.run(load))
        results.append(client.figures(load, model, requests))
        errors = [one.error for one in requests if one.error is not None]
        if errors:
            print(f"{len(errors)} of {len(requests)} requests failed; the first: {errors[0]}", file=sys.stderr)
    print(client.markdown(results))
    write_figures(args, results, None)  # the server's machine, which this process does not know
    return 0 if all(result["completed"] for result in results) else 1
