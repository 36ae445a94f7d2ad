"""Counts what an EAGLE-3 head drafts well, as chain and as tree, beside a draft model: tokens a cycle, greedy.

    python scripts/bench_eagle.py HEAD                               # of the bundled sparse target, documents of recall
    python scripts/bench_eagle.py HEAD --contexts 512 --documents 2 --drafts head --chains 4      # small
    python scripts/bench_eagle.py HEAD --task words --contexts 512 --documents 64     # of the bundled dense target

Fresh documents of held-out keys, or word problems, are answered by the target alone, and by rejection with drafts of
the head (chains of K, trees) and of the draft model (chains). Answers are greedy, so every decoder's are the target's
own, up to rounding on a GPU: `equal` is the share of tokens that are the same in place, which exactness makes 1 in
float32. A tree of M nodes, at most W of a depth, has those whose paths of ranks are the likeliest, if a draft's k-th
choice is right with probability .75, .12, .05, … of what is right at all, as `tree_of` has it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from bench_sparse_quality import agreement

from smcjax import LLM, Autoregressive, Rejection, SamplingParams
from smcjax.cli.options import check_output
from smcjax.decoders import Decoding
from smcjax.markdown import table
from smcjax.tasks.questions import LONGEST_ANSWER, TASKS, questions
from smcjax.trees import DraftTree

FIRST, FALL = 0.75, 0.16  # of what is right at all: the draft's likeliest token, and each next one's ratio to the last


def tree_of(width: int, depth: int, nodes: int) -> tuple[int, ...]:
    """The parents of a tree with so many drafted nodes, at most `width` of a depth, likeliest paths first."""
    ratios = [FIRST, *(FIRST * FALL * 0.45**rank for rank in range(width - 1))]
    kept: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    level = kept
    for _ in range(depth):
        children = [((*path, rank), p * ratio) for path, p in level for rank, ratio in enumerate(ratios)]
        level = sorted(children, key=lambda one: -one[1])[:width]
        kept = kept + level
    chosen = sorted(kept, key=lambda one: -one[1])[: nodes + 1]
    paths = sorted((path for path, _ in chosen), key=lambda path: (len(path), path))
    number = {path: index for index, path in enumerate(paths)}
    return tuple(-1 if not path else number[path[:-1]] for path in paths)


def decoders(args: argparse.Namespace) -> list[tuple[str, Decoding]]:
    """Who drafts, and how."""
    chains: list[Decoding] = [Rejection(gamma) for gamma in args.chains]
    trees: list[Decoding] = [Rejection(tree=tree_of(*map(int, one.split("x"))), siblings="top") for one in args.trees]
    found: list[tuple[str, Decoding]] = []
    for draft in args.drafts:
        found += [(draft, one) for one in (chains if draft == "model" else [*chains, *trees])]
    return found


def said(decoding: Decoding) -> str:
    """A few words for a row."""
    if decoding.speculation.tree is None:
        return f"chain, K = {decoding.speculation.gamma}"
    tree: DraftTree = decoding.speculation.tree
    widest = max(tree.depths.count(depth) for depth in range(tree.depth + 1))
    return f"tree, {tree.size - 1} nodes, {widest} wide, {tree.depth} deep"


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows."""
    asked = {
        context: questions(args.task, args.seed, documents, context=context)
        for context, documents in zip(args.contexts, args.documents, strict=True)
    }
    params = SamplingParams(temperature=0, max_tokens=LONGEST_ANSWER[args.task])
    common = {"max_model_len": max(args.contexts), "max_num_seqs": args.at_once, "compile_at_start": False}
    alone: dict[int, list[list[int]]] = {}
    found, began = [], time.perf_counter()

    def run(llm: LLM, draft: str, decoding: Decoding) -> None:
        for context, problems in asked.items():
            outputs = llm.generate([one.prompt for one in problems], params, use_tqdm=False)
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            if not draft:
                alone[context] = tokens
            right = [one.right(output.outputs[0].text) for one, output in zip(problems, outputs, strict=True)]
            metrics = [output.metrics for output in outputs]
            cycles = sum(one.cycles for one in metrics)
            reached = zip(*(one.accepted_at or () for one in metrics), strict=True)
            row = {
                "draft": draft,
                "decoder": said(decoding) if draft else "target alone",
                "context": context,
                "documents": len(problems),
                "tokens_a_cycle": sum(one.generated_tokens for one in metrics) / cycles,
                "reached": [sum(one) / cycles for one in reached],
                "right": sum(map(sum, right)) / sum(map(len, right)),
                "equal": agreement(tokens, alone[context])[0],
            }
            found.append(row)
            print(f"{time.perf_counter() - began:.0f} s: {json.dumps(row)}", file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(about(args) | {"rows": found}, indent=1))

    with LLM(args.model, decoding=Autoregressive(), **common) as llm:
        run(llm, "", Autoregressive())
    for draft, decoding in decoders(args):
        model = args.head if draft == "head" else args.draft_model
        with LLM(args.model, draft_model=model, decoding=decoding, **common) as llm:
            run(llm, draft, decoding)
    return found


def about(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a run."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "head": str(args.head),
        "task": args.task,
        "seed": args.seed,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A row a line."""
    lines = [
        (
            row["draft"] or "–",
            row["decoder"],
            f"{row['context']:,}",
            f"{row['tokens_a_cycle']:.2f}",
            ", ".join(f"{100 * one:.0f}" for one in row["reached"]),
            f"{100 * row['right']:.1f}%",
            f"{100 * row['equal']:.1f}%",
        )
        for row in rows
    ]
    heads = ["tokens", "tokens a cycle", "drafts reached, by position", "lines right", "equal"]
    return table(["drafts", "", *heads], lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", help="directory, or bundled name, of an EAGLE-3 head")
    parser.add_argument("--task", choices=TASKS, default="recall", help="(recall)")
    parser.add_argument("--model", help="the target (the task's bundled one)")
    parser.add_argument("--draft-model", help="beside the head (the task's bundled one)")
    parser.add_argument("--drafts", nargs="+", choices=("head", "model"), default=["head", "model"])
    parser.add_argument("--chains", type=int, nargs="*", default=[4, 6], metavar="K", help="(4 6)")
    parser.add_argument(
        "--trees",
        nargs="*",
        default=["8x5x32", "10x7x63"],
        metavar="WxDxM",
        help="width x depth x nodes (8x5x32 10x7x63)",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[2048, 8192],
        help="tokens of a document, and the longest sequence (2048 8192)",
    )
    parser.add_argument("--documents", type=int, nargs="+", default=[32, 16], help="of each context (32 16)")
    parser.add_argument("--at-once", type=int, default=16, help="requests (16)")
    parser.add_argument("--seed", type=int, default=7, help="of documents (7)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args(arguments)
    args.model, args.draft_model = args.model or args.task, args.draft_model or f"{args.task}-draft"
    if len(args.documents) != len(args.contexts):
        parser.error(f"--documents must be as many numbers as --contexts, {len(args.contexts)}")
    if args.json is not None:
        check_output("--json", str(args.json))
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers, prints a table, and writes what was asked for."""
    args = parse(arguments)
    rows = measured(args)
    print(f"{about(args)}\n")
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
