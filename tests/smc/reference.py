"""SMC decoding of one request in plain Python: lists of tokens, dense logits, no pages, no masks, no batch.

The oracle of the whole cycle. It shares with the package only the dense model, the numbers of `Purpose`, and its
keys and the noise of draws; weights and resampling are numpy float64.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from smcjax import noise, smc
from smcjax.decoding.sampling import Purpose
from smcjax.model import ModelConfig, Params, logits
from tests.helpers import Ask

_dense = jax.jit(logits, static_argnums=0)
_fold = jax.jit(lambda key, *data: functools.reduce(jax.random.fold_in, data, key))
_gumbels = jax.jit(noise.gumbels, static_argnums=1)
_uniforms = jax.jit(noise.uniforms, static_argnums=1)


def language_model(config: ModelConfig, params: Params, length: int) -> Callable[[list[int]], np.ndarray]:
    """Next-token logits after a list of tokens, from the dense forward at one padded length."""

    @functools.cache
    def after(tokens: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(_dense(config, params, jnp.asarray(padded)))[0, len(tokens) - 1]

    return lambda tokens: after(tuple(tokens))


@dataclasses.dataclass
class Row:
    """One particle."""

    tokens: list[int]
    finished: bool = False
    log_weight: float = 0.0
    pending: tuple[list[int], list[float]] | None = None  # pipelined: drafts that no target has seen, with log q


@dataclasses.dataclass
class Cycle:
    """Holds one cycle's fields of `smc.Info`, and the rows' tokens after the cycle."""

    ess: float
    log_weight: np.ndarray
    resampled: bool
    ancestors: list[int]
    tokens: list[tuple[int, ...]]


@dataclasses.dataclass
class Result:
    """The population at the end."""

    rows: list[Row]
    log_evidence: float
    selected: int
    cycles: list[Cycle]


def lse(x: np.ndarray) -> float:
    """log Σ exp, −inf for no mass."""
    x = np.asarray(x, np.float64)
    top = x.max()
    return top if np.isneginf(top) else float(top + np.log(np.exp(x - top).sum()))


def counts_of(method: str, u: np.ndarray, weights: np.ndarray, n: int) -> np.ndarray:
    """Offspring counts that sum to n, one position at a time."""
    counts = np.zeros(len(weights), int)
    if method == "residual":
        counts = np.floor(n * weights).astype(int)
        left = n * weights - counts
        positions = u[: n - counts.sum()]
        weights = left / left.sum() if len(positions) else weights
    elif method == "multinomial":
        positions = u
    else:
        positions = (np.broadcast_to(u, (n,)) + np.arange(n)) / n
    for position in positions:
        total = 0.0
        for i, weight in enumerate(weights):
            total += weight
            if position < total or not weights[i + 1 :].any():
                counts[i] += 1
                break
    return counts


def ancestors_of(counts: np.ndarray) -> list[int]:
    """Survivors stay, dead rows take the surplus copies in order."""
    surplus = [i for i, count in enumerate(counts) for _ in range(count - 1)]
    return [i if count else surplus.pop(0) for i, count in enumerate(counts)]


def decode(
    config: smc.SMC,
    target: Callable[[list[int]], np.ndarray],
    draft: Callable[[list[int]], np.ndarray],
    ask: Ask,
    max_model_len: int,
) -> Result:
    """docs/explanation/algorithm.md, "One cycle" and "Ends", read aloud."""
    n, alpha, has_bonus = config.n_particles, config.power, config.speculation.bonus
    limit = ask.limit(max_model_len)
    key = jax.random.key(ask.seed)
    rows = [Row(list(ask.prompt)) for _ in range(n)]
    log_evidence = 0.0
    cycles: list[Cycle] = []

    def law(model: Callable[[list[int]], np.ndarray], tokens: list[int], temperature: float) -> np.ndarray:
        scaled = model(tokens) / np.float32(temperature)
        if len(tokens) - len(ask.prompt) < ask.min_tokens:
            scaled[list(ask.stops)] = -np.inf
        return scaled

    def draw(logits: np.ndarray, *data: int) -> int:
        return int(np.argmax(np.asarray(logits, np.float32) + _gumbels(_fold(key, *data), logits.shape)))

    def push(row: Row, token: int, increment: float) -> None:
        row.tokens.append(token)
        row.log_weight += increment
        row.finished = token in ask.stops or len(row.tokens) >= limit

    def bonus(row: Row, *data: int) -> None:
        logits = law(target, row.tokens, ask.temperature)
        push(row, draw(np.float32(alpha) * logits, *data), lse(alpha * logits.astype(np.float64)) - alpha * lse(logits))

    def controlled(row: Row, drafts: list[int], uniforms: np.ndarray, *data: int) -> bool:
        """Pushes the drafts up to a rejection and the token of the residual; returns True if all were accepted."""
        c = config.control
        for token, u in zip(drafts, uniforms, strict=True):
            if row.finished:
                return False
            ell = law(target, row.tokens, ask.temperature).astype(np.float64)
            constant = lse(alpha * ell) - alpha * lse(ell)
            p = np.exp(alpha * ell - lse(alpha * ell))
            ell = law(draft, row.tokens, config.draft_temperature or ask.temperature).astype(np.float64)
            q = np.exp(ell - lse(ell))
            left, rejected = np.maximum(p - q, 0), np.maximum(q - p / c, 0).sum()
            accepted = bool(u * c * q[token] < p[token])
            if not accepted:
                with np.errstate(divide="ignore"):
                    token = draw(np.log(left), *data)
            mass = min(q[token], p[token] / c) + (rejected / left.sum() if left.any() else 0.0) * left[token]
            push(row, token, constant + np.log(p[token] / mass))
            if not accepted:
                return False
        return True

    def coin(u: float) -> None:
        """Lets the finished rows stay, or the others, by their share of the weight."""
        parts = [[row for row in rows if row.finished == done and row.log_weight > -np.inf] for done in (True, False)]
        if all(parts):
            masses = [np.exp([row.log_weight for row in part]).sum() for part in parts]
            loser = 1 if u < masses[0] / sum(masses) else 0
            for row in parts[1 - loser]:
                row.log_weight -= np.log(masses[1 - loser] / sum(masses))
            for row in parts[loser]:
                row.log_weight = -np.inf

    def ended() -> bool:
        return all(row.finished or np.isneginf(row.log_weight) for row in rows)

    for i, row in enumerate(rows):
        bonus(row, 0, i, Purpose.FIRST)
    cycle = 0
    while not ended():
        accept = np.asarray(_uniforms(_fold(key, cycle, Purpose.ACCEPT), (n, config.gamma)), np.float64)
        for i, row in enumerate(rows):
            if row.finished:
                continue
            drafts, q = [], []
            before = row.pending[0] if row.pending else []
            for column in range(config.gamma):
                logits = law(draft, row.tokens + before + drafts, config.draft_temperature or ask.temperature)
                token = draw(logits, cycle, i, Purpose.DRAFT, column)
                drafts.append(token)
                q.append(logits[token] - lse(logits))
            if config.pipelined:
                (drafts, q), row.pending = row.pending or ([], []), (drafts, q)
            if config.control > 0:
                if controlled(row, drafts, accept[i], cycle, i, Purpose.BONUS) and has_bonus and not row.finished:
                    bonus(row, cycle, i, Purpose.BONUS)
                continue
            for token, log_q in zip(drafts, q, strict=True):
                if not row.finished:
                    logits = law(target, row.tokens, ask.temperature)
                    push(row, token, alpha * (logits[token] - lse(logits)) - log_q)
            if has_bonus and not row.finished:
                bonus(row, cycle, i, Purpose.BONUS)

        if config.early_end:
            coin(float(_uniforms(_fold(key, cycle, Purpose.END), ())))
        log_weight = np.array([row.log_weight for row in rows])
        weights = np.exp(log_weight - lse(log_weight))
        ess = 1 / (weights**2).sum()
        resampled = not ended() and ess < config.ess_threshold * n * (1 - 1e-6)
        ancestors = list(range(n))
        if resampled:
            log_evidence += lse(log_weight) - np.log(n)
            shape = (1,) if config.resampling == "systematic" else (n,)
            u = np.asarray(_uniforms(_fold(key, cycle, Purpose.RESAMPLE), shape), np.float64)
            ancestors = ancestors_of(counts_of(config.resampling, u, weights, n))
            rows = [Row(list(rows[a].tokens), rows[a].finished, pending=rows[a].pending) for a in ancestors]
        cycle += 1
        cycles.append(Cycle(ess, log_weight, resampled, ancestors, [tuple(row.tokens) for row in rows]))

    log_weight = np.array([row.log_weight for row in rows])
    if config.select == "best":
        selected = int(np.argmax(log_weight))
    else:
        selected = draw(log_weight, cycle, Purpose.SELECT)
    return Result(rows, log_evidence + lse(log_weight) - np.log(n), selected, cycles)
