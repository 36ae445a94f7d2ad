"""Arguments that several commands share, and what they build."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smcjax.autoregressive import Autoregressive
    from smcjax.engine.sampling_params import SamplingParams
    from smcjax.rejection import Rejection
    from smcjax.smc import SMC

DECODINGS = ("smc", "rejection", "autoregressive")
# Options of each decoder, by the names of its fields.
OPTIONS: dict[str, dict[str, str]] = {
    "smc": {
        name: name
        for name in ("n_particles", "gamma", "power", "draft_temperature", "ess_threshold", "resampling", "select")
    },
    "rejection": {
        "n_particles": "n_candidates",
        "gamma": "gamma",
        "draft_temperature": "draft_temperature",
        "verification": "verification",
    },
    "autoregressive": {},
}


def check_output(option: str, path: str) -> None:
    """Raises ValueError for a file that could not be written once the work is done."""
    directory = os.path.dirname(path) or "."
    if not os.path.basename(path) or os.path.isdir(path):
        raise ValueError(f"{option} must be a file, got the directory {path!r}; add a file name.")
    if not os.path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
        raise ValueError(f"{option} must lie in a directory that can be written to, got {path!r}; make one.")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which models, and how they are held."""
    group = parser.add_argument_group("models")
    group.add_argument("--model", metavar="DIR", help="target: a Hugging Face directory (default: the bundled pair)")
    group.add_argument("--draft-model", metavar="DIR", help="draft: a Hugging Face directory of the same tokenizer")
    group.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32 (auto: bfloat16 on GPU)")
    group.add_argument("--quantization", help="int8: the target's matrices (default: as they are)")
    group.add_argument("--draft-quantization", help="int8: the draft's matrices (default: as they are)")
    group.add_argument("--max-model-len", type=int, metavar="T", help="prompt and generated tokens at most")
    group.add_argument("--implementation", choices=("auto", "xla"), default="auto", help="xla: no GPU kernels")
    group.add_argument("--page-size", type=int, default=16, metavar="B", help="tokens in a KV page (16)")
    group.add_argument("--num-pages", type=int, metavar="P", help="KV pages (default: what memory allows)")
    group.add_argument("--admission", default="worst_case", help="worst_case (default) or optimistic")


def add_decoding_options(parser: argparse.ArgumentParser, *, n_particles: int, gamma: int) -> None:
    """How tokens are chosen."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--decoding", choices=DECODINGS, default="smc", help="smc (default); exact: rejection, or the target alone"
    )
    group.add_argument("-N", "--n-particles", type=int, help=f"particles ({n_particles}); rejection: candidates (1)")
    group.add_argument("-K", "--gamma", type=int, help=f"draft tokens a cycle ({gamma})")
    group.add_argument("--verification", help="rejection: token (default) or block")
    group.add_argument("--power", type=float, help="exponent of the target distribution (1)")
    group.add_argument("--draft-temperature", type=float, help="default: the request's temperature")
    group.add_argument("--ess-threshold", type=float, help="resample when ESS < threshold x N (0.5)")
    group.add_argument("--resampling", help="systematic (default), stratified, multinomial or residual")
    group.add_argument("--select", help="the answer: sample (default) or best")
    parser.set_defaults(smc_defaults={"n_particles": n_particles, "gamma": gamma})


def add_debug_option(parser: argparse.ArgumentParser) -> None:
    """--debug after the command as well as before it."""
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="errors with their traceback")


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """What a request asks for."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.7, help="0.7")
    group.add_argument("--top-p", type=float, default=1.0, help="likeliest tokens of this sum; exact decoders only (1)")
    group.add_argument("--top-k", type=int, default=0, help="this many likeliest tokens; exact decoders only (0: all)")
    group.add_argument("--max-tokens", type=int, default=max_tokens, help=str(max_tokens or "up to max-model-len"))
    group.add_argument("--min-tokens", type=int, default=0, help="no end before this many (0)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")
    group.add_argument(
        "--stop-token-ids",
        action="append",
        type=int,
        metavar="ID",
        help="end with this token; may be given repeatedly",
    )


def sampling_from(
    args: argparse.Namespace, decoding: SMC | Rejection | Autoregressive, *, seed: int | None = None
) -> SamplingParams:
    """What the sampling options ask for; raises ValueError for what is out of range or not for this decoder."""
    from smcjax.engine.llm import refuse_for_smc
    from smcjax.engine.sampling_params import SamplingParams
    from smcjax.smc import SMC

    params = SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop=args.stop,
        stop_token_ids=args.stop_token_ids,
        seed=seed,
    )
    if isinstance(decoding, SMC):
        refuse_for_smc(params, decoding)
    return params


def decoding_from(args: argparse.Namespace, *, trace: bool = False) -> SMC | Rejection | Autoregressive:
    """The decoder that the arguments describe; raises ValueError for values out of range, or without a use."""
    from smcjax.autoregressive import Autoregressive
    from smcjax.rejection import Rejection
    from smcjax.smc import SMC

    fields = OPTIONS[args.decoding]
    given = {}
    for name in {name: None for options in OPTIONS.values() for name in options}:
        value = getattr(args, name)
        if value is None:
            continue
        if name not in fields:
            others = " and ".join(decoding for decoding, options in OPTIONS.items() if name in options)
            raise ValueError(
                f"--{name.replace('_', '-')} is an option of --decoding {others}, got --decoding {args.decoding}; "
                "leave it out."
            )
        given[fields[name]] = value
    if args.decoding == "smc":
        return SMC(**{**args.smc_defaults, **given}, trace=trace)
    if args.decoding == "rejection":
        return Rejection(**{"gamma": args.smc_defaults["gamma"], **given})
    return Autoregressive()


def described(decoding: SMC | Rejection | Autoregressive) -> str:
    """A decoder in a line of figures."""
    from smcjax.rejection import Rejection
    from smcjax.smc import SMC

    if isinstance(decoding, SMC):
        return f"N={decoding.n_particles} K={decoding.gamma}"
    if not isinstance(decoding, Rejection):
        return "target only"
    candidates = f", {decoding.n_candidates} candidates" if decoding.n_candidates > 1 else ""
    return f"rejection by {decoding.verification}, K={decoding.gamma}{candidates}"


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM` from the model options."""
    return {
        "draft_model": args.draft_model,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "draft_quantization": args.draft_quantization,
        "max_model_len": args.max_model_len,
        "page_size": args.page_size,
        "num_pages": args.num_pages,
        "admission": args.admission,
        "implementation": args.implementation,
    }
