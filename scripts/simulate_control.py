"""Ways to reject drafts under SMC, on a made-up pair small enough that the target's law is summed exactly.

    python scripts/simulate_control.py                    # minutes on one core; a table for each acceptance rate

Target and draft are tables of the next token's law behind the last two tokens, 12 tokens of which one ends a text; the
draft's logits are the target's plus noise, by which its tokens are accepted at a wanted rate. Every group of N
particles is simulated to its end, in NumPy.

Reported, of texts of 28 tokens that do not end by themselves: tokens a cycle, a group ending with its slowest row; mean
log Ẑ; mean of max(1 − Ẑ, 0), which bounds the total variation of the answer's law from the target's; the total
variation of the chosen answers' tokens, mean over positions. And of texts that do end: the chosen answer's mean length
over the target's, and tokens a cycle. All variants are unbiased: the mean of Ẑ is 1
(`tests/tasks/test_simulate_control.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from smcjax.markdown import head, row

V, END, CAP = 12, 0, 28  # tokens; the one that ends a text; tokens of a text at most


@dataclasses.dataclass(frozen=True)
class Pair:
    """Laws of the next token behind each two tokens, [V·V, V]."""

    p: np.ndarray
    q: np.ndarray

    @classmethod
    def made(cls, noise: float, ends: bool = True, seed: int = 0) -> Pair:
        rng = np.random.default_rng(seed)
        logits = 2.0 * rng.normal(size=(V * V, V))
        logits[:, END] -= 1.0 if ends else 60.0
        return cls(softmax(logits), softmax(logits + noise * rng.normal(size=logits.shape)))

    @property
    def acceptance(self) -> float:
        """Mean of Σ min(p, q) over contexts."""
        return float(np.minimum(self.p, self.q).sum(axis=1).mean())

    def marginals(self) -> np.ndarray:
        """The target's law of token t of a text, [CAP, V]; behind the end of a text all is END."""
        context = np.zeros(V * V)
        context[START] = 1.0
        ended, rows = 0.0, []
        for _ in range(CAP):
            joint = (context[:, None] * self.p).reshape(V, V, V)  # before last, last, next
            law = joint.sum(axis=(0, 1))
            rows.append(law + ended * (np.arange(V) == END))
            ended += law[END]
            moved = joint.sum(axis=0)
            moved[:, END] = 0.0
            context = moved.reshape(-1)
        return np.array(rows)


START = V + 2  # two tokens that no text begins with by itself


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def drawn(rng: np.random.Generator, law: np.ndarray, uniforms: np.ndarray | None = None) -> np.ndarray:
    """One token a row of `law` [R, V], which need not be normalised."""
    sums = np.cumsum(law, axis=1)
    uniforms = rng.random(len(law)) if uniforms is None else uniforms
    return np.minimum((uniforms[:, None] * sums[:, -1:] >= sums).sum(axis=1), V - 1)


@dataclasses.dataclass
class Rows:
    """G·N particles."""

    tokens: np.ndarray  # [R, CAP]
    length: np.ndarray  # [R]
    context: np.ndarray  # [R]
    done: np.ndarray  # [R]

    @classmethod
    def begun(cls, rows: int) -> Rows:
        return cls(np.full((rows, CAP), END), np.zeros(rows, int), np.full(rows, START), np.zeros(rows, bool))

    def append(self, rows: np.ndarray, token: np.ndarray) -> None:
        """Adds a token to some rows, none of which has ended."""
        self.tokens[rows, self.length[rows]] = token
        self.length[rows] += 1
        self.context[rows] = self.context[rows] % V * V + token
        self.done[rows] = (token == END) | (self.length[rows] == CAP)

    def taken(self, ancestors: np.ndarray) -> Rows:
        return Rows(*(getattr(self, field.name)[ancestors].copy() for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to reject drafts.

    `control` is c, `adapt` the share of N that the ESS is to keep (c then follows it from cycle to cycle), `by_block`
    lets a token spend what the block has gained, `chains` are independent drafts of a row, `level` resamples only where
    rows are equally long.

    `hand_over` ends the population after so many cycles, or before it would first be resampled (inf): one row of it,
    drawn by weight, goes on alone, exactly, with `candidates` drafts. `early` tosses a coin once some rows have ended:
    these stay, with the probability that is their share of the weight, and the group ends; or only the others do.

    `bonus` says when bonus tokens are drawn: "before" a resampling, "after" it, or "with" it, rows and tokens together
    by one systematic grid. `ahead` is κ in resampling by w·ψ, with ψ the κ-th power of the next column's Σ p²/q.
    """

    name: str
    control: float = 0.0
    adapt: float | None = None
    by_block: bool = False
    chains: int = 1
    level: bool = False
    particles: int = 8
    hand_over: float | None = None
    candidates: int = 1
    early: bool = False
    bonus: str = "before"
    ahead: float = 0.0


def advance(
    pair: Pair, rng: np.random.Generator, rows: Rows, c: np.ndarray, variant: Variant, gamma: int
) -> tuple[np.ndarray, np.ndarray]:
    """The drafts of a cycle: the rows' log weights' increments, and which are owed a bonus. `c` is each row's control.

    For any probability `a` of acceptance and any law r behind a rejection, the emitted token's law is m = q·a + R·r,
    R = Σ q·(1 − a), and p/m is its weight; here r ∝ max(p − q, 0). A further chain that agrees so far is accepted by
    min(1, r/q), or leaves max(r − q, 0), so that the emitted token's law stays r.
    """
    gained = np.zeros(len(rows.length))
    chains = np.repeat(rows.context[:, None], variant.chains, axis=1)
    agree = np.ones(chains.shape, bool)
    going = ~rows.done
    for _ in range(gamma):
        live = np.flatnonzero(going)
        if not len(live):
            break
        p, q = pair.p[rows.context[live]], pair.q[rows.context[live]]
        drafts = np.stack([drawn(rng, q) for _ in range(variant.chains)], axis=1)
        with np.errstate(divide="ignore", over="ignore"):
            spend = np.exp(gained[live])[:, None] if variant.by_block else 1.0
            accept = np.minimum(1.0, spend * p / (c[live][:, None] * q))
        residual = np.maximum(p - q, 0.0)
        residual /= np.maximum(residual.sum(axis=1, keepdims=True), 1e-300)
        emitted_law = q * accept + (q * (1 - accept)).sum(axis=1, keepdims=True) * residual
        token, kept = np.zeros(len(live), int), np.zeros(len(live), bool)
        left, tried, judged = residual.copy(), np.zeros(len(live), bool), np.zeros(len(live), bool)
        index = np.arange(len(live))
        for chain in range(variant.chains):
            usable = agree[live, chain] & ~kept
            draft = drafts[:, chain]
            by_rest = np.minimum(1.0, left[index, draft] / q[index, draft])
            chance = np.where(tried, by_rest, accept[index, draft])
            yes = usable & (rng.random(len(live)) < chance)
            token[yes], kept[yes] = draft[yes], True
            again = usable & ~yes & tried
            left[again] = np.maximum(left[again] - q[again], 0.0)
            left[again] /= np.maximum(left[again].sum(axis=1, keepdims=True), 1e-300)
            tried |= usable & ~yes
        judged = ~kept
        token[judged] = drawn(rng, left[judged]) if judged.any() else token[judged]
        gained[live] += np.log(p[index, token] / emitted_law[index, token])
        agree[live] &= drafts == token[:, None]
        rows.append(live, token)
        going[live] = kept & ~rows.done[live]
    return gained, going


def draw_bonus(
    pair: Pair, rng: np.random.Generator, rows: Rows, owed: np.ndarray, uniforms: np.ndarray | None = None
) -> None:
    """Adds the bonus token to rows that are owed one, by given uniforms [R] or new ones."""
    live = np.flatnonzero(owed)
    rows.append(live, drawn(rng, pair.p[rows.context[live]], None if uniforms is None else uniforms[live]))


def systematic(rng: np.random.Generator, weights: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ancestors [G, count] of weights [G, M], and how far into its ancestor's weight each stands, uniform in [0, 1)."""
    sums = np.cumsum(weights, axis=1)
    wanted = (rng.random((len(weights), 1)) + np.arange(count)) / count * sums[:, -1:]
    found = np.minimum((wanted[:, :, None] >= sums[:, None, :]).sum(axis=2), weights.shape[1] - 1)
    own = np.maximum(np.take_along_axis(weights, found, axis=1), 1e-300)
    return found, 1 - (np.take_along_axis(sums, found, axis=1) - wanted) / own


@dataclasses.dataclass(frozen=True)
class Result:
    """Figures of all groups of a variant."""

    log_evidence: np.ndarray  # [G]
    cycles: np.ndarray  # [G]
    answers: np.ndarray  # [G, CAP]
    lengths: np.ndarray  # [G]


def simulate(pair: Pair, variant: Variant, groups: int, gamma: int, seed: int = 0) -> Result:
    """All groups to their ends."""
    rng, n = np.random.default_rng(seed), variant.particles
    rows, answers = Rows.begun(groups * n), Rows.begun(groups)
    log_weight, evidence = np.zeros((groups, n)), np.zeros(groups)
    cycles, c = np.zeros(groups, int), np.full(groups, variant.control)
    base = np.arange(groups)[:, None] * n
    spread = (pair.p**2 / pair.q).sum(axis=1) ** variant.ahead

    def end(which: np.ndarray, by: np.ndarray) -> None:
        """Takes a row of some groups by weights `by`, [G, N], for their answers, and ends their populations."""
        evidence[which] += log_mean(log_weight)[which]
        chosen = rows.taken((systematic(rng, by, 1)[0] + base)[which, 0])
        for field in dataclasses.fields(Rows):
            getattr(answers, field.name)[which] = getattr(chosen, field.name)
        ended[which] = True
        rows.done.reshape(groups, n)[which] = True

    ended = np.zeros(groups, bool)
    while not ended.all():
        cycles += ~ended
        gained, owed = advance(pair, rng, rows, np.repeat(c, n), variant, gamma)
        log_weight += gained.reshape(groups, n)
        if variant.bonus == "before":
            draw_bonus(pair, rng, rows, owed)
        done = rows.done.reshape(groups, n)
        if variant.early:
            log_weight = np.where(ended[:, None], log_weight, parted(rng, log_weight, done))
        weights = np.exp(log_weight - log_weight.max(axis=1, keepdims=True))
        ess = weights.sum(axis=1) ** 2 / (weights**2).sum(axis=1)
        if variant.adapt is not None:
            c = np.clip(c * (variant.adapt * n / ess), 0.01, 1.0)
        end(~ended & (done | (weights == 0)).all(axis=1), weights)
        poor = ~ended & (ess < 0.5 * n)
        if variant.level:
            length = rows.length.reshape(groups, n)
            poor &= length.min(axis=1) == length.max(axis=1)
        if variant.hand_over is not None:
            end(~ended & (poor if variant.hand_over == np.inf else cycles == variant.hand_over), weights)
            poor &= ~ended
        psi = np.where(rows.done, 1.0, spread[rows.context]).reshape(groups, n)
        found, inside = systematic(rng, weights * psi, n)
        ancestors = np.where(poor[:, None], found, np.arange(n))
        gain = log_mean(log_weight) + np.log((weights * psi).sum(axis=1) / weights.sum(axis=1))
        evidence += np.where(poor, gain, 0.0)
        log_weight = np.where(poor[:, None], -np.log(np.take_along_axis(psi, ancestors, axis=1)), log_weight)
        taken = (ancestors + base).reshape(-1)
        rows, owed = rows.taken(taken), owed[taken]
        if variant.bonus != "before":
            at = np.where(poor[:, None] & (variant.bonus == "with"), inside, rng.random((groups, n)))
            draw_bonus(pair, rng, rows, owed, at.reshape(-1))
        idle = rows.done.reshape(groups, n) | np.isneginf(log_weight)
        end(~ended & idle.all(axis=1), np.exp(log_weight))  # copies of rows that have all finished
    exact = Variant("", chains=variant.candidates)
    while not answers.done.all():
        cycles += ~answers.done
        _, owed = advance(pair, rng, answers, np.ones(groups), exact, gamma)
        draw_bonus(pair, rng, answers, owed)
    return Result(evidence, cycles, answers.tokens, answers.length)


def parted(rng: np.random.Generator, log_weight: np.ndarray, done: np.ndarray) -> np.ndarray:
    """Log weights [G, N] after a coin of each group: the rows that have ended stay, or the others do.

    They stay with the probability that is their share of the weight, and are divided by it; the others weigh 0.
    """
    weights = np.exp(log_weight - log_weight.max(axis=1, keepdims=True))
    share = (weights * done).sum(axis=1) / weights.sum(axis=1)
    stop = rng.random(len(share)) < share
    with np.errstate(divide="ignore"):
        stays = log_weight - np.log(np.where(stop, share, 1 - share))[:, None]
    return np.where(done == stop[:, None], stays, -np.inf)


def log_mean(log_weight: np.ndarray) -> np.ndarray:
    """log of the mean weight of each group, [G]."""
    top = log_weight.max(axis=1)
    return top + np.log(np.exp(log_weight - top[:, None]).mean(axis=1))


def variation(pair: Pair, result: Result) -> float:
    """Total variation of the chosen answers' tokens from the target's law, mean over positions."""
    found = np.stack([(result.answers == token).mean(axis=0) for token in range(V)], axis=1)
    return float(0.5 * np.abs(found - pair.marginals()).sum(axis=1).mean())


def mean_length(pair: Pair) -> float:
    """Tokens of a text of the target's."""
    return float((1 - np.concatenate([[0.0], pair.marginals()[:-1, END]])).sum())


VARIANTS = [
    *(Variant(f"control {c:g}", c) for c in (0.0, 0.05, 0.1, 0.3, 0.5, 1.0)),
    *(Variant(f"(a) c follows the ESS, {share:g} N wanted", 0.1, adapt=share) for share in (0.5, 0.7, 0.9)),
    *(Variant(f"(b) control {c:g}, resampled at equal progress only", c, level=True) for c in (0.1, 0.3)),
    *(Variant(f"(d) control {c:g}, N = 4, 2 chains each", c, chains=2, particles=4) for c in (0.1, 0.3)),
    *(Variant(f"(d') control {c:g}, N = 4, 1 chain", c, particles=4) for c in (0.1, 0.3)),
    *(Variant(f"(e) control {c:g} by block", c, by_block=True) for c in (0.05, 0.1, 0.3, 0.5)),
    *(Variant(f"(f) exact, {m} candidates", 1.0, hand_over=1, particles=1, candidates=m) for m in (1, 8)),
    *(
        Variant(f"(f) control {c:g}, {t} cycles, then exact, 8 candidates", c, hand_over=t, candidates=8)
        for c in (0.0, 0.1)
        for t in (1, 2, 3, 4, 5)
    ),
    *(
        Variant(f"(f) control {c:g} up to a resampling, then exact, 8 candidates", c, hand_over=np.inf, candidates=8)
        for c in (0.0, 0.1)
    ),
    *(Variant(f"(g) control {c:g}, a coin at the first end", c, early=True) for c in (0.0, 0.1, 0.3, 0.5, 1.0)),
    *(
        Variant(f"(h) control {c:g}, bonus {when} resampling", c, bonus=when)
        for c in (0.0, 0.1, 0.3)
        for when in ("after", "with")
    ),
    *(
        Variant(f"(i) control {c:g}, resampled by w·ψ, κ = {k:g}", c, ahead=k)
        for c in (0.0, 0.1, 0.3)
        for k in (-0.5, 0.25, 0.5, 1.0)
    ),
]


def noise_for(acceptance: float, ends: bool) -> float:
    """The noise at which drafts are accepted at a rate, by bisection."""
    low, high = 0.0, 20.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if Pair.made(middle, ends).acceptance > acceptance else (low, middle)
    return low


def rows_of(acceptance: float, groups: int, gamma: int, variants: Sequence[Variant] = VARIANTS) -> Iterator[str]:
    """The table's rows, one as each variant ends."""
    endless, ending = (Pair.made(noise_for(acceptance, ends), ends) for ends in (False, True))
    for variant in variants:
        whole = simulate(endless, variant, groups, gamma)
        ended = simulate(ending, variant, groups, gamma)
        cells = (
            f"{CAP / whole.cycles.mean():.2f}",
            f"{whole.log_evidence.mean():.2f}",
            f"{np.maximum(1 - np.exp(whole.log_evidence), 0).mean():.3f}",
            f"{variation(endless, whole):.3f}",
            f"{ended.lengths.mean() / mean_length(ending):.3f}",
            f"{ended.lengths.mean() / ended.cycles.mean():.2f}",
        )
        yield row([variant.name, *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.61, 0.76])
    parser.add_argument("--groups", type=int, default=5000)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=[""], help="variants whose name begins so (all)")
    args = parser.parse_args()
    variants = [variant for variant in VARIANTS if variant.name.startswith(tuple(args.only))]
    for acceptance in args.acceptance:
        print(f"\nA token is accepted {acceptance:g} of the time; N = 8, K = {args.gamma}, {args.groups:,} groups\n")
        columns = ["variant", "tokens a cycle", "mean log Ẑ", "distance ≤", "total variation"]
        print(head([*columns, "length over the target's", "tokens a cycle of texts that end"]))
        for line in rows_of(acceptance, args.groups, args.gamma, variants):
            print(line, flush=True)


if __name__ == "__main__":
    main()
