"""Automata over a vocabulary, compiled in a process of its own, kept for the next request that asks for the same.

Which next tokens are possible, and which state each leads to, are one table [states, classes]: tokens that lead alike
from every state are one class. `reach` is the fewest tokens from a state to one where the answer may end, so a decoder
can see to it that an answer ends in time: a token is possible where what is left suffices behind it. From such a state
there always is one, so no answer runs into a dead end.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np

from smcjax.checks import short
from smcjax.errors import ExtraMissing, extra_missing
from smcjax.structured.response_format import Expression
from smcjax.tokenizer.token_bytes import token_bytes
from smcjax.tokenizer.tokenizer import Tokenizer

SECONDS = 10.0  # of processor time to compile one
BYTES = 4 << 30  # of address space
PATIENCE = 60.0  # seconds by the clock, on a machine that is busy with other things
MAX_STATES = 32_000  # of an automaton over bytes
MAX_CELLS = 1 << 19  # states times classes of an automaton over tokens
KEPT = 64  # automata for requests to come
# How the child ends that has gone beyond a limit, or has broken by what it was asked for: always so. What else ends it,
# such as the system where memory is short, may not do so again.
FINAL = (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV)
CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from smcjax.structured.automaton_child import main
main()
"""


class Undecided(ValueError):
    """An expression was not compiled, which says nothing for ever: the machine may be less busy the next time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """An automaton over V tokens with S states, of which 0 is the first, and K classes of tokens."""

    following: np.ndarray  # [S, K] int16: the next state, −1 where the class is impossible
    classes: np.ndarray  # [V] int32
    reach: np.ndarray  # [S] int32: the fewest tokens to a state where the answer may end, 0 there


class Automata:
    """Compiles and keeps the automata of one tokenizer, and why others have none. Threads may share it.

    One is compiled at a time; who asks for one that is there does not wait for it.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock, self._spelling, self._compiling = threading.Lock(), threading.Lock(), threading.Lock()
        self._tokens: list[bytes] | None = None
        self._kept: OrderedDict[tuple[Expression, frozenset[int]], Automaton | str] = OrderedDict()

    def of(self, expression: Expression, stops: Collection[int]) -> Automaton:
        """The automaton of an expression, in which `stops`, tokens that end an answer, are no text.

        Raises ValueError (one sentence) where there is none, it is too large, or a package is missing; RuntimeError for
        an error of this package's own.
        """
        tokens = self._spelled()
        _require_package(expression)
        key = self._key(expression, stops, tokens)
        found = self._found(key)
        if found is None:
            with self._compiling:
                found = self._found(key) or self._made(key, tokens)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def keeps(self, expression: Expression, stops: Collection[int]) -> bool:
        """True where `of` would say at once what it says, as it has before. It never waits for a compilation."""
        tokens = self._tokens
        return tokens is not None and self._found(self._key(expression, stops, tokens)) is not None

    def _key(
        self, expression: Expression, stops: Collection[int], tokens: Sequence[bytes]
    ) -> tuple[Expression, frozenset[int]]:
        """An expression and those stops that have a text."""
        return expression, frozenset(stop for stop in stops if stop < self._vocab_size and tokens[stop])

    def _spelled(self) -> list[bytes]:
        if self._tokenizer is None:
            raise ValueError("response_format needs a tokenizer, which the model directory lacks; leave it out.")
        with self._spelling:
            if self._tokens is None:
                self._tokens = token_bytes(self._tokenizer, self._vocab_size)
            return self._tokens

    def _found(self, key: tuple[Expression, frozenset[int]]) -> Automaton | str | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _made(self, key: tuple[Expression, frozenset[int]], tokens: Sequence[bytes]) -> Automaton | str:
        """Compiles, and keeps what comes of it: the automaton, or why there is none for good."""
        expression, stops = key
        try:
            spelled = [b"" if id in stops else token for id, token in enumerate(tokens)]
            made: Automaton | str = compile_expression(expression, spelled)
        except Undecided:
            raise
        except ValueError as error:
            made = str(error)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made


@lru_cache(KEPT)
def check_expression(expression: Expression) -> None:
    """Raises ValueError, in the words of `Automata.of`, for an expression that has no automaton over any vocabulary.

    It is read in this process, without a limit of time or memory, so it is to be its user's own.
    """
    from smcjax.structured.automaton_child import byte_automaton, worded
    from smcjax.structured.byte_automata import Refusal

    _require_package(expression)
    try:
        byte_automaton(expression.kind, expression.text, expression.depth, MAX_STATES)
    except Refusal as refusal:
        raise ValueError(f"response_format {worded(refusal, _mend(expression))}.") from None


def _require_package(expression: Expression) -> None:
    if expression.kind == "grammar" and importlib.util.find_spec("lark") is None:
        raise ExtraMissing(extra_missing("response_format", "lark", "structured") + ".")


def compile_expression(expression: Expression, tokens: Sequence[bytes]) -> Automaton:
    """The automaton of an expression over these tokens, of which empty ones are impossible.

    Raises ValueError for an expression that has none or takes too much, `Undecided` where that may be the machine's
    fault, and RuntimeError for an error of this package's own.
    """
    from smcjax.structured.automaton_child import OUT_OF_MEMORY, REFUSED

    setup = {
        "seconds": SECONDS,
        "bytes": BYTES,
        "kind": expression.kind,
        "text": expression.text,
        "depth": expression.depth,
        "mend": _mend(expression),
        "most_states": MAX_STATES,
        "most_cells": MAX_CELLS,
    }
    head, written = json.dumps(setup).encode(), io.BytesIO()
    ends = np.cumsum([len(token) for token in tokens], dtype=np.int64)
    np.savez(written, data=np.frombuffer(b"".join(tokens), np.uint8), ends=ends)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", CHILD, json.dumps(sys.path)],
            input=b"%d\n%s%s" % (len(head), head, written.getvalue()),
            capture_output=True,
            timeout=PATIENCE,
            start_new_session=True,  # an interruption from the keyboard is not for it
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Undecided(
            f"response_format was not made an automaton within {PATIENCE:g} s on a busy machine; ask again later, or "
            f"{_mend(expression)}."
        ) from None
    if done.returncode == REFUSED:
        raise ValueError(f"response_format {done.stdout.decode()}.")
    if done.returncode == OUT_OF_MEMORY or done.returncode in FINAL:
        raise ValueError(
            f"response_format takes more than {SECONDS:g} s or {BYTES >> 30} GiB to be made an automaton; "
            f"{_mend(expression)}, repeated parts above all."
        )
    if done.returncode < 0:
        raise Undecided(
            f"response_format was not made an automaton, since signal {-done.returncode} ended that; ask again later, "
            f"or {_mend(expression)}."
        )
    if done.returncode:
        last = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()][-1:]
        raise RuntimeError(f"an error ended the process that compiles response_format: {short(''.join(last))}.")
    arrays = np.load(io.BytesIO(done.stdout), allow_pickle=False)
    return Automaton(arrays["following"], arrays["classes"], arrays["reach"])


def _mend(expression: Expression) -> str:
    """The mend, as a command, of an expression that takes too much."""
    return (
        f"lower max_depth, here {expression.depth}, or simplify it" if expression.kind == "grammar" else "simplify it"
    )
