"""`response_format` as users write it, in OpenAI's form, checked: what a whole answer is to be.

    {"type": "json_schema", "json_schema": {"schema": {…}}}     JSON that a schema describes
    {"type": "json_object"}                                     any JSON object, of `JSON_DEPTH` levels at most
    {"type": "regex", "regex": "…"}                             a text that the expression matches from end to end
    {"type": "choice", "choice": ["…", …]}                      one of these texts
    {"type": "grammar", "grammar": "…", "max_depth": 4}         a text that a context-free grammar derives, in Lark's
                                                                notation or GBNF, with so many levels of nesting at most
    {"type": "text"}                                            anything

Only the form of a format is checked here. What it says is read where it is compiled, in a process of its own
(`smcjax.structured.automaton_child`), so nothing here takes longer than to write a schema as text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

from smcjax.checks import is_unicode, short

JSON_DEPTH = 4  # objects and arrays within each other where their shape is left open, and of a schema that needs itself
GRAMMAR_DEPTH = 4  # levels of nesting (`smcjax.structured.grammar`) where a request does not say how many
MAX_DEPTH = 100
MAX_CHARACTERS = 1 << 18  # of an expression, or a grammar


@dataclasses.dataclass(frozen=True)
class Expression:
    """The response format of a whole answer: a regular expression, choices or a schema as JSON, or a grammar.

    `depth` says how many nested references of rules may lie within each other (`smcjax.structured.grammar`).
    """

    text: str
    kind: str = "regex"
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
            f"response_format has the type {short(kind)}, and what is known here is {', '.join(_KINDS)}; use one of "
            "them."
        )
    needed = {"type", *([] if kind in ("text", "json_object") else [kind])}
    more = {name: response_format[name] for name in _OPTIONS.get(kind, ()) if name in response_format}
    if set(response_format) - set(more) != needed:
        optional = "".join(f", and {name} if you like" for name in _OPTIONS.get(kind, ()))
        raise ValueError(
            f"response_format of type {kind!r} has the keys {', '.join(sorted(needed))}{optional}, got "
            f"{short(sorted(map(str, response_format)))}; give these."
        )
    try:
        expression = _KINDS[kind](response_format.get(kind), **more)
    except ValueError as error:
        raise ValueError(f"response_format: {error}") from None
    length = 0 if expression is None else len(expression.text)
    if length > MAX_CHARACTERS:
        raise ValueError(f"response_format has {length} characters, and {MAX_CHARACTERS} are the most; simplify it.")
    return expression


def _schema(given: object) -> Expression:
    known = {"schema", "name", "description", "strict"}
    if not isinstance(given, Mapping) or "schema" not in given or not set(given) <= known:
        raise ValueError(f"json_schema must be a mapping with a 'schema', got {short(given)}.")
    schema = given["schema"]
    if isinstance(schema, str):
        raise ValueError(f"json_schema holds its schema as text, {short(schema)}; read it by json.loads.")
    try:
        text = json.dumps(schema, allow_nan=False)
    except RecursionError:
        raise ValueError("json_schema is nested too deeply; flatten it.") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"json_schema holds a schema that is no JSON ({short(str(error))}); mend it.") from None
    return Expression(text, "json_schema", JSON_DEPTH - 1)


def _regex(given: object) -> Expression:
    if not isinstance(given, str) or not is_unicode(given):
        raise ValueError(f"regex must be a text, got {short(given)}.")
    return Expression(given)


def _choice(given: object) -> Expression:
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, str) for one in given):
        raise ValueError(f"choice must be a list of texts, got {short(given)}.")
    return Expression(json.dumps(given, ensure_ascii=False), "choice")


def _grammar(given: object, max_depth: object = GRAMMAR_DEPTH) -> Expression:
    if not isinstance(given, str) or not given.strip() or not is_unicode(given):
        raise ValueError(f"grammar must be a text in Lark's notation or GBNF, got {short(given)}.")
    if not isinstance(max_depth, int) or isinstance(max_depth, bool) or not 0 <= max_depth <= MAX_DEPTH:
        raise ValueError(f"max_depth must be an integer from 0 to {MAX_DEPTH}, got {short(max_depth)}.")
    return Expression(given, "grammar", max_depth)


_OPTIONS = {"grammar": ("max_depth",)}
_KINDS: dict[str, Callable[..., Expression | None]] = {
    "text": lambda _: None,
    "json_object": lambda _: _schema({"schema": {"type": "object"}}),
    "json_schema": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
