"""`response_format` as users write it, in OpenAI's form, checked: the regular expression that a whole answer matches.

    {"type": "json_schema", "json_schema": {"schema": {…}}}     JSON that a schema describes
    {"type": "json_object"}                                     any JSON object, of `JSON_DEPTH` levels at most
    {"type": "regex", "regex": "…"}                             a text that the expression matches from end to end
    {"type": "choice", "choice": ["…", …]}                      one of these texts
    {"type": "text"}                                            anything

Expressions have the syntax of Rust's regex crate: no look-around, no back-references. A ^ that begins one and a $ that
ends one say what is so anyway.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

from smcjax.plain import short
from smcjax.structured.json_schema import ANY_OBJECT, escape, regex_of_schema, unanchored

JSON_DEPTH = 4  # objects and arrays within each other, where their shape is left open
MOST_CHARACTERS = 1 << 18  # of an expression


@dataclasses.dataclass(frozen=True)
class Expression:
    """A regular expression over a whole answer.

    `inner` are patterns of JSON strings by their places in a schema, which may match nothing that JSON escapes. `depth`
    is above 0 where the bytes 1 and 2 stand for any JSON object and any JSON value.
    """

    regex: str
    inner: tuple[tuple[str, str], ...] = ()
    depth: int = 0


def expression_of(response_format: object) -> Expression | None:
    """The expression that a format asks for; None where it asks for nothing. Raises ValueError, one sentence."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping) or not isinstance(response_format.get("type"), str):
        raise ValueError(
            "response_format must be a mapping such as {'type': 'json_object'} or {'type': 'regex', 'regex': …}, got "
            f"{short(response_format)}."
        )
    kind = response_format["type"]
    if kind not in _KINDS:
        raise ValueError(
            f"response_format has the type {short(kind)}, and what is known here is {', '.join(_KINDS)}"
            + ("; a context-free grammar has no finite automaton, use 'regex' or 'json_schema'." if "grammar" in kind
               else "; use one of them.")
        )  # fmt: skip
    known = {"type", *([] if kind in ("text", "json_object") else [kind])}
    if set(response_format) != known:
        raise ValueError(
            f"response_format of type {kind!r} has the keys {', '.join(sorted(known))}, got "
            f"{short(sorted(map(str, response_format)))}."
        )
    try:
        expression = _KINDS[kind](response_format.get(kind))
    except RecursionError:
        raise ValueError("response_format is nested too deeply; flatten it.") from None
    except ValueError as error:
        raise ValueError(f"response_format: {error}") from None
    if expression is not None and len(expression.regex) > MOST_CHARACTERS:
        raise ValueError(
            f"response_format makes an expression of {len(expression.regex)} characters, and {MOST_CHARACTERS} are the "
            "most; simplify it."
        )
    return expression


def _schema(given: object) -> Expression:
    known = {"schema", "name", "description", "strict"}
    if not isinstance(given, Mapping) or "schema" not in given or not set(given) <= known:
        raise ValueError(f"json_schema must be a mapping with a 'schema', got {short(given)}.")
    regex, inner, is_open = regex_of_schema(_plain(given["schema"]))
    return Expression(regex, tuple(inner.items()), JSON_DEPTH if is_open else 0)


def _plain(schema: object) -> object:
    """The schema as JSON would bring it. Raises ValueError for what is not JSON."""
    if isinstance(schema, str):
        raise ValueError(f"json_schema holds its schema as text, {short(schema)}; read it by json.loads.")
    try:
        return json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema holds a schema that is no JSON ({short(str(error))}); mend it.") from None


def _regex(given: object) -> Expression:
    if not isinstance(given, str):
        raise ValueError(f"regex must be a text, got {short(given)}.")
    return Expression(unanchored(given)[0])


def _choice(given: object) -> Expression:
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, str) for one in given):
        raise ValueError(f"choice must be a list of texts, got {short(given)}.")
    return Expression("|".join(escape(one) for one in given))


_KINDS: dict[str, Callable[[object], Expression | None]] = {
    "text": lambda _: None,
    "json_object": lambda _: Expression(ANY_OBJECT, depth=JSON_DEPTH),
    "json_schema": _schema,
    "regex": _regex,
    "choice": _choice,
}
