"""Laws for parts of one's own: `battery(part)` checks by enumeration that a part keeps SMC unbiased.

    @dataclasses.dataclass(frozen=True)
    class Capped(smc.Acceptance):
        most: float = 2.0

        def probability(self, log_p, log_q):
            return jnp.exp(jnp.minimum(0.0, jnp.log(self.most) + log_p - log_q))

    battery(Capped())               # raises AssertionError with the law that is broken
    LLM(…, decoding=SMC(acceptance=Capped()))

Every law is checked in float64 to 1e-12, and then with a mistake planted in the part, which must be seen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smcjax.decoders.parts import Ending, Potential, Resampler, hidden_size_of
from smcjax.decoders.text_potential import TextPotential
from smcjax.smc.acceptance import Acceptance, Distributions, NewBlock, block_of, decide
from smcjax.smc.control import at
from smcjax.smc.ending import Outcomes
from smcjax.smc.potential import Answers

TOLERANCE = 1e-12
TEXTS = ("", "a", "one two\nthree", "17 + 4 = 21", "Yes, it is.", "日本語")
VISIBLE = 1e-6  # by which a planted mistake must break its law


def battery(
    part: Acceptance | Ending | Resampler | Potential | TextPotential,
    *,
    seed: int = 0,
    prompt: str = "",
    texts: Sequence[str] = TEXTS,
) -> None:
    """Checks a part of `SMC` against the laws of its kind, on random distributions, weights or tokens of `seed`.

    A `TextPotential` is checked on whole answers `texts` to `prompt` and on all their beginnings: give some that it
    values and some that it forbids. Raises AssertionError that names the law and by how much it is broken, and
    TypeError for what is no part.
    """
    if isinstance(part, TextPotential):
        _check_text_potential(part, prompt, texts)
        return
    if isinstance(part, type) or not isinstance(part, Acceptance | Ending | Resampler | Potential):
        raise TypeError(
            "part must derive from smcjax.smc.Acceptance, be a smcjax.TextPotential, or have the methods of an Ending, "
            f"a Resampler or a Potential, got {part!r}."
        )
    try:
        hash(part)
    except TypeError as error:
        raise AssertionError(f"the part must be hashable, since programs are compiled for it: {error}") from None
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        if isinstance(part, Acceptance):
            _check_acceptance(part, rng)
        elif isinstance(part, Ending):
            _check_ending(part, rng)
        elif isinstance(part, Resampler):
            _check_resampler(part, rng)
        else:
            _check_potential(part, rng)


# Acceptance.


def _check_acceptance(rule: Acceptance, rng: np.random.Generator) -> None:
    """One token: emitted tokens' distribution times weight is p. A block: a cycle keeps every answer's probability."""
    size, cases = 4, 200
    p, q = (0.95 * rng.dirichlet(np.full(size, 0.5), cases) + 0.05 / size for _ in range(2))
    p[3::7] = q[3::7]
    p[::5, 0] = p[2::5, 2] = q[2::5, 2] = 0.0
    if rule.suits_any_draft:
        q[1::5, 1] = 0.0
    log_p, log_q = (jnp.log(jnp.asarray(x / x.sum(axis=1, keepdims=True))) for x in (p, q))
    never = jnp.isneginf(log_q)
    kept = jnp.where(never, 1.0, rule.probability(jnp.where(never, 0.0, log_p), jnp.where(never, 0.0, log_q)))
    least, most = float(kept.min()), float(kept.max())
    assert 0 <= least <= most <= 1, f"probability must be from 0 to 1, got {least:g} to {most:g}"
    rejected = jnp.sum(jnp.exp(log_q) * (1 - kept), axis=1, keepdims=True)
    emitted = jnp.exp(log_q) * kept + rejected * jax.nn.softmax(rule.residual(log_p, log_q), axis=1)
    every = jnp.tile(jnp.arange(size), (cases, 1))
    of_p, of_q = (jnp.repeat(x[:, None], size, axis=1) for x in (log_p, log_q))
    weight = jnp.exp(rule.increment(of_p, of_q, every))
    found = jnp.where(emitted > 0, emitted * weight, 0.0)
    _close(found, jnp.exp(log_p), "distribution times weight of an emitted token must be the target's probability")
    tables = _Tables(rng)
    _close(tables.value_after(rule), tables.value, "a cycle must keep the expected value of every answer")
    if bool((kept < 1 - VISIBLE).any()):
        mistakes = {"a replaced draft that weighs twice": _doubled, "a token behind a rejected draft": _one_more}
        for name, mistake in mistakes.items():
            _seen(tables.value_after(rule, mistake), tables.value, name)


def _doubled(block: NewBlock, accepted: Any) -> NewBlock:
    drawn = jnp.arange(block.tokens.shape[1])[None] == accepted[:, None]
    return dataclasses.replace(block, increments=block.increments + jnp.where(drawn, jnp.log(2.0), 0.0))


def _one_more(block: NewBlock, accepted: Any) -> NewBlock:
    return dataclasses.replace(block, last=jnp.minimum(accepted + 1, block.tokens.shape[1] - 1))


class _Tables:
    """Random target and draft distributions by prefix, for blocks of K = 2 drafts and a bonus over V = 3 tokens."""

    size, gamma = 3, 2

    def __init__(self, rng: np.random.Generator) -> None:
        draws = {model: rng.dirichlet(np.full(self.size, 0.8), (1 + self.size + self.size**2,)) for model in "pq"}
        prefixes = [x for n in range(self.gamma + 1) for x in itertools.product(range(self.size), repeat=n)]
        self._of = {(model, x): draws[model][at] for model in "pq" for at, x in enumerate(prefixes)}
        answers = itertools.product(range(self.size), repeat=self.gamma + 1)
        self.value = jnp.asarray([self._probability("p", x) for x in answers])

    def _probability(self, model: str, tokens: tuple[int, ...], begin: int = 0) -> float:
        """The probability of the tokens from `begin` on."""
        chances = [self._of[model, tokens[:at]][tokens[at]] for at in range(begin, len(tokens))]
        return float(np.prod(chances)) if chances else 1.0

    def value_after(self, rule: Acceptance, mistake: Any = None) -> Any:
        """E[weight·p(rest of the answer behind the block)·1{the block begins the answer}] for every answer."""
        drafts = np.array(list(itertools.product(range(self.size), repeat=self.gamma)), np.int32)
        target, draft = (
            jnp.log(jnp.asarray([[self._of[model, tuple(d[:n])] for n in range(columns)] for d in drafts.tolist()]))
            for model, columns in (("p", self.gamma + 1), ("q", self.gamma))
        )
        columns = Distributions(target, draft, jnp.zeros(target.shape[:2]), target)
        tokens = jnp.asarray(drafts)
        accepts = rule.probability(at(target[:, : self.gamma], tokens), at(draft, tokens))
        drawn = np.array([self._probability("q", tuple(d)) for d in drafts.tolist()])
        total = dict.fromkeys(itertools.product(range(self.size), repeat=self.gamma + 1), 0.0)
        place = jnp.arange(self.gamma)[None]
        for run in range(self.gamma + 1):
            uniforms = jnp.where(place < run, accepts / 2, (1 + accepts) / 2)
            fate = jnp.where(place < run, accepts, jnp.where(place == run, 1 - accepts, 1.0)).prod(axis=1)
            accepted, logits = decide(rule, columns, tokens, uniforms)
            for token in range(self.size):
                block = block_of(rule, columns, tokens, accepted, jnp.full(len(drafts), token, jnp.int32))
                block = block if mistake is None else mistake(block, accepted)
                chance = drawn * np.asarray(jnp.where(accepted == run, fate * jax.nn.softmax(logits)[:, token], 0.0))
                self._add(total, chance, block)
        return jnp.asarray(list(total.values()))

    def _add(self, total: dict[tuple[int, ...], float], chances: np.ndarray, block: NewBlock) -> None:
        """Adds every block to the answers that it begins."""
        assert block.last is not None
        rows = zip(chances.tolist(), block.tokens.tolist(), block.increments.tolist(), block.last.tolist(), strict=True)
        for chance, tokens, increments, last in rows:
            begin = tuple(tokens[: last + 1])
            if chance > 0:
                for rest in itertools.product(range(self.size), repeat=self.gamma - last):
                    answer = (*begin, *rest)
                    value = chance * np.exp(sum(increments[: last + 1])) * self._probability("p", answer, len(begin))
                    total[answer] += float(value)


# Ending.


def _check_ending(rule: Ending, rng: np.random.Generator) -> None:
    """The outcomes' chances are a distribution, and the mean of every weight over them is the weight."""
    log_weight = rng.normal(0.0, 2.0, (64, 4))
    log_weight[::3, 1] = -np.inf
    finished = rng.random((64, 4)) < 0.5
    outcomes = rule.outcomes(jnp.asarray(log_weight), jnp.asarray(finished))
    named = outcomes.probability[:, :-1]
    assert (named >= 0).all(), "probabilities of outcomes must not be negative"
    assert (named.sum(axis=1) <= 1 + TOLERANCE).all(), "probabilities of outcomes must sum to 1"
    _close(_mean_weight(outcomes), jnp.exp(log_weight), "the mean of every weight over the outcomes must be the weight")
    if outcomes.probability.shape[1] > 1:
        dead = jnp.isneginf(outcomes.log_weight)
        undivided = outcomes._replace(log_weight=jnp.where(dead, -jnp.inf, jnp.asarray(log_weight)[:, None]))
        _seen(_mean_weight(undivided), jnp.exp(log_weight), "weights that are not divided by the outcome's chance")


def _mean_weight(outcomes: Outcomes) -> Any:
    """[G, N]: the last outcome has the chance that the others leave."""
    named = outcomes.probability[:, :-1]
    chance = jnp.concatenate([named, 1 - named.sum(axis=1, keepdims=True)], axis=1)
    return jnp.sum(jnp.where(chance[..., None] > 0, chance[..., None] * jnp.exp(outcomes.log_weight), 0.0), axis=1)


# Resampler.


def _check_resampler(rule: Resampler, rng: np.random.Generator) -> None:
    """Numbers of offspring sum to N and have the mean N·W, integrated over a grid of uniforms.

    Weights are multiples of 1/32 and cells are half as wide, so that a scheme which compares uniforms with sums of
    weights, or of what whole numbers of offspring leave of them, is constant within the grid's cells.
    """
    n, cells = 3, 64
    axes = rule.num_uniforms(n)
    assert axes in (1, n), f"num_uniforms(3) must be 1 or 3, so that the battery can integrate, got {axes}"
    grid = jnp.asarray((np.indices((cells,) * axes).reshape(axes, -1).T + 0.5) / cells)
    for counts in ([4, 14, 14], [0, 20, 12], rng.multinomial(cells // 2, [0.2, 0.3, 0.5]).tolist()):
        weights = jnp.asarray(counts) / (cells // 2)
        offspring = jax.vmap(lambda u, w=weights: rule.offspring(u, w))(grid)
        whole = offspring.shape == (len(grid), n) and jnp.issubdtype(offspring.dtype, jnp.integer)
        assert whole, f"offspring must be N integers, got {offspring.dtype} of shape {offspring.shape[1:]}"
        assert (offspring >= 0).all(), "numbers of offspring must not be negative"
        assert (offspring.sum(axis=1) == n).all(), "numbers of offspring must sum to N"
        law = (
            "the mean number of offspring must be N·W; the battery's grid is exact where uniforms are compared with "
            "sums of weights alone, and another one wants a test of its own"
        )
        _close(offspring.mean(axis=0), n * weights, law)
        squeezed = jax.vmap(lambda u, w=weights: rule.offspring(0.75 * u, w))(grid)
        _seen(squeezed.mean(axis=0), n * weights, "uniforms that stop at 3/4")
    with jax.enable_x64(False):  # as in a cycle
        _check_dead(rule, rng)


def _check_dead(rule: Resampler, rng: np.random.Generator) -> None:
    """Particles of weight 0 have no offspring in float32, where sums of weights may round below the largest uniform."""
    populations, n = 256, 16
    alive = rng.random((populations, n)) < 0.5
    alive[:, -1], alive[:, 0] = np.arange(populations) % 2, True
    masses = alive * rng.random((populations, n))
    weights = jnp.asarray(masses / masses.sum(axis=1, keepdims=True), jnp.float32)
    for uniform in (np.finfo(np.float32).tiny, 1 - 2.0**-24):
        uniforms = jnp.full((rule.num_uniforms(n),), uniform, jnp.float32)
        offspring = jax.vmap(rule.offspring, (None, 0))(uniforms, weights)
        assert (offspring.sum(axis=1) == n).all(), f"numbers of offspring must sum to N, also by uniforms of {uniform}"
        drawn = int(jnp.sum(jnp.where(weights > 0, 0, offspring).any(axis=1)))
        law = "a particle of weight 0 must have no offspring, also where the sum of all weights rounds below a uniform"
        assert drawn == 0, f"{law}: it had some in {drawn} of {populations} populations by uniforms of {uniform}"


# Potential.


def _check_potential(potential: Potential, rng: np.random.Generator) -> None:
    """A row's value is a function of that row's answer alone, and below +inf."""
    rows, width = 16, 12
    tokens = rng.integers(0, 8, (rows, width)).astype(np.int32)
    begin = rng.integers(1, 4, rows).astype(np.int32)
    end = np.minimum(begin + rng.integers(0, 8, rows), width).astype(np.int32)
    finished = rng.random(rows) < 0.5
    logprobs = -rng.exponential(2.0, tokens.shape)
    size = hidden_size_of(potential)
    hidden = None if size is None else rng.normal(size=(rows, size))

    def value(tokens: np.ndarray, order: np.ndarray, logprobs: np.ndarray = logprobs) -> Any:
        of_rows, ends, done, likely = (jnp.asarray(x[order]) for x in (tokens, end, finished, logprobs))
        own = None if hidden is None else jnp.asarray(hidden[order])
        return potential.log_value(Answers(of_rows, jnp.asarray(begin[order]), ends, done, likely, hidden=own))

    order = np.arange(rows)
    found = value(tokens, order)
    assert found.shape == (rows,), f"log_value must have one entry a row, got shape {found.shape}"
    assert not (jnp.isnan(found) | jnp.isposinf(found)).any(), "log_value must be a number below +inf, or −inf"
    empty = np.asarray(found)[begin == end]
    assert np.isfinite(empty).all(), "log_value of an empty answer must be finite"
    other = rng.permutation(rows)
    alone = np.concatenate([np.asarray(value(tokens, order[i : i + 1])) for i in other])
    _close(value(tokens, other), alone, "a row's log_value must not depend on other rows")
    column = np.arange(width)
    outside = (column < begin[:, None]) | (column >= end[:, None])
    scrambled = np.where(outside, rng.integers(0, 8, tokens.shape), tokens).astype(np.int32)
    stale = np.where(outside, -rng.exponential(2.0, tokens.shape), logprobs)
    _close(value(scrambled, order, stale), found, "log_value must not depend on columns outside the answer")


def _check_text_potential(potential: TextPotential, prompt: str, texts: Sequence[str]) -> None:
    """A text's value is its own, whatever is asked beside it, and a beginning is forbidden only where all answers are.

    A particle that dies by its beginning would else be missing among the answers.
    """
    beginnings = sorted({text[:end] for text in texts for end in range(len(text) + 1)})
    for asked, whole in ((beginnings, False), (list(texts), True)):
        try:
            found = potential.values(prompt, asked, whole=whole)
            alone = [potential.values(prompt, [text], whole=whole)[0] for text in asked]
            backwards = potential.values(prompt, asked[::-1], whole=whole)[::-1]
        except ValueError as error:
            raise AssertionError(f"the values must be numbers below +inf, one a text: {error}") from None
        _close(found, alone, "a text's value must not depend on the texts beside it")
        _close(found, backwards, "a text's value must not depend on the order of texts")
    of_beginning = dict(zip(beginnings, potential.values(prompt, beginnings, whole=False), strict=True))
    for text, value in zip(texts, potential.values(prompt, list(texts), whole=True), strict=True):
        lost = [text[:end] for end in range(len(text) + 1) if of_beginning[text[:end]] == -np.inf]
        assert value == -np.inf or not lost or potential.ask is None, (
            f"a beginning that is forbidden must begin no answer of value: {lost[0]!r} has −inf and {text!r} {value:g}"
        )


def _close(found: Any, wanted: Any, law: str) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    finite = np.isfinite(found) & np.isfinite(wanted)
    assert (finite | (found == wanted)).all(), f"{law}; some are infinite or NaN"
    off = np.abs(found[finite] - wanted[finite]).max(initial=0.0)
    assert off <= TOLERANCE * max(1.0, np.abs(wanted[finite]).max(initial=0.0)), f"{law}; off by {off:.2g}"


def _seen(found: Any, wanted: Any, mistake: str) -> None:
    off = float(np.abs(np.asarray(found) - np.asarray(wanted)).max())
    assert not off <= VISIBLE, f"the battery cannot tell this part from one with a mistake: {mistake}"
