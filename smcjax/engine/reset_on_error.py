"""Methods that run to their end or leave nothing, however often they are interrupted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, Protocol


class Resettable(Protocol):
    """An object whose state several statements change together."""

    dirty: bool  # a change has begun and not ended

    def reset(self) -> None:
        """Gives the state up, also one that an earlier reset has given up in part, and clears `dirty` last."""


def reset_on_error[S: Resettable, **P, T](method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """The method, after which the object is as it should be, or reset, whatever raises within.

    An interruption that strikes while the object is being reset leaves it `dirty`; the next call resets it first.
    """

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.dirty:
            self.reset()
        self.dirty = True
        try:
            result = method(self, *args, **kwargs)
            self.dirty = False
        except BaseException:
            self.reset()
            raise
        return result

    return call
