"""The process of a command: streams that may be closed or go away, and Ctrl-C, which ends it whatever XLA is doing."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading

from smcjax.cli.failures import FILTERING

_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_ending = threading.Lock()


def main() -> int:
    """Runs the command line of this process and returns its exit code."""
    closed = _open_descriptors()
    _end_on_interrupt()
    sys.stderr = _remarks()
    if sys.stdout is not None:
        raw = io.BufferedWriter(_Answers(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(raw, sys.stdout.encoding, line_buffering=os.isatty(1))
    if 1 in closed:
        print("smcjax: error: standard output is closed; redirect it, to /dev/null if need be.", file=sys.stderr)
        return 1
    # Tracebacks as they are: an error of JAX would otherwise seem to come from the function of ours that called it.
    os.environ.setdefault(FILTERING, "off")
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


def _remarks() -> io.TextIOWrapper:
    encoding = getattr(sys.stderr, "encoding", "utf-8")
    raw = _Unfailing(2, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding, "backslashreplace", line_buffering=True, write_through=True)


def _end_on_interrupt() -> None:
    """Ends the process at a Ctrl-C, with one word.

    XLA compiles and runs outside of Python for seconds, and Python's handlers wait until it returns; an exception may
    then surface anywhere, in a callback or a destructor too. So a thread hears of the signal by a pipe, and nothing is
    unwound: the system takes everything back, and files that commands write are never half there.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job, which a Ctrl-C is not meant for
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: _end())
    threading.Thread(target=_listen, args=(heard,), daemon=True).start()


def _listen(heard: int) -> None:
    while signal.SIGINT not in os.read(heard, 64):
        pass
    _end()


def _end() -> None:
    """The word, unless nobody can be told it now, and the end. Whoever comes second leaves it to the first."""
    if not _ending.acquire(blocking=False):
        return
    with contextlib.suppress(OSError):
        word = b"\nsmcjax: interrupted\n" if os.isatty(2) else b"smcjax: interrupted\n"
        if select.select([], [2], [], 0)[1]:
            os.write(2, word)
    os._exit(_INTERRUPTED)
