"""Times populations beside genlm-control's: the same model, processor and potential, in one run.

    uv pip install genlm-control==0.4.1          beside this package; it brings PyTorch
    python scripts/benchmarks/genlm_speed.py --save FILE

An answer must have a form, which a regular expression says. The contenders take turns, one population at a time:

    genlm-control      AWRS and SMC over its Hugging Face backend in float32, in batches of N; the prompt's KV is kept
    response_format    SMC with the form as an automaton on the device
    TextPotential      SMC with genlm-control's own automaton as a function of text, asked behind every token

Prompts are openings of word problems, whose stories a model goes on with in many ways. All contenders have one core,
read the prompt anew for each population and resample at half of N. A window is one population of each prompt; the first
one compiles and is left out, and speeds are medians over the others. Seconds are the processor's, which other work on
the machine changes little; waiting is no part of them. What genlm-control knows of next tokens is forgotten between
populations, and what automata know of texts is kept.

As the target is the model's law of answers times [has the form], Ẑ estimates one number for all contenders: the model's
chance of such an answer. The table has the mean of log Ẑ over prompts, where a prompt's Ẑ is a mean over windows, with
an interval at 95%.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smcjax import LLM, SMC, SamplingParams
from smcjax.bench.record import ROOT, save, this_machine
from smcjax.cli.bench_options import add_save_option, check_files
from smcjax.markdown import table
from smcjax.model import load_checkpoint, save_checkpoint
from smcjax.model.files.checkpoint import resolve_model_path
from smcjax.tasks.intervals import Z_95
from smcjax.tasks.word_problems import generate
from smcjax.tokenizer.tokenizer import Tokenizer

FORM = r" [^?\n]*\?(\n[^\n=]*=[^\n=]*){1,2}\n#### [0-9]+"  # ends the story, in one or two calculations


class Population(NamedTuple):
    """The times and figures of one population; where no weight is left, all but the times are 0."""

    seconds: float  # of the processor
    wall: float
    tokens: int  # of all particles, with the tokens that end them
    answer: float  # of the particle that answers, in the mean over the draw
    satisfied: float  # the weight of the particles with the form
    evidence: float  # Ẑ


Contender = Callable[[str, int], Population]  # of a prompt and a window


def summarized(windows: Sequence[Sequence[Population]]) -> dict[str, Any]:
    """Figures of a contender; `windows` has in each the populations of the prompts, in their order."""
    seconds = [sum(one.seconds for one in window) for window in windows]
    totals = {name: [sum(getattr(one, name) for one in window) for window in windows] for name in ("tokens", "answer")}
    speed = {name: statistics.median(x / s for x, s in zip(of, seconds, strict=True)) for name, of in totals.items()}
    evidence = np.array([[one.evidence for one in window] for window in windows])
    means = evidence.mean(axis=0)
    if not means.all():
        raise RuntimeError("a prompt has no answer of the form in any window; take a likelier form, or more windows")
    errors = evidence.std(axis=0, ddof=1) / math.sqrt(len(windows)) / means  # of the logarithms of the means
    count = len(means)
    return {
        "tokens_per_second": speed["tokens"],
        "answer_tokens_per_second": speed["answer"],
        "seconds": statistics.median(seconds) / count,
        "satisfied": float(np.mean([one.satisfied for window in windows for one in window])),
        "log_evidence": float(np.log(means).mean()),
        "half": Z_95 * math.sqrt(float((errors**2).sum())) / count,
        "log_evidences": np.log(means).tolist(),
        "halves": (Z_95 * errors).tolist(),
        "raw_seconds": seconds,
        "raw_wall": [sum(one.wall for one in window) for window in windows],
    }


def ours(llm: LLM, form: re.Pattern[str], fields: dict[str, Any]) -> Contender:
    """The engine, whose requests have these fields."""

    def run(prompt: str, window: int) -> Population:
        params = SamplingParams(seed=window, **fields)
        clocks = Clocks()
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        took = clocks.times()
        if output.error is not None or output.smc is None:
            return Population(**took, tokens=0, answer=0.0, satisfied=0.0, evidence=0.0)
        particles = output.smc.particles
        return Population(
            **took,
            tokens=sum(len(one.token_ids) for one in particles),
            answer=sum(one.weight * len(one.token_ids) for one in particles),
            satisfied=sum(one.weight for one in particles if form.fullmatch(one.text)),
            evidence=math.exp(output.smc.log_evidence),
        )

    return run


def theirs(directory: Path, form: re.Pattern[str], args: argparse.Namespace) -> Contender:
    """genlm-control on the model of a directory."""
    import torch
    from genlm.control import AWRS, BoolFSA, PromptedLLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {"hf_opts": {"torch_dtype": torch.float32}, "batch_size": args.n}
    model = PromptedLLM.from_name(str(directory), backend="hf", temperature=args.temperature, **options)
    sampler = AWRS(model, BoolFSA.from_regex(form.pattern).coerce(model, f=b"".join))
    loop = asyncio.new_event_loop()

    def run(prompt: str, window: int) -> Population:
        clocks = Clocks()
        model.set_prompt_from_str(prompt)
        model.model.clear_cache()
        model.model.cache_kv(model.prompt_ids)
        found = loop.run_until_complete(sampler.smc(n_particles=args.n, ess_threshold=0.5, max_tokens=args.max_tokens))
        took = clocks.times()
        if found.log_ml == -math.inf:
            return Population(**took, tokens=0, answer=0.0, satisfied=0.0, evidence=0.0)
        weights, lengths = found.normalized_weights, [len(context) for context in found.contexts]
        texts = [b"".join(map(bytes, context[:-1])).decode(errors="replace") for context in found.contexts]
        return Population(
            **took,
            tokens=sum(lengths),
            answer=sum(weight * length for weight, length in zip(weights, lengths, strict=True)),
            satisfied=sum(weight for weight, text in zip(weights, texts, strict=True) if form.fullmatch(text)),
            evidence=math.exp(found.log_ml),
        )

    return run


class Clocks:
    """The processor's seconds in this process, and the wall's, since it was made."""

    def __init__(self) -> None:
        self._began = time.process_time(), time.perf_counter()

    def times(self) -> dict[str, float]:
        """The times as fields of a `Population`."""
        return {"seconds": time.process_time() - self._began[0], "wall": time.perf_counter() - self._began[1]}


def directory_of(model: str, made: Path) -> Path:
    """The Hugging Face directory of a model; of a GGUF file's, one that is written into `made`."""
    path = resolve_model_path(model)
    if path.is_dir():
        return path
    tokenizer = Tokenizer.load(path)
    if tokenizer is None:
        raise ValueError(f"--model is {model}, which has no tokenizer; give one with a tokenizer.")
    save_checkpoint(*load_checkpoint(path, "float32"), made, dtype="float32")
    tokenizer.save(made)
    return made


def measured(args: argparse.Namespace, made: Path) -> list[dict[str, Any]]:
    """A row for each contender."""
    form, directory = re.compile(args.form), directory_of(args.model, made)
    text_potential = runpy.run_path(str(ROOT / "examples" / "genlm_potential.py"))["text_potential"]
    openings = [problem.question.partition(". ")[0] + "." for problem in generate(5, args.prompts, "eval")]
    prompts = args.prompt or openings
    draft = {"draft_drop_layers": args.draft_drop_layers} if args.draft_drop_layers else {"draft_model": args.draft}
    common = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    from genlm.control import BoolFSA

    automaton = text_potential(BoolFSA.from_regex(args.form))
    decoding = SMC(n_particles=args.n, gamma=args.gamma)
    with LLM(str(directory), **draft, decoding=decoding, max_num_seqs=1, enable_prefix_caching=False) as llm:
        contenders = {
            "genlm-control": theirs(directory, form, args),
            "response_format": ours(llm, form, {**common, "response_format": {"type": "regex", "regex": args.form}}),
            "TextPotential": ours(llm, form, {**common, "potentials": [automaton]}),
        }
        found: dict[str, list[list[Population]]] = {name: [] for name in contenders}
        for window in range(args.windows + 1):
            populations: dict[str, list[Population]] = {name: [] for name in contenders}
            for prompt in prompts:
                for name, contender in contenders.items():
                    populations[name].append(contender(prompt, window))
            if window:
                for name, own in populations.items():
                    found[name].append(own)
    return [{"contender": name, "n": args.n, **summarized(windows)} for name, windows in found.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what the command line says and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="words", help="the target: a directory, or a name as LLM takes it (words)")
    parser.add_argument("--draft", default="words-draft", help="our draft (words-draft)")
    parser.add_argument("--draft-drop-layers", type=int, nargs="+", help="layers of the target that make the draft")
    parser.add_argument("--form", default=FORM, help="the regular expression")
    parser.add_argument("--prompt", action="append", help="a prompt; several times for several")
    parser.add_argument(
        "--prompts", type=int, default=4, help="openings of word problems, where there is no --prompt (4)"
    )
    parser.add_argument("--n", type=int, default=8, help="particles (8)")
    parser.add_argument("--gamma", type=int, default=4, help="our drafts a cycle (4)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer at most (128)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the model (1.0)")
    parser.add_argument("--windows", type=int, default=10, help="populations of each prompt, 2 or more (10)")
    add_save_option(parser)
    args = parser.parse_args(argv)
    check_files(args)
    try:
        import genlm.control  # noqa: F401
    except ImportError:
        print("genlm-control is not installed; run uv pip install genlm-control==0.4.1.", file=sys.stderr)
        return 1
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX and PyTorch start threads
    with tempfile.TemporaryDirectory() as made:
        rows = measured(args, Path(made))
    lines = [
        (
            row["contender"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['answer_tokens_per_second']:,.0f}",
            f"{row['seconds']:.2f}",
            f"{row['satisfied']:.1%}",
            f"{row['log_evidence']:.2f} ± {row['half']:.2f}",
        )
        for row in rows
    ]
    heads = ["contender", "tokens/s", "of answers", "seconds a population", "have the form", "log evidence"]
    print(table(heads, lines))
    for row in rows:
        each = zip(row["log_evidences"], row["halves"], strict=True)
        print(f"{row['contender']}, by prompt: {', '.join(f'{value:.2f} ± {half:.2f}' for value, half in each)}")
    if args.save is not None:
        save(args.save, rows, this_machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
