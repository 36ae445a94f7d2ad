"""Measures SMC under controls and exact decoders on a real model, by one harness outside of the engine.

    python scripts/measure_populations.py --model smollm2 --drop 3 12 --drop 3 9 15 21 \
        --runs 8,4:c0,c0.1,c0.3,c0.5,e1,e8 -o found.npz
    python scripts/measure_populations.py --tables found.npz

A pair is the model and, as its draft, the same without some layers (`--drop`) or a directory (`--draft`). A run is N,K
and decisions of `dense_smc`: c0.1 is a control, e8 exact decoding with 8 candidates. Prompts are the 64 of
`plain_prompts.held_out`, or those of a file. Tables say, with Student's intervals at 95% over prompts,

    tokens a cycle  of answers of --tokens tokens, the first being the prompt's, over the cycles that a group took
    log Ẑ           mean over groups, in nats
    distance ≤      E max(1 − Ẑ, 0), which bounds the total variation of the whole answer's law from the target's
    log p a token   of the answers' tokens, by weight, minus that of the target's own samples of the prompt

and of answers of K + 2 tokens (runs like s8,4:c0), on the first 16 prompts, what `measure_marginals` says, over groups:
there "agreement" is about the likeliest first three tokens of those that any row of the prompt has.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dense_smc as dense
import jax
import numpy as np
from measure_marginals import LOOKED_AT, Event, Group, interval_of, lower_bound, share_of_control
from measuring import by_prompt, shown
from plain_prompts import held_out

from smcjax.engine.run.programs import enable_compilation_cache
from smcjax.markdown import table
from smcjax.model.checkpoint import load_checkpoint, resolve_model_path
from smcjax.model.dropping import drop_layers
from smcjax.model.vocabulary import common_vocabulary
from smcjax.tasks.intervals import clustered_mean
from smcjax.tokenizer.tokenizer import Tokenizer

METHOD = r"(?:c(?:0|1|0?\.\d+)|e[1-9]\d*)"  # c from 0 to 1, candidates from 1
LONG = ("decoder", "tokens a cycle", "log Ẑ", "distance ≤", "log p a token, minus the target's own")


@dataclasses.dataclass(frozen=True)
class Run:
    """Decisions to measure on populations of N rows with K drafts each."""

    n: int
    gamma: int
    methods: tuple[str, ...]
    short: bool

    @classmethod
    def parsed(cls, text: str) -> Run:
        """Reads "8,4:c0,c0.1,e8", with "s" in front of what is to have short answers."""
        found = re.fullmatch(rf"(s?)(\d+),(\d+):({METHOD}(?:,{METHOD})*)", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r} must be N,K and decisions, as 8,4:c0.1,e8 or s8,4:c0")
        short, n, gamma, methods = found.groups()
        return cls(int(n), int(gamma), tuple(methods.split(",")), bool(short))


def method_of(text: str, n: int) -> tuple[dense.Control | dense.Exact, int, str]:
    """A decision, the rows that it takes, and its name."""
    kind, number = text[0], float(text[1:])
    if kind == "c":
        return dense.Control(number), n, f"SMC, N={n}, control {number:g}"
    candidates = "1 candidate" if number == 1 else f"{number:g} candidates"
    return dense.Exact(), int(number), f"rejection, {candidates}"


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts as padded tokens [P, T] with their lengths."""

    tokens: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, path: Path, texts: Sequence[str]) -> Prompts:
        """By the model's chat template."""
        tokenizer = Tokenizer.load(path)
        assert tokenizer is not None
        rows = [tokenizer.apply_chat_template([{"role": "user", "content": text}], None) for text in texts]
        padded = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for row, tokens in zip(padded, rows, strict=True):
            row[: len(tokens)] = tokens
        return cls(padded, np.array([len(tokens) for tokens in rows], np.int32))


def batches(prompts: Prompts, repeats: int, count: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """All prompts `repeats` times in batches of one size, tokens and lengths, and how many of a batch count."""
    order = np.tile(np.arange(len(prompts.lengths)), repeats)
    for begin in range(0, len(order), count):
        chosen = order[begin : begin + count]
        padded = np.concatenate([chosen, np.zeros(count - len(chosen), int)])
        yield prompts.tokens[padded], prompts.lengths[padded], len(chosen)


def all_of(
    pair: dense.Pair, method: Any, prompts: Prompts, repeats: int, rows: int, **sizes: int
) -> dict[str, np.ndarray]:
    """Runs all groups and keeps of each its evidence, cycles, log p a token by weight, and first tokens of all rows."""
    found: dict[str, list[np.ndarray]] = {}
    count = max(1, min(rows // sizes["n"], repeats * len(prompts.lengths)))
    for number, (tokens, lengths, real) in enumerate(batches(prompts, repeats, count)):
        if method is None:
            own = {name: sizes[name] for name in ("n", "tokens", "room")}
            result = dense.sampled(pair, tokens, lengths, seed=number, **own)
        else:
            result = dense.run(pair, method, tokens, lengths, seed=number, **sizes)
        kept = {
            "log_evidence": result.log_evidence,
            "cycles": result.cycles,
            "log_probability": (result.weights * result.logprobs.mean(axis=2)).sum(axis=1),
            "prefix": result.answers[..., :LOOKED_AT],
            "prefix_logprobs": result.logprobs[..., :LOOKED_AT].astype(np.float32),
            "log_weight": result.log_weight,
        }
        for name, array in kept.items():
            found.setdefault(name, []).append(array[:real])
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


class Found:
    """Runs with their arrays, in one file that is there as a whole after each of them."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self._runs: list[dict[str, Any]] = []
        self._arrays: dict[str, np.ndarray] = {}

    def add(self, run: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Adds a run and writes the file."""
        self._arrays |= {f"{len(self._runs)}/{name}": array for name, array in arrays.items()}
        self._runs.append(run)
        facts = json.dumps({**self._settings, "runs": self._runs})
        place = self._path.with_suffix(".part.npz")
        np.savez_compressed(place, facts=np.array(facts), **self._arrays)  # type: ignore[arg-type]
        os.replace(place, self._path)


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of a file with their arrays, and the settings of all in each."""
    with np.load(path) as file:
        facts = json.loads(str(file["facts"]))
        names = ("log_evidence", "cycles", "log_probability", "prefix", "prefix_logprobs", "log_weight")
        runs = [{**run, **{name: file[f"{i}/{name}"] for name in names}} for i, run in enumerate(facts["runs"])]
    return [{**facts, **run} for run in runs]


def tokens_per_cycle(run: dict[str, Any]) -> float:
    """Tokens of an answer but the first, which is the prompt's, over the cycles of its group."""
    return float((run["tokens"] - 1) * len(run["cycles"]) / run["cycles"].sum())


def long_rows(runs: Sequence[dict[str, Any]], target: dict[str, Any]) -> list[tuple[str, ...]]:
    """Cells for answers of fixed length, a row each run; `target` has the target's own answers to the same prompts."""
    own = by_prompt(target["log_probability"], target["prompts"])
    cells: list[tuple[str, ...]] = []
    for run in runs:
        weighted = not run["name"].startswith("rejection")
        evidence = by_prompt(run["log_evidence"], run["prompts"])
        distance = by_prompt(np.maximum(1 - np.exp(run["log_evidence"]), 0), run["prompts"])
        cells.append(
            (
                run["name"],
                f"{tokens_per_cycle(run):.2f}",
                shown(clustered_mean(evidence), ".2f") if weighted else "–",
                shown(clustered_mean(distance), ".2f") if weighted else "–",
                shown(clustered_mean(by_prompt(run["log_probability"], run["prompts"]) - own), "+.3f"),
            )
        )
    return cells


def groups_of(run: dict[str, Any], tokens: int) -> list[list[Group]]:
    """The groups of each prompt, their rows cut to some tokens."""
    weights = np.exp(run["log_weight"] - run["log_weight"].max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    made = []
    for prefixes, own, evidence in zip(run["prefix"], weights, run["log_evidence"], strict=True):
        by_prefix: dict[tuple[int, ...], float] = {}
        for prefix, weight in zip(prefixes[:, :tokens].tolist(), own, strict=True):
            by_prefix[tuple(prefix)] = by_prefix.get(tuple(prefix), 0.0) + float(weight)
        exact = run["name"].startswith("rejection")
        made.append(Group(by_prefix, 1.0 if exact else float(np.exp(evidence))))
    return [made[prompt :: run["prompts"]] for prompt in range(run["prompts"])]


def laws_of(runs: Sequence[dict[str, Any]], tokens: int) -> list[dict[tuple[int, ...], float]]:
    """The target's probability of every prefix that a row of a prompt has."""
    prompts = runs[0]["prompts"]
    found: list[dict[tuple[int, ...], float]] = [{} for _ in range(prompts)]
    for run in runs:
        chance = np.exp(run["prefix_logprobs"][..., :tokens].sum(axis=2, dtype=float))
        for number, (prefixes, own) in enumerate(zip(run["prefix"], chance, strict=True)):
            law = found[number % prompts]
            for prefix, probability in zip(prefixes[:, :tokens].tolist(), own, strict=True):
                law.setdefault(tuple(prefix), float(probability))
    return found


def short_table(runs: Sequence[dict[str, Any]]) -> str:
    """Answers of K + 2 tokens, one row a run."""
    laws = {tokens: laws_of(runs, tokens) for tokens in (1, LOOKED_AT)}
    likeliest = [Event.of([max(law, key=law.__getitem__)], law) for law in laws[LOOKED_AT]]
    cells = []
    for run in runs:
        few = {tokens: groups_of(run, tokens) for tokens in laws}
        beta = share_of_control(likeliest, few[LOOKED_AT])
        seen = (event.seen(own) for event, own in zip(likeliest, few[LOOKED_AT], strict=True))
        weighted = not run["name"].startswith("rejection")
        logs = [run["log_evidence"][prompt :: run["prompts"]] for prompt in range(run["prompts"])]
        cells.append(
            (
                f"{run['name']}, K={run['gamma']}",
                shown(interval_of(logs), ".2f") if weighted else "–",
                shown(interval_of([np.maximum(1 - np.exp(x), 0) for x in logs]), ".3f") if weighted else "–",
                *(shown(lower_bound(few[tokens], laws[tokens]), "+.3f") for tokens in laws),
                shown(interval_of([x - beta * y for x, y in seen]), "+.3f"),
            )
        )
    return table(("decoder", "log Ẑ", "distance ≤", "token 1 ≥", "tokens 1–3 ≥", "agreement"), cells)


def tables(paths: Sequence[Path]) -> str:
    """All tables of some files; runs of one pair and K together."""
    runs = [run for path in paths for run in read(path)]
    lines = []
    target = next((run for run in runs if run["name"] == "target alone"), None)
    runs = [run for run in runs if run["name"] != "target alone"]
    for pair, short, gamma in dict.fromkeys((run["pair"], run["short"], run["gamma"]) for run in runs):
        own = [run for run in runs if (run["pair"], run["short"], run["gamma"]) == (pair, short, gamma)]
        groups = len(own[0]["cycles"])
        lines.append(
            f"\n{pair}, K={gamma}, {own[0]['prompts']} prompts, {groups} groups of {own[0]['tokens']} tokens\n"
        )
        if short:
            lines.append(short_table(own))
        elif target is not None:
            lines.append(table(LONG, long_rows(own, target)))
    return "\n".join(lines)


def main() -> None:
    """Measures, or prints tables of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="target (smollm2)")
    parser.add_argument("--drop", type=int, nargs="+", action="append", default=[], help="layers that a draft lacks")
    parser.add_argument("--draft", action="append", default=[], metavar="DIR", help="a draft")
    parser.add_argument("--runs", type=Run.parsed, nargs="*", default=[], help="in this order")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="of plain_prompts (its held-out ones)")
    parser.add_argument("--groups", type=int, default=8, help="of each prompt (8)")
    parser.add_argument("--short-groups", type=int, default=48, help="of each of the first 16 prompts (48)")
    parser.add_argument("--tokens", type=int, default=28, help="of an answer (28)")
    parser.add_argument("--temperature", type=float, default=0.8, help="(0.8)")
    parser.add_argument("--rows", type=int, default=1024, help="of a batch (1024)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no run is begun")
    parser.add_argument("-o", "--output", type=Path, default=Path("populations.npz"), help="(populations.npz)")
    parser.add_argument("--tables", type=Path, nargs="+", metavar="FILE", help="prints tables of these instead")
    args = parser.parse_args()
    if args.tables:
        print(tables(args.tables))
        return
    if not args.drop and not args.draft:
        parser.error("there is no draft; give --drop LAYERS or --draft DIR.")
    began = time.perf_counter()
    enable_compilation_cache()
    path = resolve_model_path(args.model)
    texts = held_out()
    if args.prompts is not None:
        texts = [json.loads(line)["messages"][-1]["content"] for line in args.prompts.read_text().splitlines()]
    prompts = Prompts.of(path, texts)
    few = Prompts(prompts.tokens[:16], prompts.lengths[:16])
    config, params = load_checkpoint(path)
    drafts = {
        f"without layers {' '.join(map(str, layers))}": drop_layers(config, params, layers) for layers in args.drop
    }
    drafts |= {f"draft {name}": load_checkpoint(name) for name in args.draft}
    device = jax.devices()[0].device_kind
    found = Found(args.output, {"model": args.model, "temperature": args.temperature, "device": device})

    tokenizer = Tokenizer.load(path)
    most = max((run.gamma for run in args.runs), default=0)
    room = max(args.tokens, most + 2) + most + 2

    def model(config: Any, other: Any) -> dense.Transformer:
        return dense.Transformer(config, common_vocabulary(config, other, tokenizer, tokenizer), args.temperature)

    pairs = {
        name: dense.Pair(model(config, draft), params, model(draft, config), draft_params)
        for name, (draft, draft_params) in drafts.items()
    }

    def measure(name: str, which: str, method: Any, n: int, gamma: int, *, short: bool) -> None:
        if time.perf_counter() - began > args.seconds:
            return
        asked, groups, tokens = (few, args.short_groups, gamma + 2) if short else (prompts, args.groups, args.tokens)
        groups = max(groups, args.rows // (n * len(asked.lengths)))  # a batch as large as the others', at least
        start = time.perf_counter()
        arrays = all_of(pairs[which], method, asked, groups, args.rows, n=n, gamma=gamma, tokens=tokens, room=room)
        seconds = time.perf_counter() - start
        run = {"name": name, "pair": which, "n": n, "gamma": gamma, "tokens": tokens, "short": short}
        found.add({**run, "prompts": len(asked.lengths), "seconds": seconds}, arrays)
        line = f"{which}, K={gamma}, {name}{' (short)' if short else ''}: log Ẑ {arrays['log_evidence'].mean():.2f}, "
        print(f"{line}{arrays['cycles'].mean():.1f} cycles, {seconds:.1f} s", file=sys.stderr, flush=True)

    measure("target alone", next(iter(pairs)), None, 4, 0, short=False)
    for run, which in itertools.product(args.runs, pairs):
        for text in run.methods:
            method, n, name = method_of(text, run.n)
            measure(name, which, method, n, run.gamma, short=run.short)
    print(tables([args.output]))


if __name__ == "__main__":
    main()
