"""Measures how sparse verification changes greedy answers: lines right by length, tokens equal, and drafts accepted.

    python scripts/benchmarks/bench_sparse_quality.py  # the small trained pair of the tests, some minutes
    python scripts/benchmarks/bench_sparse_quality.py --documents 1 --context 512 --modes merged
    python scripts/benchmarks/bench_sparse_quality.py --model recall --draft-model recall-draft --context 2048

The same documents (`smcjax.tasks.recall`) are answered greedily by the target alone and by rejection with each way to
read selected blocks, and with each schedule of the layers that select, whose measure is the target alone with that
schedule: spacings, or flags of all layers as `calibrate_reuse.py` prints them. `equal` are tokens that stand in
the same place as in the measure's answer, `alike` those before the first that differs; lines are right by thirds of the
answers, as errors of shared blocks stay in the KV. Greedy answers of merged blocks are the measure's own by law (up to
rounding on a GPU). Divergences of next-token laws: `calibrate_reuse.py`. `--save` writes all lines as they
come.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from smcjax import LLM, Autoregressive, Rejection, RequestOutput, SamplingParams, SparseVerification
from smcjax.bench.record import save, this_machine
from smcjax.cli.bench_options import add_save_option, check_files
from smcjax.decoders import Decoding
from smcjax.markdown import table
from smcjax.sparse.verification import MODES, Mode
from smcjax.tasks.questions import LONGEST_ANSWER, Question, questions

TRAINED = Path(__file__).parents[2] / "tests" / "data" / "recall"
THIRDS = 3


def contenders(
    modes: Sequence[Mode], groups: Sequence[int], schedules: Sequence[int | tuple[bool, ...]], gamma: int
) -> list[tuple[Decoding, Decoding]]:
    """Decoders, each with its measure: the target alone, with the same schedule."""
    found: list[tuple[Decoding, Decoding]] = []
    for one in schedules:
        schedule = None if one == 1 else one
        alone = Autoregressive(None if schedule is None else SparseVerification(schedule=schedule))
        found.append((alone, alone))
        for mode in modes:
            for group in groups if mode != "per_query" else (1,):
                sparse = SparseVerification(mode, group, schedule=schedule)
                found.append((Rejection(gamma, sparse=sparse), alone))
    return found


def thirds(right: Sequence[Sequence[bool]]) -> list[float]:
    """The share of right lines in each third of the answers."""
    shares = []
    for part in range(THIRDS):
        lines = [one for answer in right for number, one in enumerate(answer) if number * THIRDS // len(answer) == part]
        shares.append(sum(lines) / len(lines) if lines else float("nan"))
    return shares


def agreement(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[float, float]:
    """The share of tokens equal in place, and tokens of an answer before the first that differs, in the mean."""
    equal = sum(a == b for one, other in zip(mine, theirs, strict=True) for a, b in zip(one, other, strict=False))
    total = sum(max(len(one), len(other)) for one, other in zip(mine, theirs, strict=True))
    before = 0
    for one, other in zip(mine, theirs, strict=True):
        differs = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        before += next(differs, min(len(one), len(other)))
    return equal / total, before / len(mine)


def line_of(
    decoding: Decoding, asked: Sequence[Question], outputs: Sequence[RequestOutput], measure: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """A row."""
    right = [question.right(output.outputs[0].text) for question, output in zip(asked, outputs, strict=True)]
    equal, alike = agreement([output.outputs[0].token_ids for output in outputs], measure)
    cycles = sum(output.metrics.cycles for output in outputs)
    return {
        "decoder": str(decoding),
        "lines": sum(map(len, right)),
        "right": sum(map(sum, right)) / sum(map(len, right)),
        "thirds": thirds(right),
        "equal": equal,
        "alike": alike,
        "tokens": sum(output.metrics.generated_tokens for output in outputs),
        "accepted": sum(output.metrics.accepted or 0 for output in outputs) / cycles if decoding.drafts else None,
    }


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows; those of one decoder at all contexts follow each other."""
    asked = {context: questions("recall", args.seed, args.documents, context=context) for context in args.context}
    params = SamplingParams(temperature=0, max_tokens=LONGEST_ANSWER["recall"])
    models = {"model": args.model, "draft_model": args.draft_model, "implementation": args.implementation}
    fields = {"max_model_len": max(args.context), "max_num_seqs": args.documents, "compile_at_start": False}
    found, measures = [], dict[tuple[Decoding, int], list[list[int]]]()
    with LLM(**models, decoding=Rejection(1), max_num_seqs=1, num_pages=2, compile_at_start=False) as base:
        for decoding, measure in contenders(args.modes, args.groups, args.refreshes, args.gamma):
            with LLM(share=base, decoding=decoding, **fields) as llm:
                for context, problems in asked.items():
                    outputs = llm.generate([one.prompt for one in problems], params, use_tqdm=False)
                    if decoding == measure:
                        measures[measure, context] = [output.outputs[0].token_ids for output in outputs]
                    row = line_of(decoding, problems, outputs, measures[measure, context])
                    found.append({"context": context} | row)
                    print(json.dumps(found[-1]), file=sys.stderr, flush=True)
                    if args.save is not None:
                        save(args.save, found, this_machine())
    return found


def markdown(lines: Sequence[dict[str, Any]]) -> str:
    """A row a line."""
    rows = [
        (
            line["decoder"],
            f"{line['context']:,}",
            f"{100 * line['right']:.1f}%",
            ", ".join(f"{100 * share:.0f}%" for share in line["thirds"]),
            f"{100 * line['equal']:.0f}%",
            f"{line['alike']:.0f}",
            "" if line["accepted"] is None else f"{line['accepted']:.2f}",
        )
        for line in sorted(lines, key=lambda line: line["context"])
    ]
    heads = ["lines right", "by thirds", "equal in place", "before the first other", "drafts accepted"]
    return table(["", "tokens", *heads], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Answers, prints a table, and writes what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TRAINED / "target"), help="of long documents")
    parser.add_argument("--draft-model", default=str(TRAINED / "draft"))
    parser.add_argument("--documents", type=int, default=8, help="(8)")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="tokens of a document with its answers")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES[1:]], help="ways to read")
    parser.add_argument("--groups", type=int, nargs="+", default=[4], help="C, queries that read together (4)")
    parser.add_argument(
        "--refreshes",
        type=ast.literal_eval,
        nargs="+",
        default=[1, 2],
        metavar="R",
        help="spacings of sparse layers that select, or 1 or 0 for each layer, as 1,0,1 (1 2)",
    )
    parser.add_argument("--gamma", type=int, default=4, help="K (4)")
    parser.add_argument("--implementation", choices=("auto", "xla"), default="auto", help="xla: no GPU kernels")
    parser.add_argument("--seed", type=int, default=6, help="of documents (6)")
    add_save_option(parser)
    args = parser.parse_args(argv)
    check_files(args)
    lines = measured(args)
    print(f"{jax.devices()[0].device_kind}, {args.documents} documents of each context, K = {args.gamma}\n")
    print(markdown(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
