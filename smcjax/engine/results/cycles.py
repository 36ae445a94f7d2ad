"""Cycles by the decoder's reports: as the reader of a traced request follows them, and what they make of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from smcjax.decoding.decoder import RowsAfter
from smcjax.engine.requests.requests import Request
from smcjax.engine.results.outputs import Cycle


def first_cycle(request: Request, tokens: np.ndarray) -> Cycle:
    """Cycle 0, which gives each row its first token [N]."""
    count = len(tokens)
    lengths = np.ones(count, np.int32)
    finished = np.isin(tokens, request.stop_ids) | (len(request.token_ids) + 1 >= request.limit)
    return Cycle(0, [[int(token)] for token in tokens], lengths, np.arange(count, dtype=np.int32), finished)


def later_cycle(request: Request, index: int, info: Any, rows: RowsAfter) -> Cycle:
    """Cycle `index` of rows without weights, from a decoder's `Info` of it, one group as host arrays.

    `rows` are those after the cycle. A population's are made by `CycleHistory`.
    """
    lengths = np.asarray(info.length - len(request.token_ids), np.int32)
    blocks = []
    for block in info.tokens.tolist():  # without what lies behind the first stop token
        stops = (column for column, token in enumerate(block) if token in request.stop_ids)
        blocks.append(block[: next(stops, len(block) - 1) + 1])
    return Cycle(index, blocks, lengths, rows.ancestors.copy(), rows.finished.copy())


def rows_after[R](
    before: Sequence[int],
    blocks: Sequence[Sequence[int]],
    lengths: Sequence[int],
    ancestors: Sequence[int],
    longer: Callable[[int, Sequence[int]], R],
) -> list[R]:
    """Returns the rows after a cycle: each ancestor, made `longer` by the tokens of its block, once for all its copies.

    `longer` takes the ancestor's number and these tokens; `before` and `lengths` are the rows' tokens around the cycle.
    """
    made: dict[int, R] = {}
    for row, length in zip(ancestors, lengths, strict=True):
        if row not in made:
            made[row] = longer(row, blocks[row][: length - before[row]])
    return [made[row] for row in ancestors]
