"""Engines whose programs are compiled when they are first called, which most of them never are in a test."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from smcjax.engine.run import programs

_compiled = programs._compiled
Patch = Callable[..., None]


class Patched(NamedTuple):
    """An attribute of what programs are made of, as it was before a patch, and as the patch has it."""

    target: Any
    name: str
    before: Any
    value: Any


_patches: list[Patched] = []  # in force, the first one first
_others = threading.Lock()  # held by who computes by patches that are not in force


class Later:
    """An executable as `smcjax.engine.run.programs` makes it, of which nothing is traced before it is asked for."""

    def __init__(self, *arguments: Any) -> None:
        self._make: Callable[[], Any] | None = lambda: _compiled(*arguments)
        self._made: Any = None
        self._lock = threading.Lock()
        self._patches = [*_patches]

    def executable(self) -> Any:
        """Compiles in a thread of its own, as engines do: what the calling thread has set does not reach a trace."""
        with self._lock:
            if self._make is not None:
                with _patched(self._patches):
                    self._made, self._make = _in_a_thread(self._make), None
        return self._made

    def __call__(self, *arguments: Any) -> Any:
        return self.executable()(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executable(), name)

    @classmethod
    def none_is_left(cls, of: programs.Programs) -> None:
        """Compiles all of these that wait."""
        for later in of.values():
            if isinstance(later, Later):
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
def _patched(wanted: list[Patched]) -> Iterator[None]:
    """With these patches, and none of those that are in force beside them."""
    if list(map(id, wanted)) == list(map(id, _patches)):
        yield
        return
    with _others, pytest.MonkeyPatch.context() as patches:
        for one in reversed(_patches):
            patches.setattr(one.target, one.name, one.before)
        for one in wanted:
            patches.setattr(one.target, one.name, one.value)
        yield


@contextlib.contextmanager
def program_patches(*first: Any) -> Iterator[Patch]:
    """Yields `patch(target, name, value)` for what programs are made of; a first one may be given at once.

    A program has the patches of the time when an engine asked for it, and none is shared across a patch or its end.
    """
    own: list[Patched] = []

    def patch(target: Any, name: str, value: Any) -> None:
        before = inspect.getattr_static(target, name) if inspect.isclass(target) else getattr(target, name)
        own.append(Patched(target, name, before, value))
        patches.setattr(target, name, value)
        _patches.append(own[-1])
        programs._shared.clear()

    with pytest.MonkeyPatch.context() as patches:
        try:
            if first:
                patch(*first)
            yield patch
        finally:
            patches.undo()
            _patches[:] = [one for one in _patches if not any(one is ended for ended in own)]
            programs._shared.clear()
