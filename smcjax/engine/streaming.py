"""Text as it becomes certain: what all rows that may still answer agree on.

A row can answer, or be an ancestor of one that does, as long as its weight is above 0. So the tokens at which all
such rows begin alike, taken after resampling, are final whichever row is selected (ALGORITHM.md, "What must hold", 8).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smcjax.engine.requests import Request
from smcjax.engine.results import first_stop
from smcjax.tokenizer import Tokenizer

UNDECODED = "\ufffd"  # what a decoder puts where bytes of a character are missing yet


class CertainText:
    """Follows one request's rows on the host and says what has become certain of its answer."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._rows: list[list[int]] = []
        self._alive: list[bool] = []
        self.token_ids: list[int] = []  # of the answer, handed out so far
        self.text = ""  # the same as text

    def begin(self, first: np.ndarray) -> tuple[str, list[int]]:
        """The rows' first tokens, [N]; `advance`'s result.

        A group that begins again goes through the same tokens as before; what has been said of them is not said again.
        """
        self._rows = [[int(token)] for token in first]
        self._alive = [True] * len(self._rows)
        return self._news()

    def advance(
        self, tokens: np.ndarray, lengths: np.ndarray, ancestors: np.ndarray, alive: np.ndarray
    ) -> tuple[str, list[int]]:
        """A cycle: blocks [N, C] before resampling, ancestors [N], and after it generated lengths [N] and who lives.

        Returns the text and the tokens that have become certain by it.
        """
        rows = []
        for row, length in zip(ancestors.tolist(), lengths.tolist(), strict=True):
            old = self._rows[row]
            rows.append(old + [int(token) for token in tokens[row, : length - len(old)]])
        self._rows, self._alive = rows, alive.tolist()
        return self._news()

    def _news(self) -> tuple[str, list[int]]:
        rows = [row for row, alive in zip(self._rows, self._alive, strict=True) if alive]
        certain = _common_prefix(rows) if rows else []
        fresh = certain[len(self.token_ids) :]
        if not fresh:
            return "", []
        stops = self._request.params.stop_strings
        if self._tokenizer is None:
            self.token_ids += fresh
            return "", fresh
        shown = certain[:-1] if certain and certain[-1] in self._request.stop_ids else certain
        text = self._tokenizer.decode(shown)
        if first_stop(text, stops) is not None:  # the end says where it is cut
            return "", []
        text = text[: len(text) - _open_end(text, stops)]
        if not text.startswith(self.text):  # a decoder that changes what it said; the end says it all
            return "", []
        news, self.text = text[len(self.text) :], text
        self.token_ids += fresh
        return news, fresh

    def rest(self, text: str, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """What is left of the whole answer."""
        return text[len(self.text) :], list(token_ids[len(self.token_ids) :])


def _common_prefix(rows: Sequence[Sequence[int]]) -> list[int]:
    shortest = min(rows, key=len)
    for at, token in enumerate(shortest):
        if any(row[at] != token for row in rows):
            return list(shortest[:at])
    return list(shortest)


def _open_end(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may still change: an unfinished one, or the beginning of a stop string."""
    held = len(text) - len(text.rstrip(UNDECODED))
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                held = max(held, size)
                break
    return held
