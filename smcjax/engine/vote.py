"""A vote of the particles about the answer: each votes with its weight for what its text says (`SMC(select="vote")`).

The answer that wins is the one to which the population gives most probability, so with many particles what the target
itself says most often, not what it says now and then: the winner's law is not the target's (compare self-consistency,
Wang et al. 2022, arXiv 2203.11171, whose votes weigh the same). The weights remain as they were, and with them the
evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from smcjax.engine.outputs import Vote

MARK = "####"


class Elected(NamedTuple):
    """The particle that answers, and the vote that says so."""

    row: int
    vote: Vote


def marked_answer(text: str) -> str | None:
    """The rest of the line behind the first "####", without spaces around it; None where there is none or it is empty.

    >>> marked_answer("20 - 4 = 16\\n#### 16\\n")
    '16'
    """
    _, _, rest = text.partition(MARK)
    return rest.partition("\n")[0].strip() or None


def elect(
    texts: Sequence[str],
    log_weights: Float[np.ndarray, " N"],
    answer_of: Callable[[str], Hashable] = marked_answer,
) -> Elected | None:
    """The heaviest particle of those who share the heaviest answer; of equal ones the first. None: nobody has any.

    Particles of weight 0 (log weight −inf) neither vote nor answer; at least one has to weigh something.
    """
    weights = np.exp(np.asarray(log_weights, np.float64) - np.max(log_weights))
    weights /= weights.sum()
    answers = [answer_of(text) if weight > 0 else None for text, weight in zip(texts, weights, strict=True)]
    shares: dict[Hashable, float] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            shares[answer] = shares.get(answer, 0.0) + float(weight)
    if not shares:
        return None
    ranked = dict(sorted(shares.items(), key=lambda one: -one[1]))  # stable: of equal ones the first
    winner = next(iter(ranked))
    supporters = [row for row, answer in enumerate(answers) if answer is not None and answer == winner]
    return Elected(max(supporters, key=lambda row: weights[row]), Vote(winner, ranked))
