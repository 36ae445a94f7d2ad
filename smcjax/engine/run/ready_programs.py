"""The programs that a running engine has, and those that it gets: compiled by a step, or in a thread beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from smcjax.decoding.program import Feature
from smcjax.engine.run.background import BackgroundCompiler
from smcjax.engine.run.features import ProgramVariants
from smcjax.engine.run.programs import Progress, shown
from smcjax.engine.run.runner import Runner
from smcjax.engine.schedule.clock import Clock
from smcjax.engine.schedule.scheduler import Scheduler


class ReadyPrograms:
    """The compiled programs of one engine, by size of the batch and features.

    Attributes:
        in_background: whether programs that are missing are compiled in another thread, while requests wait that need
            them and others run; else in the step that needs them. Tokens are the same either way.
        shows_progress: of programs that a step compiles.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, clock: Clock) -> None:
        self.in_background = self.shows_progress = False
        self._runner, self._scheduler, self._clock = runner, scheduler, clock
        self._variants = ProgramVariants()
        self._background = BackgroundCompiler(runner)

    def of_round(self, size: int, features: frozenset[Feature], joined: int) -> tuple[Any, str | None]:
        """The compiled program for `size` slots with these features; and why it is without them, if it is.

        Where groups join, `joined` counts all groups, for which a program of their own is wanted in the background.
        """
        program = self._runner.program
        if self.in_background:
            if joined:
                self._want([self._natural_size(joined)], features)
            found = self._variants.at(size, features)
            if found is not None:
                return dataclasses.replace(program, features=found), None
        return self._variants.ready(program, size, features, self.compile)

    def sizes(self, requests: int, features: frozenset[Feature]) -> list[int]:
        """Sizes of a batch for which programs are compiled that can run so many requests with these features.

        Where there are none, the largest is wanted, which takes in whatever comes; where nothing fits the device, they
        are admitted to be refused.
        """
        sizes, natural = self._variants.sizes(features), self._natural_size(requests)
        if requests <= max(sizes, default=0) or self._want([self._scheduler.sizes[-1], natural], features):
            return sizes
        return [natural]

    def compile(self, sizes: Sequence[int], program: Any, progress: Progress | None = None) -> None:
        """Compiles the missing programs of these sizes; the clocks of requests stand still meanwhile.

        Sizes that are ready have all moves between them, so none of these waits for a compilation.
        """
        began = time.perf_counter()
        try:
            self.wait()
            self.take()
            with contextlib.ExitStack() as stack:
                shows = progress or shown(stack, self.shows_progress)
                self._runner.compile(sizes, program, self._sizes_ready(), shows)
        finally:
            self._clock.stood_still(began)
        self._scheduler.ready.update(sizes)
        features = program.features
        while (size := self._variants.missing(sizes, features)) is not None:
            self._variants.register(size, features)

    def wait(self, seconds: float | None = None) -> None:
        """Waits until nothing is compiled in the background, for so many seconds at most."""
        self._background.wait(seconds)

    def take(self) -> None:
        """Registers programs that were compiled in the background."""
        compiled = self._background.take()
        if compiled is None:
            return
        size, program, error = compiled
        features = program.features
        if error is not None and not features:
            raise error
        self._variants.register(size, features, error)
        if error is None:
            self._scheduler.ready.add(size)

    def abandon(self) -> None:
        """Begins no further program in the background."""
        self._background.abandon()

    def _natural_size(self, count: int) -> int:
        return next(size for size in self._scheduler.sizes if size >= count)

    def _want(self, sizes: list[int], features: frozenset[Feature]) -> bool:
        """Begins to compile for the first of the sizes that is not compiled, unless anything is being compiled.

        False where it has been tried for all of them.
        """
        features = self._variants.shared(features)
        size = self._variants.missing(sizes, features)
        if size is not None and not self._background.busy:
            program = dataclasses.replace(self._runner.program, features=features)
            self._background.begin(size, program, self._sizes_ready())
        return size is not None

    def _sizes_ready(self) -> set[int]:
        """Sizes from and to which a batch may move."""
        return self._scheduler.ready | ({self._runner.size} - {0})
