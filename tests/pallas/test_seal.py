"""No kernel changes unseen: what decoding lowers to for a GPU is what `tests/pallas/seal.py` has stored.

After a change that is meant: `uv run python -m tests.pallas.seal`, and the reason into the commit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.pallas.seal import CASES, STORED


@pytest.fixture(scope="module")
def lowered() -> dict[str, list[str]]:
    """Digests made in a process of their own: what was traced before in this one may be part of a kernel's names."""
    command = [sys.executable, "-m", "tests.pallas.seal", "--print"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not jax.__version__.startswith("0.11."), reason="another JAX lowers to other code")
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_those_that_were_stored(name: str, lowered: dict[str, list[str]]) -> None:
    assert lowered[name] == json.loads(STORED.read_text())[name]


@pytest.mark.slow
def test_another_kernel_has_another_digest(lowered: dict[str, list[str]]) -> None:
    """A control: four requests read and write by other kernels than one."""
    one, four = lowered["smc, 1 request"], lowered["smc, 4 requests"]
    assert len(set(four) - set(one)) > 10
    assert len(set(one)) == len(one) > 10
