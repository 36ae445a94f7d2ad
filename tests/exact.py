"""Exact laws of tiny models: all outputs of a request with their probabilities, from the dense forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tests.helpers import Ask

Tokens = tuple[int, ...]
After = Callable[[list[int]], np.ndarray]  # next logits
Transform = Callable[[np.ndarray], np.ndarray]


def chi_square(seen: Mapping[Tokens, int], law: Mapping[Tokens, float]) -> tuple[float, int]:
    """χ² of the counts against a law, over outcomes that are expected five times or more, and how many these are.

    What the law forbids must not have been seen.
    """
    assert set(seen) <= set(law)
    samples = sum(seen.values())
    common = {x: mass * samples for x, mass in law.items() if mass * samples >= 5}
    return sum((seen[x] - n) ** 2 / n for x, n in common.items()), len(common)


def next_law(after: After, ask: Ask, tokens: Tokens, transform: Transform = lambda logits: logits) -> np.ndarray:
    """p_T of the token behind these generated ones; `transform` acts on ℓ/T."""
    scaled = after([*ask.prompt, *tokens]).astype(np.float64) / ask.temperature
    if len(tokens) < ask.min_tokens:
        scaled[list(ask.stops)] = -np.inf
    scaled = transform(scaled)
    p = np.exp(scaled - scaled.max())
    return p / p.sum()


def outcomes(
    after: After,
    ask: Ask,
    max_model_len: int,
    power: float = 1.0,
    transform: Transform = lambda logits: logits,
) -> dict[Tokens, float]:
    """Ω, each x with ∏ p_T(x_t)^α; `transform` acts on ℓ/T. Not normalised unless α = 1."""
    result: dict[Tokens, float] = {}
    stack: list[tuple[Tokens, float]] = [((), 1.0)]
    while stack:
        tokens, mass = stack.pop()
        if len(ask.prompt) + len(tokens) >= ask.limit(max_model_len) or (tokens and tokens[-1] in ask.stops):
            result[tokens] = mass
            continue
        p = next_law(after, ask, tokens, transform)
        stack += [((*tokens, v), mass * p[v] ** power) for v in range(len(p)) if p[v] > 0]
    return result
