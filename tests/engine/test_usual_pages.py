"""The pages of sparse targets where nobody says how large: what kernels of groups want, if no block is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smcjax.decoders import SMC, Autoregressive, Rejection
from smcjax.engine.loading import usual_page_size
from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.nsa import NSA
from smcjax.sparse import SparseVerification

DENSE = ModelConfig(
    vocab_size=64,
    hidden_size=256,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    dtype="bfloat16",
    max_position_embeddings=1024,
)


def sparse(**options: Any) -> ModelConfig:
    return dataclasses.replace(DENSE, layers=(LayerSpec(NSA(**options)), LayerSpec()))


def test_kernels_of_groups_want_eight_compressed_tokens_a_page() -> None:
    for decoding in (
        Autoregressive,
        lambda sparse: Rejection(4, sparse=sparse),
        lambda sparse: SMC(4, 2, sparse=sparse),
    ):
        assert usual_page_size(decoding(SparseVerification("merged", 1)), sparse(), "mosaic") == 128


@pytest.mark.parametrize(
    ("reading", "implementation"),
    [(None, "mosaic"), (SparseVerification(schedule=2), "mosaic"), (SparseVerification("merged", 2), "xla")],
)
def test_others_have_the_usual_pages(reading: SparseVerification | None, implementation: str) -> None:
    assert usual_page_size(Rejection(4, sparse=reading), sparse(), implementation) == 16
    assert usual_page_size(Rejection(4), DENSE, implementation) == 16


def test_pages_cut_no_block() -> None:
    target = sparse(kernel_size=24, kernel_stride=24, block_size=48, num_blocks=4)
    assert usual_page_size(Rejection(4, sparse=SparseVerification("merged", 2)), target, "mosaic") == 16
