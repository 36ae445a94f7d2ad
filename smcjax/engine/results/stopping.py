"""Decides when stop strings end a group: once no further token can change its answer.

A row is decided when it holds a stop string, in text that no later token changes, or has ended by itself. Rows descend
from rows, so if all rows that may still answer are decided after the group's own cycle c, they stay decided. The group
is then concluded after its cycle c + 1, or after its second cycle if the first tokens decide it. With this fixed delay
the host has always read the deciding cycle, whether it reads at once or one cycle late. So the number of cycles is a
function of the group's own tokens and weights, not of the host's speed or of other requests, and it is a stopping time
of the population's history: at power 1, where the target's law of a prefix does not depend on what follows,
E[Ẑ·Σ Wᵢ f(xᵢ)] is what it would be at any later cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smcjax.engine.requests.requests import Request
from smcjax.engine.results.completion import first_stop
from smcjax.engine.results.cycles import rows_after
from smcjax.engine.results.text import AnswerText
from smcjax.tokenizer.tokenizer import Tokenizer


class _Row(NamedTuple):
    text: AnswerText
    length: int  # tokens
    tail: str  # the end of its final text, in which a stop string may have begun
    stopped: bool


class StopStrings:
    """Follows the rows of one group and knows which of them hold a stop string."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._stops = request.params.stop_strings
        self._keep = max(map(len, self._stops)) - 1  # characters of a tail
        self._beginning = _Row(AnswerText(tokenizer, request.token_ids), 0, "", False)
        self._rows: list[_Row] = []

    def begin(self, first: Sequence[int]) -> bool:
        """Begins with the rows' first tokens, [N]. Returns whether all rows are decided."""
        self._rows = [self._longer(self._beginning, [token]) for token in first]
        return all(row.stopped for row in self._rows)

    def advance(
        self,
        blocks: Sequence[Sequence[int]],
        lengths: Sequence[int],
        ancestors: Sequence[int],
        alive: Sequence[bool],
        finished: Sequence[bool],
    ) -> bool:
        """Follows a cycle. Returns whether all rows that are alive are decided.

        Args:
            blocks: the tokens of each row's block before resampling, [N, C].
            lengths: tokens of each row after the cycle, [N].
            ancestors: the row that each row is a copy of, [N].
            alive: whether each row may still answer, [N].
            finished: whether each row has ended by itself, [N].
        """
        before, tokens = self._rows, [row.length for row in self._rows]
        self._rows = rows_after(tokens, blocks, lengths, ancestors, lambda row, new: self._longer(before[row], new))
        return all(
            row.stopped or ended or not living for row, ended, living in zip(self._rows, finished, alive, strict=True)
        )

    def _longer(self, row: _Row, tokens: Sequence[int]) -> _Row:
        length = row.length + len(tokens)
        if row.stopped:
            return row._replace(length=length)
        text = row.text.copy()
        text_end = row.tail + "".join([text.feed(token) for token in tokens])
        stopped = first_stop(text_end, self._stops) is not None
        return _Row(text, length, text_end[max(0, len(text_end) - self._keep) :], stopped)
