"""Prompts from standard input, also line by line in a conversation, and texts of files."""

from __future__ import annotations

import contextlib
import sys

from smcjax.files import MIB

PROMPT_BYTES = 64 * MIB  # at most; a tokenizer takes minutes for that
_MARK = "\ufeff"  # with which some editors and shells begin a text, as `read_file` ignores it


def require_stdin() -> None:
    """Raises OSError where standard input is closed."""
    if sys.stdin is None:
        raise OSError("standard input is closed, so there is nothing to read; redirect it from a file or a terminal.")


def stdin_is_piped() -> bool:
    """True where standard input is open and no terminal."""
    return sys.stdin is not None and not sys.stdin.isatty()


def edit_lines() -> None:
    """Lets `read_line` have the arrow keys and the lines before, where there is a terminal and a readline for it."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401


def read_line() -> str | None:
    """The next line without the space around it or a byte-order mark, None at the end of input.

    A terminal is shown "> ": by readline where lines are edited, which must know of it, else on standard error, as all
    that is not an answer.
    """
    edited = sys.stdin.isatty() and sys.stdout.isatty()
    if sys.stdin.isatty() and not edited:
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input("> " if edited else "").removeprefix(_MARK).strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise _no_text(error, "the input") from None


def read_stdin(named: str) -> str:
    """All of standard input but a byte-order mark. Raises ValueError, about `named`, for what is no text."""
    require_stdin()
    try:
        return sys.stdin.buffer.read().decode(sys.stdin.encoding).removeprefix(_MARK)
    except UnicodeDecodeError as error:
        raise _no_text(error, named) from None


def read_prompt() -> str:
    """The prompt on standard input, without the line ends that an `echo` adds. Raises ValueError for none."""
    prompt = read_stdin("the input").rstrip("\r\n")
    if not prompt:
        raise ValueError("the prompt comes from standard input, and that is empty; give at least one character.")
    return prompt


def read_file(option: str, path: str, most: int = PROMPT_BYTES) -> str:
    """The text of a file in UTF-8. Raises ValueError, naming the option, for one that cannot be read or is no text."""
    try:
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read ({error.strerror}); name another file.") from None
    if len(content) > most:
        raise ValueError(f"{option} {path} is longer than {most // MIB} MiB; name a shorter file.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _no_text(error, f"{option} {path}") from None


def _no_text(error: UnicodeDecodeError, named: str) -> ValueError:
    return ValueError(f"{named} must be {error.encoding} text, got byte {error.start} of another kind.")
