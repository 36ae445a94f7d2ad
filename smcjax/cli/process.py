"""The process of a command: streams that may be closed or go away, and Ctrl-C, which ends it whatever XLA is doing."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from smcjax.cli.failures import FILTERING
from smcjax.cli.interrupts import end_on_interrupt


def main() -> int:
    """Runs the command line of this process and returns its exit code."""
    closed = _open_descriptors()
    end_on_interrupt()
    encoding = getattr(sys.stderr, "encoding", "utf-8")
    remarks = _Unfailing(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(remarks, encoding, "backslashreplace", line_buffering=True, write_through=True)
    if sys.stdout is not None:
        raw = io.BufferedWriter(_Answers(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(raw, sys.stdout.encoding, line_buffering=os.isatty(1))
    if 1 in closed:
        print("smcjax: error: standard output is closed; redirect it, to /dev/null if need be.", file=sys.stderr)
        return 1
    # Tracebacks as they are: an error of JAX would otherwise seem to come from the function of ours that called it.
    os.environ.setdefault(FILTERING, "off")
    # XLA logs that a compilation is slow, as an error; what fails raises.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from smcjax.cli.main import main as run  # not before the process is in order

    return run()


def _open_descriptors() -> set[int]:
    """Opens what is closed of 0, 1 and 2 on nothing, and says which: the next file would else take that number."""
    closed = set()
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            closed.add(descriptor)
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free
    return closed


class _Unfailing(io.FileIO):
    """Standard error, whose reader may go away or disk be full: no reason to lose an answer."""

    def write(self, data: object) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)  # type: ignore[arg-type]
        return memoryview(data).nbytes  # type: ignore[arg-type]


class _Answers(io.FileIO):
    """Standard output, whose errors say that they are its own."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:  # the reader has gone: nothing to say
            raise
        except OSError as error:
            raise OSError(f"standard output cannot be written ({error.strerror}).") from None
