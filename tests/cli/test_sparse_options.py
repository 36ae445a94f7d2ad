"""Options that say how a sparse target verifies: the decoder that they make."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from smcjax.auto import Routed
from smcjax.cli.options import add_decoding_options, add_model_options, decoding_from, refresh_schedule
from smcjax.decoders import SMC, Autoregressive, Rejection
from smcjax.sparse.verification import SparseVerification

CASES: list[tuple[list[str], Any]] = [
    ([], Routed(SMC(gamma=4))),
    (["--sparse-mode", "merged"], Routed(SMC(gamma=4, sparse=SparseVerification("merged", 4)))),
    (
        ["--sparse-mode", "shared", "--sparse-group", "8", "--approximate"],
        Routed(SMC(gamma=4, sparse=SparseVerification("shared", 8), approximate=True)),
    ),
    (
        ["--decoding", "rejection", "--sparse-mode", "merged", "--sparse-order", "dfs", "--refresh", "1,0,1"],
        Rejection(sparse=SparseVerification("merged", 4, "dfs", (True, False, True))),
    ),
    (["--decoding", "autoregressive", "--refresh", "2"], Autoregressive(SparseVerification(schedule=2))),
]


@pytest.mark.parametrize("said", ["0", "-1", "1.5", "", ",", "1,", "0,1", "1,2", "101,", "1, 0", "one", "9" * 5000])
def test_refresh_is_a_spacing_or_flags(said: str) -> None:
    """One sentence says so of everything else. Controls: what is either."""
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"^must be a spacing of at least 1, or 1 or 0 for .*, got "
    ) as e:
        refresh_schedule(said)
    assert len(str(e.value)) < 160
    assert [refresh_schedule(one) for one in ("1", "3", "1,1", "1,0,0")] == [1, 3, (True, True), (True, False, False)]


@pytest.mark.parametrize(("words", "decoding"), CASES)
def test_options_make_the_decoder(words: list[str], decoding: Any) -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    add_decoding_options(parser, gamma=4)
    assert decoding_from(parser.parse_args(words)) == decoding
