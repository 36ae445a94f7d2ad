"""When stop strings end the work of a group: once nothing that the model may still say changes its answer.

A row is settled when it holds a stop string, in text that no later token changes, or has ended by itself. Rows descend
from rows, so where all that may still answer are settled after the group's own cycle c, they stay so. The group is then
concluded after its cycle c + 1, and after its second where the first tokens are settled: a fixed delay, within which
the host has always read what settled it, whether it reads at once or one cycle late. So the number of cycles is a
function of the group's own tokens and weights, not of the host's time or of who shares the batch, and a stopping time
of the population's own history: at power 1, where the target's law of a beginning does not depend on what follows,
E[Ẑ·Σ Wᵢ f(xᵢ)] is what it would be at any later cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smcjax.engine.requests.requests import Request
from smcjax.engine.results.results import first_stop
from smcjax.engine.results.text import AnswerText
from smcjax.tokenizer.tokenizer import Tokenizer


class _Row(NamedTuple):
    text: AnswerText
    length: int  # tokens
    tail: str  # the end of its settled text, in which a stop string may have begun
    stopped: bool


class StopStrings:
    """Follows the rows of one group and knows which of them hold a stop string."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._stops = request.params.stop_strings
        self._keep = max(map(len, self._stops)) - 1  # characters of a tail
        self._beginning = _Row(AnswerText(tokenizer, request.token_ids), 0, "", False)
        self._rows: list[_Row] = []

    def begin(self, first: Sequence[int]) -> bool:
        """The rows' first tokens, [N]; whether all of them are settled."""
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
        """Follows a cycle: blocks [N, C], ancestors [N]; after it the rows' lengths, who lives and who has ended.

        Returns whether all rows that live are settled.
        """
        before, longer = self._rows, dict[int, _Row]()
        for row, length in zip(ancestors, lengths, strict=True):
            if row not in longer:
                longer[row] = self._longer(before[row], blocks[row][: length - before[row].length])
        self._rows = [longer[row] for row in ancestors]
        return all(
            row.stopped or ended or not living for row, ended, living in zip(self._rows, finished, alive, strict=True)
        )

    def _longer(self, row: _Row, tokens: Sequence[int]) -> _Row:
        length = row.length + len(tokens)
        if row.stopped:
            return row._replace(length=length)
        text = row.text.copy()
        said = row.tail + "".join([text.feed(token) for token in tokens])
        return _Row(text, length, said[max(0, len(said) - self._keep) :], first_stop(said, self._stops) is not None)
