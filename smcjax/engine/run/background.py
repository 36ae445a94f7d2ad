"""Programs compiled in a thread beside the engine, which goes on with those that it has."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

from smcjax.engine.run.fair_lock import start_thread
from smcjax.engine.run.runner import Runner

_one = threading.Lock()  # held by the only compilation of all engines: they, and who serves them, have the other cores


class Abandoned(Exception):
    """The engine is closed, and does not need what is being compiled."""


class BackgroundCompiler:
    """One compilation at a time, of programs of one runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._wanted: tuple[int, Any] | None = None
        self._under_way = Future[None]()
        self._abandoned = False

    @property
    def busy(self) -> bool:
        """True from `begin` until `take`."""
        return self._wanted is not None

    def begin(self, size: int, program: Any, others: set[int]) -> None:
        """Begins to compile a program for `size` slots, and moves between this and other sizes of a batch.

        Nothing else may be under way.
        """
        assert not self.busy
        self._wanted, self._under_way = (size, program), Future()
        start_thread(self._work, self._under_way, size, program, others)

    def wait(self, seconds: float | None = None) -> None:
        """Waits until nothing is under way, for so many seconds at most."""
        if self.busy:
            wait([self._under_way], seconds)

    def take(self) -> tuple[int, Any, ValueError | None] | None:
        """Returns a finished compilation once: its size, its program, and the error if it does not fit; else None.

        Raises what else kept the program from being compiled.
        """
        if self._wanted is None or not self._under_way.done():
            return None
        (size, program), self._wanted = self._wanted, None
        error = self._under_way.exception()
        if error is not None and not isinstance(error, ValueError):
            raise error
        return size, program, error

    def abandon(self) -> None:
        """Begins no further program. What XLA is at goes on, and is waited for when the interpreter ends."""
        self._abandoned = True

    def _work(self, under_way: Future[None], size: int, program: Any, others: set[int]) -> None:
        try:
            with _one, _without_full_collections():
                self._runner.compile([size], program, others, self._go_on)
            _give_back()
        except BaseException as error:
            under_way.set_exception(error)
        else:
            under_way.set_result(None)

    def _go_on(self, done: int, of: int) -> None:
        if self._abandoned:
            raise Abandoned


@contextlib.contextmanager
def _without_full_collections() -> Iterator[None]:
    """Collections of garbage leave out what is old: all threads stand still for them, for long amid a large trace."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


def _give_back() -> None:
    """Has the C library return memory that XLA's compiler has freed, which it keeps otherwise: gigabytes over time."""
    with contextlib.suppress(OSError, AttributeError):  # another system's C library
        ctypes.CDLL(None).malloc_trim(0)
