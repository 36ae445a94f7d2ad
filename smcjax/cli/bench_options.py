"""Arguments that several benchmarks share, their limits, and what they build."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from smcjax.cli.options import check_output

if TYPE_CHECKING:
    from smcjax.bench.cycle import Models
    from smcjax.rejection import Rejection
    from smcjax.smc import SMC

ON_GPU = ("llama-3.1-8b", "llama-3.2-1b")  # the shapes of target and draft where none are named
ON_CPU = ("tiny-target", "tiny-draft")
LIMITS = {
    "requests": 4096,
    "context": 1 << 20,
    "contexts": 1 << 20,
    "requests_context": 1 << 20,
    "max_model_len": 1 << 20,
    "page_size": 64,
    "windows": 1000,
    "cycles": 100_000,
    "num_prompts": 1_000_000,
    "input_len": 1 << 20,
    "output_len": 1 << 20,
    "max_num_seqs": 4096,
    "num_problems": 1_000_000,
    "gammas": 64,
    "particles": 1024,
    "candidates": 1024,
}


def add_shape_options(parser: argparse.ArgumentParser, *, sizes: bool = True) -> None:
    """Whose shapes, held how, and, with `sizes`, how many rows and drafts."""
    for which, on_gpu, on_cpu in zip(("target", "draft"), ON_GPU, ON_CPU, strict=True):
        parser.add_argument(f"--{which}-shape", help=f"({on_gpu} on a GPU, {on_cpu} on a CPU)")
    parser.add_argument("--quantization", help="int8: the target's weights (default: bfloat16)")
    parser.add_argument("--draft-quantization", help="int8: the draft's weights (default: bfloat16)")
    if sizes:
        parser.add_argument(
            "-N", "--n-particles", type=int, default=8, help="particles, or candidates of rejection (8)"
        )
        parser.add_argument("-K", "--gamma", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--implementation",
        choices=("auto", "mosaic", "xla"),
        default="auto",
        help="xla: no GPU kernels; mosaic: all that apply (auto: the same on a Hopper GPU, none elsewhere)",
    )


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ValueError for numbers out of range."""
    for name, most in LIMITS.items():
        given = getattr(args, name, None)
        for value in given if isinstance(given, list) else [] if given is None else [given]:
            if not 1 <= value <= most:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} must be a whole number from 1 to {most}, got {value}.")
    if getattr(args, "bandwidth", None) is not None and not 0 < args.bandwidth <= 1e6:
        raise ValueError(f"--bandwidth must be above 0 and at most 1000000 GB/s, got {args.bandwidth}.")


def shape_decoding(args: argparse.Namespace) -> SMC | Rejection | None:
    """What to time; None is the target alone."""
    from smcjax.rejection import Rejection
    from smcjax.smc import SMC

    if args.decoding == "smc":
        return SMC(n_particles=args.n_particles, gamma=args.gamma)
    return Rejection(n_candidates=args.n_particles, gamma=args.gamma) if args.decoding == "rejection" else None


def shape_models(args: argparse.Namespace) -> Models:
    """The models that the options name, or those that this machine is good for."""
    import jax

    from smcjax.bench.cycle import Models
    from smcjax.engine.memory import require_devices

    require_devices()
    if args.implementation == "mosaic" and jax.default_backend() != "gpu":
        raise ValueError("--implementation mosaic needs a Hopper GPU and there is none; use auto or xla.")
    target, draft = ON_GPU if jax.default_backend() == "gpu" else ON_CPU
    named = (args.target_shape or target, args.draft_shape or draft)
    models = Models(*named, args.quantization, args.draft_quantization)
    print(f"Making random weights: {models.target}, {models.draft} …", file=sys.stderr)
    return models


def check_plot(args: argparse.Namespace) -> None:
    """Raises ValueError for a picture that could not be drawn or written, before anything is measured."""
    if args.plot is None:
        return
    if not args.plot.endswith((".svg", ".png", ".pdf")):
        raise ValueError(f"--plot must end in .svg, .png or .pdf, got {args.plot}.")
    check_output("--plot", args.plot)
