"""Gains of decoding by load where cycles are a device's: times of one pair, acceptance replayed from another's traces.

    python scripts/time_strategies.py -o times.jsonl            # on a GPU: T(strategy, lanes), random weights of 8B/1B
    python scripts/replay_planner.py --times times.jsonl        # anywhere, in seconds

No device is used: an engine's rounds are simulated. Requests come in phases, a lull or a burst of one kind or of both,
so many at a time, each begun when one before it has ended; a phase begins when the last one's requests have ended.
`--tokens` of each answer have acceptance from `tests/data/acceptance.json` (`scripts/trace_acceptance.py`): answers of
the request's kind, one behind the other, and one coin a position, the same whoever decodes. A cycle gives a request its
accepted drafts and one token, and takes T of the batch's lanes, which are the engine's: powers of two.

Contenders are each strategy of the times alone, and all by load: `smcjax.auto`'s choice of strategies that are worth a
program, `smcjax.engine.turns` and `smcjax.planner`'s switch, asked as the engine asks them, reports a cycle late as on
a GPU. The profile they plan by has these times, and acceptance from traces that no request replays. What a switch costs
is charged: chunks that the draft reads behind cycles of the target alone, at their own measured times. Prompts are not:
every strategy reads them, though a target that is served alone has no draft to read them too.

Reported over seeds that draw phases' requests and their order: the gain over the fixed strategy that is fastest over
all phases of all seeds together, regret (below 0 where the gain is above), quantiles of single requests' gains in
seconds a token, switches, and what the fastest strategy of every phase would gain, with hindsight and without costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_planner import QUANTILES, Contender, Took, by_phase, gains_of_requests

from smcjax.auto import Auto
from smcjax.decoders import Decoding, Rejection
from smcjax.engine.memory import buckets
from smcjax.engine.turns import Turns
from smcjax.markdown import table
from smcjax.planner import Cell, Measured, Planner, Profile, Rule, Switch
from smcjax.planner.laws import EXACT, from_json

TRACES = Path(__file__).resolve().parents[1] / "tests" / "data" / "acceptance.json"
CATCHING_UP = "catching up"
DRAWS = 16  # of coins, of each trace that a profile counts
LAG = 1  # rounds after which an engine on a GPU reads its reports

Traces = Mapping[str, Sequence[Sequence[float]]]


@dataclasses.dataclass(frozen=True)
class Times:
    """A file of `scripts/time_strategies.py`: whose it is, cycles of each strategy, and chunks of catching up."""

    facts: Mapping[str, Any]
    cells: Mapping[Decoding, Sequence[Cell]]
    chunk: int  # tokens of a request that the draft reads at a time
    chunk_ms: Mapping[int, float]  # by lanes

    @classmethod
    def load(cls, path: Path) -> Times:
        """Reads a file, leaving out loads that not all strategies were timed at, as of a run that was cut off."""
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        facts, rows = lines[0], lines[1:]
        cells: dict[Decoding, list[Cell]] = {}
        chunk, chunk_ms = 1, {}
        for one in rows:
            if CATCHING_UP in one:
                chunk, chunk_ms[one["requests"]] = one[CATCHING_UP], one["ms"]
            else:
                cell = Cell(one["requests"], one["context"], one["ms"], tuple(one["windows"]))
                cells.setdefault(from_json(one["decoding"]), []).append(cell)
        whole = set.intersection(*({cell.requests for cell in some} for some in cells.values())) & chunk_ms.keys()
        kept = {one: [cell for cell in some if cell.requests in whole] for one, some in cells.items()}
        return cls(facts, kept, chunk, {load: chunk_ms[load] for load in sorted(whole)})

    def catching_up_ms(self, lanes: int) -> float:
        """Milliseconds of a chunk, of the next larger batch that was timed."""
        return self.chunk_ms[min((load for load in self.chunk_ms if load >= lanes), default=max(self.chunk_ms))]


def accepted(coins: Sequence[bool], at: int, gamma: int) -> int:
    """Drafts that a cycle of `gamma` from position `at` on has accepted: up to the first whose coin is not."""
    count = 0
    while count < gamma and at + count < len(coins) and coins[at + count]:
        count += 1
    return count


def flips(alphas: Sequence[float], rng: random.Random) -> list[bool]:
    """A coin for each position: whether its token was a draft that is accepted."""
    return [rng.random() < alpha for alpha in alphas]


def halves(traces: Traces) -> tuple[Traces, Traces]:
    """The traces that a profile counts, and those that requests replay."""
    return (
        {kind: rows[: len(rows) // 2] for kind, rows in traces.items()},
        {kind: rows[len(rows) // 2 :] for kind, rows in traces.items()},
    )


def counted(decoding: Decoding, traces: Traces, seed: int) -> Measured:
    """Tokens a cycle and acceptance by position of a strategy on traces, as a profile has them; without times."""
    if not decoding.ragged:
        tokens = float(decoding.tokens_per_cycle)
        return Measured(decoding, tokens, (), (tokens,) * sum(map(len, traces.values())))
    rng, gamma = random.Random(seed), decoding.speculation.gamma
    reached, each, cycles = [0] * gamma, [], 0
    for alphas in (alphas for rows in traces.values() for alphas in rows):
        own = 0
        for _ in range(DRAWS):
            coins, at = flips(alphas, rng), 0
            while at < len(coins):
                run = accepted(coins, at, gamma)
                for position in range(run):
                    reached[position] += 1
                at, own = at + run + 1, own + 1
        each.append(max(1.0, DRAWS * len(alphas) / own))
        cycles += own
    fractions = tuple(one / cycles for one in reached)
    return Measured(decoding, 1 + sum(fractions), fractions, tuple(each))


def profile_of(times: Times, traces: Traces, seed: int) -> Profile:
    """The profile of these times, with acceptance counted on traces."""
    strategies = tuple(
        dataclasses.replace(counted(decoding, traces, seed), cells=tuple(cells))
        for decoding, cells in times.cells.items()
    )
    names = ("device", "model", "draft", "jax", "smcjax", "commit", "date")
    return Profile(strategies=strategies, **{name: times.facts[name] for name in names})


@dataclasses.dataclass(frozen=True)
class Phase:
    """Requests that run `load` at a time, each the coins of its answer's positions."""

    name: str
    load: int
    requests: tuple[tuple[bool, ...], ...]


def answer(rows: Sequence[Sequence[float]], tokens: int, rng: random.Random) -> tuple[bool, ...]:
    """Coins of an answer's tokens but the first: answers of the traces one behind the other, drawn by chance."""
    alphas: list[float] = []
    while len(alphas) < tokens - 1:
        alphas += rng.choice(rows)
    return tuple(flips(alphas[: tokens - 1], rng))


def phases(traces: Traces, loads: Sequence[int], waves: float, tokens: int, seed: int) -> list[Phase]:
    """A phase of each kind, and one of both, at each load, in an order drawn by chance; `waves` answers a lane."""
    rng = random.Random(seed)
    found = []
    for load in loads:
        for kinds in (*((kind,) for kind in traces), tuple(traces)):
            count = max(1, round(waves * load))
            requests = tuple(answer(traces[kinds[number % len(kinds)]], tokens, rng) for number in range(count))
            found.append(Phase(f"{' and '.join(kinds)}, {load} at a time", load, requests))
    rng.shuffle(found)
    return found


@dataclasses.dataclass(eq=False)
class Running:
    """A request as `smcjax.engine.turns` asks about it, and the coins that decide about its drafts."""

    request_id: str
    number: int
    lane: int
    prompt: int
    coins: tuple[bool, ...]
    began: float
    made: int = 1  # tokens; the first is no cycle's
    known: int = 1  # of them, by the reports that have come
    lacking: int | None = None
    infos: list[None] = dataclasses.field(default_factory=list)  # one a report
    cycles: int = 0  # that have been enqueued
    started: bool = True

    @property
    def group(self) -> Running:
        """Itself: who counts its cycles."""
        return self

    @property
    def request(self) -> Running:
        """Itself: who has its name."""
        return self

    @property
    def known_length(self) -> int:
        """Tokens of prompt and answer by the last report."""
        return self.prompt + self.known

    @property
    def ended(self) -> bool:
        """True once the answer has all of its tokens."""
        return self.made > len(self.coins)


@dataclasses.dataclass(frozen=True)
class Own:
    """A decoder's program as `Turns` sees it."""

    decoding: Decoding
    by: Decoding | None = None


class Engine:
    """Simulates rounds: the time that they take and the tokens that they give.

    Args:
        times: of cycles and of catching up.
        planner: of these times.
        context: tokens of a prompt, and those that times are looked up at.
        most: requests at once, at most.
        by: the fixed strategy, or those that take turns.
        lag: rounds after which reports are read.
    """

    def __init__(
        self, times: Times, planner: Planner, context: int, most: int, by: Decoding | Turns, lag: int = LAG
    ) -> None:
        self._times, self._planner, self._context, self._by, self._lag = times, planner, context, by, lag
        self._sizes = buckets(most)
        strategies = by.strategies if isinstance(by, Turns) else (by,)
        self._own = Own(Rejection(max(1, *(one.tokens_per_cycle - 1 for one in strategies))))
        self._late: list[tuple[Decoding, list[tuple[Running, int, int]]]] = []  # cycles that are not reported yet
        self.seconds = 0.0
        self.catching_up = 0.0  # seconds of them
        self.cycles: dict[Decoding, int] = {}

    def run(self, phase: Phase) -> Took:
        """Runs all requests of a phase."""
        waiting = list(enumerate(phase.requests))[::-1]
        running: dict[int, Running] = {}  # by lane
        began, tokens, each = self.seconds, 0, dict[int, float]()
        while waiting or running:
            for lane in range(phase.load):
                if waiting and lane not in running:
                    number, coins = waiting.pop()
                    running[lane] = Running(f"{phase.name}, {number}", number, lane, self._context, coins, self.seconds)
            self._cycle(running)
            for one in self._report():
                tokens += one.made
                each[one.number] = (self.seconds - one.began) / one.made
                del running[one.lane]
        self._late.clear()  # cycles in which nobody ran any more
        seconds = self.seconds - began
        return Took(tokens, seconds, seconds, seconds, tuple(each[number] for number in sorted(each)))

    def _cycle(self, running: Mapping[int, Running]) -> None:
        """Enqueues a cycle of all that run; who has ended without anybody's having read it runs idle."""
        lanes = next(size for size in self._sizes if size >= len(running))
        for one in running.values():
            one.cycles += 1
        by = self._by
        if isinstance(by, Turns):
            schedule: Any = SimpleNamespace(cycle=True, size=lanes)
            named: Any = {one.request_id: one for one in running.values()}
            program = by.program(self._own, schedule, named)
            chosen: Decoding = program.by or program.decoding
            lacking = by.lacking(chosen, self._own.decoding, running)  # type: ignore[arg-type]
            chunks = max((-(-(end - begin) // self._times.chunk) for begin, end in lacking.values()), default=0)
            self.catching_up += 1e-3 * chunks * self._times.catching_up_ms(lanes)
            self.seconds += 1e-3 * chunks * self._times.catching_up_ms(lanes)
        else:
            chosen = by
        self.seconds += 1e-3 * self._planner.cycle_ms(chosen, lanes, self._context)
        self.cycles[chosen] = self.cycles.get(chosen, 0) + 1
        ran = []
        for one in running.values():
            if not one.ended:
                run = accepted(one.coins, one.made - 1, chosen.speculation.gamma if chosen.ragged else 0)
                one.made = min(one.made + run + 1, len(one.coins) + 1)
                ran.append((one, run, one.made))
        self._late.append((chosen, ran))

    def _report(self) -> list[Running]:
        """Reads the reports of cycles but the last ones; returns the requests that are known to have ended now."""
        ended = []
        while len(self._late) > self._lag:
            by, ran = self._late.pop(0)
            if isinstance(self._by, Turns) and ran:
                info = SimpleNamespace(accepted=[run for _, run, _ in ran], ran=[True] * len(ran))
                groups: Any = list(enumerate(one for one, _, _ in ran))
                self._by.heard(by, info, groups)
            for one, _, made in ran:
                one.known = made
                one.infos.append(None)
                if one.ended and made > len(one.coins):
                    ended.append(one)
        return ended


@dataclasses.dataclass
class Outcome:
    """A contender over all seeds: what each phase of each seed took, and how often it switched."""

    contender: Contender
    switches: list[int] = dataclasses.field(default_factory=list)
    catching_up: float = 0.0
    cycles: dict[str, int] = dataclasses.field(default_factory=dict)


def replayed(
    times: Times,
    planner: Planner,
    asked: Sequence[Sequence[Phase]],
    strategies: Sequence[Decoding],
    rule: Rule,
    lag: int = LAG,
) -> list[Outcome]:
    """Every fixed strategy of the times, and last those that take turns, over the phases of each seed."""
    context, most = planner.profile.contexts[0], max(phase.load for some in asked for phase in some)
    fixed = planner.strategies(EXACT)
    found = [Outcome(Contender(str(one), [])) for one in fixed] + [Outcome(Contender("by load", []))]
    for some in asked:
        turns = Turns(Switch(planner, strategies, rule))
        contenders: list[Decoding | Turns] = [*fixed, turns]
        for by, outcome in zip(contenders, found, strict=True):
            engine = Engine(times, planner, context, most, by, lag)
            outcome.contender.rounds.append([engine.run(phase) for phase in some])
            outcome.catching_up += engine.catching_up
            for one, cycles in engine.cycles.items():
                outcome.cycles[str(one)] = outcome.cycles.get(str(one), 0) + cycles
        found[-1].switches.append(turns.switches)
    return found


def overall(one: Contender) -> float:
    """Tokens a second over all phases of all rounds."""
    took = [taken for some in one.rounds for taken in some]
    return sum(taken.tokens for taken in took) / sum(taken.counted for taken in took)


def hindsight(fixed: Sequence[Contender]) -> float:
    """Tokens a second where every phase has the strategy that is fastest in it."""
    tokens = seconds = 0.0
    for number in range(len(fixed[0].rounds)):
        each = [Contender(one.name, [one.rounds[number]]) for one in fixed]
        made = sum(taken.tokens for taken in fixed[0].rounds[number])
        tokens, seconds = tokens + made, seconds + made / by_phase(each)
    return tokens / seconds


def speeds_by_phase(one: Contender, asked: Sequence[Sequence[Phase]]) -> dict[str, float]:
    """Tokens a second of each phase, of all seeds together."""
    found: dict[str, list[Took]] = {}
    for some, took in zip(asked, one.rounds, strict=True):
        for phase, taken in zip(some, took, strict=True):
            found.setdefault(phase.name, []).append(taken)
    return {name: overall(Contender("", [found[name]])) for name in sorted(found)}


def report(found: Sequence[Outcome], asked: Sequence[Sequence[Phase]]) -> dict[str, Any]:
    """Prints tables and what turns have gained, and returns the numbers."""
    *fixed, planned = (one.contender for one in found)
    best = max(fixed, key=overall)
    each = {one.name: speeds_by_phase(one, asked) for one in (*fixed, planned)}
    print(table(["decoder", "tokens/s"], [[one.name, f"{overall(one):,.0f}"] for one in (*fixed, planned)]))
    names = sorted(each[best.name], key=lambda name: each[best.name][name])
    rows = [[name, *(f"{speeds[name]:,.0f}" for speeds in each.values())] for name in names]
    print(f"\n{table(['phase, tokens/s', *each], rows)}")
    gains = sorted(
        overall(Contender("", [mine])) / overall(Contender("", [theirs])) - 1
        for mine, theirs in zip(planned.rounds, best.rounds, strict=True)
    )
    single = gains_of_requests(planned, best)
    numbers: dict[str, Any] = {
        "fastest fixed": best.name,
        "tokens/s": {one.name: overall(one) for one in (*fixed, planned)},
        "phases": each,
        "gain": overall(planned) / overall(best) - 1,
        "gain of seeds": gains,
        "regret": 1 - overall(planned) / overall(best),
        "hindsight": hindsight(fixed) / overall(best) - 1,
        "single requests": single,
        "switches": found[-1].switches,
        "catching up": found[-1].catching_up / sum(t.counted for some in planned.rounds for t in some),
        "cycles": found[-1].cycles,
    }
    quantiles = ", ".join(f"{100 * one:+.0f}%" for one in single)
    print(
        f"\nGain over {best.name}: {100 * numbers['gain']:+.1f}% ({100 * gains[0]:+.1f} to {100 * gains[-1]:+.1f} over "
        f"{len(gains)} seeds); regret {100 * numbers['regret']:.1f}%.\n"
        f"Of single requests: {quantiles} (quantiles {', '.join(map(str, QUANTILES))}%).\n"
        f"The fastest strategy of every phase would gain {100 * numbers['hindsight']:+.1f}%, with hindsight.\n"
        f"Switches by seed: {', '.join(map(str, found[-1].switches))}; {100 * numbers['catching up']:.2f}% of the time "
        f"is the draft's catching up; cycles: {found[-1].cycles}."
    )
    return numbers


def main() -> int:
    """Replays and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, required=True, metavar="FILE", help="of scripts/time_strategies.py")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="FILE", help="of scripts/trace_acceptance.py")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16, 64], help="requests at a time (1 4 16 64)")
    parser.add_argument("--waves", type=float, default=4.0, help="requests of a phase for each of its lanes (4)")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer (256)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of requests and order (1 2 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all numbers")
    args = parser.parse_args()
    times = Times.load(args.times)
    counts, replays = halves(json.loads(args.traces.read_text())["kinds"])
    profile = profile_of(times, counts, args.seeds[0])
    planner = Planner(profile)
    strategies = Auto().strategies(profile, has_draft=True, loads=buckets(max(args.loads)))
    print(f"Times of {profile.device}, {profile.model} and {profile.draft}; acceptance of {args.traces}.")
    print(f"By load: {'; '.join(map(str, strategies))}.\n")
    asked = [phases(replays, args.loads, args.waves, args.tokens, seed) for seed in args.seeds]
    numbers = report(replayed(times, planner, asked, strategies, Rule()), asked)
    if args.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        args.json.write_text(json.dumps({**settings, **numbers}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
