"""One pair on disk and the few `LLM`s that most engine tests share: what costs here is compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from smcjax import LLM, SMC, Autoregressive
from tests.checkpoints import Pair, write_pair
from tests.sizes import all_sizes

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


@pytest.fixture(scope="session")
def llm(pair: Pair) -> Iterator[LLM]:
    """N = 4, K = 3, no control, four requests at a time."""
    with all_sizes():
        llm = smc_llm(pair)
    with llm:
        yield llm


@pytest.fixture(scope="session")
def plain(pair: Pair) -> Iterator[LLM]:
    """The target alone, two requests at a time."""
    with all_sizes():
        llm = LLM(pair.target, decoding=Autoregressive(), max_model_len=MAX_MODEL_LEN, max_num_seqs=2, page_size=4)
    with llm:
        yield llm
