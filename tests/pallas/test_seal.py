"""No kernel changes unseen: what decoding lowers to for a GPU is what `tests/pallas/seal.py` has stored.

After a change that is meant: `uv run python -m tests.pallas.seal`, and the reason into the commit.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from smcjax import smc
from tests.pallas.seal import CASES, STORED, digests


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_those_that_were_stored(name: str) -> None:
    assert digests(CASES[name]) == json.loads(STORED.read_text())[name]


@pytest.mark.slow
def test_another_kernel_has_another_digest() -> None:
    """A control: seven particles read and write by other kernels than eight."""
    other = dataclasses.replace(CASES["smc, 1 request"], decoding=smc.SMC(7, 8))
    stored = json.loads(STORED.read_text())["smc, 1 request"]
    assert len(set(digests(other)) - set(stored)) > 10
    assert len(set(stored)) == len(stored) > 10
