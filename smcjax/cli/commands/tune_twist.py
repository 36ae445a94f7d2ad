"""`smcjax tune-twist`: trains a twist for a potential, which guesses what beginnings of answers will be worth.

Prompts are those of `smcjax tune-draft`; the target answers each several times. The twist is one file, which
`smcjax.smc.Twist.load` reads, for requests that have the potential too. Needs optax, by the extra train.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from smcjax.checks import short
from smcjax.cli.commands.tune_draft import (
    add_answers_options,
    add_training_options,
    asked_prompts,
    require_optax,
    require_writable,
    sampling_of,
)
from smcjax.cli.options import add_quiet_option, remark
from smcjax.cli.parser import whole
from smcjax.cli.potentials import imported_potential, is_place


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("tune-twist", help="train a guide to a potential", description=__doc__)
    models = parser.add_argument_group("models")
    models.add_argument("--model", metavar="MODEL", help="target (default: the bundled pair)")
    models.add_argument("--draft-model", "--draft", metavar="MODEL", help="draft, to sample faster")
    models.add_argument(
        "--potential",
        required=True,
        metavar="MODULE:OBJECT",
        help="a smcjax.TextPotential, a smcjax.smc.Potential, or a function of a prompt and a list of texts",
    )
    add_answers_options(parser, num_prompts=512)
    training = parser.add_argument_group("training")
    training.add_argument("--samples", type=whole(1, 1024), default=8, help="answers to a prompt (8)")
    training.add_argument("--units", type=whole(1, 4096), default=32, help="of the hidden layer (32)")
    add_training_options(training, learning_rate=3e-3)
    files = parser.add_argument_group("files")
    files.add_argument("-o", "--output", required=True, metavar="FILE", help="the twist's file, as twist.safetensors")
    files.add_argument("--json", action="store_true", help="one JSON line last")
    add_quiet_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trains, writes the twist, prints the loss on held-out prompts."""
    output = Path(args.output)
    if output.exists():
        raise ValueError(f"--output {output} exists, and nothing is written over; name another file.")
    require_writable(output)
    if not is_place(args.potential):
        raise ValueError(f"--potential must be MODULE:OBJECT, got {short(args.potential)}.")
    if args.draft_model is not None and args.model is None:
        raise ValueError("draft_model is set and model is not; give both, or neither for the bundled pair.")
    potential = imported_potential(args.potential, args.potential)
    if args.prompts == "recall" and args.model is None:
        args.model, args.draft_model = "recall", "recall-draft"
    prompts, held_out = asked_prompts(args)
    require_optax("smcjax tune-twist")

    from smcjax.tuning.train import Schedule
    from smcjax.tuning.twist import tune_twist

    output.parent.mkdir(parents=True, exist_ok=True)
    report = tune_twist(
        args.model,
        args.draft_model,
        potential,
        prompts,
        held_out,
        output,
        sampling=sampling_of(args, args.samples * len(prompts)),
        schedule=Schedule(args.steps, args.learning_rate, args.seed),
        samples=args.samples,
        units=args.units,
        batch_tokens=args.batch_tokens,
        on_line=(lambda _: None) if args.quiet else remark,
    )
    before, after = report.held_out[0][1], min(loss for _, loss in report.held_out)
    print(f"held-out prompts: loss {after:.4f} after step {report.kept}, {before:.4f} of a constant")
    print(output)
    if args.json:
        print(json.dumps(dataclasses.asdict(report)))
    return 0
