"""Log-probabilities of answers and prompts, put together on the host from the reports of a request's programs.

A row's tokens are those of its ancestors: the last cycle's block lies in the row that it was a copy of after that
cycle (or in its own, where copies are made before a cycle's tokens), the block before in that one's ancestor, and so on
back to the first token. So are their log-probabilities.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from smcjax.decoding.decoder import Decoder
from smcjax.decoding.scores import Scores
from smcjax.engine.results.outputs import TokenLogprob


class Scored(NamedTuple):
    """Log-probabilities of consecutive tokens, and of the likeliest ones at their places."""

    logprobs: list[float]
    top: list[list[TokenLogprob]]


def scores_along(
    row: int,
    begin: int,
    end: int,
    *,
    first: Scores,
    infos: Sequence[Any],
    decoder: Decoder[Any, Any, Any],
    prompt_length: int,
    count: int,
) -> Scored:
    """The scores of tokens `begin` … `end − 1` of the answer that `row` has after the last of the cycles `infos`.

    `first` are those of first tokens, [N], and `count` is how many of the likeliest tokens are asked for.
    """
    found: deque[tuple[float, list[TokenLogprob]]] = deque()
    for cycle in range(len(infos) - 1, -1, -1):
        info = infos[cycle]
        rows = decoder.rows_after(info)
        source = int(rows.ancestors[row])
        before = 1 if cycle == 0 else int(infos[cycle - 1].length[source]) - prompt_length
        after = int(info.length[row]) - prompt_length
        for position in range(min(after, end) - 1, max(before, begin) - 1, -1):
            found.appendleft(_at(info.scores, (source, position - before), count))
        row = source
        if before <= begin:
            break
    if begin == 0 < end:
        found.appendleft(_at(first, (row,), count))
    return Scored([logprob for logprob, _ in found], [top for _, top in found])


def prompt_scores(chunks: Sequence[Scores], prompt_length: int, count: int) -> Scored:
    """The scores of a prompt's tokens but the first, by the scores [chunk] of its chunks from its beginning on."""
    found = [_at(chunk, (place,), count) for chunk in chunks for place in range(len(chunk.logprobs))][
        : prompt_length - 1
    ]
    return Scored([logprob for logprob, _ in found], [top for _, top in found])


def _at(scores: Scores, place: tuple[int, ...], count: int) -> tuple[float, list[TokenLogprob]]:
    """The entry at one place; tokens that are impossible there are not among the likeliest."""
    tokens, logprobs = scores.likeliest[place][:count], scores.likeliest_logprobs[place][:count]
    possible = ~np.isneginf(logprobs)
    top = [TokenLogprob(int(token), float(value)) for token, value in zip(tokens, logprobs, strict=True)]
    return float(scores.logprobs[place]), [one for one, may in zip(top, possible, strict=True) if may]
