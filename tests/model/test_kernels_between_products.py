"""A layer calls a known number of kernels between its products, and nothing else touches the KV."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from smcjax.kv import Copies
from smcjax.model import decoder
from smcjax.model.config import LayerSpec, ModelConfig
from smcjax.model.folding import folded_shapes
from smcjax.model.paged import create_cache, paged_hidden_states
from smcjax.model.params import param_shapes
from smcjax.model.quantize import quantize_params
from smcjax.model.view import BatchView
from smcjax.pallas import implementations
from smcjax.quantization import FLOAT8, INT8, Quantization
from smcjax.sparse.nsa import NSA
from smcjax.sparse.verification import SparseVerification

LAYERS, NUM_PAGES = 2, 77


def lowered(*args: Any, **options: Any) -> str:
    """Lowers for CUDA what `traced` returns."""
    return traced(*args, **options).lower(lowering_platforms=("cuda",)).as_text()


def traced(
    rows: int,
    columns: int,
    implementation: str,
    *,
    folded: bool = False,
    quantization: Quantization | None = None,
    page_size: int = 16,
    sparse: SparseVerification | None = None,
    heads: int = 8,
    **options: Any,
) -> Any:
    """A forward with copies, its cache donated."""
    config = ModelConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        num_layers=LAYERS,
        num_heads=heads,
        num_kv_heads=4,
        head_dim=128,
        max_position_embeddings=4096,
        **options,
    )
    params = (folded_shapes if folded else param_shapes)(config, jnp.bfloat16)
    if quantization is not None:
        params = jax.eval_shape(lambda params: quantize_params(params, quantization), params)
    cache = jax.eval_shape(lambda p: create_cache(config, p, num_pages=NUM_PAGES, page_size=page_size), params)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def forward(cache: Any, params: Any, view: BatchView) -> Any:
        return paged_hidden_states(config, params, cache, view)

    block = integers(rows, columns)
    copies = Copies(integers(rows), integers(rows))
    arrays = (block, block, integers(rows, 8), block, integers(rows), integers(rows), copies)
    view = BatchView(*arrays, page_size=page_size, sparse=sparse)
    with implementations(implementation):
        return jax.jit(forward, donate_argnums=0).trace(cache, params, view)


def test_kernels_of_a_layer() -> None:
    """One that rotates, writes and copies, one that attends, two that add and norm; all else leaves the pages alone."""
    text = lowered(8, 9, "mosaic")
    called = re.findall(r"call @(\w+?)(?:_\d+)?\(", text)
    assert called.count("_rotate_and_write") == called.count("paged_attention_mosaic") == LAYERS
    assert called.count("add_rms_norm_mosaic") == 2 * LAYERS
    touching = [line for line in text.splitlines() if f"tensor<{NUM_PAGES}x16x4x128xbf16>" in line]
    assert not [line for line in touching if "stablehlo." in line and "custom_call" not in line]


def test_kernels_of_a_layer_whose_norms_are_folded() -> None:
    """One that rotates, writes and copies, one that attends, one that gates; a norm behind the last layer only."""
    text = lowered(8, 9, "mosaic", folded=True)
    called = re.findall(r"call @(\w+?)(?:_\d+)?\(", text)
    kernels = ("_rotate_and_write", "paged_attention_mosaic", "_swiglu", "add_rms_norm_mosaic")
    assert [called.count(kernel) for kernel in kernels] == [LAYERS, LAYERS, LAYERS, 1]
    assert "product_mosaic" not in text


@pytest.mark.slow
def test_products_of_few_rows_are_kernels() -> None:
    """One a product, that which gates included: nothing is left to XLA, and nothing lies between the last two."""
    text = lowered(8, 1, "mosaic", folded=True)
    called = re.findall(r"call @(\w+?)(?:_\d+)?\(", text)
    kernels = ("product_mosaic", "swiglu_product_mosaic", "_swiglu", "_rotate_and_write", "add_rms_norm_mosaic")
    assert [called.count(kernel) for kernel in kernels] == [3 * LAYERS, LAYERS, 0, LAYERS, 1]
    assert "stablehlo.dot_general" not in text


@pytest.mark.parametrize(("quantization", "norms"), [(FLOAT8, 1), (INT8, 2 * LAYERS)], ids=["float8", "int8"])
def test_products_of_float8_norm_as_they_round(patch_programs: Any, quantization: Quantization, norms: int) -> None:
    """A float8 model norms by itself behind its last layer alone; products of int8 read what has been normed."""
    pytest.importorskip("jax_triton")
    asked = mock.Mock(wraps=decoder.add_rms_norm)
    patch_programs(decoder, "add_rms_norm", asked)
    traced(8, 9, "triton", quantization=quantization)
    assert asked.call_count == norms


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "folded", "heads"), [("shared", False, 8), ("per_branch", True, 16)])
def test_kernels_of_a_sparse_layer(kv: str, folded: bool, heads: int) -> None:
    """One that keeps scores, one that selects blocks by them, one that makes tasks, one that attends to those.

    Gates weigh what is merged where four heads or more share a key-value head, else what has been merged. With one pair
    of keys and values a kernel writes it beside the products of gates. A folded norm is left to kernels.
    """
    sparse = SparseVerification("merged", 9)
    layers = (LayerSpec(NSA(kv=kv)),)
    text = lowered(8, 9, "mosaic", page_size=128, sparse=sparse, folded=folded, heads=heads, layers=layers)
    called = re.findall(r"call @(\w+?)(?:_\d+)?\(", text)
    kernels = ("_by_kernels", "ranked_blocks", "_gated_merge", "_gated_sum")
    merges = heads >= 16
    assert [called.count(kernel) for kernel in kernels] == [2 * LAYERS, LAYERS, merges * LAYERS, (not merges) * LAYERS]
    beside, alone = (LAYERS, 0) if kv == "shared" else (0, LAYERS)
    kernels = ("_write_beside_gates", "gate_products", "_rotate_and_write")
    assert [called.count(kernel) for kernel in kernels] == [beside, alone, 0]
    assert called.count("add_rms_norm_mosaic") == (1 if folded else 2 * LAYERS)


def test_many_rows_are_normed_before_the_product(patch_programs: Any) -> None:
    """A prompt's chunk: nothing is left pending that plain XLA would have to divide."""
    asked: list[Any] = []
    patch_programs(decoder, "swiglu", lambda y, pending, **_: asked.append(pending) or y[..., : y.shape[-1] // 2])
    lowered(1, 1024, "mosaic", folded=True)
    assert not asked
    lowered(1, 40, "mosaic", folded=True)
    assert len(asked) == LAYERS, "control"


def test_control_without_kernels() -> None:
    """Negative control: plain XLA writes and copies by scatters, whose operands are the pages."""
    text = lowered(8, 9, "xla")
    assert "mosaic" not in text
    assert re.search(rf'"stablehlo.(scatter|gather)".*tensor<{NUM_PAGES}x16x4x128xbf16>', text)
