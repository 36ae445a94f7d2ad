"""Arguments that several benchmarks share, their limits, and what they build."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from smcjax.cli.options import QUANTIZATIONS, add_parallel_options, check_output, completed_decoder
from smcjax.cli.parser import whole
from smcjax.decoders import SMC, Decoding
from smcjax.decoders.written import Written

if TYPE_CHECKING:
    from smcjax.bench.models import Models

ON_GPU = ("llama-3.1-8b", "llama-3.2-1b")  # the shapes of target and draft where none are named
ON_CPU = ("tiny-target", "tiny-draft")
SHAPES = (
    *("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"),
    *("gemma-3-270m", "gemma-3-4b", "qwen3-0.6b", "qwen3-32b", "tiny-draft", "tiny-target"),
)
ATTENTIONS = ("nsa", "nsa-shared")

# Ranges of numbers that several benchmarks take.
ROWS, DRAFTS, PAGE, BATCH = whole(1, 1024), whole(1, 64), whole(1, 128), whole(1, 4096)
LENGTH, COUNT, CYCLES = whole(1, 1 << 20), whole(1, 1_000_000), whole(1, 100_000)


def add_shape_options(parser: argparse.ArgumentParser, *, sizes: bool = True) -> None:
    """Adds options for the models' shapes and how they are held; with `sizes`, for rows and drafts as well."""
    for which, on_gpu, on_cpu in zip(("target", "draft"), ON_GPU, ON_CPU, strict=True):
        parser.add_argument(f"--{which}-shape", choices=SHAPES, help=f"({on_gpu} on a GPU, {on_cpu} on a CPU)")
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        help="the target's: Native Sparse Attention with the paper's options, or with one pair of keys and values for "
        "all branches (default: dense)",
    )
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="the target's weights (default: bfloat16)")
    parser.add_argument("--draft-quantization", choices=QUANTIZATIONS, help="the draft's weights (default: bfloat16)")
    parser.add_argument("--target-layers", type=COUNT, metavar="L", help="of the target's layers, as many (all)")
    add_parallel_options(parser, usual_draft="1")
    if sizes:
        parser.add_argument(
            "-N", "--n-particles", type=ROWS, default=8, help="particles, or candidates of rejection (8)"
        )
        parser.add_argument("-K", "--gamma", type=DRAFTS, default=8, help="draft tokens a cycle (8)")
    parser.add_argument("--page-size", type=PAGE, default=16, help="tokens in a KV page (16)")
    parser.add_argument(
        "--implementation",
        choices=("auto", "mosaic", "triton", "xla"),
        default="auto",
        help="xla: no GPU kernels; mosaic, triton: those alone (auto: mosaic on a Hopper GPU, triton from Ampere on)",
    )


def add_decoding_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the decoder to time, which `shape_decoding` completes by the sizes."""
    parser.add_argument(
        "--decoding",
        type=completed_decoder,
        default=Written(SMC, {}),
        metavar="DECODER",
        help="as 'SMC(defer_bonus=False)'; what it does not say is of -N and -K (smc, at control 0)",
    )


def add_figures_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for the figures as JSON, which `write_figures` writes."""
    parser.add_argument("--json", action="store_true", help="one JSON line a row last")
    add_save_option(parser)


def add_save_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the figures' own file, which `check_files` checks."""
    parser.add_argument("--save", metavar="FILE", help="the rows with command, commit, date and device, as JSON")


def write_figures(
    args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any] | None
) -> None:
    """Prints the rows where --json asks for them, and writes the record that --save names; `machine` is what ran."""
    if args.json:
        for row in rows:
            print(json.dumps(row))
    if args.save is not None:
        from smcjax.bench.record import save

        save(args.save, rows, machine)


def shape_decoding(args: argparse.Namespace) -> Decoding:
    """The decoder to time; SMC as published, whose cycles give K + 1 tokens whatever the random weights say."""
    written: Written = args.decoding
    chosen = written.kind
    sizes = {chosen.rows_argument: args.n_particles, "gamma": args.gamma} if chosen.rows_argument else {}
    sizes |= {"control": 0} if chosen is SMC else {}
    if "tree" in written.options:  # it says how many tokens are drafted, of one row
        sizes = {}
    decoding: Decoding = written.make(**sizes)
    if not getattr(args, "separate_draft", False):  # an option of one benchmark
        return decoding
    if chosen is not SMC or written.options:
        raise ValueError(
            f"--separate-draft is for --decoding smc without options, whose draft need not wait for the target, got "
            f"{decoding}; leave one of them out."
        )
    if args.tensor_parallel_size > 1:
        raise ValueError(
            f"--separate-draft is for two devices that have each model whole, got --tensor-parallel-size "
            f"{args.tensor_parallel_size}; leave one of them out."
        )
    return SMC(n_particles=args.n_particles, gamma=args.gamma, pipelined=True)


def shape_models(args: argparse.Namespace) -> Models:
    """The models that the options name, or those that this machine is good for."""
    import jax

    from smcjax.bench.models import Models
    from smcjax.engine.arguments import check_devices
    from smcjax.engine.run.memory import require_devices
    from smcjax.pallas.dispatch import check_runs_here

    require_devices()
    check_runs_here("--implementation", args.implementation)
    target, draft = ON_GPU if jax.default_backend() == "gpu" else ON_CPU
    named = (args.target_shape or target, args.draft_shape or draft)
    check_devices(args.tensor_parallel_size, args.draft_tensor_parallel_size)
    models = Models(
        *named,
        args.quantization,
        args.draft_quantization,
        args.attention,
        args.target_layers,
        args.tensor_parallel_size,
        draft_divided=args.tensor_parallel_size > 1 and args.draft_tensor_parallel_size == args.tensor_parallel_size,
        separate_draft=getattr(args, "separate_draft", False),
    )
    print(f"Making random weights: {models.target}, {models.draft} …", file=sys.stderr)
    return models


def check_files(args: argparse.Namespace) -> None:
    """Raises ValueError for files that could not be written, or drawn, before anything is measured."""
    if args.save is not None:
        check_output("--save", args.save)
    plot = getattr(args, "plot", None)
    if plot is None:
        return
    if not plot.endswith((".svg", ".png", ".pdf")):
        raise ValueError(f"--plot must end in .svg, .png or .pdf, got {plot}.")
    check_output("--plot", plot)
