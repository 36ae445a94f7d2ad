"""Options that say how a sparse target verifies: the decoder that they make."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from smcjax.cli.options import add_decoding_options, decoding_from
from smcjax.decoders import SMC, Autoregressive, Rejection
from smcjax.sparse import SparseVerification

CASES: list[tuple[list[str], Any]] = [
    ([], SMC(gamma=4)),
    (["--sparse-mode", "merged"], SMC(gamma=4, sparse=SparseVerification("merged", 4))),
    (
        ["--sparse-mode", "shared", "--sparse-group", "8", "--approximate"],
        SMC(gamma=4, sparse=SparseVerification("shared", 8), approximate=True),
    ),
    (
        ["--decoding", "rejection", "--sparse-mode", "merged", "--sparse-order", "dfs", "--refresh", "1", "0", "1"],
        Rejection(sparse=SparseVerification("merged", 4, "dfs", (True, False, True))),
    ),
    (["--decoding", "autoregressive", "--refresh", "2"], Autoregressive(SparseVerification(schedule=2))),
]


@pytest.mark.parametrize(("words", "decoding"), CASES)
def test_options_make_the_decoder(words: list[str], decoding: Any) -> None:
    parser = argparse.ArgumentParser()
    add_decoding_options(parser, gamma=4)
    assert decoding_from(parser.parse_args(words)) == decoding
