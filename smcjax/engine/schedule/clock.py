"""The clock by which requests are timed: compiling counts for no request."""

from __future__ import annotations

import time

SHORT = 1e-3  # seconds; no program compiles in less


class Clock:
    """Seconds of `time.perf_counter`, less those in which programs were compiled. Plain Python."""

    def __init__(self) -> None:
        self._stops: list[tuple[float, float]] = []

    def at(self, moment: float | None = None) -> float:
        """Returns the clock's reading at a moment of `time.perf_counter` that has passed; None: now."""
        moment = time.perf_counter() if moment is None else moment
        return moment - sum(max(0.0, min(end, moment) - begin) for begin, end in self._stops)

    def stood_still(self, begin: float) -> None:
        """From this moment of `time.perf_counter` until now; not where nothing was missing."""
        end = time.perf_counter()
        if end - begin > SHORT:
            self._stops.append((begin, end))
