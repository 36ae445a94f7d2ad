"""A soak in small: `scripts/soak.py` runs the long one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.checkpoints import Pair
from tests.engine.conftest import smc_llm

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))

import soak


@pytest.mark.slow
def test_three_hundred_requests_leave_nothing_behind(pair: Pair) -> None:
    with smc_llm(pair, smc={"trace": False}, num_pages=60, max_num_seqs=2) as llm:
        soak.warm(llm, ["a", "bc", "a longer prompt"])
        report = soak.soak(llm, 300, ["a", "bc", "a longer prompt"])
        assert (report.ended, report.errors, report.compiled, report.pages_missing) == (300, 0, 0, 0)
        assert report.aborted > 5
        assert report.grown_bytes < 1 << 20
