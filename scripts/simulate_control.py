"""Ways to reject drafts under SMC, on a made-up pair small enough that the target's law is summed exactly.

    python scripts/simulate_control.py                    # minutes on one core; a table for each acceptance rate

Target and draft are tables of the next token's law behind the last two tokens, 12 tokens of which one ends a text; the
draft's logits are the target's plus noise, by which its tokens are accepted at a wanted rate. Every group of N
particles is simulated to its end, in NumPy.

Reported, of texts of 28 tokens that do not end by themselves: tokens a cycle, a group ending with its slowest row; mean
log Ẑ; the total variation of the chosen answers' tokens from the target's law, mean over positions. And of texts that
do end: the chosen answer's mean length over the target's. All variants are unbiased: the mean of Ẑ is 1
(`tests/tasks/test_simulate_control.py`).
"""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np

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


def drawn(rng: np.random.Generator, law: np.ndarray) -> np.ndarray:
    """One token a row of `law` [R, V], which need not be normalised."""
    sums = np.cumsum(law, axis=1)
    return np.minimum((rng.random(len(law))[:, None] * sums[:, -1:] >= sums).sum(axis=1), V - 1)


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
    rows are equally long, `branching` is λ in place of all that.
    """

    name: str
    control: float = 0.0
    adapt: float | None = None
    by_block: bool = False
    chains: int = 1
    level: bool = False
    branching: float | None = None
    particles: int = 8


def advance(
    pair: Pair, rng: np.random.Generator, rows: Rows, c: np.ndarray, variant: Variant, gamma: int
) -> np.ndarray:
    """One cycle: the rows' log weights' increments. `c` is each row's control.

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
    live = np.flatnonzero(going)
    rows.append(live, drawn(rng, pair.p[rows.context[live]]))
    return gained


def branched(pair: Pair, rng: np.random.Generator, rows: Rows, lam: float, gamma: int) -> tuple[Rows, np.ndarray]:
    """One cycle of branching: K + 1 weighted children of each row, [R·(K + 1)]; those that are not there weigh 0.

    p = min(p, λq) + (p − λq)₊: child j leaves for a token of the second part behind j drafts, the last one goes on.
    """
    count = len(rows.length)
    trunk, weight = rows.taken(np.arange(count)), np.ones(count)
    children, weights = [], []
    for _ in range(gamma):
        live = np.flatnonzero(~trunk.done & (weight > 0))
        child, mass = trunk.taken(np.arange(count)), np.zeros(count)
        p, q = pair.p[trunk.context[live]], pair.q[trunk.context[live]]
        rest = np.maximum(p - lam * q, 0.0)
        mass[live] = weight[live] * rest.sum(axis=1)
        child.append(live, drawn(rng, rest))
        children.append(child)
        weights.append(mass)
        draft = drawn(rng, q)
        index = np.arange(len(live))
        weight[live] *= np.minimum(p[index, draft] / q[index, draft], lam)
        trunk.append(live, draft)
    live = np.flatnonzero(~trunk.done)
    trunk.append(live, drawn(rng, pair.p[trunk.context[live]]))
    children.append(trunk)
    weights.append(weight)
    together = [np.stack([getattr(c, f.name) for c in children], axis=1) for f in dataclasses.fields(Rows)]
    return Rows(*(x.reshape(-1, *x.shape[2:]) for x in together)), np.stack(weights, axis=1).reshape(-1)


def systematic(rng: np.random.Generator, weights: np.ndarray, count: int) -> np.ndarray:
    """Ancestors [G, count] of weights [G, M]."""
    sums = np.cumsum(weights, axis=1)
    wanted = (rng.random((len(weights), 1)) + np.arange(count)) / count * sums[:, -1:]
    found = (wanted[:, :, None] >= sums[:, None, :]).sum(axis=2)
    return np.minimum(found, weights.shape[1] - 1)


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
    rows = Rows.begun(groups * n)
    log_weight, evidence = np.zeros((groups, n)), np.zeros(groups)
    cycles, c = np.zeros(groups, int), np.full(groups, variant.control)
    base = np.arange(groups)[:, None] * n
    while not rows.done.all():
        cycles += ~rows.done.reshape(groups, n).all(axis=1)
        if variant.branching is not None:
            children, weights = branched(pair, rng, rows, variant.branching, gamma)
            weights = weights.reshape(groups, -1)
            going = ~rows.done.reshape(groups, n).all(axis=1)
            evidence += np.where(going, np.log(weights.sum(axis=1) / n), 0.0)
            chosen = systematic(rng, weights, n) + np.arange(groups)[:, None] * weights.shape[1]
            own = (base + np.arange(n)) * (gamma + 1) + gamma
            rows = children.taken(np.where(going[:, None], chosen, own).reshape(-1))
            continue
        log_weight += advance(pair, rng, rows, np.repeat(c, n), variant, gamma).reshape(groups, n)
        top = log_weight.max(axis=1, keepdims=True)
        weights = np.exp(log_weight - top)
        ess = weights.sum(axis=1) ** 2 / (weights**2).sum(axis=1)
        going = ~rows.done.reshape(groups, n).all(axis=1)
        if variant.adapt is not None:
            c = np.clip(c * (variant.adapt * n / ess), 0.01, 1.0)
        poor = going & (ess < 0.5 * n)
        if variant.level:
            length = rows.length.reshape(groups, n)
            poor &= length.min(axis=1) == length.max(axis=1)
        ancestors = np.where(poor[:, None], systematic(rng, weights, n), np.arange(n)) + base
        evidence += np.where(poor, top[:, 0] + np.log(weights.mean(axis=1)), 0.0)
        log_weight = np.where(poor[:, None], 0.0, log_weight)
        rows = rows.taken(ancestors.reshape(-1))
    top = log_weight.max(axis=1, keepdims=True)
    weights = np.exp(log_weight - top)
    evidence += top[:, 0] + np.log(weights.mean(axis=1))
    chosen = (systematic(rng, weights, 1) + base)[:, 0]
    return Result(evidence, cycles, rows.tokens[chosen], rows.length[chosen])


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
    *(Variant(f"(c) branching, λ = {lam:g}", branching=lam) for lam in (1.0, 2.0, 5.0, 10.0)),
    *(Variant(f"(d) control {c:g}, N = 4, 2 chains each", c, chains=2, particles=4) for c in (0.1, 0.3)),
    *(Variant(f"(d') control {c:g}, N = 4, 1 chain", c, particles=4) for c in (0.1, 0.3)),
    *(Variant(f"(e) control {c:g} by block", c, by_block=True) for c in (0.05, 0.1, 0.3, 0.5)),
]


def noise_for(acceptance: float, ends: bool) -> float:
    """The noise at which drafts are accepted at a rate, by bisection."""
    low, high = 0.0, 20.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if Pair.made(middle, ends).acceptance > acceptance else (low, middle)
    return low


def rows_of(acceptance: float, groups: int, gamma: int) -> list[str]:
    """The table's rows."""
    endless, ending = (Pair.made(noise_for(acceptance, ends), ends) for ends in (False, True))
    rows = []
    for variant in VARIANTS:
        whole = simulate(endless, variant, groups, gamma)
        ended = simulate(ending, variant, groups, gamma)
        speed, evidence = CAP / whole.cycles.mean(), whole.log_evidence.mean()
        length = ended.lengths.mean() / mean_length(ending)
        rows.append(
            f"| {variant.name} | {speed:.2f} | {evidence:.2f} | {variation(endless, whole):.3f} | {length:.3f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.61, 0.76])
    parser.add_argument("--groups", type=int, default=5000)
    parser.add_argument("--gamma", type=int, default=4)
    args = parser.parse_args()
    for acceptance in args.acceptance:
        print(f"\nA token is accepted {acceptance:g} of the time; N = 8, K = {args.gamma}, {args.groups:,} groups\n")
        print("| variant | tokens a cycle | mean log Ẑ | total variation | length over the target's |")
        print("|---|---|---|---|---|")
        for row in rows_of(acceptance, args.groups, args.gamma):
            print(row, flush=True)


if __name__ == "__main__":
    main()
