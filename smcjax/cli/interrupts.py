"""Ctrl-C: it ends the process whatever XLA is doing, except where a conversation takes it for itself."""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import threading
from collections.abc import Iterator

_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
_MARK = b"\0"  # no signal has this number


class _Use(enum.Enum):
    """Decides what a Ctrl-C does."""

    END = enum.auto()  # ends the process
    ANSWER = enum.auto()  # ends the answer; once more, the process
    LINE = enum.auto()  # raises KeyboardInterrupt in the main thread, so that readline gives the terminal back


class _State:
    use = _Use.END
    stderr = 2
    pipe: int | None = None  # what the listening thread hears by; None: no thread listens, Python's own handling holds
    stopped = threading.Event()  # the answer's end has been asked for
    marked = threading.Event()  # the listener has come as far as the mark
    ending = threading.Lock()


def end_on_interrupt() -> None:
    """Ends the process at a Ctrl-C, with one word.

    XLA compiles and runs outside of Python for seconds, and Python's handlers wait until it returns; an exception may
    then surface anywhere, in a callback or a destructor too. So a thread hears of the signal by a pipe, and nothing is
    unwound: the system takes everything back, and files that commands write are never half there.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job, which a Ctrl-C is not meant for
        return
    _State.stderr = os.dup(2)  # 2 itself may lead to a file for a while, as where a tokenizer is tried
    heard, _State.pipe = os.pipe()
    os.set_blocking(_State.pipe, False)
    signal.set_wakeup_fd(_State.pipe, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _handle)
    threading.Thread(target=_listen, args=(heard,), daemon=True).start()


@contextlib.contextmanager
def ends_answer() -> Iterator[threading.Event]:
    """Within it the first Ctrl-C sets the event that it yields, and only the next one ends the process."""
    _State.stopped.clear()
    with _used_for(_Use.ANSWER):
        yield _State.stopped


def ends_line() -> contextlib.AbstractContextManager[None]:
    """Within it a Ctrl-C raises KeyboardInterrupt, in the main thread."""
    return _used_for(_Use.LINE)


@contextlib.contextmanager
def _used_for(use: _Use) -> Iterator[None]:
    _State.use = use
    try:
        yield
    finally:
        if _State.pipe is not None:  # what came until now was meant for `use`: let the listener see all of it
            _State.marked.clear()
            os.write(_State.pipe, _MARK)
            _State.marked.wait()
        _State.use = _Use.END


def _handle(*_: object) -> None:
    """The main thread's part, whenever Python comes to it."""
    if _State.use is _Use.LINE:
        raise KeyboardInterrupt
    if _State.use is _Use.END:
        _end()


def _listen(heard: int) -> None:
    while True:
        for number in os.read(heard, 64):
            if number == _MARK[0]:
                _State.marked.set()
            elif number != signal.SIGINT or _State.use is _Use.LINE:
                continue
            elif _State.use is _Use.ANSWER and not _State.stopped.is_set():
                _State.stopped.set()
            else:
                _end()


def _end() -> None:
    """Says the word, unless standard error is closed, and ends. A second call leaves it to the first."""
    if not _State.ending.acquire(blocking=False):
        return
    with contextlib.suppress(OSError):
        word = b"\nsmcjax: interrupted\n" if os.isatty(_State.stderr) else b"smcjax: interrupted\n"
        if select.select([], [_State.stderr], [], 0)[1]:
            os.write(_State.stderr, word)
    os._exit(_INTERRUPTED)
