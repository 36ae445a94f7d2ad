"""Engines whose programs are compiled when they are first called, which most of them never are in a test."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import pytest

from smcjax.engine.run import programs

_compiled = programs._compiled
Patch = Callable[..., None]


class Later:
    """An executable as `smcjax.engine.run.programs` makes it, of which nothing is traced before it is asked for."""

    _pending: ClassVar[weakref.WeakSet[Later]] = weakref.WeakSet()

    def __init__(self, *arguments: Any) -> None:
        self._make: Callable[[], Any] | None = lambda: _compiled(*arguments)
        self._made: Any = None
        self._lock = threading.Lock()
        Later._pending.add(self)

    def executable(self) -> Any:
        """Compiles in a thread of its own, as engines do: what the calling thread has set does not reach a trace."""
        with self._lock:
            if self._make is not None:
                self._made, self._make = _in_a_thread(self._make), None
                Later._pending.discard(self)
        return self._made

    def __call__(self, *arguments: Any) -> Any:
        return self.executable()(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executable(), name)

    @classmethod
    def none_is_left(cls) -> None:
        """Compiles all that waits."""
        for later in list(cls._pending):
            later.executable()


def _in_a_thread(make: Callable[[], Any]) -> Any:
    made: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # the caller's
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


@contextlib.contextmanager
def lazily() -> Iterator[None]:
    """Programs of engines that compile within wait for their first call. No memory is asked for beforehand."""
    before = programs._compiled, programs._require_memory

    def no_memory(what: str, executables: Iterable[Any], whose: programs.Programs) -> int:
        return 0

    programs._compiled, programs._require_memory = Later, no_memory
    try:
        yield
    finally:
        programs._compiled, programs._require_memory = before


@contextlib.contextmanager
def program_patches(*first: Any) -> Iterator[Patch]:
    """Yields `patch(target, name, value)` for what programs are made of; a first one may be given at once.

    A program has the patches of the time when an engine asked for it, and none is shared across a patch or its end.
    """

    def patch(*what: Any) -> None:
        Later.none_is_left()
        patches.setattr(*what)
        programs._shared.clear()

    with pytest.MonkeyPatch.context() as patches:
        try:
            if first:
                patch(*first)
            yield patch
            Later.none_is_left()
        finally:
            patches.undo()
            programs._shared.clear()
