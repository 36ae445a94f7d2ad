"""`Turnstile`: a lock that a thread which takes it again and again leaves to those who wait."""

from __future__ import annotations

import threading
from _thread import RLock


class Turnstile(RLock):  # type: ignore[misc]  # final in annotations only
    """A re-entrant lock for `with`, whose holder comes behind those who wait when it wants the lock again.

    One thread at a time stands at the door and waits for the lock, and whoever wants it has to pass there. A plain lock
    goes to who asks first when it is free, which is nearly always the thread that has just let go of it.
    """

    def __init__(self) -> None:
        self._door = threading.Lock()

    @property
    def wanted(self) -> bool:
        """True while a thread that does not hold the lock stands at the door."""
        return self._door.locked()

    # Leaving is the lock's own `__exit__`, in C, so that no interruption comes between.
    def __enter__(self) -> bool:  # type: ignore[override]
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
