"""Sparse targets where nobody says how they are read: in groups by kernels, and in pages that these want."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smcjax import LLM
from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.engine.load.defaults import default_page_size, default_sparse_mode
from smcjax.engine.load.loading import Models
from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.pallas.sparse.grouped_attention import grouped_branches
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SparseVerification
from tests.helpers import tiny_config

DENSE = dataclasses.replace(tiny_config(64, dtype="bfloat16"), head_dim=64)


def sparse(**options: Any) -> ModelConfig:
    return dataclasses.replace(DENSE, layers=(LayerSpec(NSA(**options)), LayerSpec()))


def models_of(target: ModelConfig, draft: ModelConfig | None = None) -> Models:
    nothing: Any = None
    return Models(nothing, target, nothing, draft)


def usual(*decodings: Decoding, target: ModelConfig, draft: ModelConfig | None = None, by: str = "mosaic") -> int:
    return default_page_size(decodings, models_of(target, draft), by)


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


@pytest.mark.parametrize(
    ("decoding", "group"),
    [(Autoregressive(), 1), (Rejection(4), 5), (Rejection(4, n_candidates=2), 10), (SMC(4, 4), 16)],
)
def test_kernels_read_in_groups_that_compute_the_same(decoding: Any, group: int) -> None:
    found = default_sparse_mode(decoding, models_of(sparse()), None, "mosaic")
    assert found == dataclasses.replace(decoding, sparse=SparseVerification("merged", group))
    assert found.speculation.sparse is not None
    assert found.speculation.sparse.precision == "strict"


@pytest.mark.parametrize(
    ("target", "page_size", "implementation"),
    [
        (DENSE, None, "mosaic"),
        (sparse(), None, "xla"),
        (sparse(), None, "auto"),  # on a CPU
        (sparse(), 64, "mosaic"),  # of which each has four compressed tokens
        (dataclasses.replace(sparse(), dtype="float32"), None, "mosaic"),
        (dataclasses.replace(sparse(), head_dim=96), None, "mosaic"),
        (sparse(kernel_size=24, kernel_stride=24, block_size=48, num_blocks=4), None, "mosaic"),
    ],
)
def test_without_kernels_nothing_is_grouped(target: ModelConfig, page_size: int | None, implementation: str) -> None:
    decoding = Rejection(4)
    assert default_sparse_mode(decoding, models_of(target), page_size, implementation) is decoding


def test_what_is_asked_for_stays() -> None:
    for asked in (SparseVerification(), SparseVerification(schedule=2), SparseVerification("merged", 2)):
        decoding = Rejection(4, sparse=asked)
        assert default_sparse_mode(decoding, models_of(sparse()), None, "mosaic") is decoding


def test_an_engine_reads_so(monkeypatch: pytest.MonkeyPatch, patch_programs: Any) -> None:
    """Where kernels would: its decoder and its pages; asked otherwise, it does as it is told."""
    patch_programs(grouped_branches, "has_kernel", lambda: True)
    monkeypatch.setattr("smcjax.engine.load.defaults.reads_by_kernels", lambda *_: True)
    fields: dict[str, Any] = {"num_pages": 9, "max_num_seqs": 1, "compile_at_start": False}
    with LLM("recall", draft_model="recall-draft", decoding=Rejection(4), **fields) as llm:
        assert llm.decoding == Rejection(4, sparse=SparseVerification("merged", 5))
        assert llm.page_size == 128
    with LLM("recall", decoding=Autoregressive(SparseVerification()), **fields, max_model_len=128) as llm:
        assert llm.decoding == Autoregressive(SparseVerification())
        assert llm.page_size == 16
