"""The answer to which a population gives most weight, and the particle that says it best."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from smcjax.engine.results.outputs import Particle


def majority(particles: Sequence[Particle], key: Callable[[str], Hashable] = str.strip) -> Particle | None:
    """The heaviest particle of those whose answers, taken together, weigh most; of equal ones the first.

    It is no sample of the target: it estimates what the target says most often (compare self-consistency, Wang et al.
    2022, arXiv 2203.11171, whose votes weigh the same).

    Args:
        particles: of `RequestOutput.smc`, whose weights they bring.
        key: makes an answer of a particle's text, as what follows "####"; None where the text has none.

    Returns None where no particle of a weight above 0 has an answer. What `key` raises is raised.
    """
    shares: dict[Hashable, float] = {}
    answers = [key(particle.text) if particle.weight > 0 else None for particle in particles]
    for answer, particle in zip(answers, particles, strict=True):
        if answer is not None:
            shares[answer] = shares.get(answer, 0.0) + particle.weight
    if not shares:
        return None
    winner = max(shares, key=lambda answer: shares[answer])
    supporters = [particle for answer, particle in zip(answers, particles, strict=True) if answer == winner]
    return max(supporters, key=lambda particle: particle.weight)
