"""`smcjax tune-draft`: trains a draft on the target's own answers, so that SMC's weights vary less.

Prompts are word problems or documents of the training split, or those of a file, a JSON object with "prompt" or
"messages" a line, of which an eighth is held out. The loss is Rényi's divergence of the draft's law from the target's
with a share of Kullback and Leibler's. Needs optax, by the extra train.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smcjax.cli.options import add_layers_option, add_quiet_option, remark
from smcjax.cli.parser import above, share, whole
from smcjax.engine.requests.sampling_params import MAX_SEED, SamplingParams
from smcjax.errors import extra_missing
from smcjax.tasks.questions import LONGEST_ANSWER, TASKS

if TYPE_CHECKING:
    from smcjax.tuning.answers import Sampling
    from smcjax.tuning.measure import Figures

HELD_OUT = 256  # prompts, at most


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("tune-draft", help="train a draft for SMC", description=__doc__)
    models = parser.add_argument_group("models")
    models.add_argument("--model", metavar="MODEL", help="target (default: the bundled pair)")
    models.add_argument("--draft-model", "--draft", metavar="MODEL", help="draft to begin with, of the same tokenizer")
    add_layers_option(models)
    add_answers_options(parser, num_prompts=2048)
    training = parser.add_argument_group("training")
    training.add_argument("-K", "--gamma", type=whole(1, 64), default=8, help="draft tokens a cycle, as SMC has (8)")
    training.add_argument("--order", type=above(1, 4), default=1.5, help="of Rényi's divergence (1.5; 2: χ²)")
    training.add_argument("--kl-share", type=share, default=0.25, help="share of the KL divergence (0.25)")
    add_training_options(training, learning_rate=3e-4)
    files = parser.add_argument_group("files")
    files.add_argument("-o", "--output", required=True, metavar="DIR", help="the draft's directory")
    files.add_argument("--resume", action="store_true", help="go on where a run with this output was interrupted")
    files.add_argument("--json", action="store_true", help="one JSON line last")
    add_quiet_option(parser)
    parser.set_defaults(run=run)


def add_answers_options(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    """Declares the prompts, and how the target answers them."""
    answers = parser.add_argument_group("the target's answers")
    answers.add_argument("--prompts", required=True, metavar="FILE", help=f"a JSONL file, or {' or '.join(TASKS)}")
    answers.add_argument(
        "-n", "--num-prompts", type=whole(2, 1_000_000), default=num_prompts, help=f"prompts ({num_prompts})"
    )
    answers.add_argument("--context", type=whole(1, 1 << 20), metavar="T", help="tokens of a document (2048)")
    answers.add_argument("--temperature", type=above(0, 100), default=0.7, help="at which SMC is to run (0.7)")
    answers.add_argument("--max-tokens", type=whole(1, 1 << 20), help="of an answer (256; of a task's as it needs)")
    answers.add_argument("--max-num-seqs", type=whole(1, 4096), default=32, help="requests at once (32)")
    answers.add_argument("--max-model-len", type=whole(2, 1 << 20), metavar="T", help="prompt and answer at most")


def add_training_options(group: argparse._ArgumentGroup, learning_rate: float) -> None:
    """Declares how long and how fast to train."""
    group.add_argument("--steps", type=whole(1, 10_000_000), default=1000, help="updates (1000)")
    group.add_argument("--batch-tokens", type=whole(16, 1 << 24), default=4096, help="of an update (4096)")
    group.add_argument(
        "--learning-rate", type=above(0, 1), default=learning_rate, help=f"at its peak ({learning_rate:g})"
    )
    group.add_argument("--seed", type=whole(0, MAX_SEED // 2), default=0, help="of all randomness (0)")


def sampling_of(args: argparse.Namespace, requests: int) -> Sampling:
    """How the target answers, in that many requests."""
    from smcjax.tuning.answers import Sampling

    return Sampling(
        temperature=args.temperature,
        max_tokens=args.max_tokens or LONGEST_ANSWER.get(args.prompts, 256),
        seed=args.seed,
        max_num_seqs=min(args.max_num_seqs, requests),
        max_model_len=args.max_model_len,
    )


def run(args: argparse.Namespace) -> int:
    """Trains, writes the draft with its report and picture, prints figures before and after."""
    output = Path(args.output)
    _check_output(output, args.resume)
    if args.prompts == "recall" and args.model is None and args.draft_model is None:
        args.model = "recall"
        args.draft_model = None if args.draft_drop_layers is not None else "recall-draft"
    prompts, held_out = asked_prompts(args)
    require_optax("smcjax tune-draft")

    from smcjax.tuning.pair import Paths
    from smcjax.tuning.run import tune
    from smcjax.tuning.train import Objective, Schedule
    from smcjax.viz.charts import draw_tuning

    report = tune(
        Paths.of(args.model, args.draft_model, args.draft_drop_layers),
        prompts,
        held_out,
        output,
        sampling=sampling_of(args, len(prompts)),
        objective=Objective(args.order, args.kl_share, args.gamma),
        schedule=Schedule(args.steps, args.learning_rate, args.seed),
        batch_tokens=args.batch_tokens,
        on_line=(lambda _: None) if args.quiet else remark,
    )
    draw_tuning(dataclasses.asdict(report), output / "tuning" / "curve.svg")
    print(table(report.before, report.after, args.gamma))
    print(output)
    if args.json:
        print(json.dumps(dataclasses.asdict(report)))
    return 0


def table(before: Figures, after: Figures, gamma: int) -> str:
    """Figures on held-out answers with their 95% intervals, for people."""
    labels = {
        "weight_variance": f"variance of weights: χ² of {gamma} tokens",
        "token_divergence": "D₂ a token, nats",
        "kl": "KL a token, nats",
        "acceptance": "a draft is accepted",
    }
    lines = [f"{'held-out answers of the target':<38}{'before':<38}after"]
    for name, label in labels.items():
        cells = ("{:.4g} ({:.4g} to {:.4g})".format(*getattr(figures, name)) for figures in (before, after))
        lines.append(f"{label:<38}{next(cells):<38}{next(cells)}")
    return "\n".join(lines)


def _check_output(output: Path, resume: bool) -> None:
    """Raises ValueError for a directory that holds something that is not to be gone on with."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output must be a directory, got the file {str(output)!r}; name another.")
    if (output / "tuning" / "answers.safetensors").exists() or (output / "tuning" / "state.safetensors").exists():
        if not resume:
            raise ValueError(f"--output {output} holds a training that was interrupted; add --resume, or name another.")
    elif output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output} is not empty, and a model is never written over; name another directory.")
    require_writable(output)


def require_writable(output: Path) -> None:
    """Raises ValueError where the nearest directory above `output` that exists cannot be written to."""
    place = next(one for one in (output, *output.absolute().parents) if one.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"--output {output} cannot be made, as {place} cannot be written to; name another.")


def asked_prompts(args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """Prompts to train on and prompts held out, of a task's two splits or of a file."""
    if args.context is not None and args.prompts != "recall":
        raise ValueError(f"--context is an option of --prompts recall, got --prompts {args.prompts}; leave it out.")
    apart = min(HELD_OUT, max(1, args.num_prompts // 8))
    if args.prompts in TASKS:
        from smcjax.tasks.questions import questions, training_prompts

        context = args.context or 2048
        kept = [one.prompt for one in questions(args.prompts, args.seed + 1, apart, context=context)]
        return training_prompts(args.prompts, args.seed, args.num_prompts, context=context), kept

    import random

    from smcjax.cli.commands.batch import read_lines
    from smcjax.decoders import Rejection

    lines = read_lines(args.prompts, SamplingParams(), Rejection(), option="--prompts")
    if len(lines) < 2:
        raise ValueError(f"--prompts {args.prompts} holds one prompt, and one has to be held out; give two or more.")
    asked = [line.content for line in lines]
    random.Random(args.seed).shuffle(asked)
    asked = asked[: args.num_prompts]
    apart = min(HELD_OUT, max(1, len(asked) // 8))
    return asked[apart:], asked[:apart]


def require_optax(command: str) -> None:
    """Raises RuntimeError where it is not installed."""
    import importlib.util

    if importlib.util.find_spec("optax") is None:
        raise RuntimeError(extra_missing(command, "optax", "train") + ".")
