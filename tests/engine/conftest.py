"""One pair on disk and the few `LLM`s that most engine tests share: what costs here is compilation."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import LLM, SMC, AsyncLLM, Autoregressive, Rejection
from smcjax.engine.engine import Engine
from smcjax.engine.schedule.page_budget import FreePages
from smcjax.kv import allocate
from tests.checkpoints import Pair, write_pair
from tests.sizes import all_sizes, one_size

MAX_MODEL_LEN = 48
CONTROLLED: dict[str, Any] = {"control": 0.1, "trace": False}
PIPELINED: dict[str, Any] = {"pipelined": True, "trace": False}
SMC_LLMS: dict[str, dict[str, Any]] = {"llm": {}, "controlled": CONTROLLED, "pipelined": PIPELINED}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def llm_arguments(pair: Pair, **changes: Any) -> dict[str, Any]:
    """The arguments that the tests' `LLM`s of the pair have, but for the changes."""
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, "page_size": 4}
    return {"model": pair.target, "draft_model": pair.draft, **sizes, **changes}


def smc_llm(pair: Pair, smc: dict[str, Any] | None = None, **changes: Any) -> LLM:
    """An `LLM` as `llm` below, but for the changes."""
    decoding = SMC(**{"n_particles": 4, "gamma": 3, "trace": True, "control": 0.0, **(smc or {})})
    return LLM(**llm_arguments(pair, **{"decoding": decoding, **changes}))


_allocate = jax.jit(allocate)
held_back = weakref.WeakKeyDictionary[Engine, np.ndarray]()  # pages that `lend` keeps from requests


def lend(llm: LLM, pages: int) -> LLM:
    """Returns the same `LLM`, whose engine forgets all, and whose requests have so many pages from now on.

    An engine that is made with so few would compile programs of its own. This one believes that groups use nothing of
    their worst case, so that it admits whom it can where admission is optimistic.
    """
    engine, runner, scheduler = llm.engine, llm.engine.runner, llm.engine._scheduler
    kept = jnp.arange(runner.num_pages - 1) < runner.num_pages - 1 - pages

    def fewer(memory: Any) -> Any:
        return dataclasses.replace(memory, pool=_allocate(memory.pool, kept)[0])

    engine.reset()
    runner.take_memory = functools.partial(type(runner).take_memory, runner, fewer)  # now, and after each reset
    runner.take_memory()
    scheduler._pages, scheduler.free = pages, FreePages(pages)
    scheduler.free.utilization = 0.0
    held_back[engine] = np.flatnonzero(runner.memory.pool.refcount)
    return llm


def make_async(pair: Pair, **changes: Any) -> AsyncLLM:
    """An `AsyncLLM` that is as `llm` below but for the changes."""
    decoding = SMC(n_particles=4, gamma=3, trace=True, control=0)
    return AsyncLLM(**llm_arguments(pair, decoding=decoding, **changes))


@pytest.fixture(scope="module")
def served(pair: Pair) -> Iterator[AsyncLLM]:
    """An `AsyncLLM` stays open until the file ends; event loops use it one after the other."""
    served = make_async(pair)
    yield served
    asyncio.run(served.close())


Make = Callable[[str, bool], LLM]


@pytest.fixture(scope="session")
def _shared(pair: Pair) -> Iterator[Make]:
    """The `LLM` of a name, with programs of all sizes or of one, which lives as long as the session."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def made(name: str, all_of_them: bool) -> LLM:
            with all_sizes() if all_of_them else one_size():
                if name in SMC_LLMS:
                    return stack.enter_context(smc_llm(pair, SMC_LLMS[name]))
                changes: dict[str, Any] = {"draft_model": None, "decoding": Autoregressive(), "max_num_seqs": 2}
                if name == "rejecting":
                    changes = {"decoding": Rejection(gamma=3, n_candidates=2)}
                elif name == "crowd":
                    changes["max_num_seqs"] = 64
                return stack.enter_context(LLM(**llm_arguments(pair, **changes)))

        yield made


@pytest.fixture(scope="module")
def _named(_shared: Make, request: pytest.FixtureRequest) -> Callable[[str], LLM]:
    """The `LLM` of a name for this file. It holds the programs that others like it will share, compiled or not yet."""
    every, at_once = (request.node.get_closest_marker(mark) for mark in ("all_sizes", "compiled_at_once"))

    def named(name: str) -> LLM:
        llm = _shared(name, every is not None)
        if every is None and at_once is None:
            llm.warm_up(use_tqdm=False)
        return llm

    return named


@pytest.fixture(scope="module")
def llm(_named: Callable[[str], LLM]) -> LLM:
    """N = 4, K = 3, no control, four requests at a time; the session's, of the sizes that the file has."""
    return _named("llm")


@pytest.fixture(scope="module")
def controlled(_named: Callable[[str], LLM]) -> LLM:
    """As `llm`, with a control and without traces; the session's."""
    return _named("controlled")


@pytest.fixture(scope="module")
def pipelined(_named: Callable[[str], LLM]) -> LLM:
    """As `llm`, pipelined and without traces; the session's."""
    return _named("pipelined")


@pytest.fixture(scope="module")
def plain(_named: Callable[[str], LLM]) -> LLM:
    """The target alone, two requests at a time; the session's, of the sizes that the file has."""
    return _named("plain")


@pytest.fixture(scope="module")
def crowd(_named: Callable[[str], LLM]) -> LLM:
    """The target alone, 64 requests at a time; the session's, for laws of many answers."""
    return _named("crowd")


@pytest.fixture(scope="module")
def rejecting(_named: Callable[[str], LLM]) -> LLM:
    """K = 3, two candidates, four requests at a time; the session's, of the sizes that the file has."""
    return _named("rejecting")
