"""Texts drawn from automata, and what readers of JSON object to them: schemas' tests have both."""

from __future__ import annotations

import decimal
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np

from smcjax.structured.automaton import Automata, Automaton
from smcjax.structured.response_format import expression_of
from smcjax.tokenizer.token_bytes import token_bytes
from smcjax.tokenizer.tokenizer import Tokenizer


class Compiler:
    """Automata of schemas over the tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = token_bytes(tokenizer, len(tokenizer))
        self._automata = Automata(tokenizer, len(tokenizer))

    def of(self, schema: Any) -> Automaton:
        """Raises ValueError where the schema is refused."""
        asked = expression_of({"type": "json_schema", "json_schema": {"schema": schema}})
        assert asked is not None
        return self._automata.of(asked, ())


def accepts(automaton: Automaton, text: str) -> bool:
    """Walks single bytes, which are tokens 0 to 255 of `tests.tokenizers_like.byte_level`."""
    state = 0
    for byte in text.encode():
        state = automaton.following[state, automaton.classes[byte]]
        if state < 0:
            return False
    return bool(automaton.reach[state] == 0)


def drawn(automaton: Automaton, tokens: Sequence[bytes], count: int, seed: int) -> list[bytes]:
    """Texts that random walks over possible tokens end with, each within a number of tokens of its own.

    Half of the walks draw a class of tokens first, so that they meet quotes, commas and brackets as often as letters.
    How soon a walk ends where it may is its own too.
    """
    rng = np.random.default_rng(seed)
    following, classes, reach = automaton.following.astype(np.int64), automaton.classes, automaton.reach
    sizes = np.bincount(classes, minlength=following.shape[1]).astype(float)
    members = [np.flatnonzero(classes == one) for one in range(following.shape[1])]
    weights = np.where(np.arange(count)[:, None] % 2, np.minimum(sizes, 1), sizes)
    left = reach[0] + rng.choice([0, 3, 10, 30, 100], count)
    ending = rng.choice([0.02, 0.2, 0.7], count)
    state, said = np.zeros(count, np.int64), [[] for _ in range(count)]
    going = np.arange(count)
    while len(going):
        after = following[state[going]]
        possible = (after >= 0) & (reach[after] < left[going, None])
        may_end = reach[state[going]] == 0
        ends = may_end & ((rng.random(len(going)) < ending[going]) | ~possible.any(axis=1))
        going, after, possible = going[~ends], after[~ends], possible[~ends]
        total = np.cumsum(weights[going] * possible, axis=1)
        assert (total[:, -1:] > 0).all(), "a walk ran into a dead end"
        drawn_class = (total <= rng.random((len(going), 1)) * total[:, -1:]).sum(axis=1)
        state[going] = after[np.arange(len(going)), drawn_class]
        left[going] -= 1
        for walk, one in zip(going, drawn_class, strict=True):
            said[walk].append(tokens[rng.choice(members[one])])
    return [b"".join(parts) for parts in said]


class Judge:
    """Two libraries' validators of a schema, the formats that it names included."""

    def __init__(self, schema: Any) -> None:
        kind = jsonschema.Draft202012Validator
        self._exact = kind(json.loads(json.dumps(schema), parse_float=Decimal), format_checker=kind.FORMAT_CHECKER)
        self._validators = {
            "jsonschema": kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid,
            "jsonschema-rs": jsonschema_rs.Draft202012Validator(schema, validate_formats=True).is_valid,
        }

    def objection(self, text: bytes) -> str:
        """Who says what against a text; empty where every reader takes it.

        Readers may take numbers for floats or decimals, and of a key that is said twice the first or the last value.
        """
        for of_twice in ("last", "first"):
            pairs = dict if of_twice == "last" else (lambda given: dict(reversed(given)))
            try:
                value, exact = (_read(text, pairs, number) for number in (float, Decimal))
            except (ValueError, ArithmeticError) as error:  # of text, of JSON, of decimals' exponents
                return f"no JSON that can be read: {error!r}"
            for name, is_valid in self._validators.items():
                if not is_valid(value):
                    return f"{name}, the {of_twice} value of each key"
            with decimal.localcontext(prec=1000):  # a remainder of 1e99 has as many digits
                is_valid = self._exact.is_valid(exact)
            if not is_valid:
                return f"jsonschema, numbers as decimals, the {of_twice} value of each key"
        return ""


def _read(text: bytes, pairs: Any, number: type) -> Any:
    return json.loads(text.decode(), object_pairs_hook=pairs, parse_float=number, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
