"""Renders chat templates in a process of its own, which `smcjax.tokenizer.chat_template` starts and may kill.

A script, to which nothing of the package is known: what it imports takes a tenth of a second. Lines of JSON come in
and go out. Memory is limited by the system, and so is the time of each rendering: the signal that ends the process
needs no Python to run, which a single multiplication may keep from running for hours.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def environment() -> Any:
    """Jinja as chat templates expect it: without access to anything of Python, or to change what they are given."""
    import datetime

    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
    import jinja2.utils

    class Generation(jinja2.ext.Extension):
        """{% generation %} … {% endgeneration %}, which marks what the assistant says, for training: here it is as if
        it were not there."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """Without names that mean something to Python."""

        def __init__(*args: Any, **named: Any) -> None:
            self, *values = args
            jinja2.utils.Namespace.__init__(self)
            for name, value in dict(*values, **named).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
            super().__setitem__(name, value)

    def raise_exception(message: object) -> None:
        raise jinja2.exceptions.TemplateError(str(message))

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": Namespace,
        "dict": lambda *values, **named: dict(*values, **named),
    }
    return made


def main() -> None:
    """The first line says what to import from and what to keep to; each other one is a template with its variables."""
    import resource
    import signal

    replies = sys.stdout
    setup = json.loads(sys.stdin.readline())
    sys.path[:] = setup["path"]
    jinja = environment()
    resource.setrlimit(resource.RLIMIT_AS, (setup["bytes"], setup["bytes"]))
    compiled: dict[str, Any] = {}
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        template = request["template"]
        signal.setitimer(signal.ITIMER_PROF, setup["seconds"])  # what ends by it is the process
        try:
            if template not in compiled:
                compiled.clear()
                compiled[template] = jinja.from_string(template)
            parts, size = [], 0
            for part in compiled[template].generate(**request["variables"]):
                parts.append(part)
                size += len(part)
                if size > setup["characters"]:
                    break
            reply: dict[str, Any] = {"long": True} if size > setup["characters"] else {"text": "".join(parts)}
        except BaseException as error:  # RecursionError, MemoryError: whatever a template brings about
            said = " ".join(str(error).split())[:200]
            by_itself = type(error).__module__.startswith("jinja2") and said
            reply = {"error": said if by_itself else f"{type(error).__name__}: {said}".removesuffix(": ")}
        answer = json.dumps(reply)
        del reply
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, file=replies, flush=True)


if __name__ == "__main__":
    main()
