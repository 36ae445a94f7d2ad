"""Log-probabilities of prompts, and at single places, by the reports of a request's programs on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from smcjax.decoding.scores import Scores
from smcjax.engine.results.outputs import TokenLogprob


class Scored(NamedTuple):
    """Log-probabilities of consecutive tokens, and of the likeliest ones at their places."""

    logprobs: list[float]
    top: list[list[TokenLogprob]]

    @classmethod
    def of(cls, found: Iterable[tuple[float, list[TokenLogprob]]]) -> Scored:
        """The entries of consecutive tokens, as `entry_at` gives them."""
        each = list(found)
        return cls([logprob for logprob, _ in each], [top for _, top in each])


def prompt_scores(chunks: Sequence[Scores], prompt_length: int, count: int) -> Scored:
    """The scores of a prompt's tokens but the first, by the scores [chunk] of its chunks from its beginning on."""
    places = ((chunk, place) for chunk in chunks for place in range(len(chunk.logprobs)))
    return Scored.of(entry_at(chunk, (place,), count) for chunk, place in islice(places, prompt_length - 1))


def entry_at(scores: Scores, place: tuple[int, ...], count: int) -> tuple[float, list[TokenLogprob]]:
    """The entry at one place; tokens that are impossible there are not among the likeliest."""
    likeliest = zip(scores.likeliest[place][:count], scores.likeliest_logprobs[place][:count], strict=True)
    top = [TokenLogprob(int(token), float(value)) for token, value in likeliest if not np.isneginf(value)]
    return float(scores.logprobs[place]), top
