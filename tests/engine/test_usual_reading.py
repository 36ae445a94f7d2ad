"""How a sparse target is read, and in which pages, where nobody says: in groups by kernels, or each query by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smcjax.decoders import SMC, Autoregressive, Rejection
from smcjax.engine.loading import usual_page_size, usual_reading
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


@pytest.mark.parametrize(
    ("decoding", "group"),
    [(Autoregressive(), 1), (Rejection(4), 16), (Rejection(4, n_candidates=2), 16), (SMC(4, 2), 16)],
)
def test_kernels_read_in_groups_that_compute_the_same(decoding: Any, group: int) -> None:
    found = usual_reading(decoding, sparse(), "mosaic")
    assert found == dataclasses.replace(decoding, sparse=SparseVerification("merged", group))
    assert found.speculation.sparse.precision == "strict"
    assert usual_page_size(found, sparse(), "mosaic") == 128


@pytest.mark.parametrize(
    ("target", "implementation"),
    [
        (DENSE, "mosaic"),
        (sparse(), "xla"),
        (sparse(), "auto"),  # on a CPU
        (dataclasses.replace(sparse(), dtype="float32"), "mosaic"),
        (dataclasses.replace(sparse(), head_dim=96), "mosaic"),
    ],
)
def test_without_kernels_nothing_is_grouped(target: ModelConfig, implementation: str) -> None:
    decoding = Rejection(4)
    assert usual_reading(decoding, target, implementation) is decoding
    assert usual_page_size(decoding, target, implementation) == 16


def test_what_is_asked_for_stays() -> None:
    for asked in (SparseVerification(), SparseVerification(schedule=2), SparseVerification("merged", 2)):
        decoding = Rejection(4, sparse=asked)
        assert usual_reading(decoding, sparse(), "mosaic") is decoding


def test_pages_cut_no_block() -> None:
    target = sparse(kernel_size=24, kernel_stride=24, block_size=48, num_blocks=4)
    decoding = Rejection(4, sparse=SparseVerification("merged", 2))
    assert usual_page_size(decoding, target, "mosaic") == 16
    assert usual_page_size(decoding, sparse(), "xla") == 16
