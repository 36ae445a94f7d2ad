"""Errors that users see. Bad input raises `ValueError`; what is wrong with a directory on disk has its own name."""

from collections.abc import Collection


class CheckpointError(ValueError):
    """A model directory that cannot be used; the message is one sentence that names the file and the mend."""


class ExtraMissing(ValueError):
    """A request asks for something whose package an optional extra brings, and that package is not installed."""


class RequestsLost(RuntimeError):
    """Requests that were in flight when a step failed, which ends them all; raised to the callers that wait."""

    def __init__(self, names: Collection[str]) -> None:
        which = f"request {next(iter(names))} is" if len(names) == 1 else f"requests {', '.join(sorted(names))} are"
        super().__init__(f"{which} gone: an error elsewhere ended everything in flight.")


class QueueFull(RuntimeError):
    """A request would be one too many of those that wait; it may come again when others have been answered."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(f"{max_waiting} requests may wait and as many do; ask again later, or raise max_waiting.")


def extra_missing(what: str, package: str, extra: str) -> str:
    """The sentence of every feature whose package an optional extra brings, without its full stop."""
    return (
        f"{what} needs {package}, which is not installed; run 'uv run --extra {extra} smcjax ...', or install "
        f"smc-sd-jax with its extra '{extra}'"
    )
