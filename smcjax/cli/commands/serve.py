"""`smcjax serve`: an OpenAI-compatible server. Requests to it choose among decoders of one pair of models."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from smcjax.auto import Auto, Routed
from smcjax.checks import short
from smcjax.cli.options import (
    add_decoding_options,
    add_memory_options,
    add_model_options,
    check_models,
    decoding_from,
    has_draft,
    llm_arguments,
    one_decoder,
)
from smcjax.cli.parser import text, whole
from smcjax.cli.potentials import imported_potential, is_place
from smcjax.cli.stdin import read_file
from smcjax.engine.requests.sampling_params import MAX_SEED
from smcjax.errors import extra_missing
from smcjax.files import MIB

KEY_VARIABLE = "SMCJAX_API_KEY"
SHORTEST_KEY = 8
KEY_BYTES = MIB  # of a file of keys


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("serve", help="serve models by OpenAI's HTTP interface", description=__doc__)
    parser.add_argument("served", type=text, nargs="?", metavar="MODEL", help="the target, as by --model")
    add_model_options(parser)
    group = parser.add_argument_group("server")
    add_memory_options(group)

    def repeatable(option: str, metavar: str, help: str, kind: Callable[[str], Any] = text) -> None:
        group.add_argument(option, type=kind, action="append", default=[], metavar=metavar, help=help)

    group.add_argument("--host", type=text, default="127.0.0.1", help="address to listen at (127.0.0.1)")
    group.add_argument("--port", type=whole(0, 65535), default=8000, help="port; 0 takes any that is free (8000)")
    repeatable(
        "--api-key",
        "KEY",
        f"a key that requests must bring; repeatable; others on this machine see it, {KEY_VARIABLE} they do not",
    )
    group.add_argument("--api-key-file", metavar="FILE", help="a file of keys, one a line")
    repeatable("--allow-origin", "ORIGIN", "an origin whose pages may ask from a browser; repeatable (default: none)")
    repeatable(
        "--allowed-host",
        "NAME",
        "a name to ask the server by, beside those of loopback; repeatable (default: any where there are keys)",
    )
    group.add_argument("--served-model-name", type=text, metavar="NAME", help="(the directory's)")
    repeatable(
        "--also",
        "DECODER",
        "one more decoder, as 'SMC(n_particles=32)', 'Rejection(gamma=6)' or autoregressive; repeatable",
        one_decoder,
    )
    repeatable(
        "--potential",
        "NAME=MODULE:OBJECT",
        "a potential that requests may ask for by name, from a module of yours: a smcjax.TextPotential, a "
        "smcjax.smc.Potential, or a function of a prompt and a list of texts; repeatable",
    )
    group.add_argument("--max-num-seqs", type=whole(1, 4096), default=8, metavar="G", help="requests at once (8)")
    group.add_argument("--max-waiting", type=whole(0, 1 << 20), default=256, help="further ones that may wait (256)")
    group.add_argument("--max-body", type=whole(1024, 1 << 30), default=8 << 20, help="bytes of a request (8 MiB)")
    group.add_argument(
        "--drain-seconds",
        type=whole(0, 86_400),
        default=30,
        metavar="S",
        help="that answers have to end after SIGTERM or Ctrl-C; what has not is cut (30)",
    )
    group.add_argument("--seed", type=whole(0, MAX_SEED), default=0, help="of requests that bring none (0)")
    group.add_argument(
        "--compile-at-start",
        action=argparse.BooleanOptionalAction,
        help="compile all programs before listening is announced, or each when it is needed first (on a CPU so)",
    )
    add_decoding_options(parser, gamma=8, profile="of smcjax profile: chooses the exact decoder, where none is named")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Checks everything, takes the port, loads, and serves until a signal comes."""
    if args.served is not None:
        if args.model is not None:
            raise ValueError(f"MODEL is {short(args.served)} and --model {short(args.model)}; leave one of them out.")
        args.model = args.served
    by_profile = args.profile
    if args.decoding is None or args.decoding.kind is not Auto:
        args.profile = None  # it chooses the exact decoder beside the one that is named
    first = decoding_from(args)
    if isinstance(first, Routed):
        first = first.choose(has_draft=has_draft(args), deterministic_drafts=args.draft_model == "ngram")[0]
    if isinstance(first, Auto) and first.profile is None:
        raise ValueError(
            "--decoding of serve must name a decoder, got auto: each request chooses among those that are served; "
            "leave it out, or give --profile, by which the exact one is chosen."
        )
    decodings = [first, *args.also]
    check_models(args)
    keys, potentials = keys_of(args), potentials_of(args.potential)
    try:
        from smcjax.server import models, process, state
    except ModuleNotFoundError as error:
        raise RuntimeError(extra_missing("smcjax serve", str(error.name), "serve") + ".") from None

    process.check_address(args.host, keys)
    listening = process.bound(args.host, args.port)
    settings = state.Settings(
        keys=keys,
        hosts=tuple(args.allowed_host),
        origins=tuple(args.allow_origin),
        max_body=args.max_body,
        drain_seconds=args.drain_seconds,
        potentials=potentials,
    )
    with listening:
        loaded = models.load(
            args.model,
            models.with_exact(decodings, by_profile),
            name=args.served_model_name,
            max_waiting=args.max_waiting,
            max_num_seqs=args.max_num_seqs,
            seed=args.seed,
            compile_at_start=args.compile_at_start,
            **llm_arguments(args),
        )
        process.serve(state.Served(loaded, settings), listening)
    return 0


def potentials_of(named: Sequence[str]) -> dict[str, Any]:
    """The operator's potentials by name. Raises ValueError for what cannot be imported, or is none."""
    found: dict[str, Any] = {}
    for one in named:
        name, _, place = one.partition("=")
        if not name or name in found or not is_place(place):
            raise ValueError(f"--potential must be NAME=MODULE:OBJECT, each name once, got {short(one)}.")
        found[name] = imported_potential(one, place)
    return found


def keys_of(args: Any) -> tuple[str, ...]:
    """All keys that are given. Raises ValueError for a file without any, and for keys that can be guessed."""
    keys = [*args.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    if args.api_key_file is not None:
        lines = [line.strip() for line in read_file("--api-key-file", args.api_key_file, KEY_BYTES).splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file {args.api_key_file} holds no key; write one a line.")
        keys += found
    for key in keys:
        if len(key) < SHORTEST_KEY or key != key.strip():
            raise ValueError(f"a key must have at least {SHORTEST_KEY} characters and no space around it; change it.")
    return tuple(keys)
