"""The pages of sparse targets where nobody says how large: what kernels of groups want, if no block is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.engine.loading import Models, usual_page_size
from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.nsa import NSA
from smcjax.sparse import SparseVerification
from tests.helpers import tiny_config

DENSE = tiny_config(64, dtype="bfloat16")


def sparse(**options: Any) -> ModelConfig:
    return dataclasses.replace(DENSE, layers=(LayerSpec(NSA(**options)), LayerSpec()))


def usual(*decodings: Decoding, target: ModelConfig, draft: ModelConfig | None = None, by: str = "mosaic") -> int:
    nothing: Any = None
    return usual_page_size(decodings, Models(nothing, target, nothing, draft), by)


def test_kernels_of_groups_want_eight_compressed_tokens_a_page() -> None:
    for decoding in (
        Autoregressive,
        lambda sparse: Rejection(4, sparse=sparse),
        lambda sparse: SMC(4, 2, sparse=sparse),
    ):
        assert usual(decoding(SparseVerification("merged", 1)), target=sparse()) == 128


def test_one_of_several_decoders_suffices() -> None:
    plain, grouped = Autoregressive(), Rejection(4, sparse=SparseVerification("merged", 2))
    assert usual(plain, grouped, target=sparse(), draft=DENSE) == 128
    assert usual(plain, Rejection(4), target=sparse(), draft=DENSE) == 16


@pytest.mark.parametrize(
    ("reading", "implementation"),
    [(None, "mosaic"), (SparseVerification(schedule=2), "mosaic"), (SparseVerification("merged", 2), "xla")],
)
def test_others_have_the_usual_pages(reading: SparseVerification | None, implementation: str) -> None:
    assert usual(Rejection(4, sparse=reading), target=sparse(), by=implementation) == 16
    assert usual(Rejection(4), target=DENSE, by=implementation) == 16


def test_pages_cut_no_block() -> None:
    cut = sparse(kernel_size=24, kernel_stride=24, block_size=48, num_blocks=4)
    reading = Rejection(4, sparse=SparseVerification("merged", 2))
    assert usual(reading, target=cut) == usual(reading, target=cut, draft=DENSE) == 16
    assert usual(reading, target=sparse(), draft=cut) == 16
