"""The text of an answer: what its tokens add to the text of its prompt. Results and streams use it.

T(tokens) is the tokenizer's text of a whole sequence, without special tokens and ids that have no token. The answer's
text is T(prompt + answer) without the prefix that it shares with T(prompt). So a tokenizer that strips the start of a
text strips the prompt, and a character that begins in the prompt and is completed by the answer belongs to the answer.

The text of a token depends on few tokens before it, so T is taken of a window of the last tokens:

    start of the text   some tokenizers strip it, or leave out a space: the window begins before emitted text
    bytes               four tokens of a byte each may make one character: the window begins at least as far back
    byte fallback       a run of byte tokens becomes one text, or replacements, as a whole: it waits for the run's end
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from smcjax.tokenizer.tokenizer import Tokenizer

UNDECODED = "\ufffd"  # stands for bytes that are no character, or not yet
BEHIND = 4  # characters of emitted text that the window keeps: the largest number of bytes of a character
LONGEST = 7  # tokens; a longer window is shortened


class AnswerText:
    """Turns the tokens of an answer into text, one by one. The text does not depend on how they are batched."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The last tokens, and the part of their text that belongs to the prompt or was emitted.
        self._window, self._known = _tail(tokenizer, prompt)
        self._run: list[int] = []  # byte tokens behind the window
        self._ends_open = False

    @property
    def open(self) -> bool:
        """True if the text of tokens fed so far may still depend on later tokens."""
        return bool(self._run) or self._ends_open

    def feed(self, token: int) -> str:
        """Adds a token. Returns the text that has become final: no later token changes it."""
        tokenizer = self._tokenizer
        if token not in tokenizer.text_ids:
            return ""
        if token in tokenizer.byte_ids:
            self._run.append(token)
            return ""
        self._window += [*self._run, token]
        self._run.clear()
        text = tokenizer.decode(self._window)
        self._ends_open = text.endswith(UNDECODED)
        final = text[:-1] if self._ends_open else text
        added = self._beyond(final)
        if added:
            self._known = final
            if len(self._window) > LONGEST:
                # As far as possible: all of its text has been emitted, but for an open end.
                self._window, self._known = _tail(tokenizer, self._window)
                self._known = self._known.removesuffix(UNDECODED) if self._ends_open else self._known
        return added

    def rest(self) -> str:
        """The text that is left if the answer ends here."""
        return self._beyond(self._tokenizer.decode([*self._window, *self._run]))

    def copy(self) -> AnswerText:
        """Another answer of the same beginning."""
        other = object.__new__(AnswerText)
        other._tokenizer, other._known, other._ends_open = self._tokenizer, self._known, self._ends_open
        other._window, other._run = list(self._window), list(self._run)
        return other

    def _beyond(self, text: str) -> str:
        """Returns the end of the window's `text`, beyond what is known of it."""
        if text.startswith(self._known):
            return text[len(self._known) :]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self._known, text, strict=False))
        return text[len(list(same)) :]


def answer_text(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> str:
    """The text of a whole answer."""
    text = AnswerText(tokenizer, prompt)
    text._window += [token for token in tokens if token in tokenizer.text_ids]
    return text.rest()


def _tail(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[list[int], str]:
    """The last tokens, no more than are to be known for what those behind them add to the text; and their text."""
    tail: list[int] = []
    wanted, in_run = BEHIND, True
    for token in reversed(tokens):
        if token not in tokenizer.text_ids:
            continue
        tail.append(token)
        in_run = in_run and token in tokenizer.byte_ids
        if not in_run and len(tail) >= wanted:
            text = tokenizer.decode(tail[::-1])
            if len(text) >= BEHIND:
                return tail[::-1], text
            wanted = 2 * len(tail)
    return tail[::-1], tokenizer.decode(tail[::-1])
