"""A fair re-entrant lock, and how threads that use JAX end with the interpreter.

A thread that is killed within XLA aborts the process. So the end of the interpreter takes all fair locks for good and
waits for the threads of `start_thread`. In a fork of the process, in whose copy of JAX every call hangs, no fair lock
can be taken.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from _thread import RLock
from collections.abc import Callable
from typing import Any

_all: weakref.WeakSet[FairRLock] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_used = _forked = False  # whether there has been any, and whether that was in a process that this one is a fork of


def require_own_process() -> None:
    """Raises RuntimeError in a fork of a process in which there was a fair lock, and so an engine."""
    if _forked:
        raise RuntimeError(
            "this process is a fork of one that has made an LLM, and JAX cannot be used in it; start processes by "
            "multiprocessing.get_context('spawn'), and make an LLM there."
        )


def _note_fork() -> None:
    global _forked
    _forked = _used


def start_thread(work: Callable[..., None], *arguments: Any) -> None:
    """Starts a daemon thread that uses JAX, under a fair lock. The end of the interpreter waits for it."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    _threads.add(thread)  # at the interpreter's end none can be started


def _take_all() -> None:
    """Waits for the steps that are in progress, then for threads that these have started; no further step begins."""
    if _forked:
        return
    for turn in list(_all):
        turn.__enter__()
    for thread in list(_threads):
        thread.join()


os.register_at_fork(after_in_child=_note_fork)
atexit.register(_take_all)


class FairRLock(RLock):  # type: ignore[misc]  # final in annotations only
    """A re-entrant lock for `with` that goes to threads in turn: its last holder comes behind those that wait.

    One thread at a time stands at the door and waits for the lock, and all others have to pass there. A plain lock goes
    to who asks first when it is free, which is nearly always the thread that has just let go of it.
    """

    def __init__(self) -> None:
        global _used
        require_own_process()
        self._door = threading.Lock()
        _all.add(self)
        _used = True

    @property
    def wanted(self) -> bool:
        """True while a thread that does not hold the lock stands at the door."""
        return self._door.locked()

    # Leaving is the lock's own `__exit__`, in C, so that no interruption comes between.
    def __enter__(self) -> bool:  # type: ignore[override]
        require_own_process()
        if self._mine():
            return self.acquire()
        try:
            with self._door:
                return self.acquire()
        except BaseException:  # an interruption, which may have come behind
            if self._mine():
                self.release()
            raise

    def _mine(self) -> bool:
        return bool(self._is_owned())  # type: ignore[attr-defined]  # which `threading.Condition` asks for
