"""Text as it becomes certain: what all rows that may still answer agree on.

A row can answer, or be an ancestor of one that does, as long as its weight is above 0. So the tokens at which all
such rows begin alike, taken after resampling, are final whichever row is selected (docs/reference/laws.md, law 8).

What a cycle costs is bounded by what it brings, however long the answer is:

    rows     a tree of their tokens, in which equal beginnings are one path; what is certain leaves it at the root
    text     `AnswerText`, which decodes a few tokens for each new one
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smcjax.engine.requests.requests import Request
from smcjax.engine.results.results import first_stop
from smcjax.engine.results.text import AnswerText
from smcjax.tokenizer.tokenizer import Tokenizer


class _Node:
    """The beginning of some rows, as a token behind its parent's."""

    __slots__ = ("children", "ends", "parent", "token")

    def __init__(self, token: int, parent: _Node | None) -> None:
        self.token, self.parent = token, parent
        self.children: dict[int, _Node] = {}
        self.ends = 0  # rows that end here


class _Rows:
    """N rows of tokens behind what all of them begin with."""

    def __init__(self, count: int) -> None:
        self._root = _Node(-1, None)
        self._root.ends = count
        self._at: list[_Node | None] = [self._root] * count  # where each row ends; None: it has no say
        self._lengths = [0] * count

    def advance(
        self,
        blocks: list[list[int]],
        lengths: list[int],
        ancestors: list[int],
        alive: list[bool],
    ) -> None:
        """Makes row i a copy of its ancestor, with as much of the ancestor's block as makes it `lengths[i]` long."""
        before, old = self._at, self._lengths
        self._at = []
        for row, length, living in zip(ancestors, lengths, alive, strict=True):
            node = before[row] if living else None
            if node is not None:
                for token in blocks[row][: length - old[row]]:
                    node = node.children.setdefault(token, _Node(token, node))
                node.ends += 1
            self._at.append(node)
        self._lengths = lengths
        for node in before:
            if node is not None:
                node.ends -= 1
                self._prune(node)

    def _prune(self, node: _Node) -> None:
        """Removes nodes with which no row begins any more."""
        while not node.ends and not node.children and node.parent is not None:
            del node.parent.children[node.token]
            node = node.parent

    def agreed(self) -> list[int]:
        """Takes the tokens that all rows go on alike with; from now on these are part of what all begin with."""
        tokens = []
        while not self._root.ends and len(self._root.children) == 1:
            (self._root,) = self._root.children.values()
            self._root.parent = None
            tokens.append(self._root.token)
        return tokens


class StablePrefixStream:
    """Follows one request's rows on the host and says what has become certain of its answer."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self.token_ids: list[int] = []  # of the answer, handed out so far
        self._said: list[str] = []  # the same as text, in pieces
        self._rows = _Rows(0)
        self._agreed = 0  # tokens, by the rows as they are now
        self._followed = 0  # tokens that have been decoded
        self._text = None if tokenizer is None else AnswerText(tokenizer, request.token_ids)
        self._open = ""  # text that may yet be the beginning of a stop string
        self._stopped = False  # a stop string is there: the end says where it is cut
        self._held: list[int] = []  # tokens that wait for their text, in which a stop string may be

    @property
    def text(self) -> str:
        """The text that was handed out so far."""
        return "".join(self._said)

    def text_of(self, shown: Sequence[int]) -> str | None:
        """The text of a whole answer of these tokens, with stop strings as they are in it.

        None where that is not to be had from what has been decoded: the answer begins otherwise, or a stop string ended
        the decoding.
        """
        decoded = self.token_ids + self._held
        if decoded and decoded[-1] in self._request.stop_ids:
            decoded.pop()
        if self._text is None or self._stopped or list(shown[: len(decoded)]) != decoded:
            return None
        text = self._text.copy()
        added = [text.feed(token) for token in shown[len(decoded) :]]
        return "".join([*self._said, self._open, *added, text.rest()])

    def begin(self, first: np.ndarray) -> tuple[str, list[int]]:
        """Begins with the rows' first tokens [N]; returns as `advance` does.

        A group that begins again goes through the same tokens as before; what has been said of them is not said again.
        """
        count = len(first)
        self._rows, self._agreed = _Rows(count), 0
        own = list(range(count))
        self._rows.advance([[int(token)] for token in first], [1] * count, own, [True] * count)
        return self._news()

    def advance(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        ancestors: np.ndarray,
        alive: np.ndarray,
    ) -> tuple[str, list[int]]:
        """Follows a cycle: blocks [N, C], ancestors [N]; after it, generated lengths [N], who lives.

        Returns the text and the tokens that have become certain by it.
        """
        self._rows.advance(tokens.tolist(), lengths.tolist(), ancestors.tolist(), alive.tolist())
        return self._news()

    def _news(self) -> tuple[str, list[int]]:
        agreed = self._rows.agreed()
        fresh = agreed[max(0, self._followed - self._agreed) :]
        self._agreed += len(agreed)
        self._followed = max(self._followed, self._agreed)
        if not fresh or self._stopped:
            return "", []
        text = self._closed(self._decoded(fresh))
        if self._stopped:
            return "", []
        self._said.append(text)
        fresh, self._held = self._held + fresh, []
        if self._request.params.stop_strings and self._text is not None and self._text.open:
            self._held = fresh
            return text, []
        self.token_ids += fresh
        return text, fresh

    def _decoded(self, fresh: list[int]) -> str:
        """The settled text that these tokens add."""
        if self._text is None:
            return ""
        shown = fresh[:-1] if fresh[-1] in self._request.stop_ids else fresh
        return "".join([self._text.feed(token) for token in shown])

    def _closed(self, added: str) -> str:
        """Returns the unsaid text up to the first stop string, or to what may become one; the rest stays open."""
        stops = self._request.params.stop_strings
        text = self._open + added
        self._stopped = self._stopped or first_stop(text, stops) is not None
        closed = len(text) - _open_end(text, stops)
        self._open = text[closed:]
        return text[:closed]

    def rest(self, text: str, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Returns the text and tokens of the whole answer that were not handed out yet."""
        return text[sum(map(len, self._said)) :], list(token_ids[len(self.token_ids) :])


def _open_end(text: str, stops: Sequence[str]) -> int:
    """The number of characters at the end that may be the beginning of a stop string."""
    sizes = (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size]))
    return max(sizes, default=0)
