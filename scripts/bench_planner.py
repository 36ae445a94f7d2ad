"""Measures what decoding by load gains on mixed requests: every fixed exact strategy of a profile, and all by turns.

    python scripts/bench_planner.py --write-prompts mixed.jsonl
    smcjax profile --input-file mixed.jsonl --contexts 160 --requests 1 4 --gammas 2 4 8 -o pair.json
    python scripts/bench_planner.py --profile pair.json --json gains.json

Requests are of two kinds: word problems, whose drafts the bundled target accepts often, and words of random letters,
where it accepts few. They come in phases: a lull, one at a time, and a burst, several at once, of each kind, and a
burst of both. The prompts that are written for the profile are of the same kinds by another seed.

A round is all phases by one contender, each request begun when one before it has ended. Contenders have their rounds in
turns, the first of which compiles and is left out. Two speeds are told:

    measured  tokens a second of time that passes and of the cores' time, which others on the machine disturb less: the
              median over rounds, the least and the largest
    counted   tokens over the sum of T(decoder, lanes) of the profile, over all cycles that ran. Of prompts, moves and
              the draft's catching up it knows nothing. The same seeds give the same figure.

The gain is over the fixed strategy that is fastest over all phases together, which nobody knows beforehand.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smcjax import LLM, Auto, SamplingParams
from smcjax.decoders import Decoding
from smcjax.markdown import head, row
from smcjax.planner import Planner, Profile
from smcjax.planner.laws import EXACT
from smcjax.tasks.questions import questions

LETTERS = "abcdefghijklmnopqrstuvwxyz"
QUANTILES = (10, 50, 90)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Requests that run `load` at a time."""

    name: str
    load: int
    prompts: tuple[str, ...]


def word_problems(seed: int, count: int) -> list[str]:
    """Prompts whose drafts are accepted often."""
    return [one.prompt for one in questions("words", seed, count, context=2048)]


def random_words(seed: int, count: int) -> list[str]:
    """Prompts whose drafts are accepted seldom."""
    rng = random.Random(seed)
    return [
        " ".join("".join(rng.choices(LETTERS, k=rng.randint(2, 7))) for _ in range(rng.randint(8, 20)))
        for _ in range(count)
    ]


def mixed(seed: int, count: int) -> list[str]:
    """Prompts of both kinds, one after the other."""
    pairs = zip(word_problems(seed, count), random_words(seed, count), strict=True)
    return [prompt for pair in pairs for prompt in pair][:count]


def phases(seed: int, burst: int, lull: int, most: int) -> list[Phase]:
    """Lulls of `lull` requests each and bursts of `burst`, `most` at a time."""
    kinds = {"words": word_problems, "letters": random_words}
    found = [
        Phase(f"{name}, {load} at a time", load, tuple(kind(seed + load, count)))
        for load, count in ((1, lull), (most, burst))
        for name, kind in kinds.items()
    ]
    return [*found, Phase(f"both, {most} at a time", most, tuple(mixed(seed + 99, burst)))]


@dataclasses.dataclass(frozen=True)
class Took:
    """Measurements of a phase: its tokens, seconds of three clocks, and each request's counted seconds a token."""

    tokens: int
    wall: float
    cpu: float
    counted: float
    requests: tuple[float, ...]


def run_phase(llm: LLM, planner: Planner, phase: Phase, params: SamplingParams) -> Took:
    """Runs a phase, `phase.load` requests at a time."""
    engine, context = llm.engine, planner.profile.contexts[0]
    todo = list(enumerate(phase.prompts))[::-1]
    begun: dict[str, tuple[int, float]] = {}
    each = dict[int, float]()
    tokens, counted = 0, 0.0
    before = dict(engine.batch_cycles)
    wall, cpu = time.perf_counter(), time.process_time()
    while todo or engine.busy:
        while todo and len(begun) < phase.load:
            number, prompt = todo.pop()
            request = llm.request(prompt, dataclasses.replace(params, seed=number))
            begun[request.request_id] = number, counted
            engine.add_request(request)
        ended = engine.step()
        for one, cycles in engine.batch_cycles.items():
            if cycles > before.get(one, 0):
                counted += planner.cycle_ms(one, engine.runner.size, context) / 1e3
                before[one] = cycles
        for output in ended:
            made = output.metrics.generated_tokens
            tokens += made
            number, since = begun.pop(output.request_id)
            each[number] = (counted - since) / made
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    return Took(tokens, *seconds, counted, tuple(each[number] for number in sorted(each)))


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to decode, and what each phase of each round took."""

    name: str
    rounds: list[list[Took]]

    def speeds(self, clock: str) -> list[float]:
        """Tokens a second of each round."""
        return [sum(one.tokens for one in took) / sum(getattr(one, clock) for one in took) for took in self.rounds]

    def speed(self, clock: str) -> float:
        """The median over rounds."""
        return statistics.median(self.speeds(clock))


def gain(of: Contender, over: Contender, clock: str) -> tuple[float, float, float]:
    """The least, the median and the largest gain in speed, round by round."""
    each = sorted(a / b - 1 for a, b in zip(of.speeds(clock), over.speeds(clock), strict=True))
    return each[0], statistics.median(each), each[-1]


def gains_of_requests(of: Contender, over: Contender) -> tuple[float, ...]:
    """Quantiles 10, 50 and 90% of the gains of single requests, in counted seconds a token."""
    each = [
        b / a - 1
        for mine, theirs in zip(of.rounds, over.rounds, strict=True)
        for one, other in zip(mine, theirs, strict=True)
        for a, b in zip(one.requests, other.requests, strict=True)
    ]
    cuts = statistics.quantiles(each, n=10, method="inclusive")
    return tuple(cuts[quantile // 10 - 1] for quantile in QUANTILES)


def by_phase(fixed: Sequence[Contender]) -> float:
    """Counted tokens a second where each phase has the strategy that is fastest in it, with hindsight."""
    tokens = seconds = 0.0
    for phase in zip(*(taken for one in fixed for taken in one.rounds[:1]), strict=True):
        best = max(phase, key=lambda took: took.tokens / took.counted)
        tokens, seconds = tokens + best.tokens, seconds + best.counted
    return tokens / seconds


def report(contenders: Sequence[Contender], planned: Contender, asked: Sequence[Phase]) -> dict[str, Any]:
    """Prints tables, and returns what they say."""
    fixed = [one for one in contenders if one is not planned]
    print(head(["decoder", "tokens/s, counted", "tokens/s of the cores' time", "tokens/s", "counted, by phase"]))
    rows = []
    for one in contenders:
        phase_speeds = [
            statistics.median(taken[at].tokens / taken[at].counted for taken in one.rounds) for at in range(len(asked))
        ]
        about: dict[str, Any] = {
            "decoder": one.name,
            "phases": dict(zip((phase.name for phase in asked), phase_speeds, strict=True)),
        }
        speeds = {clock: one.speeds(clock) for clock in ("counted", "cpu", "wall")}
        rows.append(about | speeds)
        told = [f"{one.speed(c):,.0f} ({min(each):,.0f} to {max(each):,.0f})" for c, each in speeds.items()]
        print(row([one.name, *told, ", ".join(f"{speed:,.0f}" for speed in phase_speeds)]))
    found: dict[str, Any] = {"rows": rows, "gains": {}}
    print(f"\nPhases: {'; '.join(phase.name for phase in asked)}.")
    for clock, words in (("counted", "counted"), ("cpu", "of the cores' time"), ("wall", "of time that passes")):
        best = max(fixed, key=lambda one: one.speed(clock))
        low, middle, high = gain(planned, best, clock)
        found["gains"][clock] = {"over": best.name, "least": low, "median": middle, "largest": high}
        print(
            f"Gain {words} over {best.name}: {100 * middle:+.1f}% ({100 * low:+.1f} to {100 * high:+.1f} over rounds); "
            f"regret {100 * (1 - planned.speed(clock) / best.speed(clock)):.1f}%."
        )
    best = max(fixed, key=lambda one: one.speed("counted"))
    found["requests"] = gains_of_requests(planned, best)
    found["by_phase"] = by_phase(fixed) / best.speed("counted") - 1
    quantiles = ", ".join(f"{100 * one:+.0f}%" for one in found["requests"])
    print(f"Of single requests, counted: {quantiles} (quantiles 10, 50, 90%).")
    print(f"The fastest strategy of each phase, with hindsight, would gain {100 * found['by_phase']:+.1f}%, counted.")
    return found


def main() -> int:
    """Writes prompts for a profile, or runs all contenders and prints what turns have gained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-prompts", metavar="FILE", help="prompts of both kinds, for smcjax profile, and end")
    parser.add_argument("--profile", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, help="that count, of each contender (3)")
    parser.add_argument("--burst", type=int, default=12, help="requests of a burst (12)")
    parser.add_argument("--lull", type=int, default=4, help="requests of a lull (4)")
    parser.add_argument("--at-once", type=int, default=4, help="requests at once in a burst (4)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, whose end is ignored (64)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts (1; those for the profile have 1001 more)")
    parser.add_argument("--json", metavar="FILE", help="all numbers")
    args = parser.parse_args()
    if args.write_prompts:
        lines = [json.dumps({"prompt": prompt}) for prompt in mixed(args.seed + 1001, 16)]
        Path(args.write_prompts).write_text("\n".join(lines) + "\n")
        return 0
    if args.profile is None:
        parser.error("give --profile, a file of smcjax profile, or --write-prompts.")
    profile = Profile.load(args.profile)
    planner = Planner(profile)
    asked = phases(args.seed, args.burst, args.lull, args.at_once)
    params = SamplingParams(temperature=0.7, max_tokens=args.tokens, ignore_eos=True)
    ways: list[Decoding | Auto] = [*planner.strategies(EXACT), Auto()]
    fields: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": args.at_once, "enable_prefix_caching": False}
    widest = max((one for one in ways if isinstance(one, Decoding)), key=lambda one: one.tokens_per_cycle)
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(LLM(decoding=widest, max_num_seqs=1, num_pages=2, compile_at_start=False))
        contenders, llms = [], []
        for way in ways:
            by = {"profile": args.profile} if isinstance(way, Auto) else {}
            llms.append(stack.enter_context(LLM(share=base, decoding=way, compile_at_start=False, **by, **fields)))
            contenders.append(Contender("by load" if isinstance(way, Auto) else str(way), []))
        print(f"{profile.device}; by load: {'; '.join(map(str, llms[-1].strategies))}.\n", flush=True)
        for number in range(args.rounds + 1):
            for llm, one in zip(llms, contenders, strict=True):
                took = [run_phase(llm, planner, phase, params) for phase in asked]
                if number:
                    one.rounds.append(took)
                print(f"round {number}: {one.name}, {sum(t.wall for t in took):.1f} s", file=sys.stderr, flush=True)
        switches = llms[-1].metrics().get("strategy_switches", 0)
        found = report(contenders, contenders[-1], asked)
        cycles = llms[-1].batch_cycles
        print(f"{switches:.0f} switches; cycles of the batch: {cycles}.")
    if args.json:
        settings = {"device": profile.device, "switches": switches, "cycles": cycles}
        Path(args.json).write_text(json.dumps({**vars(args), **settings, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
