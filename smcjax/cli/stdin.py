"""Reading standard input for commands."""

from __future__ import annotations

import sys


def require_stdin() -> None:
    """Raises OSError where standard input is closed."""
    if sys.stdin is None:
        raise OSError("standard input is closed, so there is nothing to read; redirect it from a file or a terminal.")


def read_line() -> str:
    """The next line, "" at the end of input. The prompt, like all that is not an answer, goes to stderr."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip()
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        raise _no_text(error) from None


def read_prompt() -> str:
    """All of the input, without the line ends that an `echo` adds. Raises ValueError for what is no prompt."""
    require_stdin()
    try:
        prompt = sys.stdin.buffer.read().decode(sys.stdin.encoding).rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise _no_text(error) from None
    if not prompt:
        raise ValueError("the prompt is -, which reads standard input, and that is empty; give at least one character.")
    return prompt


def _no_text(error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"the input must be {error.encoding} text, got byte {error.start} of another kind.")
