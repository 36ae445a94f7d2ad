"""Arguments that several commands share, and what they build."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
import stat
import sys
from collections.abc import Sequence
from typing import Any

from smcjax.auto import CHOICES, Auto, Choice, Routed, gives_draft
from smcjax.cli.parser import text, whole
from smcjax.decoders import DECODINGS, SMC, Decoding
from smcjax.decoders.written import Written, read_decoder
from smcjax.engine.requests.sampling_params import SamplingParams
from smcjax.errors import CheckpointError
from smcjax.tasks.questions import TASKS

DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = ("int8", "float8")  # those of smcjax.quantization, which needs JAX
ADMISSIONS = ("worst_case", "optimistic")
# Arguments of `LLM` that are options about models and memory, of these names.
LLM_ARGUMENTS: tuple[str, ...] = (
    *("draft_model", "draft_drop_layers", "dtype", "implementation", "quantization"),
    *("draft_quantization", "tensor_parallel_size", "draft_tensor_parallel_size", "max_model_len"),
    *("page_size", "num_pages", "admission"),
)
# Short spellings of a decoder's options; n_particles stands for its class's `rows_argument`.
SHORT = ("n_particles", "gamma", "power", "control", "profile")


def decoder(text: str) -> Written:
    """The type of an option that takes a decoder: its name, or as in Python, `SMC(early_end=True)`."""
    try:
        return read_decoder(text, CHOICES)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def one_decoder(text: str) -> Decoding:
    """The type of an option that takes one more decoder, with all its options; "auto" is none."""
    return completed_decoder(text).make()


def completed_decoder(text: str, **more: Any) -> Written:
    """A decoder that can be made with `more` of what the text does not say. Raises as argparse wants it."""
    try:
        written = read_decoder(text, DECODINGS)
        written.make(**more)
        return written
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None


def check_output(option: str, path: str, source: str | None = None) -> None:
    """Raises ValueError for a file that could not be written once the work is done, or is the `source` of that work."""
    directory = os.path.dirname(path) or "."
    if not os.path.basename(path) or os.path.isdir(path):
        raise ValueError(f"{option} must be a file, got the directory {path!r}; add a file name.")
    try:
        os.path.realpath(directory)
        writable = os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)
    except FileNotFoundError:  # the current directory is no more
        writable = False
    if not writable:
        raise ValueError(f"{option} must lie in a directory that can be written to, got {path!r}; make one.")
    try:
        kept = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"{option} must be a file, got {path!r} ({error.strerror}); name another.") from None
    if not kept:
        raise ValueError(f"{option} must be a file, got {path!r}, which is none; name another.")
    if source is not None and os.path.realpath(source) == os.path.realpath(path):
        raise ValueError(f"{option} must not be the file that is read, got {path!r}; name another.")


def check_models(args: argparse.Namespace) -> None:
    """Raises ValueError for half a pair, CheckpointError for a path that leads nowhere, before anything is loaded."""
    given = {"--model": args.model, "--draft-model": args.draft_model}
    named = None if args.decoding is None else args.decoding.kind
    needed = [option for option in given if option == "--model" or (named or SMC).drafts]
    # No draft: the decoder may do without, or the draft is made of the target. "ngram" goes with any model.
    is_optional = named in (None, Auto) or args.draft_drop_layers is not None
    if args.draft_model == "ngram" or (args.draft_model is None and is_optional):
        needed = ["--model"]
    if len({given[option] is None for option in needed}) == 2:
        there, missing = sorted(given, key=lambda option: given[option] is None)
        alone = ", or --decoding autoregressive for the target alone" if there == "--model" else ""
        raise ValueError(f"{there} is given and {missing} is not; give both, or neither for the bundled pair{alone}.")
    for option in needed:
        name = given[option]
        # What cannot be the id of a model on the hub. Whatever else is wrong is said by who loads it.
        if name is None or not (name.startswith(("/", ".", "~")) or re.split("[@:]", name)[0].count("/") > 1):
            continue
        try:
            os.stat(os.path.expanduser(name))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{option} {name} does not exist; pass a model directory, a GGUF file or a hub id."
            ) from None
        except OSError:
            continue


def add_layers_option(group: argparse._ArgumentGroup) -> None:
    """Adds the option for layers that the draft does without."""
    group.add_argument(
        "--draft-drop-layers",
        type=int,
        nargs="+",
        metavar="LAYER",
        help="layers from 0 that the draft does without; without --draft-model it is made of the target",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for the models and how they are held."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="target: a directory, a GGUF file, a hub id, smollm2, gemma3-270m or recall (default: the bundled pair)",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="draft: likewise, of the same tokenizer; an EAGLE-3 head; or ngram, for --decoding rejection",
    )
    add_layers_option(group)
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="auto (default): bfloat16 on a GPU")
    group.add_argument("--quantization", choices=QUANTIZATIONS, help="the target's matrices (default: as they are)")
    group.add_argument("--draft-quantization", choices=QUANTIZATIONS, help="the draft's (default: as they are)")
    add_parallel_options(group)
    group.add_argument("--max-model-len", type=whole(2, 1 << 20), metavar="T", help="most tokens, prompt and answer")
    kernels = "xla: no GPU kernels; triton: those in Triton alone"
    group.add_argument("--implementation", choices=("auto", "triton", "xla"), default="auto", help=kernels)
    group.add_argument("--page-size", type=whole(1, 128), metavar="B", help="tokens in a KV page (16; or 128, see LLM)")


def add_memory_options(parser: argparse._ActionsContainer) -> None:
    """Adds options for the memory of what runs for long."""
    parser.add_argument("--num-pages", type=whole(2, 1 << 30), metavar="P", help="KV pages (default: by memory)")
    parser.add_argument(
        "--admission",
        choices=ADMISSIONS,
        default="worst_case",
        help="of requests: by the pages that they can need, or by those that others have needed (worst_case)",
    )


def add_parallel_options(parser: argparse._ActionsContainer, usual_draft: str = "what is quicker") -> None:
    """Adds options for several devices that hold a model together; `usual_draft` says how the draft is otherwise."""
    devices = whole(1, 1 << 10)
    parser.add_argument(
        "--tensor-parallel-size", type=devices, default=1, metavar="n", help="devices that hold the target together (1)"
    )
    parser.add_argument(
        "--draft-tensor-parallel-size",
        type=devices,
        metavar="n",
        help=f"devices that divide the draft: 1, where each has all of it, or the target's number ({usual_draft})",
    )


def add_decoding_options(
    parser: argparse.ArgumentParser, *, gamma: int, profile: str = "of smcjax profile, by which auto chooses"
) -> None:
    """Declares how tokens are chosen, by `gamma` drafts a cycle unless told otherwise; `profile` is what one is for."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--decoding",
        type=decoder,
        metavar="DECODER",
        help="smc, rejection, autoregressive or auto, or one with options as in Python: 'SMC(early_end=True)' "
        "(default: smc where it can honour a request, else rejection, without a draft the target alone; one that is "
        "named answers all or refuses; auto: exact, unless a population is asked for)",
    )
    group.add_argument("--profile", metavar="FILE", help=profile)
    group.add_argument("-N", "--n-particles", type=int, help="particles (8); rejection: candidates (1)")
    group.add_argument("-K", "--gamma", type=int, help=f"draft tokens a cycle ({gamma})")
    group.add_argument("--power", type=float, help="exponent of the target distribution (1)")
    group.add_argument(
        "--control",
        type=float,
        help="of SMC: 0 keeps all drafts, 1 samples each particle exactly, rejecting some (0.1; pipelined: 0)",
    )
    parser.set_defaults(default_gamma=gamma)


def add_task_option(parser: argparse._ActionsContainer) -> None:
    """Adds the option for what is asked."""
    parser.add_argument("--task", choices=TASKS, default="words", help="word problems, or recall in documents (words)")


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for what is asked, and in how long documents."""
    add_task_option(parser)
    parser.add_argument("--context", type=whole(1, 1 << 20), metavar="T", help="tokens of a document (2048)")


def check_task(args: argparse.Namespace, option: str = "--context") -> None:
    """Sets the context and the pair that a task has where none is given; refuses a context that no document has."""
    if args.context is not None and args.task != "recall":
        raise ValueError(f"--context is an option of --task recall, got --task {args.task}; leave it out.")
    if args.task == "recall" and args.model is None and args.draft_model is None:
        args.model = "recall"
        args.draft_model = None if getattr(args, "draft_drop_layers", None) is not None else "recall-draft"
    args.context = args.context or 2048
    if args.task == "recall":
        from smcjax.tasks.recall import SHORTEST  # NumPy, which `smcjax --help` has no need of

        if args.context < SHORTEST:
            raise ValueError(f"{option} must be at least {SHORTEST}, the shortest document, got {args.context}.")


def add_debug_option(parser: argparse.ArgumentParser) -> None:
    """Adds --debug, so that it may stand after the command as well as before it."""
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="errors with their traceback")


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    """Adds --quiet, which leaves answers and errors."""
    parser.add_argument("-q", "--quiet", action="store_true", help="no figures, warnings or progress")


def shows_progress(args: argparse.Namespace) -> bool:
    """True where standard error is watched: bars redraw themselves, and a file would keep every state."""
    return sys.stderr.isatty() and not getattr(args, "quiet", False)


def remark(line: str) -> None:
    """Prints a line of progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Adds options for the sampling parameters of a request."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.7, help="0 is greedy, by exact decoders only (0.7)")
    group.add_argument("--top-p", type=float, default=1.0, help="likeliest tokens of this sum; exact decoders only (1)")
    group.add_argument("--top-k", type=int, default=0, help="this many likeliest tokens; exact decoders only (0: all)")
    most = max_tokens or "up to max-model-len"
    group.add_argument("--max-tokens", type=int, default=max_tokens, help=f"of the answer ({most})")
    group.add_argument("--min-tokens", type=int, default=0, help="no end before this many (0)")
    group.add_argument("--stop", type=text, action="append", metavar="TEXT", help="end before this text; repeatable")
    group.add_argument(
        "--stop-token-ids",
        action="append",
        type=whole(0, (1 << 31) - 1),
        metavar="ID",
        help="end with this token; repeatable",
    )


def sampling_from(
    args: argparse.Namespace,
    decoding: Choice,
    *,
    seed: int | None = None,
    response_format: dict[str, Any] | None = None,
) -> SamplingParams:
    """Returns the sampling parameters of the options; raises ValueError for values that `decoding` cannot honour."""
    params = SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop=args.stop,
        stop_token_ids=args.stop_token_ids,
        seed=seed,
        response_format=response_format,
    )
    # Which stop strings name special tokens, and so are tokens, the tokenizer will say.
    decoding.check(dataclasses.replace(params, stop=None))
    return params


def has_draft(args: argparse.Namespace) -> bool:
    """True where the options give a draft."""
    return gives_draft(args.model, args.draft_model, args.draft_drop_layers)


def _field(kind: type[Decoding | Auto], option: str) -> str | None:
    """The argument of a decoder's class that a short spelling stands for; None where it has none."""
    field = kind.rows_argument if option == "n_particles" else option
    return field if field in inspect.signature(kind).parameters else None


def decoding_from(args: argparse.Namespace, *, trace: bool = False) -> Choice:
    """The decoder that the arguments describe; raises ValueError for values out of range, or without a use.

    Where none is named it is `Routed`, but for a `trace`, which SMC alone has.
    """
    written: Written = args.decoding or Written(SMC, {})
    name = written.kind.name
    given: dict[str, Any] = {}
    for option in SHORT:
        value = getattr(args, option)
        if value is None:
            continue
        field = _field(written.kind, option)
        if field is None:
            others = " and ".join(name for name, kind in CHOICES.items() if _field(kind, option))
            raise ValueError(
                f"--{option.replace('_', '-')} is an option of --decoding {others}, got --decoding {name}; "
                "leave it out."
            )
        if field in written.options:
            short = option.replace("_", "-")
            raise ValueError(f"--{short} is given and --decoding says it too; leave one of them out.")
        given[field] = value
    if args.decoding is None and given and not has_draft(args):
        raise ValueError(
            f"--{next(iter(given)).replace('_', '-')} is an option of --decoding smc, which needs a draft; give "
            "--draft-model or --draft-drop-layers, or leave it out."
        )
    # To "auto" every number says something, and a tree says how deep it is.
    if written.kind is not Auto and _field(written.kind, "gamma") and not {"gamma", "tree"} & {*written.options}:
        given.setdefault("gamma", args.default_gamma)
    made = written.make(**given, **({"trace": True} if trace and "trace" not in written.options else {}))
    return Routed(made) if args.decoding is None and not trace else made


def resolved(args: argparse.Namespace, decoding: Choice, params: Sequence[SamplingParams]) -> Choice:
    """The decoders to load: the exact one alone if the rule routes all of these requests to it."""
    return decoding.resolved(params, has_draft=has_draft(args)) if isinstance(decoding, Routed) else decoding


def one_shot_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM` for a command that ends by itself.

    Where standard error is not watched, programs are compiled when they are first needed, without a bar.
    """
    return {**llm_arguments(args), "compile_at_start": None if shows_progress(args) else False}


def llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM` from the model options that the command has."""
    return {name: getattr(args, name) for name in LLM_ARGUMENTS if hasattr(args, name)}
