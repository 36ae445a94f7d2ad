"""`smcjax` on a CPU that stands in for a GPU: its programs take a given time at least, while the host goes on.

    python scripts/stand_in_device.py MILLISECONDS serve …      # and any other command of smcjax

A cycle takes that long and reading a chunk of prompts ten times as long, one program after the other; an engine
enqueues a cycle before it reads the last one's results, as on a GPU. Tiny models compute in less. So a measurement says
how much the host does, and how long the device has to wait for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from smcjax.engine.engine import Engine
from smcjax.engine.run.runner import Runner

PREFILL = 10  # cycles that a chunk takes


def install(cycle_seconds: float) -> None:
    """Makes every engine of this process take its time."""
    busy_until = 0.0  # when all that is enqueued so far has run
    rounds: dict[tuple[Engine, int], float] = {}  # likewise what had been enqueued up to a step

    def takes(method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal busy_until
            result = method(*args)
            busy_until = max(busy_until, time.perf_counter()) + seconds
            return result

        return call

    init, enqueue, collect = Engine.__init__, Engine._enqueue, Engine._collect

    def _init(engine: Engine, *args: Any, **kwargs: Any) -> None:
        init(engine, *args, **{**kwargs, "overlap": True})

    def _enqueue(engine: Engine, schedule: Any) -> None:
        enqueue(engine, schedule)
        rounds[engine, engine._round] = busy_until

    def _collect(engine: Engine, last: int) -> Any:
        ready = [rounds.pop(key) for key in list(rounds) if key[0] is engine and key[1] <= last]
        missing = max(ready, default=0.0) - time.perf_counter()
        if missing > 0:
            time.sleep(missing)
            engine.seconds_waited += missing
        return collect(engine, last)

    for owner, name, instead in (
        (Runner, "step", takes(Runner.step, cycle_seconds)),
        (Runner, "prefill", takes(Runner.prefill, PREFILL * cycle_seconds)),
        (Engine, "__init__", _init),
        (Engine, "_enqueue", _enqueue),
        (Engine, "_collect", _collect),
    ):
        setattr(owner, name, instead)


if __name__ == "__main__":
    from smcjax.cli.process import main

    install(float(sys.argv.pop(1)) / 1e3)
    sys.exit(main())
