"""One pair on disk and the few `LLM`s that most engine tests share: what costs here is compilation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smcjax import LLM, SMC, AsyncLLM, Autoregressive, Rejection
from tests.checkpoints import Pair, write_pair
from tests.sizes import all_sizes, one_size

MAX_MODEL_LEN = 48


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
                if name == "llm":
                    return stack.enter_context(smc_llm(pair))
                changes: dict[str, Any] = {"draft_model": None, "decoding": Autoregressive()}
                if name == "rejecting":
                    changes = {"decoding": Rejection(gamma=3, n_candidates=2)}
                return stack.enter_context(LLM(**llm_arguments(pair, max_num_seqs=2, **changes)))

        yield made


def _sized(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("all_sizes") is not None


@pytest.fixture(scope="module")
def llm(_shared: Make, request: pytest.FixtureRequest) -> LLM:
    """N = 4, K = 3, no control, four requests at a time; the session's, of the sizes that the file has."""
    return _shared("llm", _sized(request))


@pytest.fixture(scope="module")
def plain(_shared: Make, request: pytest.FixtureRequest) -> LLM:
    """The target alone, two requests at a time; the session's, of the sizes that the file has."""
    return _shared("plain", _sized(request))


@pytest.fixture(scope="module")
def rejecting(_shared: Make, request: pytest.FixtureRequest) -> LLM:
    """K = 3, two candidates, two requests at a time; the session's, of the sizes that the file has."""
    return _shared("rejecting", _sized(request))
