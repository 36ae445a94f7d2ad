"""Streams the stable prefix of an answer: the tokens on which all rows that may still answer agree.

A row can answer, or be an ancestor of one that does, as long as its weight is above 0. So the tokens at which all
such rows begin alike, taken after resampling, are final whichever row is selected (docs/reference/laws.md, law 8).

What a cycle costs is bounded by what it brings, however long the answer is:

    rows     a trie of their tokens; the stable prefix leaves it at the root
    text     `AnswerText`, which decodes a few tokens for each new one
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smcjax.engine.requests.requests import Request
from smcjax.engine.results.completion import first_stop
from smcjax.engine.results.text import AnswerText
from smcjax.tokenizer.tokenizer import Tokenizer


class _Node:
    """A trie node: the prefix of some rows that ends with `token`."""

    __slots__ = ("children", "ends", "parent", "token")

    def __init__(self, token: int, parent: _Node | None) -> None:
        self.token, self.parent = token, parent
        self.children: dict[int, _Node] = {}
        self.ends = 0  # rows that end here


class _Rows:
    """N rows as a trie. Its root is the end of their longest common prefix."""

    def __init__(self, count: int) -> None:
        self._root = _Node(-1, None)
        self._root.ends = count
        # The node at which each row ends; None: the row is not alive.
        self._at: list[_Node | None] = [self._root] * count
        self._lengths = [0] * count

    def advance(
        self,
        blocks: list[list[int]],
        lengths: list[int],
        ancestors: list[int],
        alive: list[bool],
    ) -> None:
        """Replaces row i by its ancestor, extended by tokens of the ancestor's block to `lengths[i]` tokens."""
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
        """Removes `node` and its ancestors as far as no row has them as a prefix."""
        while not node.ends and not node.children and node.parent is not None:
            del node.parent.children[node.token]
            node = node.parent

    def agreed(self) -> list[int]:
        """Removes from the trie, and returns, the tokens by which the rows' common prefix has grown."""
        tokens = []
        while not self._root.ends and len(self._root.children) == 1:
            (self._root,) = self._root.children.values()
            self._root.parent = None
            tokens.append(self._root.token)
        return tokens


class StablePrefixStream:
    """Follows one request's rows on the host and emits the stable prefix of its answer."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self.token_ids: list[int] = []  # of the answer, emitted so far
        self._emitted: list[str] = []  # pieces of the text emitted so far
        self._rows = _Rows(0)
        self._agreed = 0  # tokens of the common prefix since the group last began
        self._followed = 0  # tokens of the common prefix that have been decoded
        self._text = None if tokenizer is None else AnswerText(tokenizer, request.token_ids)
        self._open = ""  # decoded text that may be the start of a stop string
        self._stopped = False  # a stop string was found; the whole answer's end decides where the text is cut
        self._held: list[int] = []  # tokens whose text may hold a stop string; emitted with that text

    @property
    def text(self) -> str:
        """The text emitted so far."""
        return "".join(self._emitted)

    def text_of(self, shown: Sequence[int]) -> str | None:
        """The text of the whole answer `shown`, not cut at stop strings.

        None if the answer does not begin with the tokens decoded so far, or if a stop string ended the decoding.
        """
        decoded = self.token_ids + self._held
        if decoded and decoded[-1] in self._request.stop_ids:
            decoded.pop()
        if self._text is None or self._stopped or list(shown[: len(decoded)]) != decoded:
            return None
        text = self._text.copy()
        added = [text.feed(token) for token in shown[len(decoded) :]]
        return "".join([*self._emitted, self._open, *added, text.rest()])

    def begin(self, first: np.ndarray) -> tuple[str, list[int]]:
        """Begins with the rows' first tokens [N]; returns as `advance` does.

        A group that begins again draws the same tokens as before; those already emitted are not emitted again.
        """
        ones = np.ones(len(first), int)
        self._rows, self._agreed = _Rows(len(first)), 0
        return self.advance(first[:, None], ones, np.arange(len(first)), ones > 0)

    def advance(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        ancestors: np.ndarray,
        alive: np.ndarray,
    ) -> tuple[str, list[int]]:
        """Follows a cycle. Returns the text and the tokens that it adds to the stable prefix.

        Args:
            tokens: the block of each row before resampling, [N, C].
            lengths: generated tokens of each row after the cycle, [N].
            ancestors: the row that each row is a copy of, [N].
            alive: whether each row may still answer, [N].
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
        self._emitted.append(text)
        fresh, self._held = self._held + fresh, []
        if self._request.params.stop_strings and self._text is not None and self._text.open:
            self._held = fresh
            return text, []
        self.token_ids += fresh
        return text, fresh

    def _decoded(self, fresh: list[int]) -> str:
        """The final text that these tokens add."""
        if self._text is None:
            return ""
        shown = fresh[:-1] if fresh[-1] in self._request.stop_ids else fresh
        return "".join([self._text.feed(token) for token in shown])

    def _closed(self, added: str) -> str:
        """The pending text up to a possible start of a stop string; the rest stays open."""
        stops = self._request.params.stop_strings
        text = self._open + added
        self._stopped = self._stopped or first_stop(text, stops) is not None
        closed = len(text) - _open_end(text, stops)
        self._open = text[closed:]
        return text[:closed]

    def rest(self, text: str, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text and tokens of the whole answer that were not emitted yet."""
        return text[sum(map(len, self._emitted)) :], list(token_ids[len(self.token_ids) :])


def _open_end(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of `text` that is the start of a stop string."""
    sizes = (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size]))
    return max(sizes, default=0)
