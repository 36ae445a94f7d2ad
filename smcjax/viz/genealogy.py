"""Who descends from whom, and who had ended, over the C cycles of a trace.

Node (t, j) is row j of the population after cycle t; t = 0 is the population before the first cycle.
"""

from __future__ import annotations

import numpy as np

from smcjax.viz.trace_file import TraceFile

DEAD, SHARED = -2, -1


def lineages(ancestors: np.ndarray) -> np.ndarray:
    """[C, N] ancestors to [C+1, N]: the row, in each column, of the line that ends in final particle j."""
    cycles, n = ancestors.shape
    rows = np.empty((cycles + 1, n), np.int64)
    rows[cycles] = np.arange(n)
    for t in range(cycles, 0, -1):
        rows[t - 1] = ancestors[t - 1, rows[t]]
    return rows


def descendants(ancestors: np.ndarray) -> np.ndarray:
    """[C+1, N]: how many final particles descend from each node; 0 for lines that died out. Columns sum to N."""
    n = ancestors.shape[1]
    return np.stack([np.bincount(rows, minlength=n) for rows in lineages(ancestors)])


def families(ancestors: np.ndarray, most: int) -> np.ndarray:
    """[C+1, N]: the family of each node, SHARED for ancestors of several families, DEAD for nodes without heirs.

    Final particles are one family if they have one ancestor in the latest column where at most `most` ancestors are
    left; where that is never so, families repeat: founder k of the start is in family k mod `most`.
    """
    rows = lineages(ancestors)
    left = [len(np.unique(column)) for column in rows]
    cut = max((t for t, count in enumerate(left) if count <= most), default=0)
    family = np.unique(rows[cut], return_inverse=True)[1] % most
    result = np.full(rows.shape, DEAD)
    for t, column in enumerate(rows):
        for row in np.unique(column):
            heirs = np.unique(family[column == row])
            result[t, row] = heirs[0] if len(heirs) == 1 else SHARED
    return result


def finished_nodes(trace: TraceFile) -> np.ndarray:
    """[C+1, N] bool: sequences known to have ended by then.

    Every cycle says who had ended after it. Of those before the first, only descendants tell: a row that has ended and
    was not advanced by the cycle had ended before; a pipelined decoder's first cycle advances no row. And the request
    is over: unless it failed, what still has weight at the end has ended, be it by a stop string.
    """
    cycles, n = trace.ancestors.shape
    finished = np.zeros((cycles + 1, n), bool)
    finished[1:] = trace.finished
    if cycles:
        finished[0, trace.ancestors[0][(trace.lengths[0] == 1) & trace.finished[0]]] = True
    if np.isfinite(trace.log_evidence):
        finished[cycles] |= np.isfinite(trace.final_log_weights)
    return finished
