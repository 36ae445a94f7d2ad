"""Parsing: argparse with one line for an error, the nearest name for a misspelt one, and ranges of numbers."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from smcjax.checks import did_you_mean


class Parser(argparse.ArgumentParser):
    """Exact option names only, each at most once; without a command of those that it has, it shows its help."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def add_commands(self, dest: str, metavar: str) -> argparse._SubParsersAction:
        """Returns the object that commands are added to."""
        self.set_defaults(run=self._show_help)
        return self.add_subparsers(dest=dest, metavar=metavar)

    def _show_help(self, args: argparse.Namespace) -> int:
        self.print_help()
        return 0

    def error(self, message: str) -> NoReturn:
        """Exits with code 2; argparse itself would print the usage as well."""
        message = " ".join(message.split())
        if len(message) > 500:
            message = message[:499] + "…"
        see = " See" if message.endswith("?") else "; see"
        self.exit(2, f"smcjax: error: {message}{see} {self.prog} --help.\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Refuses all that is unknown, here where the options are known that it may stand for."""
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                break  # what follows are values, or another parser's
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in self._option_string_actions:
                self.error(f"unrecognized option {name}{did_you_mean(name, self._option_string_actions)}")
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{value!r} is not one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
            )


class _StoreOnce(argparse._StoreAction):
    """An option whose value is given twice is a mistake in one of them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        given = namespace.__dict__.setdefault("given", set())
        if option_string is not None and self.dest in given:
            raise argparse.ArgumentError(self, "given twice; give it once")
        given.add(self.dest)
        super().__call__(parser, namespace, values, option_string)


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number in this range."""
    return _ranged(int, f"must be a whole number from {least} to {most}", lambda value: least <= value <= most)


def above(least: float, most: float) -> Callable[[str], float]:
    """The type of an option that takes a number above `least` and at most `most`."""
    limit = "" if most == math.inf else f" and at most {most:g}"
    return _ranged(float, f"must be a number above {least:g}{limit}", lambda x: least < x <= most)


def share(text: str) -> float:
    """The type of an option that takes a number from 0 to 1."""
    return _ranged(float, "must be a number from 0 to 1", lambda x: 0 <= x <= 1)(text)


def _ranged[T](number: Callable[[str], T], rule: str, holds: Callable[[T], bool]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        try:
            value = number(text)
        except ValueError:  # no number, or one of thousands of digits
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"{rule}, got {text if len(text) <= 40 else text[:39] + '…'}")
        return value

    return parse


def text(value: str) -> str:
    """The type of an argument that is text: not empty, and of characters."""
    if not value:
        raise argparse.ArgumentTypeError("must not be empty; give at least one character")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(
            f"must be valid Unicode, got a byte of another encoding at position {error.start}"
        ) from None
    return value
