"""Law 2 of one cycle under a control, with three particles and three drafts: by exact enumeration, in float64.

With V_f(s) = Σ f(x)·∏ p^α over the x of Ω that begin with s, the product over the tokens behind s, a cycle from any
population of tokens s_i and log weights w_i to s'_i and w'_i, and Ẑ what its resampling adds to the evidence,

    E[Ẑ·mean_i exp(w'_i)·V_f(s'_i)] = mean_i exp(w_i)·V_f(s_i)      for every f = 1{x = y}, y of Ω

By induction over cycles that is law 2 of whole answers; shorter ones are enumerated whole in `test_control.py`.

Rows draw their blocks independently, so the outcomes of each row (its tokens, whether it has finished, its log weight)
are enumerated once, by `enumeration.controlled` and `enumeration.weigh`, and equal ones merged. The outcomes of a
population are all ordered triples of them, as offspring depend on the order of rows. One call has all controls, every
row under its own, as one program has requests of several controls; so control 0 is that of a program that can reject.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import smc
from tests.helpers import published
from tests.smc.enumeration import Enumeration, Row, Tokens, Toy, chunked, controlled, fork, pieces, settle, weigh
from tests.smc.mutations import CONTROL_MUTATIONS

CONTROLS = (0.0, 0.1, 0.5, 1.0)
MOST = 1 << 15  # populations a call
Population = tuple[Row, ...]
Outcomes = dict[Row, float]  # a row's possible states after a cycle, with their chances

# No stop is among the first two tokens: behind one token a block has the minimum inside, and behind it stops. Behind
# three and four tokens it has the cap inside.
TOY = Toy(vocab=3, cap=6, stop=2, seed=3, minimum=2)
HOLES = dataclasses.replace(TOY, impossible=True)  # the target cannot say some tokens, which weigh 0 at control 0

BEGUN: Population = (((0,), False, 0.2), ((1,), False, 0.2), ((0,), False, 0.2))
UNDER_WAY: Population = (((0, 1, 0, 1), False, 0.3), ((1,), False, -0.7), ((0, 1, 1), False, 0.1))
NEARLY_DONE: Population = (((1,), False, 0.4), ((0, 1, 2), True, -0.3), ((1, 0), False, 0.0))

CASES: dict[str, tuple[Toy, Population, dict[str, Any]]] = {
    "begun": (TOY, BEGUN, {}),
    "under way": (HOLES, UNDER_WAY, {"ess_threshold": 1.0}),
    "one has finished, no bonus": (TOY, NEARLY_DONE, {"bonus": False}),
}


def config_of(**changes: Any) -> smc.SMC:
    """Three particles and drafts, systematic resampling, a power at which weights differ under a control of 1 too."""
    return published(**{"n_particles": 3, "gamma": 3, "power": 1.5, "ess_threshold": 0.95} | changes)


def outcomes_of(toy: Toy, config: smc.SMC, prefixes: list[Tokens], mutation: str) -> list[dict[Tokens, Outcomes]]:
    """Returns, by control, the outcomes of a live row behind each prefix, whose log weight was 0.

    The package's functions run operation by operation here, as compiling them for every mistake would take longer.
    """
    laws = [toy.laws_along(prefix, config) for prefix in prefixes]
    p, q, drafts = (jnp.asarray(np.concatenate([law[at] for law in laws] * len(CONTROLS))) for at in range(3))
    per_prefix = len(laws[0][2])
    per_control = per_prefix * len(prefixes)
    controls = jnp.repeat(jnp.array(CONTROLS), per_control)
    tokens, increments, chance, last = inspect.unwrap(controlled)(mutation, config.power, controls, p, q, drafts)
    length = np.tile(np.repeat([1 + len(prefix) for prefix in prefixes], per_prefix), len(chance) // per_control)
    stops = jnp.arange(toy.vocab) == toy.stop
    ends = inspect.unwrap(weigh)(
        mutation, toy.cap, tokens, increments, last, jnp.asarray(length.astype(np.int32)), stops
    )
    tokens, chance, (end, done, weight) = np.asarray(tokens), np.asarray(chance), map(np.asarray, ends)
    result: list[dict[Tokens, Outcomes]] = [{prefix: {} for prefix in prefixes} for _ in CONTROLS]
    for at in np.flatnonzero(chance):
        number, place = divmod(at % len(drafts), per_control)
        prefix = prefixes[place // per_prefix]
        row = ((*prefix, *tokens[at].tolist())[: end[at] - 1], bool(done[at]), round(float(weight[at]), 14))
        outcomes = result[number][prefix]
        outcomes[row] = outcomes.get(row, 0.0) + float(chance[at])
    return result


def systematic(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A uniform within every cell of offspring of populations [P, N] by weight, and its volume, [P, N + 1] each."""
    edges = np.sort(w.shape[1] * np.cumsum(w, axis=1) % 1.0, axis=1)
    edges = np.pad(edges, ((0, 0), (1, 1)), constant_values=((0, 0), (0, 1)))
    return (edges[:, 1:] + edges[:, :-1]) / 2, np.diff(edges, axis=1)


@dataclasses.dataclass
class Cycle:
    """Enumerates a cycle of a population: `measure[s]` = E[Ẑ·mean_i exp(w_i)·1{s_i = s}], s a row's tokens."""

    measure: dict[Tokens, float]
    resampled: float  # probability that the population is resampled


def cycle_of(config: smc.SMC, population: Population, of_prefix: dict[Tokens, Outcomes]) -> Cycle:
    """Sums over every ordered triple of the rows' outcomes and every outcome of its resampling."""
    rows, chances = [], []
    for before, finished, log_weight in population:
        outcomes = {(before, True, 0.0): 1.0} if finished else of_prefix[before]
        rows.append([(tokens, done, log_weight + w) for tokens, done, w in outcomes])
        chances.append(np.array(list(outcomes.values())))
    names = sorted({tokens for of_row in rows for tokens, *_ in of_row})
    number = {tokens: at for at, tokens in enumerate(names)}
    grid = np.indices([len(of_row) for of_row in rows]).reshape(len(rows), -1)

    def column(values: list[np.ndarray]) -> np.ndarray:
        return np.stack([of_row[at] for of_row, at in zip(values, grid, strict=True)], axis=1)

    chance = column(chances).prod(axis=1)
    whose = column([np.array([number[row[0]] for row in of_row]) for of_row in rows])
    finished, log_weight = (column([np.array([row[at] for row in of_row]) for of_row in rows]) for at in (1, 2))
    judge = functools.partial(settle, "none", config.ess_threshold)
    _, _, low, log_evidence, w = chunked(judge, log_weight, finished, most=MOST)
    mass = (chance * np.exp(log_evidence))[:, None] * w  # of those that are not resampled, as if they ended here
    uniforms, volume = systematic(w)
    job, cell = np.nonzero(low[:, None] & (volume > 1e-14))
    resample = functools.partial(fork, "none", config.resampling)
    source, gained, fresh = chunked(resample, log_weight[job], uniforms[job, cell][:, None], most=MOST)
    copied = (chance[job] * volume[job, cell] * np.exp(gained))[:, None] * np.exp(fresh) / len(rows)
    tokens = np.concatenate([whose[~low], np.take_along_axis(whose[job], source, axis=1)])
    total = np.bincount(tokens.ravel(), np.concatenate([mass[~low], copied]).ravel(), minlength=len(names))
    return Cycle(dict(zip(names, total.tolist(), strict=True)), resampled=float(chance[low].sum()))


def value(toy: Toy, power: float, measure: dict[Tokens, float]) -> dict[Tokens, float]:
    """Σ_s measure[s]·V_f(s) for f = 1{x = y}, by y."""
    result: dict[Tokens, float] = {}
    for tokens, mass in measure.items():
        following = {tokens: 1.0} if toy.ends(tokens) else toy.outcomes(power, tokens)
        for answer, chance in following.items():
            result[answer] = result.get(answer, 0.0) + mass * chance
    return result


def deviations(toy: Toy, population: Population, config: smc.SMC, mutation: str = "none") -> list[float]:
    """Returns, by control, how far the law's two sides lie apart at most; some outcomes resample and some do not."""
    before: dict[Tokens, float] = {}
    for tokens, _, log_weight in population:
        before[tokens] = before.get(tokens, 0.0) + float(np.exp(log_weight)) / len(population)
    wanted = value(toy, config.power, before)
    live = sorted({tokens for tokens, finished, _ in population if not finished})
    result = []
    with jax.enable_x64(True):
        for of_prefix in outcomes_of(toy, config, live, mutation):
            done = cycle_of(config, population, of_prefix)
            assert 0.1 < done.resampled < 0.999
            got = value(toy, config.power, done.measure)
            result.append(max(abs(got.get(x, 0.0) - wanted.get(x, 0.0)) for x in wanted.keys() | got.keys()))
    return result


@pytest.mark.parametrize("case", CASES)
def test_a_cycle_keeps_what_is_expected(case: str) -> None:
    toy, population, changes = CASES[case]
    assert max(deviations(toy, population, config_of(**changes))) < 1e-12


# Controls at which a mistake is none: at 0 nothing is rejected, at 1 a token weighs no more than Z_α.
NO_MISTAKE = {
    "weight 1 after a rejection": {0.0, 1.0},
    "R/Z omitted": {0.0},
    "R/Z of exact sampling": {1.0},
    "bonus after a rejection": {0.0},
    "the residual replaced by p": {0.0},
    "weighed by another control": {0.0, 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", CONTROL_MUTATIONS)
def test_controls(mutation: str) -> None:
    """Known mistakes break the law wherever they are mistakes, and there alone."""
    found = deviations(TOY, UNDER_WAY, config_of(), mutation)
    unseen = NO_MISTAKE.get(mutation, set())
    for c, deviation in zip(CONTROLS, found, strict=True):
        assert deviation < 1e-12 if c in unseen else deviation > 1e-5
    assert max(found) > 1e-3


@pytest.mark.parametrize("bonus", [True, False])
def test_control_0_beside_others_is_smc(bonus: bool) -> None:
    """Where others may reject, a row under control 0 has the very outcomes of the program that cannot."""
    config, prefixes = config_of(bonus=bonus), [(1,), (0, 1, 1)]
    plain = Enumeration(HOLES, config)
    with jax.enable_x64(True):
        beside = outcomes_of(HOLES, config, prefixes, "none")
        for prefix in prefixes:
            expected = {(*row[:2], round(row[2], 10)): p for row, p in plain._row_outcomes(prefix, plain._block)}
            zero, other = ({(*r[:2], round(r[2], 10)): p for r, p in found[prefix].items()} for found in beside[:2])
            assert zero == pytest.approx(expected, abs=1e-13)
            assert other.keys() != expected.keys()


def test_cells_of_offspring() -> None:
    """The cells of many populations at once are those of each."""
    w = np.random.default_rng(0).dirichlet(np.full(3, 0.7), 20)
    for uniforms, volume, of_one in zip(*systematic(w), w, strict=True):
        kept = [([u], v) for u, v in zip(uniforms.tolist(), volume.tolist(), strict=True) if v > 1e-14]
        assert [v for _, v in kept] == pytest.approx([v for _, v in pieces("systematic", of_one)], abs=1e-13)
        assert [u[0] for u, _ in kept] == pytest.approx([u[0] for u, _ in pieces("systematic", of_one)], abs=1e-13)
