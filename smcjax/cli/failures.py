"""Errors of commands: the sentence that is printed, and if the user's arguments are to blame."""

from __future__ import annotations

import logging
import os

from smcjax.errors import CheckpointError

PLUGIN_LOG = "jax._src.xla_bridge"  # where JAX says which of its plugins it cannot use
FILTERING = "JAX_TRACEBACK_FILTERING"  # which we set ourselves
_EXPECTED = (ValueError, OSError, RuntimeError, MemoryError, ImportError)


class InputLineError(ValueError):
    """A line of a file of requests that cannot run; the message names the line, and fields as they stand there."""


def refuses(error: BaseException) -> bool:
    """True where the package itself refused an argument. A ValueError of JAX or NumPy is a failure, not wrong usage."""
    return isinstance(error, ValueError) and not isinstance(error, CheckpointError) and _is_ours(error)


def _is_ours(error: BaseException) -> bool:
    """True where one of the package's own functions raised the error."""
    traceback, module = error.__traceback__, ""
    while traceback is not None:
        module, traceback = traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_next
    return module.partition(".")[0] == "smcjax"


def jax_settings() -> str:
    """The JAX settings that the environment holds, "" where there are none."""
    return ", ".join(
        f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("JAX_") and name != FILTERING
    )


def sentence(error: Exception) -> str:
    """One line without what XLA appends; with the settings of JAX that may be behind an error of others."""
    text = " ".join(str(error).partition("=== Source Location Trace")[0].split()) or type(error).__name__
    if not isinstance(error, _EXPECTED):
        text = f"{type(error).__name__}: {text}"
    if len(text) > 500:
        text = text[:499] + "…"
    if _is_ours(error):
        return text
    if settings := jax_settings():
        text += f" (the environment sets {settings[:200]})"
    return text if isinstance(error, _EXPECTED) else f"{text}; --debug shows where"


def without_traceback(record: logging.LogRecord) -> bool:
    """Filters a log: a record with an error is one line, which says the error and what tells more."""
    if record.exc_info and record.exc_info[1] is not None:
        error = " ".join(str(record.exc_info[1]).split())
        record.msg, record.args = f"{record.getMessage()} ({error}); 'smcjax doctor' says more.", ()
        record.exc_info = record.exc_text = None
    return True
