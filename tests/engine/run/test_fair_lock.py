"""A lock that comes round: who waits has it before whoever has just had it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from smcjax.engine.run.fair_lock import FairRLock


def test_who_waits_comes_before_who_takes_it_again() -> None:
    """B waits at the door while A, who may take the lock within, holds it, lets go of it and wants it again."""
    turn, order = FairRLock(), []

    def other() -> None:
        with turn:
            order.append("B")

    thread = threading.Thread(target=other, daemon=True)
    with turn:
        order.append("A")
        assert not turn.wanted
        thread.start()
        given_up = time.monotonic() + 60
        while not turn.wanted:
            assert time.monotonic() < given_up, "nobody is seen to wait"
            time.sleep(0)
        with turn:
            assert turn.wanted
        assert order == ["A"], "an inner block lets nobody in"
    with turn:
        order.append("A")
    thread.join()
    assert order == ["A", "B", "A"]
    assert not turn.wanted


def test_an_error_within_lets_go_of_it() -> None:
    turn, had = FairRLock(), []
    with pytest.raises(ValueError, match="within"), turn, turn:
        raise ValueError("within")
    thread = threading.Thread(target=lambda: had.append(turn.acquire(timeout=60)))
    thread.start()
    thread.join()
    assert had == [True]


LATE = """
import threading, time
from smcjax.engine.run.fair_lock import FairRLock, start_thread

turn, begun = FairRLock(), threading.Event()

def late():
    time.sleep(0.3)
    print("ended", flush=True)

def step():
    with turn:
        {start}
        begun.set()
        time.sleep(0.1)

threading.Thread(target=step, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize(
    ("start", "said"),
    [("start_thread(late)", "ended"), ("threading.Thread(target=late, daemon=True).start()", "")],
    ids=["awaited", "control"],
)
def test_the_interpreters_end_waits_for_threads_that_its_last_steps_start(start: str, said: str) -> None:
    script = LATE.replace("{start}", start)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == said
