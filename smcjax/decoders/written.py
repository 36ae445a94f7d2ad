"""Decoders written as in Python where text is all there is: on a command line, in a server's options.

    smc                                                      the decoder with its defaults
    SMC(n_particles=32, early_end=True)                      its options, as keyword arguments
    Rejection(sparse=SparseVerification(mode="merged"))      options that are themselves made of options

Nothing of it is run: values are Python's literals, and only the classes that the reader names are made.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

from smcjax.checks import short
from smcjax.sparse.verification import SparseVerification

_INSIDE: dict[str, type] = {"sparseverification": SparseVerification}


@dataclasses.dataclass(frozen=True)
class Written:
    """A decoder as a text describes it, before it is made: other options may still say more of it.

    Attributes:
        kind: its class, of those that `read_decoder` was given.
        options: the keyword arguments that the text gives.
    """

    kind: type[Any]
    options: Mapping[str, Any]

    def make(self, **more: Any) -> Any:
        """Makes the decoder; `more` holds for what the text does not say. Raises ValueError for a bad option."""
        try:
            return self.kind(**{**more, **self.options})
        except TypeError as error:  # an argument that the class has not
            raise ValueError(str(error)) from None


def read_decoder(text: str, kinds: Mapping[str, type[Any]]) -> Written:
    """Reads a decoder that is written as in Python. Raises ValueError, in one sentence, for text that is none.

    `kinds` holds the classes by their lower-case names.
    """
    usage = f"{', '.join(kinds)}, or one with options as in Python, 'SMC(n_particles=32, early_end=True)'"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"must be {usage}, got {short(text)}") from None
    name = tree.func if isinstance(tree, ast.Call) else tree
    if not isinstance(name, ast.Name) or name.id.lower() not in kinds:
        raise ValueError(f"must be {usage}, got {short(text)}")
    kind = kinds[name.id.lower()]
    return Written(kind, _options(tree) if isinstance(tree, ast.Call) else {})


def _options(call: ast.Call) -> dict[str, Any]:
    """The keyword arguments of a call. Raises ValueError for an argument that is no `name=literal`."""
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("must have its options as name=value, got **")
        options[keyword.arg] = _value(keyword.arg, keyword.value)
    if call.args:
        raise ValueError(f"must have its options as name=value, got {short(ast.unparse(call.args[0]))} without a name")
    return options


def _value(name: str, value: ast.expr) -> Any:
    """A literal, or one of the classes that options are made of."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id.lower() in _INSIDE:
        return Written(_INSIDE[value.func.id.lower()], _options(value)).make()
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(
            f"has {name}={short(ast.unparse(value))}, which is no literal of Python; give a number, a text in quotes, "
            "True, False or None"
        ) from None
